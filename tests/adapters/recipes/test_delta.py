"""The benchmark of deltas: what it reads of recorded versions, what it makes, and its picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from recipes.bench.delta import codec
from recipes.bench.delta.material import ROW, stepped, version

COUNT = 64 * ROW


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"percent": [1.0], "segments": 1, "rounds": 1, "real": None, **given})


def test_recorded_versions_are_read_one_to_sixteen_steps_apart(tmp_path: Path) -> None:
    """Of four versions there are one and two steps; with one of them missing, those that it ends."""
    random = np.random.default_rng(1)
    versions = [version(random, COUNT)]
    while len(versions) < 4:
        versions.append(stepped(random, versions[-1], 1.0))
    for number, elements in enumerate(versions, 7):
        np.save(tmp_path / f"{number:08}.npy", elements)
    one, two = codec.measure(options(real=[tmp_path]))
    assert [row["changed"] for row in (one, two)] == [f"{tmp_path.name}, {steps} steps" for steps in (1, 2)]
    assert 0.9 < one["percent"] < 1.1 < 1.8 < two["percent"] < 2.1 and one["ratio"] > 1.5 * two["ratio"] > 100
    (tmp_path / "00000009.npy").unlink()
    assert [row["changed"] for row in codec.measure(options(real=[tmp_path]))] == [f"{tmp_path.name}, 2 steps"]


@pytest.mark.parametrize("percent", [1.0, 10.0, 30.0])
def test_as_much_changes_as_was_said_clustered_or_not(percent: float) -> None:
    random = np.random.default_rng(2)
    old = version(random, 8 * COUNT)
    for clustered in (False, True):
        changed = (stepped(random, old, percent, clustered=clustered) != old).reshape(-1, ROW)
        assert changed.mean() == pytest.approx(percent / 100, rel=0.2)
        assert changed.any(axis=1).all() != clustered


def test_a_step_below_zero_is_a_number() -> None:
    """As of a bias that is zero: engines compute with these weights."""
    zeros = np.zeros(COUNT, np.uint16)
    new = stepped(np.random.default_rng(3), zeros, 50.0)
    assert 0.4 < (new != zeros).mean() < 0.6 and not (new & 0x7F80 == 0x7F80).any()


def test_the_picture_is_drawn_of_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = pytest.importorskip("recipes.bench.delta.picture", reason="matplotlib is not installed")
    monkeypatch.setattr(codec, "COUNT", COUNT)
    rows = codec.measure(options(percent=[0.5, 1.0]))
    links = [{"link": link, "percent": 1.0, "whole_s": 2.0, "delta_s": 0.1} for link in ("free", "100/50")]
    (tmp_path / "codec.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "links.json").write_text(json.dumps({"rows": links}))
    picture.draw(options(files=[tmp_path / "codec.json", tmp_path / "links.json"], out=tmp_path / "delta.svg"))
    drawn = (tmp_path / "delta.svg").read_text()
    assert all(text in drawn for text in ("the bound", "encode numpy", "100 Mbit/s, 50 ms: deltas"))
