"""The MCP server over a folder of runs: each question of `Questions` is a tool.

It only reads, unless `control` is allowed: then the actions of `Actions` are tools too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from tensortap.errors import MissingExtraError, TensortapError
from tensortap.version import __version__
from tensortap.view.agent.actions import Actions
from tensortap.view.agent.questions import Questions

INSTRUCTIONS: Final = """Runs of tensortap: statistics of the tensors inside trainings and inferences.
Begin with `runs`, then `explain` or `findings` of a run; look closer with `summary`, `series`, `site`, `histogram`,
`metric`, `compare` and `sql`. A site is a module and a port: `blocks.3.mlp:output`, `:grad_output`, `fc.weight:grad`.
`run` may be left out where there is one run. Long answers come in pages: give `page`."""
TOOLS: Final = ("runs", "explain", "summary", "findings", "series", "metric", "histogram", "site", "compare", "sql")


CONTROL: Final = """
Live runs can be asked for more: `status`, `capture` (tensors of some sites for a few steps), `pause`, `resume`,
`note`. They act when the running step ends, and the run's events say what was asked."""
ACTIONS: Final = ("status", "capture", "pause", "resume", "note")


def server(path: str, control: bool = False) -> Any:
    """Return the server for the runs below a folder; `server(path).run("stdio")` serves until its input ends."""
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError:
        raise MissingExtraError("tensortap mcp needs the MCP SDK: pip install 'tensortap[mcp]'") from None
    questions = Questions(path)
    said = INSTRUCTIONS + (CONTROL if control else "")
    made = MCPServer("tensortap", version=__version__, instructions=said, log_level="WARNING")
    for name in TOOLS:
        made.tool(name=name, annotations=ToolAnnotations(read_only_hint=True))(_answered(getattr(questions, name)))
    actions = Actions(questions.where) if control else None
    for name in ACTIONS if control else ():
        hints = ToolAnnotations(read_only_hint=name == "status", destructive_hint=False)
        made.tool(name=name, annotations=hints)(_answered(getattr(actions, name)))
    return made


def _answered(ask: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a tool that answers a wrong question with the corrected call, not with a traceback."""

    @wraps(ask)
    def answer(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return ask(*args, **named)
        except (TensortapError, ValueError, OSError) as error:
            return {"error": str(error)}

    return answer
