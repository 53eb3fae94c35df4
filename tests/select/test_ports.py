"""The registry of ports."""

from __future__ import annotations

import re
from pathlib import Path

from tensortap.select import ports

ROOT = Path(__file__).resolve().parents[2]
_LIST = re.compile(r"""["']grad_output["'],\s*["']grad_input["']|["']param["'],\s*["']grad["'],\s*["']update["']""")
_TEXT = re.compile(r'"[^"\n]*"')


def test_no_port_list_is_written_a_second_time():
    """Python and the viewer read the registry: no other file spells out a list of ports, be it in one text."""
    files = [*(ROOT / "src" / "tensortap").rglob("*.py"), *(ROOT / "web" / "src").rglob("*.ts")]
    again = [str(f) for f in files if f.name != "ports.py" and _LIST.search(f.read_text(encoding="utf-8"))]
    assert not again
    every = [
        f for f in files if f.name != "ports.py" and any(map(_lists_every_port, _TEXT.findall(f.read_text("utf-8"))))
    ]
    assert not every


def _lists_every_port(text: str) -> bool:
    return set(ports.PORTS) <= set(re.findall(r"\w+", text))


def test_the_documents_name_every_port():
    """The table of patterns and the run folder's column list all ports."""
    for name in ("triggers-and-sites.md", "run-folder.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert re.search("`?[, ]+`?".join(ports.PORTS), text), name


def test_ports_refer_to_ports():
    """What is shown beside a port is a port."""
    assert {other for port in ports.PORT_INFO.values() for other in port.beside} <= set(ports.PORTS)
