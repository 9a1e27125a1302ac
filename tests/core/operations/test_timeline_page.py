"""The page of `tensorhub timeline`, as a person uses it, in a headless Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import browser
import pytest

from tensorhub_plugins.core.operations import critical_path, timeline

# How many milliseconds five frames take.
FRAMES = "(() => { const t = performance.now(); for (let i = 0; i < 5; i++) draw(); return performance.now() - t; })()"
TEMPLATE = Path(timeline.__file__).with_suffix(".html").read_text()
POISON = "</script><script>document.title='broken'</script>"


def events_of(versions: int, workers: int = 4) -> list[dict[str, Any]]:
    """Return the events of so many versions, 10 s apart, each of which reaches all workers; the last one after 4 s."""
    events: list[dict[str, Any]] = []
    for version in range(1, versions + 1):
        t = 1e9 + 10 * version
        events.append({"t": t, "event": "publish", "worker": "trainer/0", "version": version, "seconds": 1.0})
        for number in range(workers):
            worker, took = f"rollout-{number}/0", 1.0 + 3 * number / max(1, workers - 1)
            about = {"worker": worker, "version": version}
            events.append({"t": t + took, "event": "fetch", "seconds": took, "sources": {"trainer/0": 9}, **about})
            events.append({"t": t + took + 0.1, "event": "pause", "seconds": 0.1, **about, "version": version - 1})
            events.append({"t": t + took + 0.3, "event": "install", "seconds": 0.2, **about})
            events.append({"t": t + took + 0.4, "event": "resume", "seconds": 0.4, **about})
            for at in (5.0, 6.0, 9.9):
                events.append({"t": t + at, "event": "request", "worker": worker, "seconds": 3.0})
    return events


def write(file: Path, events: list[dict[str, Any]], **options: Any) -> Path:
    file.write_text(timeline.page(TEMPLATE, events, critical_path.paths(events), **options))
    return file


def test_requests_that_overlap_are_one_bar_and_states_last_until_the_next() -> None:
    events = events_of(1, 1)
    states = ("starting", 5.0), ("ready", 7.0), ("lost", 9.0)
    events += [{"t": 1e9 + t, "event": "member", "worker": "rollout-0/0", "state": state} for state, t in states]
    bars, marks = timeline._bars(events)
    found = [
        (timeline.KINDS[kind], round(start - 1e9, 3), round(end - 1e9, 3), note) for _, kind, start, end, note in bars
    ]
    assert ("request", 12.0, 16.0, "2 requests") in found and ("request", 16.9, 19.9, "1 request") in found
    assert [bar[:3] for bar in found if bar[0] in ("starting", "lost")] == [("starting", 5, 7), ("lost", 9, 19.9)]
    assert not marks


def test_of_too_many_bars_the_newest_are_shown_and_it_says_so() -> None:
    events = events_of(10)
    data = timeline.page_data(events, critical_path.paths(events), bars_max=60)
    assert sum(map(len, data["bars"])) == 4 * 60 and data["left_out"] > 60
    assert [path["version"] for path in data["paths"]] == ["8", "9", "10"]
    everything = timeline.page_data(events, critical_path.paths(events), bars_max=600)  # the control
    assert everything["left_out"] == 0 and len(everything["paths"]) == 10


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_is_used(tmp_path: Path) -> None:
    """Zoom, drag, a click on a bar, the keys, the tables; nothing is asked of any host, and no event is code."""
    events = [*events_of(12), {"t": 1e9 + 31, "event": "update_failed", "worker": "rollout-0/0", "error": POISON}]
    file = write(tmp_path / "page.html", events)
    with browser.page(tmp_path / "profile") as page:
        page.open(file)
        text = page.value("document.body.innerText")
        assert "5 workers, 12 versions" in text and "rollout-3/0 reads from trainer/0" in text
        assert page.value("document.title") == "tensorhub timeline"
        assert page.value("document.querySelector('h2').textContent").startswith("Version 1: 5.40 s until rollout-3")
        whole = page.value("[view.from, view.to]")
        left, top = page.value("(() => { const box = canvas.getBoundingClientRect(); return [box.x, box.y]; })()")
        x, y = left + page.value("x(24 * DATA.ticks)"), top + page.value("y(4)") + 5
        for _ in range(8):
            page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
        page.drawn()
        began, ended = page.value("[view.from, view.to]")
        assert ended - began == pytest.approx((whole[1] - whole[0]) / 256) and began < 24 * 10_000 < ended
        assert page.value("document.querySelector('#tip').style.display") != "block"
        page.mouse("mouseMoved", x, y)
        page.drawn()
        assert "rollout-3/0: fetch 3: sources trainer/0, 4.00 s" in page.value(
            "document.querySelector('#tip').innerText"
        )
        for kind, at in (("mousePressed", x), ("mouseReleased", x)):
            page.mouse(kind, at, y, button="left", clickCount=1)
        page.drawn()
        said = page.value("document.querySelector('#path').innerText")
        assert "Version 3: 5.40 s until rollout-3 had it" in said and "rollout-3/0 installs it" in said
        page.mouse("mousePressed", x, y, button="left", clickCount=1)
        page.mouse("mouseMoved", x - 200, y, button="left")
        page.mouse("mouseReleased", x - 200, y, button="left", clickCount=1)
        page.drawn()
        moved = page.value("view.from")
        assert began < moved < ended and page.value("paths[chosen].version") == "3"  # a drag chooses nothing
        for key, version in (("ArrowRight", "4"), ("ArrowRight", "5"), ("ArrowLeft", "4")):
            page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
            assert page.value("paths[chosen].version") == version
        page.value("document.querySelector('#versions tbody tr:last-child').click()")
        assert page.value("paths[chosen].version") == "12"
        page.value("document.querySelector('th[data-by=\"1\"]').click()")
        assert page.value("document.querySelectorAll('#versions tbody tr').length") == 12
        page.value("fit()")
        assert page.value("[view.from, view.to]") == whole
        drawn = page.screenshot()
        page.value("document.querySelectorAll('#kinds input').forEach((box) => box.click())")
        page.drawn()
        assert page.screenshot() != drawn  # the control: what is hidden is not drawn
        assert page.asked == [file.resolve().as_uri()] and page.errors == []
        many = [{"t": 1e9 + n / 10, "event": "request_retried", "worker": "a/0"} for n in range(200_000)]
        for events, said in (([], "0 workers, 0 versions"), (many, "1 workers, 0 versions, 20000 s")):
            page.open(write(tmp_path / "other.html", events))
            assert said in page.value("document.body.innerText") and page.errors == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_usable_with_64_workers_and_1000_versions(tmp_path: Path) -> None:
    events = [event for event in events_of(1000, 64) if event["event"] != "request"]
    file = write(tmp_path / "page.html", events)
    assert file.stat().st_size < 12_000_000
    with browser.page(tmp_path / "profile") as page:
        page.open(file)
        assert page.value("lanes.length") == 65 and page.value("paths.length") == 1000
        assert page.value("document.querySelector('#thin').hidden") is False  # it says that bars are below a pixel
        took = page.value(FRAMES)
        page.value("choose(499)")
        page.drawn()
        assert page.value("document.querySelector('#thin').hidden") is True
        near = page.value(FRAMES)
        assert re.match("Version 500: 5.40 s until rollout-63", page.value("document.querySelector('h2').textContent"))
        print(f"a frame: {took / 5:.0f} ms of all, {near / 5:.1f} ms of one version")
        assert page.errors == []
