"""`tensorhub timeline`: a page, a trace that Perfetto reads, and what each version waited for, of journals."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_limits import AT_ONCE

from tensorhub_plugins.core import Client, run_log, start_server
from tensorhub_plugins.core.cli import main
from tensorhub_plugins.core.operations import critical_path, timeline
from tensorhub_plugins.core.types import COMPILED


def journal(folder: Path, name: str, *events: dict[str, Any]) -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Version 3 reaches a in 0.2 s and b, whose fetch was slow, in 2.4 s."""
    publish = {"t": 100.0, "event": "publish", "worker": "trainer/0", "version": 3, "seconds": 0.5}
    journal(tmp_path, "trainer.jsonl", publish)
    for replica, fetch_s, at in (("a", 0.1, 100.2), ("b", 2.0, 102.4)):
        sources = {"trainer/0": 70, "c/0": 30}
        journal(
            tmp_path,
            f"{replica}.jsonl",
            {"t": at - 0.1, "event": "fetch", "worker": f"{replica}/0", "version": 3, "seconds": fetch_s,
             "sources": sources},
            {"t": at - 0.09, "event": "pause", "worker": f"{replica}/0", "version": 2, "seconds": 0.0},
            {"t": at, "event": "resume", "worker": f"{replica}/0", "version": 3, "seconds": 0.09},
            {"t": at + 1, "event": "request", "worker": f"{replica}/0", "seconds": 0.5, "versions": [3, 3]},
        )  # fmt: skip
    return tmp_path


def test_loops_by_hand_have_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/loop.md's: the client records what it does; what engines compile is no version of the model."""
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    with start_server(limits=AT_ONCE) as hub, ExitStack() as stack:

        def join(replica: str, model: str = "actor") -> Client:
            return stack.enter_context(Client(hub.address, run="r", model=model, replica=replica))

        trainer, rollout, target = join("trainer"), join("rollout-3"), {"w": torch.zeros(1000)}
        for version in (1, 2):
            trainer.publish(version, {"w": torch.full((1000,), float(version))})
            rollout.wait(newer_than=version - 1, timeout_s=20.0)
            assert rollout.replicate(target, timeout_s=20.0).version == version
            rollout.unpublish(version)
        join("engine", f"actor{COMPILED}0").publish(3, {"files": torch.zeros(10)})
        trainer.publish(3, {"w": torch.zeros(1000)}, "runtime:f")
    events = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert [each["version"] for each in events if each["event"] == "publish"] == [1, 2]
    paths = [(path.version, path.replica) for path in critical_path.paths(events)]
    assert paths == [(1, "rollout-3"), (2, "rollout-3")]


def test_it_says_who_was_last_and_for_what(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out" / "trace.json"
    assert main(["timeline", str(folder), "--out", str(out)]) == 1 and "No such file" in capsys.readouterr().err
    out.parent.mkdir()
    assert main(["timeline", str(folder), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "version 3: 2.90 s until b had it, as the last: b/0 reads from trainer/0 2.00 s" in said
    rows = json.loads(out.with_suffix(".json").read_text())["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    slices = {(names[row["pid"]], row["name"]): row for row in rows if row["ph"] == "X"}
    assert set(names.values()) == {"trainer", "a", "b"}
    assert (slices["b", "fetch 3"]["ts"], slices["b", "fetch 3"]["dur"]) == (800_000, 2_000_000)  # from the publish on
    assert slices["b", "fetch 3"]["args"]["sources"] == {"trainer/0": 70, "c/0": 30}
    assert slices["b", "request"]["tid"] != slices["b", "resume 3"]["tid"]  # a lane of their own
    assert all(row["ts"] >= 0 for row in rows if "ts" in row)
    assert [row["name"] for row in rows if row["ph"] == "i"] == ["pause 2", "pause 2"]


def test_what_a_process_records_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    run_log.record("install", worker="a/0", version=1_000_000_002, seconds=0.25, layout="x\x1b[31m")
    (file,) = tmp_path.iterdir()
    (event,) = timeline.parse(file.read_bytes().splitlines(), file.name)
    assert timeline.label(event) == "install 1/2"
    assert timeline.trace([event])["traceEvents"][-1]["dur"] == 250_000


def test_a_line_that_was_cut_off_is_left_out_and_another_file_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(folder / "trace")]
    (folder / "a.jsonl").write_bytes((folder / "a.jsonl").read_bytes()[:-20])
    assert main(["timeline", *map(str, folder.glob("*.jsonl")), *out]) == 0
    for text in (
        b"not a journal",
        b'{"t": NaN, "event": "x"}',
        b'{"t": -1e300, "event": "x"}',
        b'{"t": "x", "event": 1}',
        b"\xff\n{}\n",
        b'[1]\n{"t": 1, "event": "x"}\n',
    ):
        (folder / "other").write_bytes(text)
        assert main(["timeline", str(folder / "other"), *out]) == 1
        assert "line 1 is no event: give files of a folder" in capsys.readouterr().err
    assert main(["timeline", str(folder / "none"), *out]) == 1
    (folder / "empty").mkdir()
    assert main(["timeline", str(folder / "empty"), *out]) == 0
    assert "nothing to compare" in capsys.readouterr().out


def test_values_of_any_kind_break_nothing() -> None:
    odd: Any = [
        {"t": 1, "event": "publish", "version": "x", "worker": 7, "seconds": "long"},
        {"t": 2, "event": "resume", "version": -1, "worker": None, "seconds": -5},
        {"t": 3, "event": "fetch", "version": 4, "worker": "a/0", "sources": None},
    ]
    assert len(timeline.trace(odd)["traceEvents"]) > 3 and critical_path.paths(odd) == []
    assert timeline.page("/*DATA*/null", odd, []).startswith("{")


PUBLISH = b'{"t": 1, "event": "publish", "worker": "t/0", "version": 1, "seconds": 0.1}\n'
FETCH = b'{"t": 2, "event": "fetch", "version": 1, %s}\n'
BIG = b"1" + b"0" * 400
FIELDS = [b'"seconds": 1e308', b'"seconds": ' + BIG, b'"reads": {"t/0": 5}', b'"reads": {"t/0": ["x", null]}']
FIELDS += [b'"reads": {"t/0": []}', b'"sources": {"t/0": "x", "u/0": 3}', b'"bytes": ' + BIG, b'"find_s": ' + BIG]
FIELDS += [b'"tokens": NaN, "more": [Infinity]', b'"worker": "r' + b"9" * 5000 + b'/0"', b'"worker": {"a": [1]}']


@pytest.mark.parametrize("field", [*FIELDS, b'"version": ' + BIG], ids=lambda field: field[:24].decode())
def test_a_field_that_is_not_of_its_form_is_left_out(field: bytes, tmp_path: Path) -> None:
    file, out = tmp_path / "journal", tmp_path / "out"
    file.write_bytes(PUBLISH + FETCH % field)
    assert main(["timeline", str(file), "--out", str(out)]) == 0
    trace = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert {row["name"] for row in trace["traceEvents"]} >= {"publish 1"} and (tmp_path / "out.html").exists()


def test_what_is_nested_without_end_is_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").write_bytes(b"[" * 100_000)
    assert main(["timeline", str(tmp_path / "deep"), "--out", str(tmp_path / "out")]) != 0
    assert "line 1 is no event" in capsys.readouterr().err


def test_of_a_long_run_the_newest_events_are_kept_in_bounded_memory() -> None:
    def run(first: int, count: int) -> Iterator[dict[str, Any]]:
        return ({"t": float(each), "event": "install", "worker": "a/0"} for each in range(first, first + count))

    def peak(events: Iterator[dict[str, Any]], most: int) -> int:
        tracemalloc.start()
        timeline.newest(events, most)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    for files in ((run(0, 1000), run(500, 1000)), (run(500, 1000), run(0, 1000))):
        kept, left_out = timeline.newest((event for file in files for event in file), 100)
        assert [event["t"] for event in kept] == [float(each) for each in range(1400, 1500)] and left_out == 1900
    assert timeline.newest(run(0, 100), 100) == (list(run(0, 100)), 0) and timeline.newest([]) == ([], 0)
    assert peak(run(0, 20_000), 500) < 1.5 * peak(run(0, 2_000), 500) < peak(run(0, 20_000), 20_000) / 5


def test_what_was_left_out_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = timeline.newest
    monkeypatch.setattr(timeline, "newest", lambda events: newest(events, 4))
    assert main(["timeline", str(folder), "--out", str(folder / "page")]) == 0
    assert "4 events, without 5 earlier ones;" in capsys.readouterr().out


def test_of_a_folder_only_files_are_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe there would be waited for."""
    assert main(["timeline", str(folder), "--out", str(folder / "page")]) == 0
    expected = capsys.readouterr().out
    for name in ("page.html", "page.json"):
        (folder / name).unlink()
    os.mkfifo(folder / "pipe")
    assert main(["timeline", str(folder), "--out", str(folder / "page")]) == 0
    assert capsys.readouterr().out == expected


def test_a_file_without_lines_is_not_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b" " * (3 * timeline.LINE_BYTES_MAX))
    assert main(["timeline", str(file)]) == 1 and "line 1 is no event" in capsys.readouterr().err
