"""The lines that data comes from, followed back by name."""

from __future__ import annotations

import linecache
import textwrap

import pytest

from tensortap.context import origins

LOADER = """
raw = read("pixels")
images = raw.reshape(-1, 8, 8)
images = images / 255
labels = read("labels")
loader = DataLoader(TensorDataset(images, labels), batch_size=8)
other = 5
for x, y in loader:
    out = model(x)
    loss = criterion(out, y)
"""
METHOD = """
class Data:
    def __init__(self):
        self.x = load() * 3

def prepare():
    data = Data()
    return data

def train(batches, model):
    for batch in batches:
        model(batch)

train(prepare(), make())
"""


@pytest.fixture
def lines(tmp_path):
    """Return the text of the lines that a call's data comes from."""

    def find(text, *calls, way=origins.input_lines):
        source = textwrap.dedent(text).splitlines()
        file = tmp_path / "script.py"
        file.write_text("\n".join(source))
        linecache.checkcache(str(file))
        at = [next(i for i, line in enumerate(source, 1) if call in line) for call in calls]
        found = way([(str(file), line) for line in at])
        return [source[int(line.rpartition(":")[2]) - 1].strip() for line in found]

    return find


def test_inputs_of_a_loader(lines):
    """A batch is followed through its loop and its loader to what was read."""
    found = lines(LOADER, "model(x)")
    assert found[0].startswith("loader =")
    assert {"images = images / 255", "images = raw.reshape(-1, 8, 8)", 'raw = read("pixels")'} <= set(found)
    assert "other = 5" not in found


def test_targets(lines):
    """The last argument of a loss is its target."""
    assert 'labels = read("labels")' in lines(LOADER, "criterion(out, y)", way=origins.target_lines)


def test_parameters_are_followed_to_the_caller(lines):
    """What a function is given is looked for where it is called, through functions to the class that reads."""
    assert "self.x = load() * 3" in lines(METHOD, "model(batch)", "train(prepare()")


def test_a_file_that_is_no_python(lines):
    """Of what cannot be parsed nothing is said."""
    assert lines("this is (no python\nmodel(x)", "model(x)") == []
