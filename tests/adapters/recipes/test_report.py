"""The demo's report: a sample run that keeps every claim, and one way to break each of them."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest

from recipes.demo import __main__ as demo_verl
from recipes.demo import openrlhf as demo_openrlhf
from recipes.demo import report as reports
from recipes.demo import watch

STEPS, CONTROL_STEPS, REPLICAS = 4, 4, 2
SIZE_BYTES = 69_000_000


def good_events():
    """Two replicas; the trainer serves one of them (in turns), which serves the other."""
    events, t = [], 1000.0
    for version in range(1, STEPS + CONTROL_STEPS + 2):
        t += 10.0
        events.append(event(t, "publish", "trainer/0", version, layout="checkpoint", bytes=SIZE_BYTES, seconds=0.1))
        events.append(event(t, "digests", "trainer/0", version, layout="checkpoint", digests={"root": f"c{version}"}))
        if version > STEPS + 1:
            continue
        first, second = ("rollout-0/0", "rollout-1/0")[:: 1 if version % 2 else -1]
        for worker, source in ((first, "trainer/0"), (second, first)):
            t += 1.0
            events += [
                event(
                    t,
                    "fetch",
                    worker,
                    version,
                    layout="checkpoint" if source == "trainer/0" else "runtime:f",
                    bytes=SIZE_BYTES,
                    seconds=0.5,
                    sources={source: SIZE_BYTES},
                    transports={"shm": SIZE_BYTES},
                ),
                event(t, "pause", worker, version - 1, seconds=0.01, in_flight=3),
                event(t, "resume", worker, version, seconds=0.05, in_flight=3, lost=0),
                event(t, "digests", worker, version, layout="runtime:f", digests={"root": f"r{version}"}),
                event(t + 0.5, "request", worker, version, seconds=2.0, outcome="length", tokens=24),
            ]
            if source == "trainer/0":
                events.append(
                    event(t, "digests", worker, version, layout="checkpoint", digests={"root": f"c{version}"})
                )
    return sorted(events, key=lambda e: e["t"])


def event(t, name, worker, version, **fields):
    return {"t": t, "event": name, "worker": worker, "version": version, **fields}


def good_metrics():
    rows = []
    for step in range(1, STEPS + CONTROL_STEPS + 1):
        late = max(0, step - STEPS - 2)
        data = {"critic/score/mean": 0.1 * step, "rollout_corr/k3_kl": 1e-4 + 2e-3 * late}
        rows.append({"step": step, "data": data})
    return rows


def make(events=None, metrics=None):
    return reports.make_report(
        good_events() if events is None else events,
        good_metrics() if metrics is None else metrics,
        replicas=REPLICAS,
        steps=STEPS,
        control_steps=CONTROL_STEPS,
    )


def broken(report):
    return [claim.claim for claim in report.claims if not claim.holds]


def test_good_run_keeps_every_claim():
    report = make()
    assert broken(report) == []
    assert report.holds
    assert [version.trainer_bytes for version in report.versions[: STEPS + 1]] == [SIZE_BYTES] * (STEPS + 1)
    assert [version.peer_bytes for version in report.versions[: STEPS + 1]] == [SIZE_BYTES] * (STEPS + 1)
    assert json.loads(report.to_json())["holds"] is True


def change(name, version, worker=None, **fields):
    """An edit of the first matching event."""

    def edit(events, metrics):
        found = next(
            e for e in events if e["event"] == name and e["version"] == version and worker in (None, e["worker"])
        )
        found.update(fields)

    return edit


def drop(**wanted):
    def edit(events, metrics):
        before = len(events)
        events[:] = [e for e in events if any(e.get(key) != value for key, value in wanted.items())]
        assert len(events) < before

    return edit


def no_kept(events, metrics):
    for e in events:
        if e["event"] == "resume":
            e["in_flight"] = 0


def late_pull(events, metrics):
    events.append(event(2000.0, "resume", "rollout-0/0", STEPS + 2, seconds=0.1, in_flight=0, lost=0))


def flat_control(events, metrics):
    for row in metrics:
        row["data"]["rollout_corr/k3_kl"] = 1e-4


def large_kl(events, metrics):
    metrics[1]["data"]["rollout_corr/k3_kl"] = 2e-3


def missing_kl(events, metrics):
    del metrics[1]["data"]["rollout_corr/k3_kl"]


def no_events(events, metrics):
    events.clear()


@pytest.mark.parametrize(
    ("edit", "claim"),
    [
        (change("digests", 3, "rollout-1/0", digests={"root": "other"}), "digests"),
        (change("digests", 3, "trainer/0", digests={"root": "other"}), "digests"),
        (drop(event="digests", worker="trainer/0", version=2), "digests"),
        (drop(event="digests", worker="rollout-0/0", version=2), "digests"),
        (change("fetch", 3, "rollout-1/0", sources={"trainer/0": SIZE_BYTES}), "from the second version"),
        (change("fetch", 3, "rollout-0/0", sources={"rollout-1/0": SIZE_BYTES}), "from the second version"),
        (drop(event="fetch", worker="rollout-1/0", version=4), "from the second version"),
        (change("resume", 2, lost=1), "no request is lost"),
        (change("request", 2, outcome="abort"), "no request is lost"),
        (no_kept, "no request is lost"),
        (drop(event="resume", worker="rollout-1/0", version=4), "every replica takes"),
        (late_pull, "every replica takes"),
        (large_kl, "trainer and rollout log-probabilities"),
        (missing_kl, "trainer and rollout log-probabilities"),
        (flat_control, "negative control"),
        (no_events, "every replica takes"),
    ],
)
def test_each_breach_is_found(edit, claim):
    events, metrics = good_events(), good_metrics()
    edit(events, metrics)
    report = make(events, metrics)
    assert not report.holds
    assert any(name.startswith(("the " + claim, claim)) for name in broken(report)), broken(report)


def test_one_replica_is_not_two():
    events = [e for e in good_events() if not e["worker"].startswith("rollout-1")]
    assert broken(make(events))


def test_no_metrics_is_no_proof():
    assert len(broken(make(metrics=[]))) == 2


def test_text_names_the_numbers():
    report = make()
    table = reports.table(report)
    assert "69.0" in table and "500 ms" in table and "3/0" in table and "pulling off" in table
    assert len(table.splitlines()) == 2 + STEPS + CONTROL_STEPS + 1
    assert len(reports.reward_curve(report).splitlines()) == STEPS + CONTROL_STEPS
    assert "FAIL" not in reports.claims(report)


def test_reading_leaves_out_a_line_cut_off_by_a_kill(tmp_path):
    lines = [json.dumps(e) for e in good_events()]
    (tmp_path / "host-1.jsonl").write_text("\n".join(lines[1:]) + "\n" + '{"t": 12')
    (tmp_path / "host-2.jsonl").write_text(lines[0] + "\n")
    assert sorted(reports.read_events(tmp_path), key=str) == sorted(good_events(), key=str)
    (tmp_path / "host-3.jsonl").write_text('{"t": 12\n{"t": 13}\n')
    with pytest.raises(json.JSONDecodeError):
        reports.read_events(tmp_path)


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from recipes.demo.picture import draw

    draw(make(), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


# --- OpenRLHF ---------------------------------------------------------------------------------------------------------


def in_turns():
    """As OpenRLHF has it: version N comes of step N, and an update meets no answer in flight."""
    events = [e for e in good_events() if e["version"] <= STEPS or e["worker"] == "trainer/0"]
    events = [{**e, "in_flight": 0} if "in_flight" in e else e for e in events]
    late = {step: max(0, step - STEPS - 1) for step in range(1, STEPS + CONTROL_STEPS + 1)}
    rows = [{"reward": 0.1 * step, "vllm_kl": 1e-3 + 2e-2 * late[step]} for step in late]
    return events, [{"step": step, "data": row} for step, row in zip(late, rows, strict=True)]


def test_a_framework_that_generates_and_trains_in_turns():
    events, metrics = in_turns()
    given = {"replicas": REPLICAS, "steps": STEPS, "control_steps": CONTROL_STEPS}
    assert broken(reports.make_report(events, metrics, **given, trainer=reports.OPENRLHF_SYNC)) == []
    metrics[STEPS]["data"]["vllm_kl"] = 0.02  # the first step after the last version pulled still trains on it
    (claim,) = broken(reports.make_report(events, metrics, **given, trainer=reports.OPENRLHF_SYNC))
    assert claim.startswith("trainer and rollout log-probabilities agree")
    assert len(broken(reports.make_report(events, metrics, **given, trainer=reports.VERL))) > 1


RISING = [0.1 + 0.1 * step for step in range(8)]


@pytest.mark.parametrize(
    ("ours", "holds"),
    [
        (RISING, True),
        ([0.02 + value for value in RISING] + [0.0], True),  # what comes after pulling is off does not count
        ([0.1] * 8, False),  # learns nothing
        ([0.4 * value for value in RISING], False),  # learns less
        (RISING[:7], False),  # ended early
    ],
)
def test_both_curves_must_rise_alike(ours, holds):
    curves = {"stock": RISING, "tensorhub": ours}
    assert demo_openrlhf.learns_alike(curves, 8).holds is holds
    assert len(demo_openrlhf.both_curves(curves, 8).splitlines()) == 1 + max(8, len(ours))


def test_the_demos_watch_a_run_until_it_ends(tmp_path, monkeypatch, capsys):
    """A script stands for the recipe, and for one that never ends."""
    for recipe in ("verl_grpo", "openrlhf_grpo"):
        script = tmp_path / f"recipes/{recipe}/run.sh"
        script.parent.mkdir(parents=True)
        script.write_text('#!/bin/sh\nread line < "$FIFO"\nexit $line\n')
        script.chmod(0o755)
    monkeypatch.setenv("FIFO", str(tmp_path / "fifo"))
    os.mkfifo(tmp_path / "fifo")
    for demo, arguments in ((demo_verl, ()), (demo_openrlhf, ("stock",))):
        monkeypatch.setattr(demo, "ROOT", tmp_path)
        seen = []

        def let_it_end(_, seen=seen):
            if not seen:  # the watcher has looked once
                (tmp_path / "fifo").write_text("3\n")
            seen.append(True)

        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=let_it_end))
        code = demo.train(tmp_path / f"run-{demo.__name__}", *arguments, demo.make_parser().parse_args([]))
        assert code == 3 and seen
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
        ended = demo.train(
            tmp_path / f"late-{demo.__name__}", *arguments, demo.make_parser().parse_args(["--timeout-s", "0"])
        )
        assert ended == 124 and "giving up" in capsys.readouterr().err


# What OpenRLHF and DeepSpeed write, cut short.
LOG = """(TensorHubEngine pid=1) (EngineCore pid=4) INFO loading
(PolicyModelActor pid=2) loading
(PolicyModelActor pid=2) Building extension module cpu_adam...
(PPOTrainer pid=3) Generate samples:   0%|
(PPOTrainer pid=3) INFO ppo_trainer.py:551] ✨ Global step 1: {'policy_loss': 0.1, 'reward': 0.125, 'kl': 0}
(PPOTrainer pid=3) INFO ppo_trainer.py:551] ✨ Global step 2: {'policy_loss': 0.1, 'reward': 0.25, 'kl': 0}
(PPOTrainer pid=3) INFO ppo_trainer.py:551] ✨ Global step 3: {'reward': 0.5}
"""


def test_the_openrlhf_demo_says_how_far_a_run_is(tmp_path, capsys):
    """OpenRLHF's own path writes no events, and is told of all the same."""
    log = tmp_path / "openrlhf.log"
    log.write_text("")
    progress = demo_openrlhf.Progress(tmp_path, 30, time.monotonic())
    said = []
    for line in LOG.splitlines(keepends=True):
        with open(log, "a") as file:
            file.write(line[:20])
        progress.tell()
        with open(log, "a") as file:
            file.write(line[20:])
        progress.tell()
        said += [text.partition("] ")[2] for text in capsys.readouterr().out.splitlines()]
    assert [text.partition(" (")[0] for text in said] == [
        "the engines load the model",
        "the trainer loads the model",
        "DeepSpeed compiles its optimizer",
        "the first samples are generated",
        "step 1 of 30, reward 0.125",
        "step 3 of 30, reward 0.500",
    ]
    text = demo_openrlhf.version_text(good_events(), 3)
    assert text == "; version 3: publish 100 ms, rollout-0 from trainer 500 ms, rollout-1 from rollout-0 500 ms"
    assert demo_openrlhf.version_text(good_events(), 99) == ""


def test_a_long_phase_is_named_with_its_time_and_more_and_more_rarely(tmp_path, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    (tmp_path / "log").write_text("")
    watcher = watch.Watcher(tmp_path / "log", (("", "Ray starts"), ("cpu_adam", "DeepSpeed compiles")), 0.0)
    for second in range(200):
        clock[0] = float(second)
        if second == 30:
            (tmp_path / "log").write_text("Building cpu_adam\n")
        watcher.tell()
    assert [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "Ray starts: for 21 s so far",
        "DeepSpeed compiles",
        "DeepSpeed compiles: for 21 s so far",
        "DeepSpeed compiles: for 62 s so far",
        "DeepSpeed compiles: for 143 s so far",
    ]


def test_what_the_openrlhf_demo_ends_with_fits_a_terminal():
    events, metrics = in_turns()
    given = {"replicas": REPLICAS, "steps": STEPS, "control_steps": CONTROL_STEPS}
    report = reports.make_report(events, metrics, **given, trainer=reports.OPENRLHF_SYNC)
    table = reports.short_table(report, 4)
    assert max(map(len, table.splitlines())) <= 100
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["1", "2", "4", "5", "6", "9"]
    assert "hands on what its engine runs" not in table
    report.versions[0].pulls[1].bytes_from_peers += 1
    assert "hands on what its engine runs" in reports.short_table(report, 4)
    curves = {"stock": 40 * [0.5], "tensorhub": 72 * [0.5]}
    shown = demo_openrlhf.both_curves(curves, 40, shown=8).splitlines()
    assert len(shown) <= 11 and max(map(len, shown)) <= 100
    assert any("the last version pulled" in line for line in shown)
    brief = reports.claims(report, brief=True).splitlines()
    assert len(brief) == len(report.claims)  # all hold
    report.claims[0].holds = False
    assert len(reports.claims(report, brief=True).splitlines()) == len(brief) + 1
