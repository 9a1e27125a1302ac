"""The elastic demo's report: a run that keeps every claim, and one way to break each of them."""

from __future__ import annotations

import json

import pytest

from recipes.demo import elastic_report as reports
from recipes.demo.watch import page_of

PROMPTS, ANSWERS = 4, 2
SAMPLES = PROMPTS * ANSWERS


def event(t, name, worker="", **fields):
    return {"t": t, "event": name, "worker": worker, **fields}


def member(t, name, state, kind="joined"):
    return event(t, "member", f"{name}/0", state=state, kind=kind, version=1)


def version(t, number, *names):
    """The trainer publishes it, and these replicas take it, each from the one before."""
    events = [
        event(t, "publish", "trainer/0", version=number),
        event(t, "digests", "trainer/0", version=number, layout="checkpoint", digests={"root": f"c{number}"}),
    ]
    source = "trainer/0"
    for order, name in enumerate(names, 1):
        worker, at = f"{name}/0", t + order / 10
        events += [
            event(at, "fetch", worker, version=number, sources={source: 100}),
            event(at, "resume", worker, version=number, seconds=0.05, lost=0),
            event(at, "digests", worker, version=number, layout="checkpoint", digests={"root": f"c{number}"}),
        ]
        source = worker
    return events


def good_run():
    """One replica; three; one of them is killed and comes back; two."""
    events = [
        member(1, "rollout-0", "ready", "first"),
        *version(2, 1, "rollout-0"),
        event(10, "act", what="target 3", goal=3, leaves=None),
        member(11, "rollout-1", "starting"),
        member(11, "rollout-2", "starting"),
        *version(14, 2, "rollout-0", "rollout-1", "rollout-2"),
        member(15, "rollout-1", "ready"),
        member(16, "rollout-2", "ready"),
        event(20, "act", what="SIGKILL", goal=3, leaves="rollout-1"),
        member(21, "rollout-1", "lost"),
        event(21.5, "request_retried", "rollout-0/0"),
        *version(22, 3, "rollout-0", "rollout-2"),
        *version(23, 4, "rollout-0", "rollout-1"),
        member(24, "rollout-1", "ready"),
        event(30, "act", what="target 2", goal=2, leaves=None),
        *version(31, 5, "rollout-0", "rollout-1"),
        member(31.5, "rollout-2", "draining"),
        member(32, "rollout-2", "gone"),
    ]
    return sorted(events, key=lambda e: e["t"])


def metrics(*counts):
    data = [{"prompt_length/mean": 4.0, "response_length/mean": 6.0, "perf/total_num_tokens": 10 * n} for n in counts]
    return [{"step": step, "data": row} for step, row in enumerate(data, 1)]


def samples(steps=2):
    """What each step was trained on, as verl calls it."""
    return {
        step: [f"prompt-{step}.{prompt}_{answer}_0" for prompt in range(PROMPTS) for answer in range(ANSWERS)]
        for step in range(1, steps + 1)
    }


def report_of(events, rows=None, trained=None):
    rows = metrics(SAMPLES, SAMPLES) if rows is None else rows
    trained = samples() if trained is None else trained
    counts = [reports.samples_of(row["data"]) for row in rows]
    how = {"prompts_per_step": PROMPTS, "answers": ANSWERS, "counts": counts}
    return reports.make_report(events, trained, steps=len(rows), **how)


def broken(report):
    return [claim.claim for claim in report.claims if not claim.holds]


def test_a_good_run_keeps_every_claim():
    report = report_of(good_run())
    assert broken(report) == [] and report.holds
    assert [(act.ready_before, act.ready_after, act.seconds) for act in report.acts] == [
        (1, 3, 6.0),
        (3, 3, 4.0),
        (3, 2, 1.5),
    ]
    assert report.acts[0].joined == ["rollout-1 (from rollout-0)", "rollout-2 (from rollout-1)"]
    assert report.versions == 5 and report.samples == 2 * SAMPLES and report.retried == 1
    assert "SIGKILL" in reports.table(report)


def without(events, name, worker):
    return [e for e in events if not (e["event"] == name and e["worker"] == worker)]


def spoilt_digest(events):
    return [{**e, "digests": {"root": "x"}} if e["event"] == "digests" and e["t"] == 14.2 else e for e in events]


def lost_answer(events):
    return [{**e, "lost": 1} if e["event"] == "resume" and e["t"] == 14.1 else e for e in events]


@pytest.mark.parametrize(
    ("what", "spoil", "claim"),
    [
        ("one never came", lambda e: [x for x in e if x["t"] != 16], "as large as it is told"),
        ("the killed one did not come back", lambda e: [x for x in e if x["t"] != 24], "as large as it is told"),
        ("the loss was never noticed", lambda e: [x for x in e if x["t"] not in (21, 24)], "as large as it is told"),
        ("nothing was done", lambda e: [x for x in e if x["event"] != "act"], "as large as it is told"),
        ("weights from nowhere", lambda e: without(e, "fetch", "rollout-2/0"), "from the store"),
        ("other bytes", spoilt_digest, "the same bytes"),
        ("no digests", lambda e: [x for x in e if x["event"] != "digests"], "the same bytes"),
        ("an answer was lost in a pause", lost_answer, "answers are lost"),
    ],
)
def test_what_breaks_a_claim_is_told(what, spoil, claim):
    assert any(claim in name for name in broken(report_of(spoil(good_run())))), what


@pytest.mark.parametrize("counts", [(SAMPLES, SAMPLES - 1), (SAMPLES + 1,), ()])
def test_a_sample_too_many_or_too_few_is_told(counts):
    trained = samples(len(counts))
    assert broken(report_of(good_run(), metrics(*counts), trained)) == [reports.samples_claim(PROMPTS, ANSWERS)]


def swapped(step, at, by):
    """As many samples as before, one of them another one's."""
    trained = samples()
    trained[step][at] = by
    return trained


@pytest.mark.parametrize(
    ("trained", "says"),
    [
        (swapped(2, 3, "prompt-2.1_0_0"), "prompt-2.1_0_0 2 times; step 2: answers [0] to prompt-2.1"),
        (swapped(2, 3, "prompt-1.1_1_0"), "prompt-1.1_1_0 2 times"),  # of an earlier step
        (swapped(2, 3, "prompt-2.1_7_0"), "step 2: answers [0, 7] to prompt-2.1"),
        (swapped(2, 3, "prompt-3.1_1_0"), "step 2: 5 prompts"),
        ({1: samples()[1]}, "step 2: not known on what"),
        ({1: samples()[1], 2: samples()[1]}, "prompt-1.0_0_0 2 times"),
        ({}, "step 1: not known on what"),
    ],
)
def test_a_sample_in_the_place_of_another_is_told(trained, says):
    (claim,) = [claim for claim in report_of(good_run(), trained=trained).claims if not claim.holds]
    assert says in claim.detail


def test_the_page_is_written(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "host-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in good_run()))
    text = page_of(tmp_path).read_text()
    assert "starting" in text and "rollout-1" in text
