"""What JAX can show."""

from typing import Final

from tensortap.adapters.capabilities import Capabilities

CAPABILITIES: Final = Capabilities(
    "jax",
    "JAX",
    lacks={
        "update": "name it in your step, which knows it: tensortap.tap(updates, 'net/updates')",
        "buffer": "name a layer's state where the model runs: tensortap.tap(self.bn.mean[...], 'bn/mean')",
        "exact": "XLA compiles an observed step again, and rounding may differ; tt.verify says whether it does",
        "check_model": "record a few steps, tensortap.watch_step(step), and ask the rules: tensortap check RUN",
        "context": "record the script, whose compiled steps are seen from outside: tensortap run SCRIPT",
        "blocks": "watch the function as a step: step = tensortap.watch_step(step, None, 'op:dot_general')",
        "compiled": "watch the function as a step: step = tensortap.watch_step(step)",
        "global_stats": "merge what each rank recorded: tensortap.open_run(path).merged(over='ranks')",
    },
    notes={
        "output": "with `watch_step`; `watch` of a model inside `jit` uses callbacks, which are slow",
        "grad": "NNX and Equinox; elsewhere name them: `tensortap.tap(params, 'net/params')`, port `grad_output`",
        "op": "with `watch_step`; operations of the backward have the port `grad_input`",
        "shared": "NNX; Equinox modules and other pytrees lose shared layers when a transformation flattens them",
        "functions": "are given the tensor on the host",
        "reused": "the iterations of a `scan`, and the first 64 of a `while_loop`, are calls",
    },
)
