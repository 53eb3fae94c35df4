"""The graph that a session really runs: dumped after optimisation, and compared with the original model."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import onnxruntime

from tensortap.errors import MissingExtraError, UnsupportedError
from tensortap.reduce import kernel as kernels

try:
    import onnx

    from tensortap.adapters.onnx.channel_blocks import ChannelBlocks, channel_blocks_of
except ImportError as error:
    raise MissingExtraError(
        "watching an ONNX Runtime session needs the package onnx, to name the tensors inside: "
        "pip install 'tensortap[onnx]'"
    ) from error

FUSED: Final = (
    "was fused or folded away when the session optimised its graph; a session with graph_optimization_level = "
    "ORT_DISABLE_ALL has it, with other rounding"
)
INSIDE: Final = "is inside the {kind} node {name!r}; only what that node returns can be seen"
_SILENT: Final = 3  # only errors: a dumped graph is bound to this machine, which is where it is used
_RANDOM: Final = ("Random", "Multinomial", "Bernoulli", "Dropout")
_WEIGHTS: Final = "weights.bin"
_DOMAIN: Final = "tensortap"  # of the operators in _kernel_onnx.h
_OPERATORS: Final = {  # by whether a histogram and a hash are wanted (csrc/onnx.h)
    (False, False): "Row",
    (True, False): "RowAndHistogram",
    (False, True): "RowAndHash",
    (True, True): "RowHistogramAndHash",
}
_DUMPED: Final = "session.optimized_model_external_initializers_file_name"
_FOLDER: Final = "session.model_external_initializers_file_folder_path"
_GONE: Final = (
    "It was loaded from {!r}, which is not there any more (seen from the working directory): watch it while it is, "
    "or load it from bytes"
)
_PROVIDERS: Final = (
    "Sessions with providers that compile the graph themselves show no tensors; use the CPU or CUDA provider"
)


def row_of(name: str) -> str:
    """Return the name of a tensor's row in an instrumented session."""
    return f"{_DOMAIN}:{name}"


class OnnxNode(NamedTuple):
    """One node: its inputs without constants, its outputs, and its weights' size.

    `types` are its kind and, if its output is stored in blocks of channels whose plain form is not known, `Blocked`:
    the elements are there, in another order.
    """

    types: tuple[str, ...]
    given: tuple[str, ...]
    gives: tuple[str, ...]
    parameters: int


class OnnxGraph:
    """A session's optimised graph, in a folder that is removed with this object."""

    def __init__(self, session: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tensortap-onnx-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._source = session._model_path or session._model_bytes
        self._options = session._sess.session_options  # a copy
        self._initial = session._sess_options_initial
        self._offers_rows = False
        given = session.get_provider_options()
        self._providers = [(name, given.get(name, {})) for name in session.get_providers()]
        self._dump()
        self.model = onnx.load(self.folder / "graph.onnx", load_external_data=False)

    @cached_property
    def nodes(self) -> list[OnnxNode]:
        """Every node in order of execution."""
        return [self._node(node) for node in self.model.graph.node if not self._blocks.is_reorder(node)]

    @cached_property
    def _loaded(self) -> Any:
        """The model as it was loaded; an empty one if it was an .ort file, or is gone."""
        try:
            return _load(self._source)
        except Exception:
            return onnx.ModelProto()

    @cached_property
    def _blocks(self) -> ChannelBlocks:
        return channel_blocks_of(self.model.graph, self._loaded)

    def _node(self, node: Any) -> OnnxNode:
        plain = self._blocks.plain
        held = [self.constants[name] for name in node.input if name in self.constants]
        return OnnxNode(
            (node.op_type, *(["Blocked"] * self._blocks.is_blocked(node))),
            tuple(plain(name) for name in node.input if name and name not in self.constants),
            tuple(plain(name) for name in node.output if name),
            sum(math.prod(constant.dims) for constant in held),
        )

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The initializers: name to what holds them."""
        return {constant.name: constant for constant in self.model.graph.initializer}

    def constant(self, name: str) -> Any:
        """Return the elements of one initializer."""
        return onnx.numpy_helper.to_array(self.constants[name], str(self.folder))

    @cached_property
    def missing(self) -> dict[str, str]:
        """The tensors of the original graph that were removed, and those that cannot be reached, each with
        the reason.
        """
        loaded = self._loaded
        there = {name for node in self.nodes for name in node.gives} | set(self.constants)
        inside = {name: why for graph in (loaded.graph, self.model.graph) for name, why in _inside(graph)}
        gone = {name: FUSED for node in loaded.graph.node for name in node.output if name and name not in there}
        return gone | {name: why for name, why in inside.items() if name not in there}

    @cached_property
    def inner_nodes(self) -> list[OnnxNode]:
        """The nodes in the branches and bodies of If, Loop and Scan nodes, which cannot be seen."""
        inner = (each for node in self.model.graph.node for body in _bodies(node) for each in _nodes(body))
        return [self._node(node) for node in inner]

    @cached_property
    def random(self) -> bool:
        """Whether any node draws random numbers, so that an additional run changes the results of later ones."""
        return any(word in node.op_type for node in _nodes(self.model.graph) for word in _RANDOM)

    def instrumented_session(
        self, names: Sequence[str], rows: Mapping[str, bool] = MappingProxyType({}), hashed: Collection[str] = ()
    ) -> Any:
        """Return a session that runs the same nodes and outputs more tensors.

        For the tensors in `rows` it outputs rows under `row_of(name)`, with histograms where the value is True, and
        with content hashes for those in `hashed`, which are read in logical order.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        sources = {name: name if name in hashed else self._blocks.unordered(name) for name in rows}
        plain = [*names, *(name for name, source in sources.items() if name == source)]
        model.graph.node.extend(self._blocks.reorders(dict.fromkeys(plain)))
        for name, histogram in rows.items():
            kind = _OPERATORS[histogram, name in hashed]
            model.graph.node.append(onnx.helper.make_node(kind, [sources[name]], [row_of(name)], domain=_DOMAIN))
        known = {output.name for output in model.graph.output}
        given = [*(name for name in names if name not in known), *map(row_of, rows)]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in given)
        if rows:
            model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
            self._offer_rows()
        path = self.folder / f"instrumented-{len(list(self.folder.iterdir()))}.onnx"
        path.write_bytes(model.SerializeToString())
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Without a path, so that the user's own optimised model is not overwritten.
        return self._session(str(path), graph_optimization_level=level, optimized_model_filepath="")

    @property
    def can_reduce(self) -> bool:
        """Whether the kernel can read the tensors' memory while the graph runs."""
        return kernels.library is not None and [name for name, _ in self._providers] == ["CPUExecutionProvider"]

    def _offer_rows(self) -> None:
        if not self._offers_rows:
            self._options.register_custom_ops_library(kernels.library)
            self._offers_rows = True

    @property
    def nbytes(self) -> int:
        """How much memory the weights of an instrumented session take, roughly."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if not file.name.startswith("instrumented"))

    def _dump(self) -> None:
        path = str(self.folder / "graph.onnx")
        self._session(self._source, optimized_model_filepath=path)

    def _session(self, source: str | bytes, **options: Any) -> Any:
        """Return a session like the user's; the user's own options are used if a copy lacks something (custom
        operators).
        """
        own = (
            source is not self._source
        )  # our own files have their weights beside them, wherever the user's model has them
        entries = {_FOLDER: str(self.folder)} if own else {_DUMPED: _WEIGHTS}
        for given in (self._options, self._initial):
            try:
                with _changed(given, entries, given is self._initial, **options):
                    return onnxruntime.InferenceSession(source, given, providers=self._providers)
            except Exception as error:
                if given is self._initial or self._initial is None:
                    why = _GONE.format(source) if _is_gone(source) else _PROVIDERS
                    raise UnsupportedError(
                        f"this session cannot be watched: it cannot be built again ({error}). {why}"
                    ) from error
        raise AssertionError  # pragma: no cover


@contextmanager
def _changed(options: Any, entries: Mapping[str, str], users: bool, **values: Any) -> Iterator[None]:
    """Change session options temporarily; in the user's own options the entries are restored too."""
    values |= {"log_severity_level": _SILENT, "enable_profiling": False}
    before = {name: getattr(options, name) for name in values}
    held = {name: _entry(options, name) for name in entries}
    for name, entry in entries.items():
        if held[name] != entry and (held[name] or name != _FOLDER):  # where no folder is said, it is the model's
            options.add_session_config_entry(name, entry)
    try:
        for name, value in values.items():
            setattr(options, name, value)
        yield
    finally:
        for name, entry in held.items() if users else ():
            if _entry(options, name) != entry:
                options.add_session_config_entry(name, entry)
        for name, value in before.items():
            setattr(options, name, value)


def _entry(options: Any, name: str) -> str:
    """Return an entry of the session's configuration; empty where there is none, which means the same."""
    try:
        return str(options.get_session_config_entry(name))
    except Exception:
        return ""


def _is_gone(source: str | bytes | Path) -> bool:
    return not isinstance(source, bytes) and not Path(source).exists()


def _load(source: str | bytes) -> Any:
    if isinstance(source, bytes):
        return onnx.load_model_from_string(source)
    return onnx.load(source, load_external_data=False)


def _inside(graph: Any) -> Iterator[tuple[str, str]]:
    """Return the tensors in the branches and loop bodies of nodes."""
    for node in graph.node:
        why = INSIDE.format(kind=node.op_type, name=node.name or node.output[0])
        yield from ((name, why) for body in _bodies(node) for inner in _nodes(body) for name in inner.output if name)


def _nodes(graph: Any) -> Iterator[Any]:
    """Return every node, also those in bodies of other nodes."""
    for node in graph.node:
        yield node
        for body in _bodies(node):
            yield from _nodes(body)


def _bodies(node: Any) -> list[Any]:
    return [body for a in node.attribute for body in (*([a.g] if a.HasField("g") else []), *a.graphs)]
