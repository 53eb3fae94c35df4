"""What NumPy-style models and scikit-learn can show."""

from typing import Final

from tensortap.adapters.capabilities import Capabilities

_NO_GRAPH: Final = "NumPy keeps no graph; name the value where you compute it: tensortap.tap(dx, 'fc/dx')"
CAPABILITIES: Final = Capabilities(
    "numpy",
    "NumPy-style, scikit-learn",
    lacks={
        "grad_output": _NO_GRAPH,
        "grad_input": _NO_GRAPH,
        "grad": "a gradient that a layer holds in an attribute is an array like any other: write 'fc.dW:param'",
        "update": "no optimizer is known; watch the array itself, 'fc.W:param', and take differences between steps",
        "check_model": "record a few steps, tensortap.watch(model), and ask the rules: tensortap check RUN",
        "context": "no loss or optimizer is known; name what matters: tensortap.tap(dx, 'fc/dx'), tap.step(loss=loss)",
        "blocks": "name the values: tensortap.tap(x, 'name'); or watch an object whose layers compute them",
        "compiled": "nothing is compiled, so tensortap.tap(x, 'name') sees values as they are",
        "global_stats": "merge what each rank recorded: tensortap.open_run(path).merged(over='ranks')",
    },
    notes={
        "param": "every array of floats that a layer holds when the taps go on",
        "op": "opt-in: only inside layers, lost where `np.asarray` makes a plain array",
        "reused": "a layer that calls itself counts as one call",
        "output": "not in other processes (`n_jobs`); public methods are layers where an object holds no others",
    },
)
