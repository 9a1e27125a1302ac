"""What a reader over a long way does not wait for: a connection to a source that it has read, and three answers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from typing import Any

import torch
from client_stage import until

from tensorhub_plugins.core import Location, SourceLost
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.link import SocketLink
from tensorhub_plugins.core.transports.stream.messages import StreamFinish
from tensorhub_plugins.core.transports.stream.source import ReaderConnection

HERE, THERE = Location(host="a"), Location(host="b")


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(100_000, dtype=torch.float32) * version}


def is_version(fetched: Any, version: int) -> bool:
    return torch.equal(fetched.tensors()["w"], weights(version)["w"])


def pair(stage: Any, **options: Any) -> tuple[Any, Any]:
    trainer, reader = (
        stage.client(name, location=where, transports=("tcp",), **options)
        for name, where in (("trainer", HERE), ("reader", THERE))
    )
    for version in (1, 2, 3):
        trainer.publish(version, weights(version))
    return trainer, reader


def connections(client: Any) -> list[Any]:
    return list(client._transports["tcp"]._server._connections)


def test_the_next_version_is_read_over_the_connection_of_the_last(stage):
    trainer, reader = pair(stage)
    reader.fetch(1).release()
    first = connections(trainer)
    reader.fetch(2).release()
    assert connections(trainer) == first and len(first) == 1
    trainer.unpublish(1)  # at rest it delays nobody
    until(lambda: not first[0].has_offer)  # the reader waits for no last word of its source


def test_what_its_digests_prove_waits_for_no_last_word_of_its_source(stage, monkeypatch):
    """The control: without digests it does."""
    answer, goes_on, held = ReaderConnection._answer, threading.Event(), threading.Event()

    def withheld(self: ReaderConnection, request: Any) -> None:
        if isinstance(request, StreamFinish):
            held.set()
            goes_on.wait(30)
        answer(self, request)

    monkeypatch.setattr(ReaderConnection, "_answer", withheld)
    _, reader = pair(stage)
    fetched = reader.fetch(1)
    assert is_version(fetched, 1)
    assert held.wait(30) and not goes_on.is_set()
    goes_on.set()
    assert is_version(reader.fetch(2), 2)  # the late answer is not taken for another
    goes_on.clear()
    believing = stage.client("believing", location=Location(host="c"), transports=("tcp",), verify=False)
    waiting = threading.Thread(target=lambda: believing.fetch(3, converts=False).release())
    held.clear()
    waiting.start()
    assert held.wait(30)
    waiting.join(0.2)
    assert waiting.is_alive()
    goes_on.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_connection_that_was_lost_unnoticed_costs_no_source(stage, monkeypatch):
    trainer, reader = pair(stage)
    reader.fetch(1).release()
    (lost,) = connections(trainer)
    monkeypatch.setattr(Channel, "is_lost", lambda self: False)
    lost.cut()
    fetched = reader.fetch(2)
    assert is_version(fetched, 2)
    assert fetched.report.losses == () and connections(trainer) != [lost]


def test_all_kept_connections_together_have_half_of_the_time(stage, monkeypatch):
    """All are half open: a new one is made while there is time for it."""
    trainer, reader = pair(stage)
    reader.fetch(1).release()
    transport, left, opened = reader._transports["tcp"], [], SocketLink.open
    peer = transport._idle[0].channels[0].peer
    monkeypatch.setattr(transport, "_take", lambda *_: None)
    for link in [transport.connect(peer, deadline=time.monotonic() + 30) for _ in range(3)]:
        transport._keep(link._connection)
    monkeypatch.undo()

    def silent(self: SocketLink, *arguments: Any, deadline: float) -> Any:
        left.append(deadline - time.monotonic())
        if not self.progress.is_kept:
            return opened(self, *arguments, deadline=deadline)
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise SourceLost("sent nothing", phase="open")

    monkeypatch.setattr(SocketLink, "open", silent)
    reader._limits = TransferLimits(open_s=3.0)
    fetched = reader.fetch(2)
    assert is_version(fetched, 2) and fetched.report.losses == ()
    assert len(left) == 5 and left[-1] > 0.75  # of 3 s; halved each time it were an eighth


def test_only_a_hub_that_is_near_is_waited_for(stage, monkeypatch):
    """The control: near ones are, for what a reader serves from then on."""
    waited: list[float] = []
    monkeypatch.setattr("tensorhub_plugins.core.client.serving.wait", _noting(waited))
    _, reader = pair(stage)
    for far in (True, False):
        monkeypatch.setattr(type(reader._hub), "is_far", far)
        reader.fetch(2 + far, serve=True)
    assert [seconds > 0 for seconds in waited] == [False, True]


def _noting(waited: list[float]) -> Any:
    def noted(futures: Any, timeout_s: float) -> Any:
        waited.append(timeout_s)
        return wait(futures, timeout_s)

    return noted


def test_a_connection_over_which_nothing_had_to_be_read_is_kept_too(stage):
    """All of it is here already: the segments are copied from the version before."""
    trainer, reader = (
        stage.client(name, location=where, transports=("tcp",))
        for name, where in (("trainer", HERE), ("reader", THERE))
    )
    for version in (1, 2, 3):
        trainer.publish(version, weights(1))
    reader.fetch(1, serve=True)
    first = connections(trainer)
    for version in (2, 3):
        assert reader.fetch(version, serve=True).report.sources == {}
    assert connections(trainer) == first and len(first) == 1
