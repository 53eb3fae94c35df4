"""Every registered framework keeps the contract: it gives what it says, and refuses the rest by name."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from subjects import SUBJECTS

import tensortap as tt
from tensortap.adapters import capabilities
from tensortap.adapters.lookup import adapter_for, framework_for, framework_named
from tensortap.adapters.null import IdleAdapter, NullAdapter
from tensortap.adapters.protocol import Adapter, Framework
from tensortap.adapters.registry import FRAMEWORKS
from tensortap.errors import PatternError, UnsupportedError

NAMES = [each.name for each in FRAMEWORKS]
# What a framework is asked for, by the feature that stands in the table.
ASKED = {
    "blocks": lambda framework: framework.function_adapter(print),
    "global_stats": lambda framework: framework.summed(np.zeros(1)),
}


@pytest.fixture(params=NAMES)
def framework(request):
    for package in SUBJECTS[request.param]:
        pytest.importorskip(package)
    return framework_named(request.param)


def test_every_framework_is_one_object(framework):
    """A framework is an object of a subclass of `Framework` with the capabilities of its package."""
    assert isinstance(framework, Framework) and type(framework) is not Framework
    assert framework.capabilities.name in NAMES


@pytest.mark.parametrize("feature", ASKED)
def test_what_a_framework_cannot_do_is_refused_by_name(framework, feature):
    """The refusal names the framework, the feature and what to do instead."""
    if framework.capabilities.gives(feature):
        pytest.skip("it can")
    with pytest.raises(UnsupportedError) as refused:
        ASKED[feature](framework)
    said = str(refused.value)
    assert framework.capabilities.title in said
    assert capabilities.FEATURES[feature].replace("`", "") in said
    assert framework.capabilities.lacks[feature] in said


def test_the_subject_of_a_framework_is_found(subject):
    """A model is served by its framework's adapter, and the adapter knows its capabilities."""
    adapter = adapter_for(subject.model)
    assert isinstance(adapter, Adapter)
    assert adapter.capabilities is framework_for(subject.model).capabilities
    assert adapter_for(adapter) is adapter


def test_sites_with_a_batch(subject):
    """`tt.sites(model, batch)` lists the sites, and the operations where a call shows them."""
    plain = {site.path for site in tt.sites(subject.model)}
    found = {site.path for site in tt.sites(subject.model, subject.arguments(reference.batch()))}
    assert plain <= found
    if subject.framework in ("torch", "keras", "numpy"):
        assert any("/matmul#0" in path.lower() or "/linear#0" in path.lower() for path in found - plain)
    else:
        assert found == plain


def test_all_reduce_of_another_framework_is_refused(monkeypatch, tmp_path):
    """`global_stats=True` on several ranks names the framework, the feature and the alternative."""

    class Layer:
        def __call__(self, x):
            return x

    class Net:
        def __init__(self):
            self.fc = Layer()

        def __call__(self, x):
            return self.fc(x)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match=r"NumPy-style.*global_stats=True.*merged\(over='ranks'\)"):
        tt.watch(Net(), "fc", to=tmp_path / "run", global_stats=True)


def test_no_model_needs_no_special_case():
    """Without a model an adapter is there all the same: it refuses operations and `span()`."""
    assert NullAdapter().candidates() == [] and NullAdapter().unseen() == {}
    with pytest.raises(PatternError, match=r"ops\('matmul'\)"):
        tt.watch("op:matmul", to=tt.Memory())
    with tt.watch(to=tt.Memory()) as watching, pytest.raises(UnsupportedError, match="needs a model"), watching.span():
        pass


def test_a_rank_that_does_not_record_still_calls_the_function():
    """`tap.call` runs a watched function on every rank."""
    assert IdleAdapter(lambda x: x + 1).call(1) == 2
    with pytest.raises(UnsupportedError, match="watch\\(function"):
        IdleAdapter().call(1)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [({"queue_byte": 1}, "queue_bytes"), ({"lookbak": 1}, "lookback"), ({"zzz": 1}, "'zzz'")],
)
def test_an_unknown_keyword_names_the_nearest(keywords, said):
    """A misspelt keyword of `watch` raises a TypeError with the right one."""
    with pytest.raises(TypeError, match=said):
        tt.watch(to=tt.Memory(), **keywords)


def test_rare_options_are_accepted_both_ways():
    """`options=` and the keywords that were there before mean the same."""
    with tt.watch(to=tt.Memory(), start=7) as old, tt.watch(to=tt.Memory(), options=tt.Options(start=7)) as new:
        assert old.recorder.current.number == new.recorder.current.number == 7
