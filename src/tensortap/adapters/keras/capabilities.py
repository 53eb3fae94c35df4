"""What Keras models can show."""

from typing import Final

from tensortap.adapters.capabilities import Capabilities

CAPABILITIES: Final = Capabilities(
    "keras",
    "Keras",
    lacks={
        "update": "watch the weight itself, 'dense.kernel:param', and take differences between steps",
        "check_model": "record a few steps, tensortap run train.py, and ask the rules: tensortap check RUN",
        "blocks": "watch the layer or model that computes them: tensortap.watch(model, 'op:matmul')",
        "compiled": "watch the model whose call holds it: tensortap.watch(model)",
        "global_stats": "merge what each rank recorded: tensortap.open_run(path).merged(over='ranks')",
    },
    notes={
        "exact": "in eager mode; a graph with taps is compiled again, and is the same to rounding",
        "grad_output": "not of a sigmoid or softmax whose loss Keras computes from the logits; that is reported",
        "grad": "the gradients that a Keras optimizer is given",
        "param": "of layers that are built",
        "steps": "eager calls, `fit`, `evaluate`, `predict`; in a `tf.function` of your own close each with tap.step()",
        "functions": "given NumPy arrays; what XLA compiles gives statistics and histograms only",
        "op": "on the TensorFlow backend, those that layers run forward",
        "compare": "outputs and weights; gradients by `tt.diff` of two runs",
        "reused": "the first 64 passes of a loop inside a graph are calls",
    },
)
