"""Which site of one run is which of the other."""

from __future__ import annotations

import pytest

from tensortap.diff.align import SiteSignature, align, renames
from tensortap.errors import PatternError, RunError
from tensortap.types import Place


def places(text: str) -> list[Place]:
    return [Place(name) for name in text.split()]


def looks(shapes: str, levels: list[float] | None = None) -> dict[Place, SiteSignature]:
    """Sites such as `a:4` with a shape each, and a mean."""
    pairs = [item.split(":") for item in shapes.split()]
    levels = levels or [0.0] * len(pairs)
    return {Place(n): SiteSignature("output", (int(s),), (m,)) for (n, s), m in zip(pairs, levels, strict=True)}


def by_order(a: dict[Place, SiteSignature], b: dict[Place, SiteSignature]) -> dict[str, str]:
    found = align(list(a), list(b), [], lambda: (a, b))
    assert found.by == "order"
    return {x.site: y.site for x, y in found.pairs.items()}


def no_looks():
    raise AssertionError("not asked for")


def test_names():
    """Equal names are partners, in order of execution; the rest is listed."""
    found = align(places("a b c"), places("c x b"), [], no_looks)
    assert (list(found.pairs), found.by) == (places("b c"), "name")
    assert (found.only_in_a, found.only_in_b) == (tuple(places("a")), tuple(places("x")))


def test_wrappers():
    """A compiled module is the module; equal names come first."""
    found = align(places("a.b a"), places("_orig_mod.a._orig_mod.b _orig_mod.a a"), [], no_looks)
    assert [p.site for p in found.pairs.values()] == ["_orig_mod.a._orig_mod.b", "a"]
    assert found.only_in_b == tuple(places("_orig_mod.a"))


def test_a_few_sites_of_many():
    """A run of few sites is aligned by name with one of many."""
    assert align(places("a b"), places("a b c d e f g"), [], no_looks).by == "name"


@pytest.mark.parametrize(
    ("rename", "site", "other"),
    [
        ("enc=encoder", "enc.0.fc", "encoder.0.fc"),
        ("enc=encoder", "encode.0", None),
        ("h.*.mlp=blocks.*.ffn", "h.11.mlp.fc", "blocks.11.ffn.fc"),
        ("**.fc1=**.up", "a.b.fc1", "a.b.up"),
        ("model=", "model.fc", "fc"),
        ("=model", "fc", "model.fc"),
        ("=model", "", "model"),
        ("attn=attention", "attn/matmul#1", "attention/matmul#1"),
    ],
)
def test_rename(rename, site, other):
    """A rename is of a module with all below it; stars stand for the same on both sides."""
    assert renames([rename])[0].apply(site) == other


def test_map_and_names():
    """What no rename is about keeps its name."""
    found = align(places("enc.a enc.b head"), places("encoder.a encoder.b head"), renames({"enc": "encoder"}), no_looks)
    assert [p.site for p in found.pairs.values()] == ["encoder.a", "encoder.b", "head"]


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        ("enc", "OLD=NEW"),
        ("h.*=blocks", r"each \*"),
        ("endocer=enc", "Did you mean 'encoder'"),
        ("enc=encoder", "encoder=enc"),
        ("encoder=ecn", "Did you mean 'enc'"),
    ],
)
def test_bad_maps(rename, said):
    """A map that maps nothing is an error that names what would work."""
    with pytest.raises(PatternError, match=said):
        align(places("encoder head"), places("enc head"), renames([rename]), no_looks)


def test_order():
    """Other names: the longest common sequence of shapes."""
    assert by_order(looks("a:4 b:8 c:8 d:2"), looks("p:4 q:8 r:3 s:8 t:2")) == {"a": "p", "b": "q", "c": "s", "d": "t"}


def test_order_by_likeness():
    """Where shapes leave a choice, statistics decide."""
    a = looks("a:4 drop:4 b:4", [1.0, 5.0, 9.0])
    assert by_order(a, looks("p:4 q:4", [1.0, 9.0])) == {"a": "p", "b": "q"}
    assert by_order(a, looks("p:4 q:4", [1.0, 5.0])) == {"a": "p", "drop": "q"}


def test_order_of_channels():
    """Channels first agree with channels last, and the same shape agrees better."""
    first, last = (
        {Place(n): SiteSignature("output", shape, (1.0,))} for n, shape in (("a", (2, 3, 5, 5)), ("p", (2, 5, 5, 3)))
    )
    same = {Place("q"): SiteSignature("output", (2, 3, 5, 5), (1.0,))}
    assert by_order(first, last) == {"a": "p"} and by_order(last, first) == {"p": "a"}
    assert by_order(first, last | same) == {"a": "q"} and by_order(first, same | last) == {"a": "q"}


def test_nothing_fits():
    """Shapes that never agree are of different models, and a part of one agrees only in other layouts."""
    with pytest.raises(RunError, match="0 of 1 sites have a partner"):
        by_order(looks("a:4"), looks("p:8"))
    known = looks("a:4"), looks("p:8")
    assert align(list(known[0]), list(known[1]), [], lambda: known, spread=True).pairs == {Place("a"): Place("p")}


def ported(port: str, names: str, level: float = 1.0) -> dict[Place, SiteSignature]:
    return {Place(n, port): SiteSignature(port, (4,), (level * i,)) for i, n in enumerate(names.split(), 1)}


def test_names_count_by_port():
    """Parameters that match by name do not keep outputs whose names mean nothing from being aligned by order."""
    a = ported("param", "fc.weight ln.weight head.weight") | ported("output", "fc ln head")
    b = ported("param", "fc.weight ln.weight head.weight") | ported("output", "/fc/Gemm_0 /ln/Norm_0 10")
    found = align(list(a), list(b), [], lambda: (a, b))
    outputs = {x.site: y.site for x, y in found.pairs.items() if x.port == "output"}
    assert outputs == {"fc": "/fc/Gemm_0", "ln": "/ln/Norm_0", "head": "10"} and found.by == "order"
    assert all(x == y for x, y in found.pairs.items() if x.port == "param")
    assert {place.site for place in found.ordered} == {"fc", "ln", "head"}


def test_other_sites_of_one_model_are_not_aligned_by_order():
    """Outputs of other modules of one model, whose names both runs know, are no partners."""
    params = ported("param", "a.weight b.weight c.weight d.weight")
    first, second = params | ported("output", "a b"), params | ported("output", "c d")
    found = align(list(first), list(second), [], no_looks)
    assert found.by == "name" and {place.port for place in found.pairs} == {"param"}
