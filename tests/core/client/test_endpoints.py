"""A source with several endpoints, read over the one that was measured to be the fastest."""

from __future__ import annotations

import time

import pytest
import torch
from client_stage import SOON_S

from tensorhub_plugins.core import SourceLost, TransferLimits
from tensorhub_plugins.core.transfer.source_reader import SourceReader
from tensorhub_plugins.core.transports.tcp import TcpLink
from tensorhub_plugins.core.transports.ways import WAYS

TENSORS = {"w": torch.arange(2_000_000)}
HOSTS = ("127.0.0.2", "127.0.0.3")


PATIENT = TransferLimits(measure_s=SOON_S)  # however busy the machine is


class Read:
    """A trainer at two addresses, its reader, and over which of them bytes come."""

    def __init__(self, stage, monkeypatch):
        self.trainer = stage.client("trainer", transports=("tcp",), advertise_host=",".join(HOSTS))
        self.reader = stage.client("reader", transports=("tcp",), limits=PATIENT)
        self.over = []
        self.segments = dict.fromkeys(HOSTS, 0)
        transfer = TcpLink._transfer

        def noted(link, manifest, plan, segments, deadline):
            for segment in transfer(link, manifest, plan, segments, deadline):
                self.segments[self.host_of(link.peer)] += 1
                yield segment

        monkeypatch.setattr(TcpLink, "_transfer", noted)

    @staticmethod
    def host_of(endpoint):
        return endpoint.removeprefix("tcp://").rpartition(":")[0]

    def fetch(self, version):
        """Return how many segments have come from each address."""
        self.whole = self.trainer.publish(version, TENSORS).manifest.segment_count
        self.segments.update(dict.fromkeys(HOSTS, 0))
        fetched = self.reader.fetch(version, timeout_s=SOON_S)
        assert torch.equal(fetched.tensors()["w"], TENSORS["w"]) and not fetched.report.losses
        return tuple(self.segments.values())

    @property
    def endpoints(self):
        port = next(iter(self.trainer._transports.values()))._server._listeners[0].getsockname()[1]
        return [f"tcp://{host}:{port}" for host in HOSTS]


@pytest.fixture
def read(stage, monkeypatch):
    return Read(stage, monkeypatch)


def test_each_is_measured_by_a_segment_and_then_the_fastest_is_taken(read):
    first, second = read.fetch(1)
    assert min(first, second) == 1 and first + second == read.whole > 16
    assert WAYS.unmeasured(read.endpoints, time.monotonic()) == []
    for version, faster in ((2, 1), (3, 0)):
        for number, endpoint in enumerate(read.endpoints):
            WAYS.measured(endpoint, 1.0 + (number == faster), time.monotonic())
        segments = read.fetch(version)
        assert segments[faster] == read.whole and segments[1 - faster] == 0


@pytest.mark.parametrize("how", ["is cut", "is slow"])
def test_one_that_fails_while_it_is_measured_costs_nothing_but_its_segment(read, monkeypatch, how):
    transfer = TcpLink._transfer

    def fails(link, manifest, plan, segments, deadline):
        if read.host_of(link.peer) == HOSTS[1]:
            if how == "is cut":
                link.cut()
            else:
                raise SourceLost("the deadline passed", peer=link.peer)
        return transfer(link, manifest, plan, segments, deadline)

    monkeypatch.setattr(TcpLink, "_transfer", fails)
    assert read.fetch(1) == (read.whole, 0)
    assert WAYS.order(read.endpoints[::-1], time.monotonic()) == read.endpoints, "it is known to be the worse one"
    assert read.fetch(2) == (read.whole, 0)


def test_what_is_small_and_what_has_no_digests_is_not_measured(stage, read, monkeypatch):
    read.trainer.publish(1, {"w": TENSORS["w"][:1000]})
    assert read.reader.fetch(1, timeout_s=SOON_S).report.sources
    assert WAYS.unmeasured(read.endpoints, time.monotonic()) == read.endpoints
    plain = stage.client("plain", transports=("tcp",), advertise_host=",".join(HOSTS), verify=False)
    plain.publish(2, TENSORS)
    monkeypatch.setattr(SourceReader, "_measure", lambda *_: pytest.fail("without digests it could not be checked"))
    stage.client("other", transports=("tcp",), verify=False).fetch(2, timeout_s=SOON_S)


def test_other_bytes_over_another_endpoint_are_the_sources_fault(read, monkeypatch):
    """The control of the test above: what was corrupt is not read again from the same memory."""
    read.trainer.publish(1, TENSORS)
    digest, measured = TcpLink.digest, []

    def wrong(link, segment):
        if read.host_of(link.peer) == HOSTS[1]:
            measured.append(segment)
            return bytes(16)
        return digest(link, segment)

    monkeypatch.setattr(TcpLink, "digest", wrong)
    with pytest.raises(Exception, match="corrupt"):
        read.reader.fetch(1, timeout_s=5.0)
    assert measured
