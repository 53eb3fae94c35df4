"""Patterns that name a site: they are looked up, and not tried on every candidate."""

from __future__ import annotations

from tensortap.select.sites import Candidate, Pattern, select


def module(path: str, kind: str = "Linear") -> Candidate:
    return Candidate(path, (kind, "Module"), ("output", "input"))


def test_a_pattern_without_wildcards_knows_its_paths() -> None:
    """Its paths are all that its regular expression matches; one with a wildcard may match any number."""
    for text in ("", "a.b", "blocks.{0,7}.mlp:input", "a{b", "a..b", "in/out", "x/y#1"):
        pattern = Pattern.parse(text)
        assert pattern.paths is not None
        for path in (*pattern.paths, "", "a", "blocks.3.mlp", "a.b.c"):
            assert (path in pattern.paths) == pattern.matches(module(path), sorted(pattern.ports)[0])
    assert [Pattern.parse(text).paths for text in ("*", "a?", "type:Linear", "re:a", "**.b")] == [None] * 5


def test_a_named_site_is_looked_up() -> None:
    """Patterns without wildcards find their sites, however often a path occurs and in the candidates' order."""
    asked: list[str] = []

    class Listed(list[Candidate]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            asked.append("all")
            return super().__iter__()

    sites = Listed([module("b"), module("a"), module("c"), module("a", "Other")])
    chosen = select(["{a,b}", "a", "c", "b:input"], sites)
    assert [[(match.candidate.path, match.candidate.types[0], match.port) for match in found] for found in chosen] == [
        [("b", "Linear", "output"), ("a", "Linear", "output"), ("a", "Other", "output")],
        [("a", "Linear", "output"), ("a", "Other", "output")],
        [("c", "Linear", "output")],
        [("b", "Linear", "input")],
    ]
    assert len(asked) <= 1  # to copy them, and not once for each pattern
