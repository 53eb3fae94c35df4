"""Pair the sites of two runs: by a map of renames, by name, or by order of execution and shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.diff.site_names import unwrapped
from tensortap.errors import PatternError, RunError, suggest
from tensortap.types import Place

ENOUGH: Final = 0.5  # of the smaller run's sites must match by name, or the names are taken to mean nothing
ALIKE: Final = 0.25  # of the smaller run's sites must have a partner, or the runs are of different models
_STARS: Final = re.compile(r"(\*+)")
Shape = tuple[int, ...]
Renames = Mapping[str, str] | Iterable[str] | None
Renaming = Renames | Callable[[str], str | None]


class SiteSignature(NamedTuple):
    """The features of a site besides its name: its port, its shape, and the statistics of one record."""

    port: str
    shape: tuple[int, ...]
    statistics: tuple[float, ...]


Signatures = Mapping[Place, SiteSignature]


class Alignment(NamedTuple):
    """The sites of `a` with their partners in `b`, how these were found, and the sites without a partner."""

    pairs: dict[Place, Place]
    by: Literal["name", "order"]
    only_in_a: tuple[Place, ...]
    only_in_b: tuple[Place, ...]
    ordered: frozenset[Place] = frozenset()  # of `a`, those that have a partner of another name by order
    wrong: tuple[str, ...] = ()  # pairs by order that were given up


class Rename(NamedTuple):
    """One `OLD=NEW`: a module's path in `a` and in `b`, with all below it; `*` stands for the same on both sides.

    >>> Rename.parse("encoder.layer.*.attn=blocks.*.attention").apply("encoder.layer.3.attn.q_proj")
    'blocks.3.attention.q_proj'
    >>> Rename.parse("=model").apply("fc"), Rename.parse("model=").apply("model.fc")
    ('model.fc', 'fc')
    """

    old: str
    new: str
    pattern: re.Pattern[str]

    @staticmethod
    def parse(text: str) -> Rename:
        """Read `OLD=NEW`."""
        old, equals, new = text.partition("=")
        if not equals:
            raise PatternError(f"{text!r} maps nothing; write OLD=NEW, a module's name in the first run and the second")
        if len(_STARS.findall(old)) != len(_STARS.findall(new)):
            raise PatternError(
                f"{text!r}: each * of {old!r} needs its own in {new!r}, such as 'h.*.attn=blocks.*.attention'"
            )
        pieces = ("(.*)" if "**" in p else "([^./]*)" if "*" in p else re.escape(p) for p in _STARS.split(old))
        return Rename(old, new, re.compile(rf"(?:{''.join(pieces)})((?:[./].*)?)" if old else "()(.*)", re.DOTALL))

    def apply(self, site: str) -> str | None:
        """Return the site's name in the other run; None when this rename is not about it."""
        found = self.pattern.fullmatch(site)
        if not found:
            return None
        *stars, rest = found.groups()
        if not self.old:
            return ".".join(filter(None, (self.new, site)))
        filled = iter(stars)
        name = "".join(next(filled) if "*" in piece else piece for piece in _STARS.split(self.new))
        return name + rest if name else rest.removeprefix(".")


def renames(given: Renames) -> list[Rename]:
    """Return the `map=` argument: a mapping, or texts such as `OLD=NEW`."""
    if isinstance(given, str):
        given = [given]
    texts = [f"{old}={new}" for old, new in given.items()] if isinstance(given, Mapping) else given or ()
    return [Rename.parse(text) for text in texts]


def align(
    a: Sequence[Place], b: Sequence[Place], mapped: Sequence[Rename],
    signatures: Callable[[], tuple[Signatures, Signatures]], *, spread: bool = False,
) -> Alignment:  # fmt: skip
    """Find each site's partner. Renames come first; `signatures` is called only when too few names match.

    Where enough match, ports are looked at one by one: parameters have their names in every format, outputs not.
    `spread` says that the runs are of other layouts, where a tensor of one may be a part of one of the other.
    """
    mapped_pairs = _by_map(a, b, mapped)
    rest_a, rest_b = _without(a, mapped_pairs), _without(b, mapped_pairs.values())
    named = _by_name(rest_a, rest_b)
    ordered: dict[Place, Place] = {}
    few = len(mapped_pairs) + len(named) < ENOUGH * min(len(a), len(b))
    if few:
        named, ordered = {}, _by_signature(rest_a, rest_b, signatures, spread=spread)
        _require_alike(len(mapped_pairs) + len(ordered), a, b)
    elif ports := _ports_by_order(a, b, mapped_pairs | named):
        rest_a, rest_b = ([p for p in rest if p.port in ports] for rest in (_without(rest_a, named), rest_b))
        ordered = _by_signature(rest_a, _without(rest_b, named.values()), signatures, spread=spread)
    pairs = mapped_pairs | named | ordered
    pairs = {place: pairs[place] for place in a if place in pairs}
    rest = tuple(_without(a, pairs)), tuple(_without(b, pairs.values()))
    other = frozenset(x for x, y in ordered.items() if x != y)
    return Alignment(pairs, "order" if few or ordered else "name", *rest, other)


def _by_signature(
    a: Sequence[Place], b: Sequence[Place], signatures: Callable[[], tuple[Signatures, Signatures]], *, spread: bool
) -> dict[Place, Place]:
    """Return the partners by order of execution, shape and statistics."""
    known_a, known_b = signatures()
    in_a, in_b = [p for p in a if p in known_a], [p for p in b if p in known_b]
    score = _scores([known_a[p] for p in in_a], [known_b[p] for p in in_b], spread=spread)
    return _by_order(in_a, in_b, score)


def _ports_by_order(a: Sequence[Place], b: Sequence[Place], pairs: Mapping[Place, Place]) -> set[str]:
    """Return the ports with too few matching names, if the names of one run mean nothing in the other.

    Names of modules that both runs know mean something: they have recorded other modules of one model.
    """
    rest_a, rest_b = _without(a, pairs), _without(b, pairs.values())
    matched = Counter(place.port for place in pairs)
    counts = [Counter(place.port for place in side) for side in (a, b)]
    few = {port for port in counts[0] if matched[port] < ENOUGH * min(counts[0][port], counts[1][port])}
    return {port for port in few if _is_foreign(rest_a, b, port) or _is_foreign(rest_b, a, port)}


def _is_foreign(rest: Sequence[Place], other: Sequence[Place], port: str) -> bool:
    """Return whether most names of a port are neither sites of the other run nor modules that contain such sites."""
    known = {place.site for place in other}
    known |= {site[:i] for site in known for i, letter in enumerate(site) if letter == "."}
    own = [place.site for place in rest if place.port == port]
    return sum(site not in known for site in own) > ENOUGH * len(own)


def _require_alike(paired: int, a: Sequence[Place], b: Sequence[Place]) -> None:
    """Raise when so few sites have a partner that the runs are of different models."""
    fewer = min(len(a), len(b))
    if paired >= ALIKE * fewer:
        return
    raise RunError(
        f"these are runs of different models: names differ, and by order of execution and shape only {paired} of "
        f"{fewer} sites have a partner. One has {_examples(a)}, the other {_examples(b)}. If they compute the same, "
        "give a map of names, OLD=NEW"
    )


def _examples(places: Sequence[Place]) -> str:
    inner = [str(place) for place in places if place.site] or list(map(str, places))
    return ", ".join(dict.fromkeys([*inner[:1], *inner[len(inner) // 2 :][:1]]))


def _without(places: Sequence[Place], taken: Iterable[Place]) -> list[Place]:
    gone = set(taken)
    return [place for place in places if place not in gone]


def _by_name(a: Sequence[Place], b: Sequence[Place]) -> dict[Place, Place]:
    """Pair equal names, then those that differ only by a wrapper, such as that of torch.compile."""
    there = set(b)
    pairs = {place: place for place in a if place in there}
    known = {_unwrapped(place): place for place in reversed(_without(b, pairs.values()))}
    for place in _without(a, pairs):
        if (other := known.pop(_unwrapped(place), None)) is not None:
            pairs[place] = other
    return pairs


def _unwrapped(place: Place) -> Place:
    return place._replace(site=unwrapped(place.site))


def _by_map(a: Sequence[Place], b: Sequence[Place], mapped: Sequence[Rename]) -> dict[Place, Place]:
    there, pairs = set(b), dict[Place, Place]()
    for rename in mapped:
        meant = {place: name for place in a if (name := rename.apply(place.site)) is not None}
        found = {place: place._replace(site=name) for place, name in meant.items()}
        found = {place: other for place, other in found.items() if other in there}
        if not found:
            raise PatternError(_useless(rename, meant, a, b))
        taken = set(pairs.values())
        pairs |= {place: other for place, other in found.items() if place not in pairs and other not in taken}
    return pairs


def _useless(rename: Rename, meant: Mapping[Place, str], a: Sequence[Place], b: Sequence[Place]) -> str:
    said = f"the map {rename.old}={rename.new}"
    if not meant:
        if any(rename.apply(place.site) is not None for place in b):
            return f"{said} is the wrong way round: the first run's name comes first, {rename.new}={rename.old}"
        return f"{said} matches no site of the first run.{suggest(rename.old, (p.site for p in a))}"
    name = next(iter(meant.values()))
    return f"{said} makes {name!r}, and the second run has no such port there.{suggest(name, (p.site for p in b))}"


def _by_order(a: Sequence[Place], b: Sequence[Place], score: npt.NDArray[np.float64]) -> dict[Place, Place]:
    """Return the longest common sequence of ports and shapes; where there is a choice, the sites with like statistics.

    Sequence alignment without a penalty for gaps: a row of the table of best scores is a running maximum.
    """
    best = np.zeros((len(a) + 1, len(b) + 1))
    for i in range(len(a)):
        matched = np.where(score[i] > 0, best[i, :-1] + score[i], 0)
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], matched))
    pairs, i, j = list[tuple[Place, Place]](), len(a), len(b)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((a[i], b[j]))
    return dict(reversed(pairs))


def _scores(a: Sequence[SiteSignature], b: Sequence[SiteSignature], *, spread: bool) -> npt.NDArray[np.float64]:
    """Return 0 where port or shape differ, 1 where they agree, up to 2 where the statistics agree as well."""
    kinds, codes = [], []
    for side in (a, b):
        known: dict[tuple[str, Shape], int] = {}
        codes.append(np.array([known.setdefault((x.port, x.shape), len(known)) for x in side], np.intp))
        kinds.append(list(known))
    agreement = np.array([[_agreement(x, y, spread) for y in kinds[1]] for x in kinds[0]]).reshape(
        len(kinds[0]), len(kinds[1])
    )
    agree = agreement[codes[0][:, None], codes[1][None, :]] if a and b else np.zeros((len(a), len(b)))
    first, second = (np.array([x.statistics for x in side]).reshape(len(side), -1) for side in (a, b))
    if not a or not b:
        return agree
    apart = np.abs(first[:, None, :] - second[None, :, :])
    size = np.abs(first[:, None, :]) + np.abs(second[None, :, :])
    likeness = 1 - np.where(size > 0, apart / np.where(size > 0, size, 1), 0).mean(axis=2)
    return np.where(agree > 0, agree + likeness, 0.0)


def _agreement(a: tuple[str, Shape], b: tuple[str, Shape], spread: bool) -> float:
    """Return how well port and shape agree: less if channels are first in one and last in the other, least
    for a part.
    """
    if a[0] != b[0]:
        return 0.0
    if a[1] == b[1]:
        return 1.0
    if channels_last(a[1]) == b[1] or channels_last(b[1]) == a[1]:
        return 0.5
    return 0.25 if spread and _is_part(a[1], b[1]) else 0.0


def _is_part(a: Shape, b: Shape) -> bool:
    """Return whether one shape is a whole number of times the other in every dimension.

    >>> _is_part((8, 16), (2, 16)), _is_part((8, 16), (3, 16))
    (True, False)
    """
    return len(a) == len(b) and all(
        x == y or (min(x, y) and max(x, y) % min(x, y) == 0) for x, y in zip(a, b, strict=True)
    )


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a batch whose channels were first.

    >>> channels_last((2, 16, 8, 9)), channels_last((2, 16))
    ((2, 8, 9, 16), (2, 16))
    """
    return (shape[0], *shape[2:], shape[1]) if len(shape) > 2 else tuple(shape)
