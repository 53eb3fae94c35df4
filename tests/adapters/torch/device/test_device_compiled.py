"""The Triton kernel as machine code: it compiles for real devices, though none is here to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRITON = Path(sys.prefix, "triton")
COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tensortap.adapters.torch.device import triton_kernel as ours

def machine_code(kernel, signature, **constants):
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return compile(ASTSource(kernel, signature, values), GPUTarget("cuda", 80, 32), dict(ours.OPTIONS)).asm

blocks = dict(table="*fp32", scale="*fp64", parts="*fp64", counts="*i32", numel="i64", blocks="i32")
for pointer, kind, wide, scaled in (("*fp32", 0, 0, 0), ("*fp64", 0, 1, 1), ("*i16", 1, 0, 0), ("*u8", 2, 0, 0)):
    asm = machine_code(ours._reduce_blocks, blocks | {"x": pointer}, KIND=kind, WIDE=bool(wide), SCALED=bool(scaled),
                       HISTOGRAM=True, GROUPS=ours._GROUPS, PARTS=ours._PARTS)
    assert asm["cubin"] and ("red.global" in asm["ptx"] or "atom.global" in asm["ptx"])
    print("compiled", pointer)
merge = dict(parts="*fp64", words="*i64", programs="i32")
assert machine_code(ours._merge_parts, merge, PROGRAMS=1024, PARTS=ours._PARTS)["cubin"]
print("compiled the merge")
"""


@pytest.mark.thorough
@pytest.mark.skipif(not TRITON.is_dir(), reason="Triton is not installed beside the environment: see the Makefile")
def test_the_kernels_compile_for_cuda(tmp_path):
    """Float32, float64, bfloat16, eight-bit floats and the merge become code for compute capability 8.0."""
    path = os.pathsep.join([str(TRITON), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0 and done.stdout.count("compiled") == 5, done.stderr
