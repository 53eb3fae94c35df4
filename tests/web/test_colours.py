"""The colour scales, as people with each kind of colour vision see them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

SOURCE = (Path(__file__).resolve().parents[2] / "web" / "src" / "colours.ts").read_text(encoding="utf-8")
# Machado, Oliveira and Fernandes (2009): linear RGB as seen without one kind of cones.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
MIDDLES = dict(re.findall(r'(light|dark): "(#\w+)"', SOURCE))


def stops(name):
    """A ramp's colours, from the page's source."""
    found = re.search(rf"const {name} = \[(.*?)\];", SOURCE, re.DOTALL)[1]
    return re.findall(r"#\w{6}", found)


def between(ramp):
    """A ramp's colours with seven between each two, as the page mixes them."""
    ends = [np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) for colour in ramp]
    mixed = [a + (b - a) * share for a, b in itertools.pairwise(ends) for share in np.linspace(0, 1, 9)]
    return ["#" + bytes(np.round(colour).astype(np.uint8)).hex() for colour in mixed]


def lab(colours, sight):
    """CIE Lab of colours as they are seen."""
    srgb = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(linear @ np.array(SIGHT[sight]).T, 0, 1) @ XYZ.T / XYZ.sum(axis=1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


@pytest.mark.parametrize("sight", SIGHT)
def test_more_is_lighter(sight):
    """The sequential ramp's lightness rises from step to step, so that order can be read without hue."""
    lightness = lab(stops("SEQUENTIAL"), sight)[:, 0]
    assert (np.diff(lightness) > 4).all() and lightness[-1] - lightness[0] > 70


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_farther_from_the_middle_stands_out_more(sight, theme):
    """Both arms of the diverging ramp leave the middle's lightness in one direction, and are not alike."""
    middle = MIDDLES[theme]
    below, above = stops("BELOW")[::-1], stops("ABOVE")  # from the middle outwards, on a light ground
    if theme == "dark":
        below, above = below[::-1], above[::-1]
    away = -1 if theme == "light" else 1
    for arm in (below, above):
        lightness = lab([middle, *arm], sight)[:, 0]
        assert (away * np.diff(lightness) > 0).all() and abs(lightness[-1] - lightness[0]) > 45
    apart = np.linalg.norm(lab(below, sight) - lab(above, sight), axis=1)
    assert (apart > 20).all()


@pytest.mark.parametrize("sight", SIGHT)
def test_what_is_not_finite_is_like_nothing_else(sight):
    """The colour of NaN and infinity is far from every colour of the ramps."""
    bad = re.search(r'NONFINITE = "(#\w+)"', SOURCE)[1]
    below, above = stops("BELOW"), stops("ABOVE")
    ramps = [stops("SEQUENTIAL"), [*below, MIDDLES["light"], *above], [*below[::-1], MIDDLES["dark"], *above[::-1]]]
    others = [colour for ramp in ramps for colour in between(ramp)]
    assert np.linalg.norm(lab(others, sight) - lab([bad], sight), axis=1).min() > 30
