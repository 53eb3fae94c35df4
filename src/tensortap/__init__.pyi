"""The public names and where each is made: type checkers read this file, and so does `import tensortap`."""

from tensortap.compare import compare
from tensortap.diagnose import Rule, findings, rule
from tensortap.diff import Diff
from tensortap.errors import TensortapError
from tensortap.finding import Finding, Findings
from tensortap.harvest import Drift, Harvest, Ray, diff, harvest, open_harvest, pooled, samples, tokens, top_k
from tensortap.inspect import capture, check_model, locate_nonfinite, rank_samples, sites, verify
from tensortap.ops import ops
from tensortap.options import Options
from tensortap.record.counters import TensortapWarning
from tensortap.record.step import Record
from tensortap.reduce.reducers import (
    content_hash,
    full,
    histogram,
    per_sample,
    quantiles,
    rows,
    sample,
    stats,
    units,
)
from tensortap.reduce.summary import Summary, summarize
from tensortap.script.notebook import load_ipython_extension as load_ipython_extension  # what `%load_ext` looks for
from tensortap.script.notebook import unload_ipython_extension as unload_ipython_extension
from tensortap.select.probes import Probe, escalation, probe
from tensortap.select.triggers import (
    Trigger,
    at,
    between,
    chance,
    desync,
    every,
    first,
    following,
    metric,
    nonfinite,
    powers_of,
    spike,
)
from tensortap.sinks.console import Console
from tensortap.sinks.csv import Csv
from tensortap.sinks.jsonl import JsonLines
from tensortap.sinks.memory import Memory
from tensortap.sinks.mlflow import MLflow
from tensortap.sinks.npy import Npy
from tensortap.sinks.otel import OpenTelemetry
from tensortap.sinks.prometheus import Prometheus
from tensortap.sinks.tensorboard import TensorBoard
from tensortap.sinks.trackio import Trackio
from tensortap.sinks.wandb import WandB
from tensortap.store.compact import compact
from tensortap.store.run import Run, open_run
from tensortap.types import Call
from tensortap.version import __version__
from tensortap.view.terminal.tensor import show_tensor as show
from tensortap.watch import Tap, tap, watch
from tensortap.watch_step import watch_step

open = open_run  # names that shadow builtins, here only
print = show
hash = content_hash

__all__ = [
    "Call",
    "Console",
    "Csv",
    "Diff",
    "Drift",
    "Finding",
    "Findings",
    "Harvest",
    "JsonLines",
    "MLflow",
    "Memory",
    "Npy",
    "OpenTelemetry",
    "Options",
    "Probe",
    "Prometheus",
    "Ray",
    "Record",
    "Rule",
    "Run",
    "Summary",
    "Tap",
    "TensorBoard",
    "TensortapError",
    "TensortapWarning",
    "Trackio",
    "Trigger",
    "WandB",
    "__version__",
    "at",
    "between",
    "capture",
    "chance",
    "check_model",
    "compact",
    "compare",
    "content_hash",
    "desync",
    "diff",
    "escalation",
    "every",
    "findings",
    "first",
    "following",
    "full",
    "harvest",
    "hash",
    "histogram",
    "locate_nonfinite",
    "metric",
    "nonfinite",
    "open",
    "open_harvest",
    "open_run",
    "ops",
    "per_sample",
    "pooled",
    "powers_of",
    "print",
    "probe",
    "quantiles",
    "rank_samples",
    "rows",
    "rule",
    "sample",
    "samples",
    "show",
    "sites",
    "spike",
    "stats",
    "summarize",
    "tap",
    "tokens",
    "top_k",
    "units",
    "verify",
    "watch",
    "watch_step",
]
