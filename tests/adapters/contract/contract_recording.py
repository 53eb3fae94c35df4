"""The part of the contract that every framework keeps: sites, values, steps, triggers, and nothing left behind."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import reference
from watched import CLOSE, Watched, given, layers, name, require, same

import tensortap as tt
from tensortap.adapters.capabilities import PORTS
from tensortap.control.listener import Peer
from tensortap.control.requests import ControlRequest
from tensortap.select.ports import PORT_INFO


class RecordingContract:
    """Collected by test_contract.py for every subject."""

    def test_sites(self, subject):
        """Every layer is listed with the ports that the framework gives."""
        found = {site.path: site for site in tt.sites(subject.model)}
        ports = [port for port in ("output", "input", "grad_output", "grad_input") if given(subject).gives(port)]
        for layer in layers(subject):
            assert set(found[name(subject, layer)].ports) == set(ports), layer
        required = {port for port in PORTS if given(subject).gives(port) and not PORT_INFO[port].optional}
        assert {port for site in found.values() for port in site.ports} == required
        assert all(name(subject, layer) in str(tt.sites(subject.model)) for layer in layers(subject))

    def test_patterns(self, subject):
        """Globs, classes and functions choose the same layers everywhere."""
        blocks = [f"{name(subject, layer)}:output" for layer in ("blocks.0", "blocks.1")]
        for pattern in ("blocks.?", "re:blocks\\.[01]", lambda site: site.path in ("blocks.0", "blocks.1")):
            with Watched(subject, pattern) as watched:
                watched.step()
            assert watched.places == blocks
        with Watched(subject, f"type:{subject.act}") as watched:
            watched.step()
        assert f"{name(subject, 'act')}:output" in watched.places

    def test_probes_change_while_it_runs(self, subject):
        """A capture that a running tap is asked for has its steps, what was watched goes on, outputs stay the same."""
        x = reference.batch()
        alone, before = np.array(subject.call(x)), subject.traces()
        head, block = name(subject, "head"), name(subject, "blocks.0")
        asked = ControlRequest(action="capture", sites=(f"{head}:output",), keep=("full",), steps=2, wait=0)
        for explicit in (True, False):
            with Watched(subject, "blocks.0") as watched:
                for call in range(6):
                    if call == 1:
                        assert watched.tap._control.ask(asked, Peer(1, 1))["waiting"]
                    assert np.array(subject.call(x)).tobytes() == alone.tobytes() or not given(subject).gives("exact")
                    if explicit:
                        watched.tap.step()
            steps = [record.step for record in watched.of("head")]
            assert steps == ([2, 3] if explicit or steps[0] == 2 else [1, 2]), steps
            assert sorted({r.step for r in watched.records if str(r.place) == f"{block}:output"}) == [*range(6)]
            assert subject.traces() == before and not watched.tap.counts

    def test_a_misspelt_site(self, subject):
        """A pattern that matches nothing raises at once and names what is near."""
        with pytest.raises(tt.TensortapError, match="blocks"):
            subject.watch("block.0", to=tt.Memory())

    def test_outputs(self, subject):
        """The output of every layer, in every call, is what the reference computes."""
        x = reference.batch()
        with Watched(subject, "**") as watched:
            watched.step()
        assert watched.steps == [0]
        for layer in set(layers(subject)) - {"split"}:
            self.compare(watched.of(layer), reference.expected(x)[f"{layer}:output"], layer)

    def test_inputs(self, subject):
        """So is what every layer is given."""
        require(subject, "input")
        x = reference.batch()
        with Watched(subject, "**:input") as watched:
            watched.step()
        for layer in layers(subject):
            self.compare(watched.of(layer, "input"), reference.expected(x)[f"{layer}:input"], layer)

    def compare(self, records, arrays, what):
        assert records, what
        assert len(records) in (1, len(arrays)), what  # where each call is a site of its own it has one
        assert [r.call for r in records] == list(range(len(records))), what
        for record, array in zip(records, arrays, strict=False):
            assert same(record, array), (what, record)

    def test_a_reused_layer(self, subject):
        """Each call of a layer used three times is a record of its own, in order."""
        require(subject, "reused")
        x = reference.batch()
        with Watched(subject, "act") as watched:
            watched.step()
        assert [r.call for r in watched.of("act")] == [0, 1, 2]
        assert all(map(same, watched.of("act"), reference.expected(x)["act:output"]))

    def test_a_shared_layer(self, subject):
        """A layer with two names is recorded under both, and under one alone when only that is asked for."""
        require(subject, "shared")
        with Watched(subject, "blocks.0", "tied") as watched:
            watched.step()
        assert len(watched.of("blocks.0")) == len(watched.of("tied")) == 2
        with Watched(subject, "tied") as alone:
            alone.step()
        assert alone.places == ["tied:output"]

    def test_nested_values(self, subject):
        """Arrays in dicts and tuples have slots, and a pattern may name one."""
        require(subject, "nested")
        x = reference.batch()
        with Watched(subject, "split") as watched:
            watched.step()
        for slot in ("output.left", "output.right[0]", "output.right[1]"):
            (record,) = watched.of("split", slot)
            assert same(record, reference.expected(x)[f"split:{slot}"][0])
        with Watched(subject, "split:output.right[1]") as one:
            one.step()
        assert one.places == ["split:output.right[1]"]

    def test_every(self, subject):
        """`every(2)` keeps the even steps and touches no data in the others."""
        with Watched(subject, tt.probe("fc1", when=tt.every(2))) as watched:
            for seed in range(5):
                watched.step(seed)
        assert watched.steps == [0, 2, 4]
        assert same(watched.of("fc1")[1], reference.expected(reference.batch(2))["fc1:output"][0])

    def test_a_metric(self, subject):
        """The step with the high loss is the one that is kept."""
        with Watched(subject, tt.probe("fc1", when=tt.metric("loss") > 1.0)) as watched:
            for seed, loss in enumerate((0.5, 3.0, 0.4)):
                watched.step(seed, loss=loss)
        assert watched.steps == [1]
        assert same(watched.of("fc1")[0], reference.expected(reference.batch(1))["fc1:output"][0])

    def test_steps_find_themselves(self, subject):
        """Without `tap.step()` each call of the model is a step."""
        require(subject, "steps")
        with Watched(subject, "fc1", "head") as watched:
            for seed in range(3):
                subject.call(reference.batch(seed))
        assert [(r.step, str(r.place.site)) for r in watched.records] == [
            (step, name(subject, layer)) for step in range(3) for layer in ("fc1", "head")
        ]

    def test_reducers(self, subject):
        """Elements, samples and rows are those of the tensor, and quantiles and histograms come along."""
        keep = [tt.stats(), tt.histogram(), tt.quantiles(0.0, 1.0), tt.full(), tt.sample(4), tt.rows([1])]
        with Watched(subject, tt.probe("head", keep=keep)) as watched:
            watched.step()
        expected = reference.expected(reference.batch())["head:output"][0]
        kept = {tensor.kind: tensor.array for tensor in watched.memory.tensors}
        assert kept["full"] == pytest.approx(expected, **CLOSE)
        assert kept["rows"] == pytest.approx(expected[1:2], **CLOSE)
        assert kept["sample"].shape == (4,) and np.isin(kept["sample"], kept["full"]).all()
        (record,) = watched.of("head")
        assert record["hist_counts"].sum() == expected.size
        assert [record.numbers[q] for q in ("q0", "q1")] == [record["min"], record["max"]]

    def test_functions_as_reducers(self, subject):
        """A function of the tensor is a reducer."""
        require(subject, "functions")

        def largest(x):
            return float(abs(x).max())

        with Watched(subject, tt.probe("head", keep=largest)) as watched:
            watched.step()
        expected = abs(reference.expected(reference.batch())["head:output"][0]).max()
        assert watched.of("head")[0].numbers["largest"] == pytest.approx(expected, **CLOSE)

    def test_lookback(self, subject):
        """A trigger writes the steps before it too."""
        with Watched(subject, tt.probe("fc1", when=tt.metric("loss") > 1.0), lookback=2) as watched:
            for seed, loss in enumerate((0.1, 0.1, 0.1, 5.0, 0.1)):
                watched.step(seed, loss=loss)
        assert watched.steps == [1, 2, 3]
        assert [r["reason"].startswith("lookback") for r in watched.of("fc1")] == [True, True, False]

    def test_pause_and_resume(self, subject):
        """Nothing is recorded while paused, and the count of steps goes on."""
        with Watched(subject, "fc1") as watched:
            watched.step()
            watched.tap.pause()
            watched.step()
            watched.tap.resume()
            watched.step()  # opened while paused
            watched.step()
        assert watched.steps == [0, 3]

    def test_named_values(self, subject):
        """A value that the user names goes into the same step."""
        with Watched(subject, "fc1", "my/value") as watched:
            tt.tap(np.full(3, 2.0), "my/value")
            watched.step()
        assert watched.steps == [0]
        assert [r["mean"] for r in watched.records if str(r.place) == "my/value:output"] == [2.0]

    def test_unseen(self, subject):
        """What was wanted and never ran is counted when the tap closes."""
        with Watched(subject, "fc1", "my/value") as watched:
            pass
        assert watched.tap.counts["unseen"] == 2

    def test_spans(self, subject):
        """A span is a step of its own."""
        require(subject, "threads")
        with Watched(subject, "fc1") as watched:
            with watched.tap.span(request="a"):
                subject.call(reference.batch())
            with watched.tap.span(request="b"):
                subject.call(reference.batch(1))
        assert len(watched.of("fc1")) == len(watched.steps) == 2

    def test_closing_leaves_no_trace(self, subject):
        """After closing the model has what it had before, and nothing is recorded any more."""
        subject.call(reference.batch())
        before = subject.traces()
        with Watched(subject, "**:{output,input}" if given(subject).gives("input") else "**") as watched:
            watched.step()
        seen = len(watched.records)
        assert subject.traces() == before
        subject.call(reference.batch())
        assert subject.traces() == before
        assert len(watched.records) == seen > 0

    def test_nothing_is_changed(self, subject):
        """Outputs and parameters are what they were: bit for bit where that is promised, else up to rounding."""
        x = reference.batch()
        bare, parameters = subject.call(x), subject.parameters()
        ports = ",".join(port for port in ("output", "input") if given(subject).gives(port))
        with Watched(subject, tt.probe(f"**:{{{ports}}}", keep=[tt.stats(), tt.histogram(), tt.full()])) as watched:
            tapped = [watched.step(), watched.step()]
        after = subject.call(x)
        for output in (*tapped, after):
            assert output.dtype == bare.dtype
            if given(subject).gives("exact"):
                assert output.tobytes() == bare.tobytes()
            assert output == pytest.approx(bare, **CLOSE)
        assert subject.parameters() == parameters

    def test_exceptions_of_the_model(self, subject):
        """The model's own error comes out as it is, and the next step is recorded."""
        with pytest.raises(Exception) as bare:
            subject.fail(reference.batch())
        with Watched(subject, "fc1", "head") as watched:
            with pytest.raises(type(bare.value)) as tapped:
                subject.fail(reference.batch())
            watched.tap.step()
            watched.step()
        assert str(tapped.value) == str(bare.value)
        assert watched.of("head")[-1].step == 1
        assert same(watched.of("head")[-1], reference.expected(reference.batch())["head:output"][0])

    def test_errors_of_ours(self, subject):
        """A reducer that raises is counted and said once; the model's output is what it was."""
        require(subject, "functions")

        def broken(x):
            raise RuntimeError("no")

        bare = subject.call(reference.batch())
        with warnings.catch_warnings(record=True) as said, Watched(subject, tt.probe("fc1", keep=broken)) as watched:
            warnings.simplefilter("always")
            outputs = [watched.step(), watched.step()]
        assert watched.tap.counts["reducer_errors"] == 2
        assert len([w for w in said if w.category is tt.TensortapWarning]) == 1
        assert all(output == pytest.approx(bare, **CLOSE) for output in outputs)

    def test_two_taps_at_once(self, subject):
        """Each sees what it asked for; closing one leaves the other; in the end nothing is left."""
        subject.call(reference.batch())
        before = subject.traces()
        first, second = Watched(subject, "fc1"), Watched(subject, "fc1", "head")
        subject.call(reference.batch())
        first.tap.step()
        second.tap.step()
        first.tap.close()
        second.step()
        second.tap.close()
        assert [(r.step, r.call) for r in first.of("fc1")] == [(0, 0)]
        assert [(r.step, r.call) for r in second.of("fc1")] == [(r.step, r.call) for r in second.of("head")]
        assert second.steps == [0, 1]
        assert subject.traces() == before

    def test_a_model_watched_again(self, subject):
        """Watching, closing and watching again gives the same records."""
        runs = []
        for _ in range(2):
            with Watched(subject, "**") as watched:
                watched.step()
            runs.append([(str(r.place), r.call, r["mean"]) for r in watched.records])
        assert runs[0] == runs[1]
