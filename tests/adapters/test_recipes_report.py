"""The demo's report: a sample run that keeps every claim, and one way to break each of them."""

from __future__ import annotations

import json

import pytest

from recipes.demo import openrlhf as demo_openrlhf
from recipes.demo import report as reports

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

    draw(make(), good_events(), tmp_path / "run.png")
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
