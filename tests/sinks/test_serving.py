"""OpenTelemetry and Prometheus: what a collector or a scrape sees of a model that serves."""

import functools
import sys

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import MissingExtraError, ProbeError

X = np.linspace(-2, 4, 64, dtype=np.float32)
BAD = X.copy()
BAD[:3] = np.nan


def serve(to):
    """Three requests, the second with NaN, through two sites."""
    with tt.watch(to=to) as tap:
        for request in (X, BAD, X * 2):
            tt.tap(request, "head")
            tt.tap(request, "body")
            tap.step()
    assert tap.counts == {}


@pytest.fixture
def meter():
    """A meter whose metrics can be read."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    yield provider.get_meter("test"), reader
    provider.shutdown()


def points(reader):
    """All points by the metric's name."""
    found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: list(metric.data.data_points) for metric in found}


def test_opentelemetry(meter):
    """The chosen site alone is there: newest values as gauges, totals as counters, magnitudes as a histogram."""
    serve(tt.OpenTelemetry("head", meter=meter[0]))
    found = points(meter[1])
    assert all(len(series) == 1 for series in found.values())
    attributes = {"site": "head", "port": "output", "rank": "0"}
    assert all(dict(series[0].attributes) == attributes for series in found.values())
    assert found["tensortap.tensor.absmax"][0].value == 8.0
    assert found["tensortap.tensor.std"][0].value == pytest.approx(2 * X.std())
    assert found["tensortap.tensor.nonfinite"][0].value == 0
    assert found["tensortap.tensor.nonfinite_elements"][0].value == 3
    assert found["tensortap.tensor.records"][0].value == 3
    seen = found["tensortap.tensor.absmax_seen"][0]
    assert (seen.count, seen.max) == (3, 8.0)
    assert 1.0 in seen.explicit_bounds


def test_prometheus():
    """A scrape sees the chosen site; after the tap is closed the registry is as it was."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    sink = tt.Prometheus("head", registry=registry, stats=["absmax", "nonfinite"])
    sink.close, close = lambda: None, sink.close
    serve(sink)
    labels = {"site": "head", "port": "output", "rank": "0"}
    assert registry.get_sample_value("tensortap_tensor_absmax", labels) == 8.0
    assert registry.get_sample_value("tensortap_tensor_nonfinite_elements_total", labels) == 3
    assert registry.get_sample_value("tensortap_tensor_records_total", labels) == 3
    assert b"body" not in client.generate_latest(registry)
    with pytest.raises(ProbeError, match="prefix='tensortap_tensor_2'"):
        tt.Prometheus("head", registry=registry)
    close()
    assert client.generate_latest(registry) == b""


@pytest.mark.parametrize("sites", [("**",), ("head", "*"), ("re:.*",), ("**:*",), ()])
@pytest.mark.parametrize("sink", [tt.OpenTelemetry, tt.Prometheus])
def test_everything_is_refused(sink, sites):
    """A pattern that chooses everything is refused, with the reason and a call that works."""
    with pytest.raises(ProbeError, match=rf"metrics servers do not bear .* Choose: {sink.__name__}\('head'"):
        sink(*sites)


def test_types_are_refused():
    """A sink sees names only, and says so."""
    with pytest.raises(ProbeError, match="knows names"):
        tt.Prometheus("type:Linear")


def test_places_are_bounded(make_step, meter):
    """However many places a pattern turns out to choose, at most so many become series; the others are counted."""
    sink = tt.OpenTelemetry("blocks.*", meter=meter[0], most=3)
    for number in range(2):
        sink.write(make_step({f"blocks.{n}": X for n in range(5)}, number=number))
    sink.close()
    assert len(points(meter[1])["tensortap.tensor.std"]) == 3
    assert sink.left_out == 2


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [("opentelemetry.metrics", tt.OpenTelemetry, "otel"), ("prometheus_client", tt.Prometheus, "prometheus")],
)
def test_missing(module, make, extra, monkeypatch):
    """Where the package is missing the error names the line that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'tensortap\[{extra}\]'"):
        make("head")


class Served:
    """A network in NumPy."""

    def __init__(self):
        self.head = np.tanh

    def __call__(self, x):
        return self.head(x)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_request_shows_before_the_next_one(kind):
    """Nobody calls `tap.step()`: a call that no backward can follow is published when it has returned."""
    prometheus = pytest.importorskip("prometheus_client")
    registry, site = prometheus.CollectorRegistry(), "head" if kind == "numpy" else "0"
    if kind == "torch":
        torch = pytest.importorskip("torch")
        model = torch.nn.Sequential(torch.nn.Linear(2, 2)).eval()
        call = torch.inference_mode()(lambda: model(torch.ones(1, 2)))
    else:
        model = Served()
        call = functools.partial(model, np.ones(3))
    with tt.watch(model, site, to=tt.Prometheus(site, registry=registry)) as tap:
        for number in (1, 2, 3):
            call()
            tap.flush()
            labels = {"site": site, "port": "output", "rank": "0"}
            assert registry.get_sample_value("tensortap_tensor_records_total", labels) == number


def test_training_with_a_metrics_server():
    """With gradients a step is a whole step of training, and is published once."""
    prometheus, torch = pytest.importorskip("prometheus_client"), pytest.importorskip("torch")
    registry, model, memory = prometheus.CollectorRegistry(), torch.nn.Sequential(torch.nn.Linear(2, 2)), tt.Memory()
    with tt.watch(model, "0:{output,grad_output}", to=[tt.Prometheus("0", registry=registry), memory]):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    found = [(record.step, str(record.place)) for record in memory.records]
    assert found == [(step, f"0:{port}") for step in (0, 1) for port in ("output", "grad_output")]
