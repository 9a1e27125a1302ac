"""The commands on a full disk, into a pipe that is closed, and where the output has few letters."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tensorhub_plugins.core import Client, Keys, start_server
from tensorhub_plugins.core.cli import fetch_status, main

COMMAND = [sys.executable, "-m", "tensorhub_plugins.core.cli"]
NAME = "訓練-é"
SOON_S = 60.0

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a hub with one worker that has a name in Japanese and French."""
    with start_server() as hub, Client(hub.address, run="r", model="m", replica=NAME, transports=("tcp",)):
        yield hub.address


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, timeout=SOON_S, check=False, **options
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", NAME), ("latin-1", r"\u8a13\u7df4-é"), ("ascii", r"\u8a13\u7df4-\xe9")],
)
def test_status_where_the_output_has_few_letters(address, encoding, shown):
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*COMMAND, "status", "--hub", address], env=environment, capture_output=True, timeout=SOON_S, check=True
    )
    assert shown.encode(encoding) in done.stdout and not done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_secret_is_the_same_in_each_locale(tmp_path, locale):
    """In a file and in the environment, read and written."""
    text = "é" * 40
    given = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TENSORHUB_SECRET": text}
    (tmp_path / "secret").write_text(text, encoding="utf-8")
    assert run("keygen", str(tmp_path / "new"), "--from", str(tmp_path / "secret"), env=given).returncode == 0
    assert (tmp_path / "new").read_bytes() == f"{text}\n".encode()
    program = "from tensorhub_plugins.core import keys_from_environment as k; print(ascii(k().text()))"
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=SOON_S)
    assert done.stdout == f"{ascii(text)}\n"


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json")], ids=" ".join)
def test_a_full_disk_is_said_and_no_success(address, arguments):
    with open("/dev/full", "w") as full:
        done = run(*arguments, "--hub", address, stdout=full)
    assert (done.returncode, "No space left on device" in done.stderr) == (2, True)  # 1: something is wrong with a run
    assert run(*arguments, "--hub", address, stdout=subprocess.DEVNULL).returncode == 0  # the control


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("--help",), ("fleet", "add", "--help")], ids=" ".join)
def test_help_that_cannot_be_written_is_said(arguments, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full, env=environment)
    assert (done.returncode, done.stderr) == (1, "tensorhub: [Errno 28] No space left on device\n")
    done = run(*arguments, stdout=subprocess.PIPE, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("usage: tensorhub")  # the control


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json")], ids=" ".join)
def test_a_reader_that_closes_the_pipe_ends_it_in_silence(address, arguments):
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(*arguments, "--hub", address, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_without_any_output_it_is_no_error(address):
    done = run("status", "--hub", address, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("full", ["stdout", "stderr", "both"])
def test_a_hub_serves_though_nobody_can_read_where(tmp_path, full):
    with start_server() as other:  # a port that is free again
        where = other.address
    with open("/dev/full", "w") as disk, open(tmp_path / "out", "w") as file:
        streams = {name: disk if full in (name, "both") else file for name in ("stdout", "stderr")}
        process = subprocess.Popen([*COMMAND, "server", "--address", where], **streams)
        try:
            assert fetch_status(where, timeout_s=SOON_S)["models"] == []
            process.terminate()
            assert process.wait(SOON_S) == 0
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in (text := (tmp_path / "out").read_text())
    assert full != "stdout" or "cannot write where the hub listens" in text


def test_a_hub_serves_though_nobody_reads_its_log_any_more():
    """A launcher that keeps the pipe and never reads it. What did not fit is counted when somebody reads again."""
    read, write = os.pipe()
    environment = {**os.environ, "TENSORHUB_SECRET": "s" * 40}
    command = [*COMMAND, "server", "--address", "tcp://127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write, text=True, env=environment)
    try:
        where = process.stdout.readline().split()[-1]
        full = os.open(f"/proc/self/fd/{write}", os.O_WRONLY | os.O_NONBLOCK)  # not the server's own description
        with pytest.raises(BlockingIOError):
            while True:
                os.write(full, b"." * 4096)
        keys = Keys.parse(environment["TENSORHUB_SECRET"])
        assert fetch_status(where, timeout_s=SOON_S, keys=keys)["models"] == []
        for number in range(3):  # each is logged
            Client(where, run="r", model="m", replica=f"a{number}", transports=("tcp",), keys=keys).close()
        os.close(full)
        os.close(write)
        text, end = "", time.monotonic() + SOON_S
        while "lines are left out: no process was reading" not in text:
            text += os.read(read, 65536).decode()
            Client(where, run="r", model="m", replica="b", transports=("tcp",), keys=keys).close()
            assert time.monotonic() < end
        process.terminate()
        while os.read(read, 65536):
            pass
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(read)


def test_an_error_is_no_output_where_stderr_is_closed():
    arguments = ("status", "--json", "--hub", "tcp://127.0.0.1:1", "--timeout", "1")
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), timeout=SOON_S, check=False)
    assert (done.returncode != 0, done.stdout) == (True, b"")


def test_a_secret_that_could_not_be_written_leaves_no_file(tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))

    done = run("keygen", str(tmp_path / "key"), preexec_fn=limit)
    assert (done.returncode, done.stderr) == (1, f"tensorhub: {tmp_path}/key cannot be written: File too large\n")
    assert not list(tmp_path.iterdir())
    assert run("keygen", str(tmp_path / "key"), stdout=subprocess.DEVNULL).returncode == 0  # the control


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("server", "--metrics-host", "\udcff", "--metrics-port", "0", "--address", "tcp://127.0.0.1:0"), "served at"),
        (("server", "--interface", "\udcff"), "no network interface of that name"),
        (("status", "--hub", "tcp://\udcff:1"), "is no hub address"),
        (("pin", "\udcff", "--model", "m", "--hub", "tcp://127.0.0.1:1"), "give a step"),
        (("keygen", "/no-such-folder/\udcff"), "cannot be written"),
        (("doctor", "check-sync", "--model", "\udcff", "--engine", "[1]"), "give an object"),
    ],
)
def test_words_that_are_no_text_and_no_settings_are_refused(arguments, says, capsys):
    """Bytes of another encoding arrive as surrogates."""
    try:
        ended = main(list(arguments))
    except SystemExit as usage:
        ended = usage.code
    assert ended in (1, 2) and says in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_timeout_that_is_none_is_refused(address, seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", "--hub", address, "--timeout", seconds])
    assert ended.value.code == 2 and "--timeout" in capsys.readouterr().err


CONTROLS = ["\n", "\x1b[31m", "\r", "\x7f", "\u202e", "\u2066", "\u061c", "\u200b", "\U000e0041", "\xad", "\ud800"]


@pytest.mark.parametrize("control", CONTROLS, ids=ascii)
def test_a_name_that_would_control_how_it_is_printed_is_refused_by_every_command(address, control, capsys):
    name = f"t{control}2026 ERROR all is lost"
    for given in (["--run", name, "--model", "m"], ["--model", name]):
        assert main(["pin", "1", "--hub", address, *given]) == 1
        error = capsys.readouterr().err
        assert "characters that control how it is printed" in error or "must be a text" in error
        assert control not in error.rstrip("\n")


def test_a_report_of_others_is_escaped(monkeypatch, capsys):
    """A hub that is older, or no friend, may report any name."""
    monkeypatch.setattr("tensorhub_plugins.core.operations.status._fetch_status", lambda *_: {
        "hub": "h" * 32, "up_s": 1.0, "models": [{
            "run": "r\x1b[2J", "model": "m\u202e", "newest": 0, "versions": [], "workers": [], "leases": [],
        }],
    })  # fmt: skip
    assert main(["status", "--hub", "tcp://127.0.0.1:1"]) == 0
    assert (text := capsys.readouterr().out).replace("\n", "").isprintable() and r"r\x1b[2J/m\u202e" in text
    assert main(["status", "--json", "--hub", "tcp://127.0.0.1:1"]) == 0
    (model,) = json.loads(text := capsys.readouterr().out)["models"]
    assert model["model"] == "m\u202e" and text.isascii() and not model["model"].isprintable()
