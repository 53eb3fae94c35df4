"""Split site names, `path/op#number:port.slot`, and read the ports of a text such as `grad*` or `{input,output}`."""

from __future__ import annotations

import re
from typing import NamedTuple

from tensortap.select.globs import alternatives, word_regex
from tensortap.select.ports import OP_PORTS, PORTS

PORT_AND_SLOT = re.compile(r"(?P<path>.*):(?P<port>[\w*?{},]+)(?P<slot>(?:\.[^.\[\]:]+|\[[^\]]*\])*)", re.DOTALL)
OPERATION = re.compile(r"(?P<path>.*)/(?P<op>[\w@*?{},.-]+)(?:#(?P<number>\d+))?", re.DOTALL)


class SiteName(NamedTuple):
    """A full site name in its parts."""

    path: str
    op: str
    number: int | None
    port: str
    slot: str


def split(text: str) -> SiteName:
    """Split a full site name as records have it. A value named with a slash reads as an operation.

    >>> split("blocks.3.attn/matmul#1:output[0]")
    SiteName(path='blocks.3.attn', op='matmul', number=1, port='output', slot='[0]')
    """
    head, port, slot = split_port(text)
    found = find_op(head, port)
    return SiteName(found["path"] if found else head, found["op"] if found else "", operation_number(found), port, slot)


def split_port(text: str) -> tuple[str, str, str]:
    """Return path, port and slot; what follows the last colon belongs to the path unless it is a port."""
    found = PORT_AND_SLOT.fullmatch(text)
    if found is None or not ports_meant(found["port"]):
        return text, "output", ""
    return found["path"], found["port"], found["slot"]


def ports_meant(text: str) -> frozenset[str]:
    """Return the ports that `output`, `grad*` or `{input,output}` mean; none when a part of the text is not a port."""
    meant = [[port for port in PORTS if word_regex([word]).fullmatch(port)] for word in alternatives(text)]
    return frozenset().union(*meant) if all(meant) else frozenset()


def find_op(head: str, port: str) -> re.Match[str] | None:
    """Find `path/op#number` in a name without port and slot, if operations have the port."""
    return OPERATION.fullmatch(head) if ports_meant(port).intersection(OP_PORTS) else None


def operation_number(found: re.Match[str] | None) -> int | None:
    """Return the number after the `#` in a match of `find_op`."""
    return int(found["number"]) if found and found["number"] else None
