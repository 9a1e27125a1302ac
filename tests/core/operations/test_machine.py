"""`tensorhub doctor machine`: every line is ok or one thing to do, and a peer says whether it reaches this host."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tensorhub_plugins.core import Deadline, start_server
from tensorhub_plugins.core.cli import main
from tensorhub_plugins.core.operations import machine
from tensorhub_plugins.core.operations.machine import Check, reached
from tensorhub_plugins.vllm import names

SOON_S = 20.0
COMMAND = [sys.executable, "-m", "tensorhub_plugins.core.cli", "doctor", "machine"]


def of(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.name.split()[0]: check for check in checks}


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(machine, "_installed", versions.get)


def test_a_pair_of_versions_is_known_to_work_or_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.13.0", verl="0.9.1", openrlhf="0.11.0")
    found = of(machine.software(names.VERSIONS, "0.24.0+cpu"))
    assert not found["torch"].to_do and not found["vllm"].to_do and "known to work" in found["verl"].found
    assert found["openrlhf"].to_do == "`pip install openrlhf==0.11.2`: the adapter is written for that"
    found = of(machine.software(names.VERSIONS, "0.32.0"))
    assert "known to work" in found["vllm"].found and found["verl"].to_do == "install vLLM 0.24, 0.29"
    assert of(machine.software(names.VERSIONS, "0.30.0"))["vllm"].found == "0.30.0, checked by its sources, not run"
    assert of(machine.software(names.VERSIONS, "0.9.1"))["vllm"].to_do == "install vLLM 0.24, 0.29, 0.32, 0.33"
    installed(monkeypatch)
    found = of(machine.software(names.VERSIONS, None))
    assert found["torch"].to_do and not found["vllm"].to_do and "verl" not in found


def test_limits_that_are_too_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a container, as its files say."""
    assert not [check.to_do for check in machine.limits() if check.to_do], "the control: nothing is low here"
    for name, text in {
        "proc/self/cgroup": "0::/\n",
        "proc/meminfo": "MemAvailable: 9000000 kB\n",
        "sys/fs/cgroup/memory.max": "900000000\n",
        "sys/fs/cgroup/memory.current": "500000000\n",
        "sys/fs/cgroup/pids.max": "100\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def forbidden(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    monkeypatch.setattr(os, "eventfd", forbidden)
    monkeypatch.setattr(machine, "raise_files_max", lambda: 1024)
    low = list(machine.limits(tmp_path, child="print(8)"))  # no process has memory there
    assert low[0].found.startswith("0.4 GB free of 0.9")
    assert "permit eventfd2" in next(check for check in low if check.name == "system calls").to_do
    assert len(low) == 7 and all(check.to_do for check in low)


def test_memory_that_the_system_does_not_report_is_not_said_to_be_low(tmp_path: Path) -> None:
    """Without /proc."""
    found = next(machine.limits(tmp_path))
    assert "an unknown part is free" in found.found and not found.to_do


def test_a_sandbox_that_forbids_to_ask_for_limits_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(kind: int) -> tuple[int, int]:
        raise PermissionError(1, "Operation not permitted")

    before = [check.name for check in machine.limits()]
    monkeypatch.setattr(resource, "getrlimit", forbidden)
    assert [check.name for check in machine.limits()] == before


def test_ports_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_server() as hub, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("TENSORHUB_PORTS", f"{port}-{port}")
        found = of(machine.network(hub.address, lambda: None, 5.0))
        assert found["ports"].found == f"0 free of {port}-{port}" and "TENSORHUB_PORTS" in found["ports"].to_do
        assert "answers, with 0 models" in found["hub"].found
        assert "other hosts cannot connect there" in found["advertised"].to_do
    found = of(machine.network(hub.address, lambda: None, 0.2))
    assert "no hub answers" in found["hub"].to_do
    monkeypatch.setenv("TENSORHUB_ADVERTISE", "0.0.0.0")
    assert "cannot be connected to" in of(machine.network(None, lambda: None, 1.0))["advertised"].to_do


def test_a_secret_that_cannot_be_read_is_one_thing_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "machine", "--secret-file", str(tmp_path / "none")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("DO")] == ["DO  secret"]
    assert all(re.match(r"(ok|DO)  \S", line) for line in lines) and len(lines) > 12


@contextmanager
def listening() -> Iterator[int]:
    process = subprocess.Popen([*COMMAND, "--listen", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(re.search(r"THIS-HOST:(\d+)", process.stdout.readline())[1])  # type: ignore[index]
    finally:
        process.kill()
        process.communicate()


def test_a_peer_says_whether_it_reaches_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        for said in (b'{"hosts": 7}', b'{"hosts": ["127.0.0.1"], "port": 1e999, "token": ""}', b"[" * 4000):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said + b"\n")
                assert stranger.recv(100) == b""  # and it goes on
        (check,) = reached(f"127.0.0.1:{port}", None, 10.0)
        assert check == Check("from 127.0.0.1", "127.0.0.1 is reached")
        monkeypatch.setenv("TENSORHUB_ADVERTISE", "127.0.0.1,192.0.2.1.invalid")
        good, bad = reached(f"127.0.0.1:{port}", None, 20.0)
        assert not good.to_do and "192.0.2.1.invalid is not reached" in bad.found and "TENSORHUB_ADVERTISE" in bad.to_do
    (check,) = reached(f"127.0.0.1:{port}", None, 5.0)
    assert "no answer" in check.found and f"open its port {port}" in check.to_do


def test_an_address_where_somebody_else_answers_is_not_reached() -> None:
    """Behind address translation the port may lead to another host."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = machine.threading.Thread(target=machine._answer_all, args=(other, "x" * 32), daemon=True)
        answering.start()
        assert machine._tried("127.0.0.1", other.getsockname()[1], "x" * 32, SOON_S) == "ok"
        assert "another program" in machine._tried("127.0.0.1", other.getsockname()[1], "y" * 32, SOON_S)
        other.shutdown(socket.SHUT_RDWR)
        answering.join()


def test_all_addresses_of_a_peer_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other would keep it for longer than it waits, and it would say that nobody listens here."""
    both = threading.Barrier(2)  # the control: the first one alone would wait, and break it

    def tried(host: str, *_: object) -> str:
        both.wait(SOON_S)
        return f"{host} answers"

    monkeypatch.setattr(machine, "_tried", tried)
    assert machine._tried_all(["a", "b"], 1, "", SOON_S) == {"a": "a answers", "b": "b answers"}


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE], ids=errno.errorcode.get)
def test_a_process_that_cannot_be_started_is_one_thing_to_do(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    before = [check.name for check in machine.limits()]

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refused)
    *others, last = machine.limits()
    assert [*(check.name for check in others), last.name] == before and not any(check.to_do for check in others)
    assert (last.found, "ulimit -" in last.to_do) == ("not tried", True)


@pytest.mark.parametrize("port", ["65536", "-1", "taken"])
def test_a_port_to_listen_at_that_cannot_be(capsys: pytest.CaptureFixture[str], port: str) -> None:
    with socket.create_server(("", 0)) as taken:
        given = str(taken.getsockname()[1]) if port == "taken" else port
        assert main(["doctor", "machine", "--listen", given]) == 1
    said = capsys.readouterr().err
    told = "choose another one for --listen" if port == "taken" else f"tcp://0.0.0.0:{port}' is no endpoint"
    assert told in said and "PORTS" not in said


def test_a_peer_without_a_name_is_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set."""
    assert main(["doctor", "machine", "--with", ""]) == 1
    assert "is no endpoint of tcp" in capsys.readouterr().err


def test_a_peer_that_is_another_program_is_said_to_be_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            link, _ = web.accept()
            with link:
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        (check,) = reached(f"127.0.0.1:{web.getsockname()[1]}", None, SOON_S)
        answering.join()
    assert check.found == "no answer: another program answers" and "--listen" in check.to_do


def test_a_peer_is_answered_though_there_was_no_file_left_for_one_before() -> None:
    class Server:
        outcomes = [errno.EMFILE, errno.EINVAL]  # the latter: it was shut down

        def accept(self) -> None:
            raise OSError(number := self.outcomes.pop(0), os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        machine.answer_peers(Server(), lambda *_: None, timeout_s=1.0)  # type: ignore[arg-type]
    assert not Server.outcomes


def test_one_time_is_for_the_hub_and_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, float]()

    def asked(name: str) -> Callable[..., Iterator[Check]]:
        def check(*arguments: object) -> Iterator[Check]:
            given[name] = float(str(arguments[-1]))
            yield Check(name, "")

        return check

    monkeypatch.setattr(machine, "network", asked("network"))
    monkeypatch.setattr(machine, "reached", asked("reached"))
    assert [check.name for check in machine.asked("tcp://hub:1", lambda: None, "peer", 8.0)] == ["network", "reached"]
    assert given["network"] == 4.0 and 4.0 < given["reached"] <= 8.0  # what the first one has left
    list(machine.asked("tcp://hub:1", lambda: None, None, 8.0))
    assert given["network"] == 8.0


def test_a_peer_that_sends_a_byte_now_and_then_is_left_in_time() -> None:
    """The control: it is never silent for as long."""
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.01):
            other.sendall(b" ")

    one, other = socket.socketpair()
    with one, other:
        dribbling = threading.Thread(target=dribble, daemon=True)
        dribbling.start()
        with pytest.raises(TimeoutError):
            machine.line_of(one, Deadline.after(0.1))
        over.set()
        dribbling.join()
