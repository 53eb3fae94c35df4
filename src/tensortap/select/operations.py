"""Groups of operations, for patterns such as `op:@matmul`: by the names that PyTorch's functions have.

In-place variants (`relu_`) belong to the group of the function. Scaled dot product attention multiplies matrices too,
but shows neither factors nor products: it is in `attention`, and `op:{@matmul,@attention}` means both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NAMES: Final = {
    "matmul": (
        "matmul mm bmm mv dot vdot inner outer ger addmm addmv addr addbmm baddbmm linear bilinear einsum tensordot "
        "chain_matmul linalg_matmul linalg_multi_dot linalg_vecdot matrix_power linalg_matrix_power trilinear smm "
        "hspmm sspaddmm sparse_mm int_mm scaled_mm grouped_mm scaled_grouped_mm"
    ),
    "softmax": "softmax log_softmax softmin gumbel_softmax special_softmax special_log_softmax sparse_softmax",
    "norm": (
        "layer_norm batch_norm group_norm instance_norm rms_norm local_response_norm normalize "
        "native_batch_norm native_group_norm fused_rms_norm cudnn_batch_norm"
    ),
    "activation": (
        "relu relu6 leaky_relu rrelu prelu elu celu selu gelu silu mish sigmoid tanh hardtanh hardswish hardsigmoid "
        "hardshrink softshrink tanhshrink softplus softsign log_sigmoid glu threshold special_expit"
    ),
    "attention": "scaled_dot_product_attention multi_head_attention_forward native_multi_head_attention",
    "conv": (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution "
        "mkldnn_convolution"
    ),
    "reduce": (
        "sum nansum mean nanmean prod max min amax amin aminmax argmax argmin all any std std_mean var var_mean median "
        "nanmedian mode quantile nanquantile logsumexp count_nonzero norm linalg_norm linalg_vector_norm "
        "linalg_matrix_norm dist trace"
    ),
    "elementwise": (
        "add sub mul div rsub pow float_power true_divide divide multiply subtract floor_divide remainder fmod neg "
        "negative abs absolute sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin "
        "acos atan atan2 sinh cosh asinh acosh atanh erf erfc erfinv logit xlogy logaddexp logaddexp2 maximum minimum "
        "fmax fmin clamp clip clamp_min clamp_max round floor ceil trunc frac lerp addcmul addcdiv where masked_fill "
        "nan_to_num hypot"
    ),
}  # fmt: skip

GROUPS: Final[Mapping[str, frozenset[str]]] = {
    group: frozenset(variant for name in names.split() for variant in (name, f"{name}_"))
    for group, names in _NAMES.items()
}
