"""`tensorhub top`: what it shows, in a terminal of 80 columns and in a pipe, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hub_scenarios import Scenario
from rich.console import Console

from tensorhub_plugins.core import UsageError, cli, start_server
from tensorhub_plugins.core.cli import main
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.operations import problems, top
from tensorhub_plugins.core.operations.status import fetch_status
from tensorhub_plugins.core.operations.top import HEADINGS, Frame, drawn, frame, plain
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import Location

SOON_S = 60.0


def shown(*, followers: int = 3, name: str = "rollout") -> Frame:
    """A trainer at 16, followers at 16 but for the last one, at 9, and a worker that reads from the trainer."""
    story = Scenario()
    story.join("trainer/0", location=Location(host="node-a"))
    for version in range(9, 17):
        story.publish("trainer/0", version)
    story.join(f"{name}/0", location=Location(host="node-b"))
    for number in range(followers):
        story.join(f"{name}-{number}-follow/0", location=Location(host="node-b"))
        story.say(f"{name}-{number}-follow/0", m.Target, installed=9 if number == followers - 1 else 16, timeout_s=30.0)
    story.wait(70.0)
    story.acquire(f"{name}/0", 16)
    said = report(story.hub.registry, story.now)
    return frame(said, problems.find(said))


def rendered(what: Frame, *, width: int = 80, height: int = 24, note: str = "") -> list[str]:
    console = Console(file=(file := io.StringIO()), width=width, height=height, force_terminal=False)
    console.print(drawn(what, note, console))
    return file.getvalue().splitlines()


def test_what_is_wrong_comes_first_and_who_reads_whom() -> None:
    lines = plain(shown()).splitlines()
    assert lines[0].endswith("1 problem") and lines[1].startswith("! run/actor: 1 of 3 followers install nothing newer")
    table = [re.split(r"  +", line) for line in lines if line.startswith(("WORKER", "rollout", "trainer"))]
    assert tuple(table[0]) == HEADINGS
    assert ["rollout/0", "node-b", "trainer/0"] in table
    assert ["rollout-2-follow/0", "node-b", "9", "7, 70 s"] in table
    assert ["rollout-1-follow/0", "node-b", "16", "0"] in table
    assert ["trainer/0", "node-a", "14 15 16", "0"] in table


def test_it_fits_eighty_columns_and_twenty_four_lines() -> None:
    """With a hundred followers of long names, and a note: what is wrong is there whole."""
    lines = rendered(shown(followers=100, name="r" * 40), note="no answer for 9 s")
    assert max(map(len, lines)) <= 80 and len(lines) <= 24
    assert "more workers" in lines[-1] and "no answer for 9 s" in lines[1]
    assert "up to 7 steps behind" in " ".join(line.strip() for line in lines)
    assert len(rendered(shown(followers=100), height=60)) > 40  # the control: there is room


def test_names_draw_nothing() -> None:
    lines = rendered(shown(name="[bold red]x[/]\\"))
    assert any("[bold red]x[/]" in line for line in lines)


def test_into_a_pipe_it_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server() as hub:
        assert main(["top", "--hub", hub.address]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["top", "--hub", hub.address, "--timeout", "0.2"]) == 2
    assert "no hub answers" in capsys.readouterr().err


@pytest.mark.parametrize("heard", [True, False], ids=["heard before", "control: never heard"])
def test_a_hub_whose_name_is_gone_for_a_while_does_not_end_it(monkeypatch, heard) -> None:
    """A name server says so while the hub's pod is started anew."""
    with start_server() as hub:
        report = {**fetch_status(hub.address), "address": hub.address}
    notes = list[str]()
    monkeypatch.setattr(top, "drawn", lambda shown, note, console: notes.append(note) or note)
    answers: list[Any] = [(report, [])] * heard + [UsageError("correct the host's name"), KeyboardInterrupt()]

    def fetch() -> Any:
        if isinstance(answer := answers.pop(0), BaseException):
            raise answer
        return answer

    if heard:
        assert top.watch(fetch, 0.0) == 2
        assert [bool(note) for note in notes] == [False, True] and "correct the host's name" in notes[1]
    else:
        with pytest.raises(UsageError, match="correct the host's name"):
            top.watch(fetch, 0.0)


@pytest.mark.parametrize("term", ["dumb", "xterm"], ids=["dumb", "control"])
def test_where_nothing_can_be_drawn_it_is_written_once(monkeypatch, capsys, term) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top, "watch", lambda fetch, interval_s: 7)
    with start_server() as hub:
        assert main(["top", "--hub", hub.address]) == (0 if term == "dumb" else 7)
    assert ("nothing is wrong" in capsys.readouterr().out) == (term == "dumb")


def test_it_ends_with_its_terminal_and_waits_as_long_as_can_be_waited(monkeypatch) -> None:
    """Rich draws nothing where no terminal is any more: it would ask the hub for ever."""
    asked, slept, at_terminal = list[int](), list[float](), [True, True, True, False]
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: at_terminal[len(slept)]))
    monkeypatch.setattr(top, "drawn", lambda *_: "")
    monkeypatch.setattr(top.time, "sleep", slept.append)
    with start_server() as hub:

        def fetch() -> Any:
            asked.append(1)
            return {**fetch_status(hub.address), "address": hub.address}, []

        assert top.watch(fetch, float("inf")) == 0 and len(asked) == 3
    assert all(0 < seconds < threading.TIMEOUT_MAX for seconds in slept)


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "fetch_status", interrupted)
    assert main(["status", "--hub", "tcp://127.0.0.1:1"]) == 130 and not "".join(capsys.readouterr())


class Terminal:
    """The command in a terminal of its own, and what it has drawn."""

    def __init__(self, *arguments: str) -> None:
        self._own, other = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "tensorhub_plugins.core.cli", "top", "--interval", "0.1", *arguments]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self.drawn = ""

    def until(self, words: str) -> None:
        end = time.monotonic() + SOON_S
        while words not in self.drawn:
            assert time.monotonic() < end and self.process.poll() is None, self.drawn[-2000:]
            if select.select([self._own], [], [], 1.0)[0]:
                self.drawn += os.read(self._own, 65536).decode(errors="replace")

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(SOON_S)
        os.close(self._own)
        return status


@pytest.mark.slow
def test_in_a_terminal_it_goes_on_without_its_hub_and_ends_with_the_state() -> None:
    with start_server() as hub:
        terminal: Any = Terminal("--hub", hub.address, "--timeout", "0.5")
        terminal.until("nothing is wrong")
    terminal.until("no answer for")
    assert terminal.end() == 2
    with start_server() as hub:
        terminal = Terminal("--hub", hub.address)
        terminal.until("nothing is wrong")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.drawn
