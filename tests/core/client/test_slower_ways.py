"""A source that is read by a slower way than it might be is warned of, once for each source, with the reason."""

from __future__ import annotations

import errno
import logging
import os

import pytest
from client_processes import same_bytes, tensors_of
from client_stage import FAR, SOON_S

from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.transfer.unreached import SLOW_MAX, Unreached
from tensorhub_plugins.core.transports.shm import process_memory
from tensorhub_plugins.core.transports.stream import unix_socket

BOTH = ("shm", "tcp")


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.INFO, "tensorhub")
    return lambda: [
        r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "faster way" in r.getMessage()
    ]


def read(stage, source, *versions, copy=False, reader="reader", **options):
    """The transports of the last one, each published and read in turn."""
    reader, kept = stage.client(reader, **{"transports": BOTH, **options}), []
    for version in versions:
        kept.append(tensors_of(version))
        source.publish(version, kept[-1], copy=copy)
        fetched = reader.fetch(version, timeout_s=SOON_S)
        assert same_bytes(fetched.tensors(), tensors_of(version))
        fetched.release()
        source.unpublish(version, timeout_s=SOON_S)
    return list(fetched.report.transports)


def test_a_process_of_another_pid_namespace(stage, monkeypatch, warned):
    source = stage.client("trainer", transports=BOTH)
    monkeypatch.setattr(unix_socket, "peer_of", lambda sock: (0, os.getuid()))
    assert read(stage, source, 1, copy=True, reader="control") == ["shm"] and warned() == []
    assert read(stage, source, 2, 3) == ["tcp"]
    (said,) = warned()
    assert said.startswith("trainer/0 is read over tcp, and not over a faster way: shm: its tensors lie in memory")
    assert "its process is in another PID namespace: let both containers share one" in said and "copy=True" in said


def test_memory_of_others_that_may_not_be_read(stage, monkeypatch, warned):
    source = stage.client("trainer", transports=BOTH)
    assert read(stage, source, 1, reader="control") == ["shm"] and warned() == []

    def refused(self):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(process_memory.ProcessMemory, "probe", refused)
    assert read(stage, source, 2, 3) == ["tcp"]
    (said,) = warned()
    assert "the memory of other processes cannot be read here: allow that" in said and "PID namespace" not in said


def test_a_source_that_does_not_serve_it_and_one_that_only_has_the_same_name(stage, monkeypatch, warned):
    source = stage.client("trainer", transports=("tcp",))
    assert read(stage, source, 1, reader="chosen", transports=("tcp",)) == ["tcp"]
    assert read(stage, source, 2, reader="elsewhere", location=FAR) == ["tcp"]
    assert warned() == [], "the controls: a reader that wants tcp, and one of another host"
    assert read(stage, source, 3, 4) == ["tcp"]
    (said,) = warned()
    assert said.endswith(
        "way: shm: it does not serve that; if it is on another machine of the same name, set TENSORHUB_HOST on each"
    )
    other = stage.client("other", transports=BOTH)

    def not_here(*arguments, **options):
        raise SourceLost("not on this host, or gone: Connection refused", peer="shm://1", phase="connect")

    monkeypatch.setattr(unix_socket, "connect", not_here)
    assert read(stage, other, 5, reader="far", location=FAR) == ["tcp"] and len(warned()) == 1, "the control"
    assert read(stage, other, 6, 7, reader="near") == ["tcp"]
    assert "other/0 is read over tcp, and not over a faster way: shm: not on this host, or gone" in warned()[1]


def test_only_so_many_are_remembered():
    unreached = Unreached()
    many = [number.to_bytes(16, "big") for number in range(SLOW_MAX + 1)]
    assert all(map(unreached.is_first_slow, many)) and not unreached.is_first_slow(many[-1])
    assert unreached.is_first_slow(many[0])
