"""`tensorhub server`, `status`, `pin`, `unpin` and `withdraw`: the server as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tensorhub_plugins.core import Client, UsageError, cli, resources, start_server, version_of
from tensorhub_plugins.core.cli import fetch_status, main, status_text
from tensorhub_plugins.core.hub import exposition
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.security import secret

COMMAND = [sys.executable, "-m", "tensorhub_plugins.core.cli"]


@contextlib.contextmanager
def server_process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address it printed."""
    process = subprocess.Popen(
        [*COMMAND, "server", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        match = re.fullmatch(r"tensorhub server at (tcp://\S+:(\d+))\n", line)
        assert match and int(match[2]) > 0, (line, process.poll() is not None and process.stderr.read())
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


def test_a_server_prints_its_port_serves_and_ends_when_told():
    with server_process("--address", "tcp://127.0.0.1:0") as (process, address):
        assert fetch_status(address)["models"] == []
        with Client(address, run="r", model="actor", replica="t", transports=("tcp",)) as client:
            client.publish(1, {"w": torch.ones(3)})
            assert fetch_status(address)["models"][0]["newest"] == 1
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "version 1 is visible" in log and "Traceback" not in log


@contextlib.contextmanager
def server_beside_a_free_port(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command, its address and what it says of its figures. Their port, the next one, may be another process's."""
    for _ in range(20):
        with server_process("--address", "tcp://127.0.0.1:0", *flags) as (process, address):
            wanted = "listens on" if "-1" in flags else "metrics "
            while wanted not in (line := process.stderr.readline()):
                assert line, process.poll()
            if "cannot be served" not in line:
                yield process, address, line
                return
    raise AssertionError("there was no free port beside any of twenty")


@pytest.mark.parametrize("flags", [(), ("--metrics-host", "localhost"), ("--metrics-port", "-1")], ids=" ".join)
def test_a_server_serves_its_figures_unless_told_not_to(flags):
    with server_beside_a_free_port(*flags) as (process, address, line):
        if "-1" in flags:
            assert "metrics" not in line
            return
        url = re.search(r"metrics at (http://\S+/metrics)", line)[1]
        assert url.startswith(f"http://{flags[1] if flags else '127.0.0.1'}:{int(address.rpartition(':')[2]) + 1}/")
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert "tensorhub_hub_answers 1.0" in answer.read().decode()


def test_metrics_at_an_address_that_is_taken_are_refused_where_it_was_chosen(capsys):
    with start_server() as other:
        port = other.address.rpartition(":")[2]
        assert main(["server", "--address", "tcp://127.0.0.1:0", "--metrics-port", port]) == 1
    assert "choose --metrics-port" in capsys.readouterr().err


def test_a_hub_whose_figures_get_no_thread_runs_without_them(monkeypatch, capsys):
    def refused(**_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(exposition, "Thread", refused)
    served = exposition.served  # at a free port: the one after the hub's may be another process's
    monkeypatch.setattr(exposition, "served", lambda server, host, port: served(server, host, 0))
    with start_server() as hub:
        with cli._metrics(hub, Namespace(metrics_host="127.0.0.1", metrics_port=None)):
            assert "metrics cannot be served" in (said := capsys.readouterr().err) and "refuses threads" in said
        chosen = cli._metrics(hub, Namespace(metrics_host="127.0.0.1", metrics_port=0))
        with pytest.raises(UsageError, match="refuses threads"), chosen:
            pass


def test_figures_are_answered_though_no_thread_is_left(monkeypatch):
    asked = []

    def refused(**_):
        asked.append(1)
        raise RuntimeError("can't start new thread")

    with start_server() as hub, exposition.served(hub, "127.0.0.1", 0) as url:
        monkeypatch.setattr(socketserver, "threading", SimpleNamespace(Thread=refused))
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert "tensorhub_hub_answers 1.0" in answer.read().decode() and asked


@pytest.mark.parametrize("text", ["can't start new thread", "control"])
def test_a_command_names_what_the_system_refuses_it(monkeypatch, capsys, text):
    def refused(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr(cli, "fetch_status", refused)
    if text == "control":
        with pytest.raises(RuntimeError, match=text):
            main(["status", "--hub", "tcp://127.0.0.1:1"])
        return
    assert main(["status", "--hub", "tcp://127.0.0.1:1"]) == 2
    assert "the system refuses threads" in capsys.readouterr().err


def test_the_address_is_taken(capsys):
    with start_server() as other:
        assert main(["server", "--address", other.address]) == 1
    assert "cannot listen on" in capsys.readouterr().err
    assert main(["server", "--address", "0.0.0.0:7070"]) == 1
    assert "use tcp://host:port" in capsys.readouterr().err


def test_a_server_listens_on_the_interface_that_is_named(capsys, monkeypatch):
    asked = []

    def taken(address, **_):
        asked.append(address)
        raise UsageError("taken")

    monkeypatch.setattr(cli, "Server", taken)
    assert main(["server", "--interface", "nope0,lo"]) == 1 and asked == ["tcp://127.0.0.1:7070"]
    for name in ("nope0", ""):  # the latter: of an empty variable, and not all interfaces
        assert main(["server", "--interface", name]) == 1 and asked[1:] == []
        assert f"--interface={name!r}: no network interface of that name is up here" in capsys.readouterr().err
    assert main(["server", "--address", ""]) == 1 and asked[1:] == [""]
    with pytest.raises(SystemExit):
        main(["server", "--interface", "lo", "--address", "tcp://127.0.0.1:0"])


@pytest.fixture
def hub_with_versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Client]]:
    """Versions 1 and 2 of r/actor, in two layouts. What another test of this process has lacked is no part of it."""
    monkeypatch.setattr(resources, "_noted", ("", float("-inf")))
    with start_server(limits=HubLimits(grace_s=0.0)) as server:
        options = {"run": "r", "model": "actor", "transports": ("tcp",)}
        with Client(server.address, replica="trainer", **options) as trainer:
            trainer.publish(1, {"w": torch.ones(1000)})
            trainer.publish(2, {"w": torch.ones(1000)}, layout="runtime:f")
            yield server.address, trainer


def test_status_for_people_and_for_machines(hub_with_versions, capsys, monkeypatch):
    address, _ = hub_with_versions
    assert main(["status", "--hub", address]) == 0
    text = capsys.readouterr().out
    for words in (
        "1 models",
        "r/actor: newest version 2",
        "version 1 (visible)",
        "checkpoint: trainer/0",
        "runtime:f: trainer/0",
        f"worker trainer/0 on {os.environ.get('TENSORHUB_HOST') or socket.gethostname()}: holds [1, 2]",
    ):
        assert words in text, text
    monkeypatch.setenv("TENSORHUB_HUB", address)
    assert main(["status", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["run"], model["model"], model["newest"], model["leases"]) == ("r", "actor", 2, [])
    assert [(v["version"], v["visible"], v["layouts"]) for v in model["versions"]] == [
        (1, True, {"checkpoint": ["trainer/0"]}),
        (2, True, {"runtime:f": ["trainer/0"]}),
    ]
    assert model["workers"][0]["bytes_held"] == 8000 and "tcp" in model["workers"][0]["endpoints"]


def test_a_trainer_that_started_again_is_shown_by_attempt_and_step(hub_with_versions, capsys, monkeypatch):
    address, trainer = hub_with_versions
    monkeypatch.setenv("TENSORHUB_HUB", address)
    assert main(["status"]) == 0
    assert "attempt" not in capsys.readouterr().out  # the control: who never starts again reads steps only
    trainer.begin(1)
    trainer.publish(version_of(1, 2), {"w": torch.zeros(1000)})
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    for words in (
        "r/actor: newest version 1/2, published 0 s ago\n"
        "  the trainer is in attempt 1: versions are attempt/step, those of 0 a step",
        "version 1 (visible)",
        "version 1/2 (visible)",
        "holds [1, 1/2]",
    ):
        assert words in text, text
    assert str(version_of(1, 2)) not in text
    assert main(["status", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["newest"], model["newest_attempt"], model["newest_step"]) == (version_of(1, 2), 1, 2)
    assert [(v["version"], v["attempt"], v["step"]) for v in model["versions"]] == [(1, 0, 1), (version_of(1, 2), 1, 2)]
    for given in ("1/2", str(version_of(1, 2))):
        assert main(["pin", given, "--run", "r", "--model", "actor"]) == 0
        assert capsys.readouterr().out == "r/actor: version 1/2 is pinned\n"


def test_pin_unpin_and_withdraw_say_what_is_so_and_status_shows_it(hub_with_versions, capsys, monkeypatch):
    address, trainer = hub_with_versions
    monkeypatch.setenv("TENSORHUB_HUB", address)
    history = ["--run", "r", "--model", "actor"]

    def run(*arguments: str) -> str:
        assert main([*arguments, *history]) == 0
        return capsys.readouterr().out

    assert run("pin", "1") == "r/actor: version 1 is pinned\n"
    assert trainer.wait() == 1
    assert main(["status"]) == 1
    text = capsys.readouterr().out
    assert "r/actor: version 1 is pinned" in text and "version 1 (visible, pinned)" in text
    assert "    `tensorhub unpin --run=r --model=actor`, when the pin has done its work\n" in text
    words = "version 1 is pinned; withdrawn: 2\n"
    assert run("withdraw", "2").endswith(words) and run("withdraw", "2").endswith(words)
    assert main(["status"]) == 0  # what is pinned is the newest
    text = capsys.readouterr().out
    assert "version 2 (withdrawn)" in text and words in text
    assert run("unpin") == run("unpin") == "r/actor: no version is pinned, followers run the newest; withdrawn: 2\n"
    assert main(["status", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["pinned"], model["withdrawn"]) == (None, [2])
    assert [worker["worker"] for worker in model["workers"]] == ["trainer/0"]  # the operators have left


def test_directives_that_cannot_be_are_refused_and_say_why(hub_with_versions, capsys):
    address, _ = hub_with_versions
    for arguments, words in (
        (["pin", "7", "--run", "r"], "no worker holds it; held: [1, 2]"),
        (["pin", "1"], "no worker holds it; held: none"),  # of the run "default"
        (["withdraw", "7", "--run", "r"], "never published"),
        (["withdraw", "0", "--run", "r"], "positive integer"),
        (["withdraw", "three", "--run", "r"], "version 'three': give a step, or attempt/step"),
        (["unpin", "--run", ""], "1 to 256 characters"),
    ):
        assert main([*arguments, "--model", "actor", "--hub", address]) == 1
        captured = capsys.readouterr()
        assert words in captured.err and not captured.out, captured.err
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        assert main(["unpin", "--model", "actor", "--hub", address, "--timeout", "0.2"]) == 1
    assert "no hub answers" in capsys.readouterr().err


def test_a_pinned_version_that_nobody_holds_is_shown(hub_with_versions):
    address, trainer = hub_with_versions
    report = fetch_status(address)
    report["models"][0]["pinned"] = 9
    assert "! r/actor: version 9 is pinned, but no worker holds it\n    `tensorhub unpin" in status_text(report)


def test_leases_are_shown_by_name():
    report = {
        "hub": "00" * 16,
        "up_s": 3.0,
        "models": [
            {
                "run": "r",
                "model": "actor",
                "newest": 0,
                "versions": [{"version": 3, "visible": False, "layouts": {}}],
                "workers": [],
                "leases": [
                    {
                        "reader": "rollout/0",
                        "version": 3,
                        "layout": "checkpoint",
                        "sources": {"0": "trainer/0", "1": "trainer/1", "2": "trainer/0"},
                        "seconds_left": 41.7,
                    }
                ],
            }
        ],
    }
    text = status_text(report)
    assert "newest version none" in text and "version 3 (not visible)" in text
    assert "lease: rollout/0 reads version 3 checkpoint from trainer/0, trainer/1, 42 s left" in text


def test_status_of_a_hub_that_is_not_there(capsys):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        assert main(["status", "--hub", address, "--timeout", "0.2"]) == 2
    captured = capsys.readouterr()
    assert "no hub answers" in captured.err and address in captured.err and not captured.out
    assert main(["status", "--hub", "somewhere"]) == 2
    assert "use tcp://host:port" in capsys.readouterr().err


def test_wrong_use_of_the_command_says_how(capsys, monkeypatch):
    monkeypatch.delenv("TENSORHUB_HUB", raising=False)
    for arguments, words in (
        (["status"], "TENSORHUB_HUB"),
        (["pin", "3", "--model", "actor"], "TENSORHUB_HUB"),
        (["pin", "--model", "actor"], "version"),
        (["unpin"], "--model"),
        ([], "usage"),
        (["fly"], "invalid choice"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and words in capsys.readouterr().err


def test_keygen_writes_a_secret_and_keys_made_from_it(tmp_path, capsys):
    whole, reader, observer = tmp_path / "run.secret", tmp_path / "reader.key", tmp_path / "observer.key"
    assert main(["keygen", str(whole)]) == 0
    assert f"TENSORHUB_SECRET_FILE={whole}" in capsys.readouterr().out
    assert main(["keygen", str(reader), "--role", "reader", "--from", str(whole)]) == 0
    assert main(["keygen", str(observer), "--role", "observer", "--from", str(whole)]) == 0
    assert {file.stat().st_mode & 0o777 for file in (whole, reader, observer)} == {0o600}
    assert [secret.read(file).role for file in (whole, reader, observer)] == ["publisher", "reader", "observer"]
    for wrong, words in (
        (["keygen", str(whole)], "is there already"),
        (["keygen", str(tmp_path / "x"), "--role", "reader"], "name its file with --from"),
        (["keygen", str(tmp_path / "x"), "--role", "observer", "--from", str(reader)], "is the key of a reader"),
    ):
        assert main(wrong) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_server_with_a_secret_is_for_those_who_have_it(tmp_path, capsys):
    file, observer = tmp_path / "run.secret", tmp_path / "observer.key"
    keys = secret.generate()
    secret.write(file, keys)
    secret.write(observer, keys.limited("observer"))
    with server_process("--address", "tcp://127.0.0.1:0", "--secret-file", str(file)) as (process, address):
        assert main(["status", "--hub", address, "--secret-file", str(observer)]) == 0
        assert main(["status", "--hub", address]) == 2
        assert "asks for the run's secret: set TENSORHUB_SECRET_FILE" in capsys.readouterr().err
        with Client(address, run="r", model="actor", replica="t", transports=("tcp",), keys=keys) as client:
            client.publish(1, {"w": torch.ones(3)})
            arguments = ["pin", "1", "--model", "actor", "--run", "r", "--hub", address, "--secret-file"]
            assert main([*arguments, str(observer)]) == 1
            assert "an observer's key" in capsys.readouterr().err
            assert main([*arguments, str(file)]) == 0
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        assert keys.text().encode() not in command
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert keys.text() not in log and "no secret" not in log


def test_a_server_without_a_secret_says_for_whom_it_is(capsys):
    assert main(["server", "--address", "tcp://0.0.0.0:0"]) == 1
    assert "without a secret any process that reaches tcp://0.0.0.0:0 could read" in capsys.readouterr().err
    for options, words in (
        (["--address", "tcp://127.0.0.1:0"], "no secret, so this hub is for this host only: `tensorhub keygen`"),
        (["--address", "tcp://0.0.0.0:0", "--insecure"], "no secret, so this hub is for whatever reaches it"),
    ):
        with server_process(*options) as (process, address):
            assert fetch_status(address.replace("0.0.0.0", "127.0.0.1"))["models"] == []
            process.send_signal(signal.SIGTERM)
            assert words in process.communicate(timeout=20)[1]
