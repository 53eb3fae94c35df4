"""Say how large the rounding error of a sum may be: it follows the terms and their number, not the sum.

The gradient of a weight is a sum over all rows of a batch. Where the terms cancel, as in the bias of attention's keys,
what is left is rounding, and no two layouts agree on it. An optimizer that divides by the gradient's size, as Adam
does, makes an update of it like any other. So a parameter's gradient may differ by what the rounding of its terms
explains; elements of an update are compared where the gradient is well above that; and what updates differed by is
allowed for in the parameter later.

What a module is given may differ by rounding already, and what it makes of it then differs by more: so a value may
differ by a few times what the values computed before it in the same part of the model were seen to differ by. A ReLU
whose input is next to zero passes a gradient in one run and none in the other: of the elements of a gradient as many
may be beyond the tolerance as rounding of that size can turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tensortap.diff.elements import CommonElements
from tensortap.diff.metrics import rms_of
from tensortap.diff.pair import Pair
from tensortap.diff.tolerance import Tolerance
from tensortap.record.step import Record
from tensortap.reduce.summary import Summary
from tensortap.select.ports import MODULE_PORTS, is_backward, module_of
from tensortap.types import Place

_ABOVE: Final = 32  # times its tolerance a gradient must be for its element's update to be compared
_UPDATE: Final = 8  # an update is a few operations further than the gradient
_GROWTH: Final = 4  # how much of a difference in parameters or values shows in the values computed from them
_DEVIATIONS: Final = 4  # how many more elements than expected may be turned, in standard deviations of their number


class _Gradient(NamedTuple):
    tolerance: Tolerance
    rms: float
    elements: CommonElements | None


class RoundingFloors:
    """Return for each pair of a step the difference that rounding explains beyond its type's tolerance, from earlier
    values.
    """

    def __init__(self) -> None:
        self._terms: dict[str, tuple[float, float]] = {}
        self._gradients: dict[tuple[str, str], _Gradient] = {}
        self._drifted: dict[tuple[str, str], float] = {}
        self._parameters: dict[tuple[str, str], Summary] = {}
        self._apart = _ParametersApart()
        self._seen = _SeenDifferences()
        self._steps = 0  # rounding of earlier steps adds up, as a random walk does

    def next_step(self, records: Mapping[Place, Sequence[Record]]) -> None:
        """Begin a step of the reference."""
        self._terms = dict(_terms(records))
        self._gradients = {}
        self._apart = _ParametersApart()
        self._seen = _SeenDifferences()
        self._steps += 1

    def tolerance(self, place: Place, x: Summary, known: Tolerance) -> Tolerance:
        """Return the tolerance of a pair."""
        key = (place.site, place.slot)
        if place.port == "param":
            return Tolerance(known.rtol, known.atol + self._drifted.get(key, 0.0))
        if place.port == "grad":
            seen = self._seen.within(self._called(module_of(place.site, "grad"))).largest
            rtol = known.rtol + 2 * self._apart.everywhere + _GROWTH * seen
            return Tolerance(rtol, known.atol + rtol * self._of_terms(place, x))
        if place.port == "update":
            return self._of_update(key, x, known)
        if not known.rtol:
            return known
        # A gradient depends on the parameters twice: through the values, and by itself.
        times = 2 if is_backward(place.port) else 1
        seen = _GROWTH * self._seen.around(place.site).largest
        return Tolerance(known.rtol * math.sqrt(self._steps) + times * self._apart.at(place.site) + seen, known.atol)

    def _of_terms(self, place: Place, x: Summary) -> float:
        """Return the size that a sum of independent terms of this size would have."""
        inputs, gradients = self._terms.get(self._called(module_of(place.site, place.port)), (0.0, 0.0))
        size = max(x.shape[0] if x.shape else 1, 1)
        flat = len(x.shape) < 2
        return gradients / math.sqrt(size) * (1.0 if flat else inputs)

    def _called(self, module: str) -> str:
        """Return the module itself, or the one around it whose code uses its parameters without calling it."""
        while module and module not in self._terms:
            module = module.rpartition(".")[0]
        return module

    def drifted(self, shape: tuple[int, ...]) -> float:
        """Return how far apart the updates of parameters of this shape have come so far."""
        known = ((self._parameters.get(key), apart) for key, apart in self._drifted.items())
        return max((apart for x, apart in known if x is not None and x.shape == shape), default=0.0)

    def _of_update(self, key: tuple[str, str], x: Summary, known: Tolerance) -> Tolerance:
        rtol, atol = _UPDATE * known.rtol, known.atol
        parameter, gradient = self._parameters.get(key), self._gradients.get(key)
        if parameter is not None:  # the difference of two rounded parameters
            atol += known.rtol * _finite(parameter.absmax)
        if gradient is not None:
            rtol = max(rtol, _UPDATE * gradient.tolerance.rtol)
            if gradient.rms:
                atol += gradient.tolerance.atol * rms_of(x) / gradient.rms
        return Tolerance(rtol, atol)

    def above_noise(self, place: Place, update: CommonElements) -> CommonElements | None:
        """Return the elements of an update whose gradient is well above its rounding; None when there are none."""
        gradient = self._gradients.get((place.site, place.slot))
        if gradient is None or gradient.elements is None or gradient.elements.a.size != update.a.size:
            return update
        size = np.abs(gradient.elements.a.astype(np.float64))
        tolerance = gradient.tolerance
        none = (size == 0) & (gradient.elements.b == 0)
        clear = (size > _ABOVE * (tolerance.atol + tolerance.rtol * (size + gradient.rms))) | none
        return CommonElements(update.kind, update.a[clear], update.b[clear]) if clear.any() else None

    def without_turned(self, place: Place, kept: CommonElements, bound: Tolerance, rms: float) -> CommonElements | None:
        """Return the elements of a gradient without those that a turned decision explains; None when there are more."""
        x, y = kept.a.astype(np.float64), kept.b.astype(np.float64)
        beyond = np.abs(x - y) > bound.atol + bound.rtol * (np.abs(x) + rms)
        expected = _GROWTH * self._seen.around(place.site).typical * x.size
        if np.count_nonzero(beyond) > expected + _DEVIATIONS * math.sqrt(expected) or not np.isfinite(y).all():
            return None
        return CommonElements(kept.kind, kept.a[~beyond], kept.b[~beyond])

    def compared(self, place: Place, pair: Pair, x: Summary, kept: CommonElements | None) -> None:
        """Note a compared pair: later ones may differ as a consequence. `kept` are all its elements."""
        key = (place.site, place.slot)
        if place.port == "param":
            self._parameters[key] = x
            module = module_of(place.site, "param")
            self._apart.add(module, pair, x)
            self._seen.add(module, 0.0 if pair.differs else pair.error, 0.0)
        elif place.port == "grad":
            self._gradients[key] = _Gradient(Tolerance(pair.rtol, pair.atol), rms_of(x), kept)
        elif place.port == "update" and not pair.differs:
            apart = pair.error * 2 * rms_of(x) if kept is None else _farthest(kept)
            self._drifted[key] = self._drifted.get(key, 0.0) + _finite(apart)
        elif place.port in MODULE_PORTS and not pair.differs:
            self._seen.add(place.site, pair.error, pair.error if pair.nl2 is None else pair.nl2)


class SeenDifference(NamedTuple):
    """How far the values of a part of the model differ within their tolerance: the largest, and the norm's share."""

    largest: float = 0.0
    typical: float = 0.0


class _SeenDifferences:
    """The differences of the values and parameters compared so far in a step, by the module that holds them."""

    def __init__(self) -> None:
        self._under: dict[str, SeenDifference] = {}

    def add(self, module: str, largest: float, typical: float) -> None:
        """Add a value of a module: it is one of every module that holds that one, too."""
        new = min(_finite(largest), 1.0), min(_finite(typical), 1.0)
        path = module
        while True:
            known = self._under.get(path, SeenDifference())
            self._under[path] = SeenDifference(max(known.largest, new[0]), max(known.typical, new[1]))
            if not path:
                return
            path = path.rpartition(".")[0]

    def within(self, module: str) -> SeenDifference:
        """Return what was seen in a module and in those that it holds."""
        return self._under.get(module, SeenDifference())

    def around(self, module: str) -> SeenDifference:
        """Return what was seen in the module that holds this one."""
        return self.within(module.rpartition(".")[0])


class _ParametersApart:
    """How far the parameters of a step differ within their tolerance: values computed from them may differ as much."""

    def __init__(self) -> None:
        self._modules: dict[str, float] = {}
        self._squares = [0.0, 0.0]  # of differences, of parameters

    def add(self, module: str, pair: Pair, x: Summary) -> None:
        """Add a parameter; one that is beyond its tolerance is a difference to be found and not a tolerance."""
        size = _finite(x.l2)
        apart = 0.0 if pair.differs else _finite(pair.error)
        self._modules[module] = max(self._modules.get(module, 0.0), apart)
        share = apart if pair.nl2 is None or pair.differs else _finite(pair.nl2)
        self._squares = [self._squares[0] + (share * size) ** 2, self._squares[1] + size**2]

    @property
    def everywhere(self) -> float:
        """The relative tolerance that follows for any value."""
        return _GROWTH * math.sqrt(self._squares[0] / self._squares[1]) if self._squares[1] else 0.0

    def at(self, module: str) -> float:
        """Return the relative tolerance that follows for the values of one module."""
        return max(self.everywhere, _GROWTH * self._modules.get(module, 0.0))


def _farthest(kept: CommonElements) -> float:
    return float(np.abs(kept.a.astype(np.float64) - kept.b.astype(np.float64)).max()) if kept.a.size else 0.0


def _terms(records: Mapping[Place, Sequence[Record]]) -> list[tuple[str, tuple[float, float]]]:
    """Return for each module the root mean square of what goes in, and the norm of the gradients that come to it."""
    inputs: dict[str, float] = {}
    gradients: dict[str, float] = {}
    for place, of in records.items():
        if place.port == "input":
            sizes = [1.0 if r.summary.dtype.startswith(("int", "uint", "bool")) else rms_of(r.summary) for r in of]
            inputs[place.site] = max(inputs.get(place.site, 0.0), *sizes)
        elif place.port == "grad_output":
            norm = math.sqrt(sum(_finite(r.summary.l2) ** 2 for r in of))
            gradients[place.site] = max(gradients.get(place.site, 0.0), norm)
    return [(site, (inputs.get(site, 1.0), norm)) for site, norm in gradients.items()]


def _finite(x: float) -> float:
    return x if math.isfinite(x) else 0.0
