"""The part of the contract that a framework may lack: gradients, parameters, quick looks, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from watched import CLOSE, Watched, given, layers, name, require, same

import tensortap as tt
from tensortap.adapters.capabilities import PORTS


class CapabilitiesContract:
    """Collected by test_contract.py for every subject."""

    def test_gradients(self, subject):
        """Where there are gradients, those of outputs and parameters are what the reference computes."""
        require(subject, "grad_output", "grad")
        x = reference.batch()
        expected = reference.gradients(x)
        with Watched(subject, "head:grad_output", f"{subject.weight}:grad") as watched:
            subject.train(x)
            watched.tap.step()
        assert same(watched.of("head", "grad_output")[0], expected["head:grad_output"])
        assert same(watched.of(subject.weight, "grad")[0], expected["weight"])

    def test_parameters(self, subject):
        """A parameter is recorded as it is."""
        require(subject, "param")
        with Watched(subject, f"{subject.weight}:param") as watched:
            watched.step()
        assert same(watched.of(subject.weight, "param")[0], reference.weights()["head"][0])

    def test_parameters_of_the_last_step(self, subject):
        """They are read when a step closes, and closing the tap closes the step that is open, without `tap.step()`."""
        require(subject, "param", "steps")
        with Watched(subject, f"{subject.weight}:param") as watched:
            for seed in range(2):
                subject.call(reference.batch(seed))
        assert watched.steps == [0, 1]

    @pytest.mark.parametrize("port", PORTS)
    def test_refusals(self, subject, port):
        """A port that the framework does not have is refused: the port, the framework, and what to do instead."""
        if given(subject).gives(port):
            return
        with pytest.raises(tt.TensortapError) as refused:
            subject.watch(f"**:{port}", to=tt.Memory())
        assert port in str(refused.value) and given(subject).title in str(refused.value)
        assert given(subject).lacks[port] in str(refused.value)

    def test_capture(self, subject):
        """One call, and the tensors at the chosen sites, with what the model returned."""
        require(subject, "capture")
        x = reference.batch()
        found = tt.capture(subject.model, subject.arguments(x), "fc1", "head")
        assert list(found) == [name(subject, "fc1"), name(subject, "head")]
        for layer in ("fc1", "head"):
            expected = reference.expected(x)[f"{layer}:output"][0]
            assert subject.array(found[name(subject, layer)]) == pytest.approx(expected, **CLOSE)

    def test_capture_of_every_call(self, subject):
        """A second call of one site does not overwrite the first."""
        require(subject, "capture", "reused")
        found = tt.capture(subject.model, subject.arguments(reference.batch()), "act")
        assert list(found) == ["act", "act#1", "act#2"]

    def test_verify(self, subject):
        """The proof on this very model."""
        require(subject, "verify")
        before = subject.parameters()
        proof = tt.verify(subject.model, subject.arguments(reference.batch()), repeats=1)
        assert proof and proof.deterministic and proof.records > 0, str(proof)
        assert subject.parameters() == before

    def test_compare(self, subject):
        """A model compared with itself is equal."""
        require(subject, "compare")
        found = tt.compare(subject.model, subject.model, subject.arguments(reference.batch()))
        assert found and found.pairs >= len(layers(subject))

    def test_locating_a_nonfinite_value(self, subject):
        """The first layer that makes a NaN is named; without one there is nothing to name."""
        require(subject, "origin")
        x = reference.batch()
        assert tt.locate_nonfinite(subject.model, subject.arguments(x)) is None
        with np.errstate(all="ignore"):
            found = tt.locate_nonfinite(subject.model, subject.arguments(np.full_like(x, 3.4e38)))
        assert (found.site, found.direction) == (name(subject, "fc1"), "forward")

    def test_locating_a_batch_that_is_not_finite(self, subject):
        """What was not finite when it came in is named, and no layer is blamed for it."""
        require(subject, "origin")
        x = reference.batch()
        x.flat[0] = np.nan
        with np.errstate(all="ignore"):
            found = tt.locate_nonfinite(subject.model, subject.arguments(x))
        assert found.why == "the batch was not finite when it came in"
        assert [seen.summary.nan for seen in found.inputs] == [1]

    def test_the_run_folder(self, subject, tmp_path):
        """A run says which framework it is of, and holds every step."""
        with subject.watch(to=tmp_path / "run") as tap:
            subject.call(reference.batch())
            tap.step(loss=1.0)
        run = tt.open(tmp_path / "run")
        assert run.info["model"]["framework"] == subject.framework
        assert run.steps == [0] and len(run.sites) >= 4
