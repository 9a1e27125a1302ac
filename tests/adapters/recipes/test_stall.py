"""The stall benchmark: what its probe sees of a real engine, and what is made of its notes."""

from __future__ import annotations

import json

import pytest

from recipes.bench import stall
from recipes.bench.verl_stall import stalls


@pytest.mark.heavy
@pytest.mark.parametrize("own_core", [False, True], ids=["within", "core of its own"])
def test_the_probe_sees_an_engine_stand_still(own_core, models, tmp_path, monkeypatch):
    """Whatever pauses it: its core is told here, as the store does it from within."""
    pytest.importorskip("vllm")
    from vllm_engines import PROMPTS, engines, wait_until

    monkeypatch.syspath_prepend(str(stall.write_plugin(tmp_path)))
    notes = tmp_path / "notes"

    def seen():
        return [json.loads(line) for file in notes.glob("*") for line in file.read_text().split("\n")[:-1]]

    with engines(models("qwen2-tied", 1), env={"VERL_STALL_PROBE": str(notes)}, own_core=own_core) as (engine,):
        engine.ask("submit", "long", PROMPTS[:2], 200)
        wait_until(lambda: any(note["what"] == "tokens" for note in seen()), "tokens")
        assert stalls.find_stalls(seen()) == []
        engine.ask("stand_still")
        wait_until(lambda: stalls.find_stalls(seen()), "tokens after the pause")
        (found,) = stalls.find_stalls(seen())
    assert found.requests == 2 and 0 < found.closed_s < found.silent_s


def notes(*rows):
    return [{"what": what, "at": at, **({"requests": r[0]} if r else {})} for what, at, *r in rows]


def test_a_stall_is_closed_from_stop_to_go_and_silent_from_token_to_token():
    found = stalls.find_stalls(
        notes(("tokens", 1.0), ("tokens", 1.5), ("stop", 1.6, 3), ("tokens", 1.7), ("go", 2.6), ("tokens", 3.7))
    )
    assert [(round(s.closed_s, 6), round(s.silent_s, 6), s.requests) for s in found] == [(1.0, 2.0, 3)]


@pytest.mark.parametrize(
    "rows",
    [
        [("tokens", 1.0), ("stop", 1.6, 0), ("go", 2.6), ("tokens", 3.7)],  # nothing in flight
        [("stop", 1.6, 3), ("go", 2.6), ("tokens", 3.7)],  # nothing generated before
        [("tokens", 1.0), ("stop", 1.6, 3), ("go", 2.6)],  # nothing generated after
        [("tokens", 1.0), ("stop", 1.6, 3), ("tokens", 1.7)],  # never went on
        [("go", 1.0), ("tokens", 1.1)],
    ],
)
def test_what_is_no_stall(rows):
    assert stalls.find_stalls(notes(*rows)) == []


def test_two_stops_before_a_go_are_one_stall():
    (found,) = stalls.find_stalls(
        notes(("tokens", 1.0), ("stop", 2.0, 1), ("stop", 3.0, 1), ("go", 4.0), ("go", 5.0), ("tokens", 6.0))
    )
    assert found.closed_s == 2.0


def test_the_first_updates_are_warm_up_whether_they_met_answers_or_not():
    """Of a run of which few updates met answers, those few were left out."""
    rows = [("tokens", 1.0), ("stop", 1.5, 0), ("go", 1.6), ("stop", 2.0, 2), ("go", 3.0), ("tokens", 4.0)]
    assert len(stalls.find_stalls(notes(*rows), skip=1)) == 1
    assert stalls.find_stalls(notes(*rows), skip=2) == []


def write_run(folder, waits, closed):
    (folder / "probe").mkdir(parents=True)
    rows = [{"step": i + 1, "data": {"timing_s/update_weights": wait}} for i, wait in enumerate(waits)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = []
    for i, seconds in enumerate(closed):
        at = 100.0 * i
        lines += notes(("tokens", at), ("stop", at + 1, 4), ("go", at + 1 + seconds), ("tokens", at + 1 + seconds))
    (folder / "probe/1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_compare_takes_medians_without_warm_up(tmp_path):
    write_run(tmp_path / "stock", [99, 4.0, 5.0, 6.0], [99, 2.0, 3.0, 4.0])
    write_run(tmp_path / "pull", [99, 0.5, 0.5, 0.6], [99, 0.1, 0.1, 0.1])
    rounds = [stalls.read_round(path, tmp_path / path, skip_steps=1) for path in ("stock", "pull")]
    wait, closed, silent = stalls.compare(rounds, "update_weights")
    assert (wait.stock_s, wait.ours_s, wait.ratio) == (5.0, 0.5, 10.0)
    assert closed.ratio == pytest.approx(30.0)
    assert (wait.counts, closed.counts, silent.counts) == (True, True, False)
    assert silent.stock_s == pytest.approx(4.0)


def test_nothing_measured_is_an_error(tmp_path):
    write_run(tmp_path / "stock", [4.0], [2.0])
    write_run(tmp_path / "pull", [0.5], [])
    rounds = [stalls.read_round(path, tmp_path / path, skip_steps=0) for path in ("stock", "pull")]
    with pytest.raises(ValueError, match="pull: nothing measured"):
        stalls.compare(rounds, "update_weights")
