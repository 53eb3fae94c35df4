"""Find the lines of the user's code that make the arguments of a call, followed back by name."""

from __future__ import annotations

import ast
import linecache
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

from tensortap.context.caller import frames_of_caller, in_library, shortened_path

_MOST_LINES: Final = 8
_DEPTH: Final = 8
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Use(NamedTuple):
    """Names that are used at a line of a scope."""

    names: frozenset[str]
    line: int
    scope: ast.AST


class SourceFile:
    """One file of the user's, as a tree."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def statement_at(self, line: int) -> ast.stmt | None:
        """Return the smallest statement that has a line."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        return min(found, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)

    def scope_of(self, node: ast.AST) -> ast.AST:
        """Return the function around a node, or the module."""
        while node in self._parents and not isinstance(node, _SCOPES):
            node = self._parents[node]
        return node

    def definitions(self, name: str, use: Use) -> list[ast.AST]:
        """Return the statements that bind a name before a line: in its function, or else in the module; the last ones
        first.
        """
        bindings = self._bindings.get(name, [])
        own = [(node, scope) for node, scope in bindings if scope is use.scope]
        if isinstance(use.scope, _SCOPES) and not own:
            own = [(node, scope) for node, scope in bindings if scope is self.tree]
            return [node for node, _ in reversed(own)]
        before = [node for node, _ in own if getattr(node, "lineno", 0) < use.line or _is_loop_around(node, use.line)]
        return list(reversed(before))

    @cached_property
    def _bindings(self) -> dict[str, list[tuple[ast.AST, ast.AST]]]:
        """The statements that bind each name, by scope: the file is walked once."""
        found: dict[str, list[tuple[ast.AST, ast.AST]]] = {}
        for node in ast.walk(self.tree):
            for name in _bound(node):
                found.setdefault(name, []).append((node, self.scope_of(self._parents.get(node, self.tree))))
        return found


@lru_cache(maxsize=16)
def _source(file: str) -> SourceFile | None:
    try:
        return SourceFile("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def frames_of_user() -> list[tuple[str, int]]:
    """Return file and line of the frames that are the user's own, the innermost first."""
    running = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames_of_caller(2))
    return [(file, line) for file, line in running if not in_library(file) and not file.startswith("<")][:4]


def input_lines(calls: list[tuple[str, int]]) -> list[str]:
    """Return `file:line` of the statements that make the arguments of the innermost call; `calls` are the user's
    frames.

    The last assignment comes first. Parameters of a function are followed into the frame that called it.
    """
    return _followed(calls, _innermost)


def target_lines(calls: list[tuple[str, int]]) -> list[str]:
    """Return `file:line` of the statements that make the last argument of a call, such as that of a loss."""
    return _followed(calls, _last_argument)


def lines_that_return(code: str) -> list[str]:
    """Return `file:line` of what functions of the same file return that a line (`file:line`) calls."""
    file, _, line = code.rpartition(":")
    try:
        source = _source(file)
        statement = None if source is None else source.statement_at(int(line))
    except ValueError:
        return []
    if source is None or statement is None:
        return []
    called = {_called_name(n.func) for n in ast.walk(statement) if isinstance(n, ast.Call)} - {"forward", "__call__"}
    functions = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name in called]
    returns = [n for function in functions[:2] for n in ast.walk(function) if isinstance(n, ast.Return)]
    return [f"{file}:{n.lineno}" for n in returns[:3]]


def callers() -> list[str]:
    """Return `file:line` of the user's frames around the innermost one."""
    return [f"{shortened_path(file)}:{line}" for file, line in frames_of_user()[1:3]]


def _called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _followed(calls: list[tuple[str, int]], choose: Any) -> list[str]:
    try:
        return _walked(calls, choose)
    except Exception:  # a program of an unexpected form
        return []


def _walked(calls: list[tuple[str, int]], choose: Any) -> list[str]:
    found: dict[str, None] = {}
    wanted: frozenset[str] | None = None
    for file, line in calls[:4]:
        source = _source(file)
        statement = None if source is None else source.statement_at(line)
        if source is None or statement is None:
            break
        names = choose(statement) if wanted is None else _names(statement)
        uses = [Use(names, line, source.scope_of(statement))]
        wanted = frozenset(_follow(source, file, uses, found))
        if not wanted or len(found) >= _MOST_LINES:
            break
    return list(found)[:_MOST_LINES]


def _follow(source: SourceFile, file: str, uses: list[Use], found: dict[str, None]) -> set[str]:
    """Add the lines that bind names, and those that bind what they are made of; return parameters that were met."""
    parameters: set[str] = set()
    begun = uses[0].scope
    known: set[tuple[str, ast.AST]] = set()
    for _ in range(_DEPTH):
        following: list[Use] = []
        for use in uses:
            for name in sorted(use.names):
                if (name, use.scope) in known:
                    continue
                known.add((name, use.scope))
                definitions = source.definitions(name, use)[:3]
                if not definitions and use.scope is begun and name in _parameters(begun):
                    parameters.add(name)
                for node in definitions:
                    found.update({f"{shortened_path(file)}:{line}": None for line in _lines(node)})
                    following += _uses_in(source, node)
        uses = following
    return parameters


def _uses_in(source: SourceFile, node: Any) -> list[Use]:
    """Return the names that a binding is made of; for a function, those in what it returns."""
    if not isinstance(node, ast.FunctionDef):
        return [Use(_names_in_value(node), node.lineno, source.scope_of(node))]
    given = [n for n in ast.walk(node) if isinstance(n, (ast.Return, ast.Yield)) and n.value is not None]
    return [Use(_names(n), n.lineno, node) for n in given[-2:]]


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a statement binds."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        targets = [node.target]
    elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return {node.name}
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _lines(node: ast.AST) -> list[int]:
    """Return the lines of a binding; for a class, those that set attributes."""
    if isinstance(node, ast.ClassDef):
        inside = [n for n in ast.walk(node) if isinstance(n, (ast.Assign, ast.AugAssign))]
        return [n.lineno for n in inside if any(_is_attribute(t) for t in _targets(n))][:6]
    return [] if isinstance(node, (ast.For, ast.FunctionDef)) else [node.lineno]  # type: ignore[attr-defined]


def _is_attribute(target: ast.expr) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute)


def _targets(node: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _names_in_value(node: ast.AST) -> frozenset[str]:
    if isinstance(node, ast.ClassDef):
        return frozenset()
    part = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
    names = _names(part) if part is not None else frozenset()
    return names | frozenset(_bound(node)) if isinstance(node, ast.AugAssign) else names


def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def _innermost(statement: ast.stmt) -> frozenset[str]:
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)]
    inner = [c for c in calls if not any(isinstance(n, ast.Call) for a in _arguments(c) for n in ast.walk(a))]
    given = frozenset(name for call in inner for argument in _arguments(call) for name in _names(argument))
    return given or _names(statement)


def _last_argument(statement: ast.stmt) -> frozenset[str]:
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and len(_arguments(n)) > 1]
    return _names(_arguments(calls[0])[-1]) if calls else _names(statement)


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _parameters(scope: ast.AST) -> set[str]:
    if not isinstance(scope, _SCOPES):
        return set()
    given = scope.args
    return {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self"}


def _is_loop_around(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.For) and node.lineno <= line <= (node.end_lineno or node.lineno)
