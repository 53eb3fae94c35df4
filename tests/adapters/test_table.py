"""What the documents say of frameworks is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tensortap as tt
from tensortap.adapters import capabilities, registry
from tensortap.select.sites import Pattern

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"


def markdown():
    """The table and the sentences below it, as the document must have them."""
    adapters = registry.table()
    head = "| | " + " | ".join(each.title for each in adapters) + " |"
    rows = [
        f"| {title} | " + " | ".join("yes" if each.gives(feature) else "no" for each in adapters) + " |"
        for feature, title in capabilities.FEATURES.items()
    ]
    said = [f"- **{each.title}**, {capabilities.FEATURES[f]}: {n}." for each in adapters for f, n in each.notes.items()]
    said += [
        f"- **{each.title}**, no {', '.join(f'`{f}`' if f.startswith(':') else f for f in features)}: {instead}."
        for each in adapters
        for instead, features in each.refusals().items()
    ]
    return "\n".join([head, "|---|" + "---|" * len(adapters), *rows]), "\n".join(said)


def test_the_document_has_the_table():
    """Every capability of every adapter, every condition and every refusal stands in docs/frameworks.md."""
    table, said = markdown()
    text = DOCUMENT.read_text(encoding="utf-8")
    assert table in text, f"docs/frameworks.md needs\n{table}"
    assert " ".join(said.split()) in " ".join(text.split()), f"docs/frameworks.md needs\n{said}"  # it is wrapped


def test_every_feature_is_known():
    """No adapter lacks or notes what the table has no row for."""
    for each in registry.table():
        assert set(each.lacks) | set(each.notes) <= set(capabilities.FEATURES), each.name


@pytest.mark.parametrize("name", registry.BY_NAME)
def test_refusals_are_sentences(name):
    """A refusal names the framework, the thing and a way out, and nothing that is given is refused."""
    each = registry.capabilities_of(name)
    for feature in each.lacks:
        what = repr(feature) if feature in capabilities.PORTS else "does not support"
        assert each.title in each.refusal(feature) and what in each.refusal(feature)
        assert re.search(r": .{20,}", each.refusal(feature))
    for port in filter(each.gives, capabilities.PORTS):
        capabilities.refuse(each, Pattern.parse(f"**:{port}"))


def test_operations_are_refused_where_there_are_none():
    """`op:matmul` names the framework and what to do instead."""
    with pytest.raises(tt.TensortapError, match="type:MatMul"):
        capabilities.refuse(registry.capabilities_of("onnx"), Pattern.parse("op:matmul"))
