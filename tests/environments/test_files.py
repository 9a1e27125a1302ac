"""What a user names as a file may be none, or a huge one: each entrance refuses it at once, in a sentence."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest

from tensorhub_plugins.core import UsageError, keys_from_environment, run_log
from tensorhub_plugins.core.cli import main
from tensorhub_plugins.core.deadline import aside
from tensorhub_plugins.core.security import secret, tls

SOON_S = 5.0
SECRET = "s" * 40
KINDS = {
    "pipe": "it is a pipe, and no regular file",
    "socket": "it is a socket, and no regular file",
    "device": "it is a device, and no regular file",
    "folder": "it is a folder, and no regular file",
    "huge": f"it has {1 << 40} bytes, of at most",
    "loop": "Too many levels of symbolic links",
    "null": "null",
    "nobody": "No such file or directory",
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """One of each kind."""
    found = {kind: tmp_path / kind for kind in KINDS}
    os.mkfifo(found["pipe"])
    found["device"].symlink_to("/dev/zero")
    found["folder"].mkdir()
    with found["huge"].open("wb") as huge:
        huge.truncate(1 << 40)
    found["loop"].symlink_to(found["loop"])
    found["null"], found["nobody"] = tmp_path / "a\0b", Path("~no-such-user/secret")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(found["socket"]))  # a long path does not fit
        yield found


def of_environment(path: Path) -> None:
    os.environ["TENSORHUB_SECRET_FILE"] = str(path)
    keys_from_environment()


def of_tls(path: Path) -> None:
    for place in range(3):
        with pytest.raises(UsageError) as said:
            tls.contexts(tls.TlsFiles(*(str(path) if place == at else __file__ for at in range(3))))
        assert str(path) in str(said.value)
    raise said.value


def command(*arguments: str) -> Callable[[Path], None]:
    return lambda path: _ended(main([*arguments, str(path)]))


def _ended(status: int) -> None:
    assert status in (1, 2)  # not by a signal


ENTRANCES: dict[str, Callable[[Path], object]] = {
    "secret": secret.read,
    "TENSORHUB_SECRET_FILE": of_environment,
    "tls": of_tls,
    "status": command("status", "--hub", "tcp://127.0.0.1:1", "--secret-file"),
    "server": command("server", "--address", "tcp://127.0.0.1:0", "--secret-file"),
    "keygen": command("keygen", "/no-such-folder/key", "--from"),
    "timeline": command("timeline"),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_what_is_no_file_is_refused_at_once(
    entrance: str,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TENSORHUB_SECRET_FILE", "")
    for kind, path in files.items():
        if kind == "null" and "_" in entrance or entrance == "timeline" and kind in ("folder", "huge"):
            continue  # none can be set; a folder is read by its files, and a large file line by line
        try:
            aside(lambda path=path: ENTRANCES[entrance](path)).result(SOON_S)
            said = capsys.readouterr().err
            assert said.startswith("tensorhub: ")
        except UsageError as error:
            said = str(error)
        assert KINDS[kind] in said, kind


def test_a_pipe_that_nobody_writes_to_would_be_waited_for(files: dict[str, Path]) -> None:
    """The control."""
    waiting = aside(files["pipe"].read_bytes)
    with pytest.raises(FutureTimeout):
        waiting.result(0.2)
    files["pipe"].write_bytes(b"x")
    assert waiting.result(SOON_S) == b"x"


def test_of_the_page_and_the_journal_no_pipe_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal").write_text('{"t": 1.0, "event": "publish", "worker": "a/0"}\n')
    os.mkfifo(tmp_path / "page.html")
    arguments = ["timeline", str(tmp_path / "journal"), "--out", str(tmp_path / "page")]
    assert aside(lambda: main(arguments)).result(SOON_S) == 1
    assert "it is a pipe, and no regular file" in capsys.readouterr().err
    (tmp_path / "page.html").unlink()
    assert main(arguments) == 0  # the control


def test_a_process_whose_journal_is_a_pipe_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_file", None)
    monkeypatch.setattr(run_log, "_failed_pid", -1)
    monkeypatch.setattr(run_log, "failure", "")
    monkeypatch.setenv(run_log.VARIABLE, str(tmp_path))
    os.mkfifo(tmp_path / f"{socket.gethostname()}-{os.getpid()}.jsonl")
    aside(lambda: run_log.record("publish", worker="a/0")).result(SOON_S)
    assert "events are no longer recorded" in run_log.failure


def test_a_secret_of_letters_of_four_bytes_is_the_same_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\N{GRINNING FACE}" * 4096
    (tmp_path / "secret").write_text(f"{text}\n")
    monkeypatch.delenv("TENSORHUB_SECRET_FILE", raising=False)
    monkeypatch.setenv("TENSORHUB_SECRET", text)
    read, given = secret.read(tmp_path / "secret"), keys_from_environment()
    assert given is not None and read.text() == given.text() == text
