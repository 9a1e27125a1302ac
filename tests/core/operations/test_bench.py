"""`tensorhub bench`: both ways move the same bytes, and what is in the way of them is said in words."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tensorhub_plugins.core import Client, HubUnreachable, Keys, TensorHubError, UsageError, new_secret, start_server
from tensorhub_plugins.core.cli import main
from tensorhub_plugins.core.errors import ResourceRefused
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.operations import bench
from tensorhub_plugins.core.operations.bench import BLOCK_BYTES, Result, measure, served, text

HERE = "tcp://127.0.0.1:0"


def at(hub: str) -> str:
    return hub.removeprefix("tcp://")


def test_on_one_host_memory_is_shared_and_between_two_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(HERE, None, 16) as hub:
        result = measure(at(hub), None, rounds=2)
        assert list(result.taken) == ["shm"] and result.taken["shm"] >= 2 * BLOCK_BYTES and result.not_taken == {}
        assert len(result.bare_s) == len(result.store_s) == 2 and result.ratio > 0
        monkeypatch.setattr(bench, "Client", partial(Client, transports=("tcp",)))
        result = measure(at(hub), None, rounds=1)
    assert list(result.taken) == ["tcp"]
    assert "not on one host" in result.not_taken["shm"] and "rdma" in result.not_taken


def test_the_result_in_words() -> None:
    said = text(Result(16_000_000, [0.2, 0.1, 0.4], [0.1, 0.1, 0.1], {"tcp": 16_000_000}, {"rdma": "no card"}, []), "h")
    assert said.splitlines()[1:] == [
        "one bare tcp stream: 0.2000 s (0.1000 to 0.4000), 80 MB/s",
        "the store, verified: 0.1000 s (0.1000 to 0.1000), 160 MB/s",
        "the store is 2.00 times as fast as the stream (by round: 2.00, 1.00, 4.00)",
        "it was read over tcp: 16.0 MB",
        "not over rdma, which is faster: no card",
    ]


def test_what_the_time_is_too_short_for_is_read_in_part() -> None:
    with served(HERE, None, 24) as hub:
        assert measure(at(hub), None, rounds=1).size_bytes == 3 * BLOCK_BYTES  # the control
        short = measure(at(hub), None, rounds=1, share=1e-9)
        assert short.size_bytes == BLOCK_BYTES and "--timeout" in text(short, "h")


def test_a_secret_is_asked_for_and_a_readers_key_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = new_secret()
    with served(HERE, keys, 8) as hub:
        assert measure(at(hub), Keys.parse(keys.limited("reader").text()), rounds=1).taken
        with pytest.raises(TensorHubError, match="secret"):
            measure(at(hub), None, timeout_s=5.0)
        file = tmp_path / "other"
        assert main(["keygen", str(file)]) == 0
        assert main(["bench", at(hub), "--secret-file", str(file), "--timeout", "5"]) == 1
        assert "does not know this process's secret" in capsys.readouterr().err


def test_a_stranger_gets_no_byte_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[socket.socket](), bench.server_at
    monkeypatch.setattr(bench, "server_at", lambda here: made.append(real(here)) or made[-1])
    with served(HERE, None, 8) as hub:
        for said in (b'{"token": "x", "blocks": 1}\n', b"7\n", b'{"token": 7}\n', b"\n", b"[" * 4000 + b"\n"):
            with socket.create_connection(("127.0.0.1", made[0].getsockname()[1])) as stranger:
                stranger.sendall(said)
                assert stranger.recv(1) == b""
        assert measure(at(hub), None, rounds=1).taken  # and it goes on


def test_what_is_in_the_way_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HubUnreachable, match=r"start `tensorhub bench --serve` there, and open its port 1\b"):
        measure("127.0.0.1:1", None, timeout_s=0.5)
    with pytest.raises(UsageError, match="correct the host's name"):
        measure("no-such-host.invalid", None, timeout_s=5.0)
    with start_server() as hub, pytest.raises(UsageError, match="the hub of a run, which is not measured"):
        measure(at(hub.address), None, timeout_s=0.5)
    with served(HERE, None, 8) as hub:
        monkeypatch.setattr(bench._Stream, "__init__", lambda self, host, about: _shut(self, host))
        with pytest.raises(UsageError, match="refused; open that port there"):
            measure(at(hub), None, timeout_s=5.0)
    assert main(["bench", "--serve", "7", "--mb", "0"]) == 1 and "0 MB" in capsys.readouterr().err
    for wrong in (["bench"], ["bench", "h", "--rounds", "0"], ["bench", "h", "--timeout", "0"]):
        with pytest.raises(SystemExit):
            main(wrong)


def test_memory_that_is_not_there_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 60000 kB\n")
    with served(HERE, None, 32) as hub:  # the control: there is as much
        measure(at(hub), None, rounds=1, share=1e9)
        monkeypatch.setattr(bench, "Room", partial(Room, tmp_path))
        for call in (lambda: measure(at(hub), None, rounds=1, share=1e9), lambda: served(HERE, None, 32).__enter__()):
            with pytest.raises(ResourceRefused, match=r"0.1 GB of host memory are needed"):  # for twice as many bytes
                call()


def _shut(stream: bench._Stream, host: str) -> None:
    """Let it lead to a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        stream._host, stream._port, stream._token, stream.blocks = host, gone.getsockname()[1], "", 1
    stream._memory = memoryview(bytearray())
