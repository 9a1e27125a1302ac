"""A source that a client could not connect to is asked last, for a minute, and costs its time once."""

import errno
import logging
import os
import socket

import pytest
from client_processes import SIZE, same_bytes, tensors_of
from client_stage import FAR, SOON_S, until

from tensorhub_plugins.core import DeadlineExceeded, Location
from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transfer.unreached import REMEMBERED_S, SOURCES_MAX, Unreached
from tensorhub_plugins.core.transports import tcp
from tensorhub_plugins.core.transports.stream import tcp_socket


@pytest.fixture
def nowhere():
    """An endpoint where nobody answers: its queue of connections is full."""
    with socket.socket() as listening, socket.socket() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting.connect(listening.getsockname())
        with socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(listening.getsockname())
            yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def behind_a_firewall(stage, monkeypatch, nowhere):
    """A trainer far away, and a source near its readers that none of them reaches, which fetches each version."""
    trainer = stage.client("trainer", location=FAR)
    with monkeypatch.context() as patched:
        patched.setattr(tcp.TcpTransport, "serve", lambda self, shelf: nowhere)
        shut = stage.client("shut", transports=("tcp",))
        trainer.publish(1, tensors_of(1))
        shut.fetch(1, serve=True)
    return trainer, shut


def test_it_costs_its_time_once(stage, behind_a_firewall):
    trainer, shut = behind_a_firewall
    limits = TransferLimits(open_s=0.3)
    reader = stage.client("reader", transports=("tcp",), limits=limits)
    other = stage.client("other", transports=("tcp",), limits=limits)
    lost = []
    for version in (1, 2, 3):
        if version > 1:
            trainer.publish(version, tensors_of(version))
            shut.fetch(version, serve=True)
        fetched = reader.fetch(version, timeout_s=SOON_S)
        assert fetched.report.sources == {"trainer/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(version))
        lost.append(len(fetched.report.losses))
    assert lost == [1, 0, 0]
    assert len(other.fetch(3, timeout_s=SOON_S).report.losses) == 1  # the control: one that does not know yet


def test_where_there_is_no_other_it_is_tried_and_the_error_says_what_to_set(stage, behind_a_firewall):
    trainer, _ = behind_a_firewall
    reader = stage.client("reader", transports=("tcp",), limits=TransferLimits(open_s=0.2))
    reader.fetch(1, timeout_s=SOON_S).release()
    trainer.close()
    with pytest.raises(DeadlineExceeded, match="TENSORHUB_ADVERTISE .* TENSORHUB_PORTS"):
        reader.fetch(1, timeout_s=1.5)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_a_connection_that_the_reader_s_own_host_forbids_is_not_the_source_s_fault(stage, monkeypatch, number):
    trainer = stage.client("trainer", location=FAR)
    reader = stage.client("reader", transports=("tcp",), limits=TransferLimits(open_s=0.2))
    trainer.publish(1, tensors_of(1))

    def forbids(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(tcp_socket, "first_connected", forbids)
        with pytest.raises(DeadlineExceeded, match="its routes, firewall and sandbox") as raised:
            reader.fetch(1, timeout_s=0.5)
    assert "TENSORHUB_ADVERTISE" not in str(raised.value) and told(stage) == ""
    assert same_bytes(reader.fetch(1, timeout_s=SOON_S).tensors(), tensors_of(1))


def test_it_is_forgotten_after_a_minute_and_only_so_many_are_kept():
    unreached = Unreached()
    for session, now in ((b"a", 10.0), (b"b", 20.0), (b"a", 20.0)):
        unreached.add(session, now)
    assert unreached.sessions(20.0 + REMEMBERED_S - 1) == (b"b", b"a")
    assert unreached.sessions(20.0 + REMEMBERED_S) == ()
    many = [number.to_bytes(2, "big") for number in range(SOURCES_MAX + 3)]
    for session in many:
        unreached.add(session, 100.0)
    assert unreached.sessions(100.0) == tuple(many[3:])


def told(stage, name="trainer/0"):
    """What status says of this worker, and to people."""
    report = fetch_status(stage.address)
    model = next(each for each in report["models"] if each["run"] == stage.run)
    said = next(each["unreached"] for each in model["workers"] if each["worker"] == name)
    assert not said or f"    {said}" in status_text(report).splitlines()
    return said


def test_it_is_said_by_status_and_by_the_logs_of_the_hub_and_of_its_host(stage, behind_a_firewall, caplog, nowhere):
    """The hub is told by the reader, and believes it when the source lives."""
    reader = stage.client("reader", transports=("tcp",), limits=TransferLimits(open_s=0.3))
    assert told(stage, "shut/0") == ""
    with caplog.at_level(logging.WARNING, "tensorhub"):
        reader.fetch(1, timeout_s=SOON_S)
        said = until(lambda: told(stage, "shut/0"))
        logged = until(lambda: [r for r in caplog.records if "shut/0: reader/0" in r.getMessage()])
    assert said.startswith(
        f"reader/0 cannot connect to shut/0 at {nowhere}, an address of its own host alone: set TENSORHUB_ADVERTISE"
    )
    assert [record.name for record in logged] == ["tensorhub.client"] and "TENSORHUB_ADVERTISE" in logged[
        0
    ].getMessage()
    hub = [r for r in caplog.records if r.name == "tensorhub.hub" and "cannot connect to shut/0" in r.getMessage()]
    assert len(hub) == 1 and "reader/0 on here cannot" in hub[0].getMessage() and hub[0].levelname == "WARNING"
    assert told(stage) == "", "the control: one that was reached"


def test_loopback_that_leads_to_another_process_of_the_reader_s_host(stage, caplog):
    """With the same ports on each host somebody listens there, often the reader itself."""
    trainer = stage.client("trainer", location=Location("dc", "rack", "there"))
    reader = stage.client("reader", limits=TransferLimits(open_s=0.3))
    trainer.publish(1, tensors_of(1))
    for key in trainer.serving():
        trainer.find(key).withdraw()  # stands for a listener that knows nothing of it
    with pytest.raises(DeadlineExceeded, match="TENSORHUB_ADVERTISE"):
        reader.fetch(1, timeout_s=1.0)
    assert until(lambda: told(stage)).startswith("reader/0 cannot connect to trainer/0 at tcp://127.0.0.1:")
