"""Draws docs/pipeline.svg: the path of one tensor, from the framework's hook to the reader.

`make picture` runs it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, BOX, TALL, GAP = 1000, 210, 74, 38
ROWS = (
    (
        "in your step, for each tensor",
        ("framework hook", "adapters/"), ("recorder.observe", "record/recorder"), ("kernel: one row", "reduce/, C"),
        ("step table", "record/table"),
    ),
    (
        "in your step, once at its end",
        ("step detector", "adapters/steps"), ("triggers decide", "select/triggers"),
        ("keep, hold, drop", "record/decision"), ("tail file: durable", "store/tail"),
    ),
    (
        "on a thread of its own",
        ("writer", "record/writer"), ("seal to Parquet", "store/sealing"), ("tensors", "store/tensors"),
        ("other sinks", "sinks/"),
    ),
    (
        "in any process, also while it runs",
        ("Run: one snapshot", "store/run"), ("rules, diff", "diagnose/, diff/"), ("show, view, report", "view/"),
        ("ctl asks for more", "control/"),
    ),
)  # fmt: skip
HEAD = 'markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto"'
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1d2126 } .where { font-size: 12px; fill: #5f6770 }
.row { font-size: 13px; font-weight: 600; fill: #0b62c4 } rect { fill: #fff; stroke: #b9bcb6 }
path { stroke: #5f6770; fill: none; stroke-width: 1.5 } svg { background: #fbfbfa }
"""


def box(x: int, y: int, name: str, where: str) -> str:
    """Return one stage."""
    middle = x + BOX // 2
    return (
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{TALL}" rx="6"/>'
        f'<text x="{middle}" y="{y + 32}" text-anchor="middle">{escape(name)}</text>'
        f'<text class="where" x="{middle}" y="{y + 54}" text-anchor="middle">{escape(where)}</text>'
    )


def arrow(points: str) -> str:
    """Return a line with a head."""
    return f'<path d="{points}" marker-end="url(#head)"/>'


def main() -> None:
    """Draw the rows, an arrow between neighbours, and one from the end of a row to the next."""
    drawn, y = [], 30
    for number, (title, *stages) in enumerate(ROWS):
        drawn.append(f'<text class="row" x="20" y="{y}">{escape(title)}</text>')
        for at, (name, where) in enumerate(stages):
            x = 20 + at * (BOX + GAP)
            drawn.append(box(x, y + 12, name, where))
            if at:
                drawn.append(arrow(f"M{x - GAP + 2},{y + 12 + TALL // 2} H{x - 6}"))
        below = y + 12 + TALL
        if number + 1 < len(ROWS):
            drawn.append(arrow(f"M{20 + 3 * (BOX + GAP) + BOX // 2},{below} v18 H{20 + BOX // 2} v26"))
        y = below + 60
    head = f'<marker id="head" {HEAD}><path d="M1,1 L8,4 L1,7"/></marker>'
    size = f'viewBox="0 0 {WIDTH} {y - 40}" width="{WIDTH}" height="{y - 40}"'
    label = "The path of one tensor: hook, recorder, kernel, step table, triggers, tail file, writer, Parquet, readers"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    text = f"{svg}<style>{STYLE}</style><defs>{head}</defs>"
    (HERE / "pipeline.svg").write_text(text + "\n".join(drawn) + "</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
