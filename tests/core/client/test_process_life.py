"""A process that forks, and an interpreter that exits: nobody waits for what is not there."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from client_processes import SIZE, same_bytes, tensors_of
from client_stage import FAR, HELD, SOON_S, holders, until
from forks import forked

from tensorhub_plugins.core import CHECKPOINT, Client, ShardKey, UsageError, process_lifetime, start_server
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import session
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.memory import inherited
from tensorhub_plugins.core.process_lifetime import socket_of
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.transfer.limits import TransferLimits

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, for what this is about

CALLS: dict[str, Callable[[Client], Any]] = {
    "publish": lambda c: c.publish(2, {"w": torch.ones(1)}),
    "unpublish": lambda c: c.unpublish(1),
    "recheck": lambda c: c.recheck(1),
    "replicate": lambda c: c.replicate({"w": torch.ones(1)}),
    "fetch": lambda c: c.fetch(),
    "wait": lambda c: c.wait(),
    "target": lambda c: c.target(),
    "versions": lambda c: c.versions(),
    "retain": lambda c: c.retain(),
    "pin": lambda c: c.pin(1),
    "begin": lambda c: c.begin(1),
    "abandon": lambda c: c.abandon(1, CHECKPOINT),
    "allocate": lambda c: c.allocate([]),
    "reserve": lambda c: c.reserve([], 1),
    "serving": lambda c: c.serving(),
    "hand_over": lambda c: c.hand_over(0.1),
    "find": lambda c: c.find(ShardKey(1, CHECKPOINT)),
}


def in_a_child(action: Callable[[], str]) -> str:
    """What it returns in a forked child, which must not wait for anybody."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, action().encode())
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        with open(ours, "rb") as pipe:
            os.set_blocking(ours, False)
            return until(lambda: pipe.read() or b"").decode()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def outcome(call: Callable[[Client], Any], client: Client) -> str:
    try:
        return repr(call(client))
    except UsageError as error:
        return str(error)


def test_a_forked_child_is_told_what_to_do_and_the_parent_goes_on(stage):
    client = stage.client("a")
    client.publish(1, {"w": torch.ones(3)})
    released = stage.client("c")
    here, parent = released.fetch(), os.getpid()
    locks = [
        lock for c in (client, released) for lock in (c._lock, c._serving._changed, c._hub._lock, c._serving.pool._lock)
    ]

    def child() -> str:
        with ExitStack() as held:
            for lock in locks:  # as another thread may have held them
                held.enter_context(lock)
            said = {outcome(call, client) for call in CALLS.values()}
            here.release()
        client.close()
        client.close()
        process_lifetime._exits(parent)  # those of other libraries may wait for threads that are not here
        return "; ".join(said)

    said = in_a_child(child)
    assert f"this client was made by process {os.getpid()} and this is its fork" in said
    assert said.count("make a client in the child") == 1  # all say the same
    assert holders(client, 1) == ("a/0",)  # no Bye was said for us
    fetched = stage.client("b").fetch()
    assert torch.equal(fetched.tensors()["w"], torch.ones(3))


def connections(others: list[str]) -> list[str]:
    """Return the address of each TCP socket of this process but those."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as sock:
                    if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM:
                        found.append("{}:{}".format(*sock.getsockname()))
    return [address for address in found if address not in others]


@pytest.mark.parametrize("is_closed", [True, False], ids=["", "control"])
def test_a_forked_child_has_no_connection(stage, monkeypatch, is_closed):
    """Neither to the hub nor to a source or a reader; nor the sockets of a hub, or a source, that is in this process,
    where others would connect to nobody."""
    address = stage.address.removeprefix("tcp://")
    others = connections([address])  # of libraries that other tests have used
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"w": torch.ones(3)})
    rollout.fetch()
    assert connections(others).count(address) >= 3  # it listens, and has accepted two
    if not is_closed:
        monkeypatch.setattr(process_lifetime, "_in_children", WeakSet())
    assert (in_a_child(lambda: str(connections(others))) == "[]") == is_closed
    monkeypatch.undo()
    assert torch.equal(rollout.fetch().tensors()["w"], torch.ones(3)) and holders(trainer, 1) == ("trainer/0",)
    trainer._hub._is_to_redial = True  # the next connection, and none of its number that is another's
    trainer._hub._wake()
    until(lambda: trainer._hub._dialed == 1)
    until(lambda: trainer._hub._handshakes._connection is not None)
    assert holders(trainer, 1) == ("trainer/0",)
    assert in_a_child(lambda: str(connections(others))) == "[]"


@pytest.mark.parametrize("how", ["", "control", "without descriptors"])
def test_a_forked_child_keeps_the_bytes_of_what_its_parent_has_fetched(stage, monkeypatch, how):
    """Also when the parent has released it, and reads the next version; and what it writes there is its own. The
    control: one memory for both."""
    if how == "control":
        monkeypatch.setattr(inherited, "_inherited", lambda slab: None)
    if how == "without descriptors":
        monkeypatch.setattr(inherited.os, "dup", no_descriptors)
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.retain(2)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    fetched = rollout.fetch(1)
    tensors, slab = fetched.tensors(), fetched.slab
    asked, asks = os.pipe()
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.disable()  # it may be meant to die
        os.read(asked, 1)
        is_right = same_bytes(tensors, tensors_of(1))
        for tensor in tensors.values():
            tensor.zero_()
        os.write(tells, b"x")
        os.read(asked, 1)
        is_own = all(not tensor.any() for tensor in tensors.values())
        grandchild = os.fork()
        if not grandchild:
            os._exit(any(tensor.any() for tensor in tensors.values()))
        os._exit(3 if is_right and is_own and os.waitpid(grandchild, 0)[1] == 0 else 1)
    os.close(tells)
    monkeypatch.undo()
    fetched.release()
    again = rollout.fetch(2)
    assert (again.slab is slab) == (how != "")
    os.write(asks, b"x")
    os.read(told, 1)  # nothing, where it has died
    assert same_bytes(again.tensors(), tensors_of(2)) == (how != "control")
    os.write(asks, b"x")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == {"": 3, "control": 1}.get(how, -signal.SIGSEGV)
    for fd in (asked, asks, told):
        os.close(fd)


def no_descriptors(fd: int) -> int:
    raise OSError(errno.EMFILE, "too many open files")


def test_memory_that_a_child_had_is_used_again_when_it_has_ended(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.retain(2)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    fetched = rollout.fetch(1)
    slab = fetched.slab
    with forked():
        fetched.release()
    with forked():  # what was released, nobody has
        again = rollout.fetch(2)
    assert again.slab is slab and same_bytes(again.tensors(), tensors_of(2))


def test_a_number_that_is_another_socket_by_now_is_not_closed(stage):
    one, other = socket.socketpair()
    kept = process_lifetime.ForeignSocket(one.fileno())
    number = one.fileno()
    one.close()
    another = os.dup2(other.fileno(), number)
    assert in_a_child(lambda: os.readlink(f"/proc/self/fd/{another}")[:7]) == "socket:"
    os.close(another)
    other.close()
    del kept


@pytest.fixture
def sleeper(tmp_path):
    """A FIFO on which children wait, which end with the test."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR)  # so that nobody waits for the other end
    yield path
    os.close(keep)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_death_of_a_process_is_noticed_although_its_child_lives(stage, progress, sleeper, transport):
    options = {"transports": (transport,)}
    near, far = stage.worker("near", **options), stage.client("far", location=FAR, **options)
    rollout = stage.client("rollout", limits=TransferLimits(stall_s=SOON_S), **options)
    near.call("publish", 1, 1, hold_from=HELD)
    far.publish(1, tensors_of(1))
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    child = near.call("fork", sleeper)
    began = time.monotonic()
    near.signal(signal.SIGKILL)  # its end is not waited for: the child has that pipe, too
    fetched = reading.result(2 * SOON_S)
    assert time.monotonic() - began < SOON_S  # it did not have to become silent for long
    assert fetched.report.sources["far/0"] < SIZE and same_bytes(fetched.tensors(), tensors_of(1))
    assert "went away" in fetched.report.losses[0] or "cannot be read any more" in fetched.report.losses[0]
    os.kill(child, 0)  # it lives


def test_a_child_that_keeps_the_sockets_hides_the_death(stage, progress, sleeper):
    """The control: its reader sees silence, which is noticed by chance, because somebody else could take over."""
    near, far, rollout = stage.worker("near"), stage.client("far", location=FAR), stage.client("rollout")
    near.call("publish", 1, 1, hold_from=HELD)
    far.publish(1, tensors_of(1))
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    near.call("fork", sleeper, keeps_sockets=True)
    near.signal(signal.SIGKILL)
    (loss,) = reading.result(2 * SOON_S).report.losses
    assert "went away" not in loss


PROGRAM = """
import sys
import torch
from tensorhub_plugins.core import Client
client = Client(sys.argv[1], run="r", model="m", replica="leaves", transports=("tcp",))
client.publish(1, {"w": torch.ones(3)})
"""


def test_an_interpreter_that_exits_says_bye():
    with start_server(limits=HubLimits(session_timeout_s=3600)) as hub:
        subprocess.run([sys.executable, "-c", PROGRAM, hub.address], check=True, timeout=4 * SOON_S)
        until(lambda: fetch_status(hub.address)["models"] == [])  # not given up for its silence


KEPT = """
import os, types
class Keeper:
    def __del__(self, client=client, os=os, is_finalizing=sys.is_finalizing):
        client.close()
        os.write(1, str(is_finalizing()).encode())
late = sys.modules["late"] = types.ModuleType("late")  # cleared before those that it needs
late.keeper = Keeper()
del late
"""


def test_a_client_is_closed_by_what_the_interpreter_collects_last():
    """No thread runs any more that could carry the call out."""
    with start_server(limits=HubLimits(session_timeout_s=3600)) as hub:
        command = [sys.executable, "-c", PROGRAM + KEPT, hub.address]
        assert subprocess.run(command, check=True, timeout=4 * SOON_S, stdout=subprocess.PIPE).stdout == b"True"


def test_goodbye_is_the_last_word(monkeypatch):
    """A Hello behind it, as the hub was restarted just then, would be listed for a session timeout."""
    with start_server(limits=HubLimits(session_timeout_s=3600)) as hub:
        client = Client(hub.address, run="r", model="m", replica="leaves", transports=("tcp",))
        link, receive_all, leaving = client._hub, HubLink._receive_all, threading.Thread(target=client.close)

        def unknown_while_it_leaves(self: HubLink) -> None:
            if self is link and leaving.ident is None:
                leaving.start()
                until(lambda: link._closing)
                with link._lock:
                    unknown = session.Heard(messages.Unknown(link._machine.hub, 0.0))
                    link._carry_out(link._machine.handle(unknown, time.monotonic()))
                assert not link._machine._welcomed  # so that it has said Hello
            receive_all(self)

        monkeypatch.setattr(HubLink, "_receive_all", unknown_while_it_leaves)
        until(lambda: leaving.ident)
        leaving.join(SOON_S)
        assert fetch_status(hub.address)["models"] == []


def test_a_second_close_waits_for_the_first(stage, monkeypatch):
    client = stage.client("leaves")
    free, wait, waits, order = client._serving.free, client._left.wait, threading.Event(), []

    def free_when_the_second_waits() -> None:
        assert waits.wait(SOON_S)
        free()
        order.append("first")

    monkeypatch.setattr(client._serving, "free", free_when_the_second_waits)
    monkeypatch.setattr(client._left, "wait", lambda timeout_s: waits.set() or wait(SOON_S))
    first = stage.begin(client.close)
    until(lambda: client._closed)
    client.close()
    order.append("second")
    first.result(SOON_S)
    assert order == ["first", "second"]


def test_who_looks_at_a_library_s_socket_leaves_it_open_and_as_it_is_and_needs_no_file_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that blocks, of the parent of a child too, did so no more where a default timeout was set; and a hub without
    a file for a copy cut nobody off. The control: a number that is a file's by now."""
    monkeypatch.setattr(os, "dup", lambda number: pytest.fail("there may be no file left"))
    with socket.socket() as listening, (tmp_path / "file").open("w") as file:
        with pytest.raises(OSError), socket_of(file.fileno()):
            raise AssertionError("a file is no socket")
        assert os.fstat(file.fileno()).st_size == 0 and os.get_blocking(listening.fileno())
        try:
            socket.setdefaulttimeout(SOON_S)
            with socket_of(listening.fileno()) as same:
                assert (same.family, same.fileno()) == (listening.family, listening.fileno())
        finally:
            socket.setdefaulttimeout(None)
        assert same.fileno() == -1 and os.get_blocking(listening.fileno())
