"""What the benchmark of the three workloads makes of its stopwatches' notes; no engine is started."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.bench import network
from recipes.bench.workloads import report as reports

ROOT = Path(__file__).resolve().parents[3]

MEMCPY_S, STREAM_S = 0.01, 0.5
VERSIONS = 3
PERIOD_S = 10.0
PLACES = {"standalone": ("east", "east"), "elastic": ("east", "east"), "cross": ("east", "west")}


def notes(*rows):
    return [{"what": what, "at": at} for what, at in rows]


def test_a_pause_is_from_the_last_step_to_the_next():
    found = reports.pauses(
        notes(
            ("tokens", 1.0), ("stop", 1.5), ("go", 3.5), ("tokens", 4.0), ("stop", 5.0), ("go", 5.25), ("tokens", 6.0)
        )
    )
    assert found == [reports.Pause(1.5, 3.5, 3.0), reports.Pause(5.0, 5.25, 2.0)]


def test_a_pause_before_the_first_token_is_the_start():
    assert reports.pauses(notes(("stop", 1.0), ("go", 3.0), ("tokens", 4.0))) == []


def test_two_stops_before_a_go_are_one_pause():
    (found,) = reports.pauses(notes(("tokens", 0.5), ("stop", 1.0), ("stop", 2.0), ("go", 3.0), ("tokens", 4.0)))
    assert (found.began, found.ended) == (1.0, 3.0)


def test_a_pause_without_an_end_that_can_be_seen_is_an_error():
    with pytest.raises(ValueError, match="no token after its last pause"):
        reports.pauses(notes(("tokens", 0.5), ("stop", 1.0), ("go", 3.0)))


def play(workload, path, number, pause_s, *, join=None, equal=True):
    """One run: every engine stands still for pause_s (by site) for each version, the warm-up's a hundred times as long.

    join: seconds from asking to the first token, and everybody's pause for it."""
    count = reports.WARM_UP + (0 if join else VERSIONS)
    updates = [
        {
            "version": 2 + k,
            "began": PERIOD_S * k,
            "trainer_s": pause_s["east"] / 2,
            "done": PERIOD_S * k + 4 * pause_s["east"],
        }
        for k in range(count)
    ]
    asked = PERIOD_S * count
    engines = []
    for index, place in enumerate(PLACES[workload]):
        long = [100.0 if k < reports.WARM_UP else 1.0 for k in range(count)]
        pauses = [(PERIOD_S * k, PERIOD_S * k + pause_s[place] * long[k]) for k in range(count)]
        if join and join[1]:
            pauses.append((asked + 1.0, asked + 1.0 + join[1]))
        engines.append(
            {
                "name": f"rollout-{index}",
                "data_center": place,
                "pauses": [{"began": b, "ended": e, "silent_s": e - b + 0.25} for b, e in pauses],
                "tokens": [(0.5 + k, 2) for k in range(int(asked + PERIOD_S))],
                "equal": equal,
            }
        )
    if join:
        engines.append({**engines[0], "name": reports.JOINER})
    return {
        "workload": workload,
        "path": path,
        "round": number,
        "limits": {"size_bytes": 70_000_000, "memcpy_s": MEMCPY_S, "stream_s": STREAM_S},
        "sent_bytes": 71_000_000 * (1 if join else count - reports.WARM_UP) * (2 if path == "star" and not join else 1),
        "updates": updates,
        "join": {
            "asked": asked,
            "token": asked + join[0],
            "weights_s": join[0] / 4,
            "trainer_s": join[1],
            "imports_s": 10.0,
        }
        if join
        else None,
        "ended": asked + (PERIOD_S if join else 0.0),
        "engines": engines,
        "load": float(number),
    }


STALLS = {"store": 0.02, "deltas": 0.01, "star": 0.04, "stock": 0.8}  # of every engine for every version
JOINS = {"store": (2.0, 0.0), "spare": (0.4, 0.0), "star": (3.0, 0.0), "stock": (20.0, 1.5), "restart": (30.0, 28.0)}


def plays(workload, rounds=(0.5, 1.0, 9.0), **changed):
    """Three rounds, of which one is an outlier."""
    made = []
    for number, factor in enumerate(rounds, 1):
        for path in reports.PATHS[workload]:
            seconds = {**STALLS, "spare": 0.02, "restart": 0.8, **changed}[path]
            pause_s = {"east": seconds * factor, "west": 2 * seconds * factor}
            made.append(play(workload, path, number, pause_s, join=JOINS[path] if workload == "elastic" else None))
    return made


def line(report, start):
    (found,) = [line for line in report.lines if line.what.startswith(start)]
    return found


def test_standalone_sums_over_engines_and_takes_the_median_round():
    report = reports.make_report("standalone", plays("standalone"))
    stall = line(report, "all rollouts' stall")
    assert stall.values == pytest.approx(
        {"store": 0.04, "deltas": 0.02, "star": 0.08, "stock": 1.6}
    )  # two engines, without warm-up
    assert stall.ratio("stock") == pytest.approx(40) and stall.ratio("star") == pytest.approx(2)
    assert stall.rounds["store"] == pytest.approx([0.02, 0.04, 0.36])
    assert line(report, "the trainer waits").values["stock"] == pytest.approx(0.4)
    assert line(report, "all rollouts, until their next token").values["store"] == pytest.approx(2 * (0.02 + 0.25))
    assert line(report, "until all rollouts run it").values["stock"] == pytest.approx(3.2)
    assert line(report, "copies").values == pytest.approx(
        {"store": 71 / 70, "deltas": 71 / 70, "star": 142 / 70, "stock": 71 / 70}
    )
    tokens = line(report, "tokens of all rollouts")
    assert tokens.values["store"] == pytest.approx(4.0) and tokens.ratio("stock") == pytest.approx(1.0)
    assert report.reached and report.best_collective_s == 2 * STREAM_S
    assert (report.memcpy_s, report.stream_s) == (MEMCPY_S, STREAM_S)


def test_what_happens_once_is_in_the_sum_and_not_in_the_median_version():
    made = plays("standalone")
    for each in made:
        if each["path"] == "store":
            each["engines"][1]["pauses"][-2]["ended"] += 0.6  # one of three versions
    report = reports.make_report("standalone", made)
    assert line(report, "all rollouts' stall").values["store"] == pytest.approx(0.04 + 0.6 / VERSIONS)
    assert line(report, "  for the median").values["store"] == pytest.approx(0.04)


def test_two_sites_count_the_remote_rollouts_alone():
    report = reports.make_report("cross", plays("cross"))
    assert line(report, "remote").values == pytest.approx({"store": 0.04, "deltas": 0.02, "star": 0.08, "stock": 1.6})
    assert line(report, "local").values == pytest.approx({"store": 0.02, "deltas": 0.01, "star": 0.04, "stock": 0.8})
    assert report.best_collective_s == STREAM_S  # one remote engine


def test_a_join_counts_the_newcomer_and_what_the_others_lose():
    report = reports.make_report("elastic", plays("elastic"))
    assert line(report, "from asking").values == pytest.approx(
        {"store": 2.0, "spare": 0.4, "star": 3.0, "stock": 20.0, "restart": 30.0}
    )
    assert line(report, "the same first token with").ratio("stock") == pytest.approx(30 / 12)
    assert line(report, "of the first").values == pytest.approx(
        {"store": 0.5, "spare": 0.1, "star": 0.75, "stock": 5.0, "restart": 7.5}
    )
    stall = line(report, "the others' stall")
    assert stall.values == pytest.approx(
        {"store": 0.0, "spare": 0.0, "star": 0.0, "stock": 3.0, "restart": 56.0}
    )  # the newcomer's own is none
    everybody = line(report, "everybody's stall")
    assert everybody.values == pytest.approx({"store": 0.5, "spare": 0.1, "star": 0.75, "stock": 8.0, "restart": 63.5})
    assert math.isinf(stall.ratio("stock")) and stall.ratio("star") == 1.0
    assert report.worst_ratio == pytest.approx(10) and report.reached
    assert "none here" in reports.table(report)


@pytest.mark.parametrize(
    ("workload", "worse"), [("standalone", 0.8 / 6.6), ("cross", 0.8 / 18.9), ("standalone", 0.8), ("cross", 0.8)]
)
def test_a_goal_that_is_not_reached_is_said_so(workload, worse):
    """The control: the same numbers, with a slower store."""
    report = reports.make_report(workload, plays(workload, store=worse))
    assert not report.reached and "NOT reached" in reports.table(report)
    assert report.to_dict()["reached"] is False
    assert reports.make_report(workload, plays(workload)).reached


def test_both_halves_of_a_join_must_reach_the_goal(monkeypatch):
    monkeypatch.setitem(JOINS, "stock", (2.5, 1.5))
    report = reports.make_report("elastic", plays("elastic"))
    assert report.worst_ratio == pytest.approx(1.25) and not report.reached


def test_other_weights_are_no_result():
    broken = [*plays("standalone")[:-1], play("standalone", "stock", 3, {"east": 9.0}, equal=False)]
    report = reports.make_report("standalone", broken)
    assert not report.reached and len(report.wrong) == 2
    assert "WRONG round 3, stock: rollout-0 has other weights than the trainer" in reports.table(report)


@pytest.mark.parametrize("workload", list(reports.GOALS))
def test_a_star_whose_engines_read_each_other_is_no_result(workload):
    made = plays(workload)
    (star, *_) = [play for play in made if play["path"] == "star"]
    star["sent_bytes"] //= 2
    report = reports.make_report(workload, made)
    assert report.wrong == ["round 1, star: not everybody has read the trainer, so this was no star"]
    assert not report.reached


def test_a_version_that_an_engine_skipped_is_an_error():
    made = plays("standalone")
    del made[0]["engines"][1]["pauses"][-1]
    with pytest.raises(ValueError, match="standalone, store: rollout-1 stood still 2 times for 3 versions"):
        reports.make_report("standalone", made)


def test_a_path_that_was_not_run_is_an_error():
    with pytest.raises(ValueError, match="nothing measured for star"):
        reports.make_report("standalone", [play for play in plays("standalone") if play["path"] != "star"])


def test_the_report_is_json_and_the_picture_is_drawn(tmp_path):
    picture = pytest.importorskip("recipes.bench.workloads.picture", reason="matplotlib is not installed")
    measured = {name: plays(name) for name in reports.GOALS}
    made = [reports.make_report(name, own) for name, own in measured.items()]
    read = json.loads(json.dumps([report.to_dict() for report in made], allow_nan=False))
    assert [each["workload"] for each in read] == list(reports.GOALS)
    assert read[1]["lines"][1]["times_better_than"] == {
        "spare": 1.0,
        "star": 1.0,
        "stock": None,
        "restart": None,
    }  # None: no stall at all
    picture.draw(made, measured, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(900)
def test_it_runs_with_real_engines(tmp_path):
    """A minute: one round of `standalone` with a tiny model. Whoever is how fast, the weights are right."""
    for package in ("verl", "vllm"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    reason = network.missing()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "recipes.bench.workloads", "--quick", "--size", "tiny", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stderr  # 1: a tiny model leaves stock little to do
    (report,) = json.loads((tmp_path / "report.json").read_text())
    assert report["wrong"] == [] and (tmp_path / "stalls.png").exists()
    stall, usual, *_ = report["lines"]
    assert all(seconds > 0 for each in (stall, usual) for seconds in each["medians"].values())
    played = json.loads((tmp_path / "standalone.json").read_text())["plays"]
    assert sorted(play["path"] for play in played) == sorted(reports.PATHS["standalone"])
    assert all(engine["equal"] and len(engine["tokens"]) > 10 for play in played for engine in play["engines"])
