"""The client over real sockets, with hubs and workers that are killed, frozen and started again in the middle.

What "in the middle" means is counted, not timed: a source serves its first few segments only, as if the rest were
still on its way to it (`hold_back`), and `progress` counts what its readers have verified.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from client_processes import (
    SEGMENT,
    SEGMENTS,
    SIZE,
    Hub,
    Process,
    Worker,
    hold_back,
    let_go,
    same_bytes,
    tensors_of,
    zeros_like,
)

from tensorhub_plugins.core import (
    CHECKPOINT,
    LATEST,
    Client,
    DeadlineExceeded,
    HubUnreachable,
    Location,
    NotPublished,
    Part,
    Server,
    ShardKey,
    Slab,
    SourceLost,
    TensorTable,
    UsageError,
    VersionGone,
    VersionRefused,
    spec_of,
    start_server,
)
from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.core.client.destinations import Destinations
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.memory import moves as reads
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transports import inproc as memory
from tensorhub_plugins.core.transports import tcp
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.stream import link as _wire

NEAR, FAR = Location("dc", "rack", "here"), Location("dc", "other rack", "there")
RUNTIME = "runtime:f"
HELD = 6  # segments that a source held back serves
LATE_S = 5.0  # beyond a deadline, on a busy machine
SOON_S = 30.0  # for what happens at once unless something is broken


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(Slab.manifest, "__defaults__", (SEGMENT,))


@pytest.fixture(scope="module")
def module_hub() -> Iterator[Server]:
    with start_server(limits=HubLimits(grace_s=0.2)) as server:
        yield server


class Stage:
    """Clients of one run, and threads for what blocks."""

    def __init__(self, address: str, run: str) -> None:
        self.address, self.run = address, run
        self.threads = ThreadPoolExecutor(8)
        self.open: list[Client | Process] = []

    def client(self, replica: str, **options: Any) -> Client:
        options = {"transports": ("tcp",), "location": NEAR, **options}
        client = Client(self.address, run=self.run, model="actor", replica=replica, **options)
        self.open.append(client)
        return client

    def worker(self, replica: str, **options: Any) -> Process:
        options = {"transports": ("tcp",), "location": NEAR, **options}
        worker = Process(Worker, self.address, replica, run=self.run, **options)
        self.open.append(worker)
        return worker

    def hub(self, address: str, grace_s: float = 0.3) -> Process:
        hub = Process(Hub, address, grace_s)
        self.open.append(hub)
        return hub

    def begin(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        return self.threads.submit(call, *arguments, **options)

    def close(self) -> None:
        while self.open:
            self.open.pop().close()
        self.threads.shutdown()


@pytest.fixture
def stage(module_hub, request) -> Iterator[Stage]:
    stage = Stage(module_hub.address, request.node.name[:200])
    yield stage
    stage.close()


class Progress:
    """What the readers in this process have verified, in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.verified: list[tuple[str, int, int]] = []  # replica, shard, segment

    def of(self, replica: str) -> list[int]:
        return [segment for name, _, segment in self.verified if name == replica]

    def wait(self, replica: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(replica)) >= count, SOON_S), self.verified


@pytest.fixture
def progress(monkeypatch) -> Progress:
    progress, verified = Progress(), Destinations.verified

    def count(self, shard: int, segment: int) -> None:
        verified(self, shard, segment)
        with progress.changed:
            progress.verified.append((self.worker.partition("/")[0], shard, segment))
            progress.changed.notify_all()

    monkeypatch.setattr(Destinations, "verified", count)
    return progress


def until(condition: Callable[[], Any]) -> Any:
    """Poll for what another thread or process does; the value."""
    deadline = time.monotonic() + SOON_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return value


def holders(client: Client, version: int, layout: str = CHECKPOINT) -> tuple[str, ...]:
    return next((info.layouts.get(layout, ()) for info in client.versions() if info.version == version), ())


# --- publish, replicate, fetch, wait, versions, unpublish ---


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
def test_a_version_from_trainer_to_rollout(stage, transport):
    trainer, rollout = (stage.client(name, transports=(transport,)) for name in ("trainer", "rollout"))
    published, expected = trainer.publish(3, tensors_of(1)), tensors_of(1)
    assert (published.version, published.size_bytes, published.layout) == (3, SIZE, CHECKPOINT)
    assert set(published.seconds) == {"copy", "digest", "announce"}

    mine = zeros_like(expected)
    report = rollout.replicate(mine)
    assert same_bytes(mine, expected)
    assert (report.version, report.layout, report.size_bytes) == (3, CHECKPOINT, SIZE)
    assert report.sources == {"trainer/0": SIZE} and report.transports == {transport: SIZE} and report.losses == ()
    assert report.roots == {0: published.manifest.root().hex()} and set(report.seconds) == {"find", "read"}
    assert holders(trainer, 3) == ("rollout/0", "trainer/0") and rollout.serving() == [ShardKey(3, CHECKPOINT)]

    assert rollout.wait() == rollout.wait(3) == trainer.wait(newer_than=2) == 3
    assert not trainer.unpublish(3).kept and trainer.serving() == []
    assert holders(rollout, 3) == ("rollout/0",)


def test_a_version_is_fetched_into_memory_of_its_own_and_the_memory_is_used_again(stage):
    trainer, rollout = stage.client("trainer", transports=("shm",)), stage.client("rollout", transports=("shm",))
    trainer.publish(1, tensors_of(1))
    fetched = rollout.fetch()
    assert (fetched.version, fetched.layout, fetched.converts) == (1, CHECKPOINT, None)
    assert same_bytes(fetched.tensors(), tensors_of(1)) and rollout.serving() == []
    slab = fetched.slab
    rollout.publish(1, slab, RUNTIME)
    fetched.release()  # it stays with what is published
    assert rollout.fetch().slab is not slab
    rollout.unpublish(1, RUNTIME)
    fetched.release()
    trainer.publish(2, tensors_of(2))
    again = rollout.fetch()
    assert again.slab is slab and same_bytes(again.tensors(), tensors_of(2))
    fetched.release()  # it is not the old one's any more
    third = rollout.fetch()
    assert third.slab is not slab and same_bytes(again.tensors(), tensors_of(2))


def test_a_slab_under_two_layouts_is_used_again_when_both_are_gone(stage):
    client = stage.client("trainer")
    slab = client.allocate([spec_of("w", torch.ones(10))])
    slab.write("w", torch.ones(10))
    client.publish(1, slab, CHECKPOINT)
    client.publish(1, slab, RUNTIME)
    client.unpublish(1, RUNTIME)
    assert client.allocate(slab.specs) is not slab
    client.publish(2, {"w": torch.zeros(10)})
    client.unpublish(1)
    assert client.allocate(slab.specs) is slab
    slab.write("w", torch.ones(10))
    client.publish(3, slab)
    client.unpublish(2)
    client.publish(4, slab, "x")  # by its owner, who has it still
    assert client.allocate(slab.specs) is not slab


def test_a_published_slab_is_not_copied_and_adopted_tensors_are_served_in_place(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    live = tensors_of(1)
    slab = trainer.allocate([spec_of(name, t) for name, t in live.items()])
    with pytest.raises(UsageError, match=r"6 tensors of the slab were never written, first \['embed'"):
        trainer.publish(1, slab)
    for name, tensor in live.items():
        slab.write(name, tensor)
    trainer.publish(1, slab)
    assert trainer.find(ShardKey(1, CHECKPOINT)).slab is slab
    trainer.publish(2, live, copy=False)
    assert trainer.find(ShardKey(2, CHECKPOINT)).slab.tensors()["rest"] is live["rest"]
    assert same_bytes(rollout.fetch(2).tensors(), live)


def test_what_is_adopted_travels_over_tcp_when_shared_memory_cannot(stage, monkeypatch):
    trainer, rollout = stage.client("trainer", transports=("shm", "tcp")), stage.client("r", transports=("shm", "tcp"))
    trainer.publish(1, tensors_of(1), copy=False)
    assert rollout.fetch().report.transports == {"shm": SIZE}  # by its address
    monkeypatch.setattr(_process, "available", lambda: False)
    rollout = stage.client("other", transports=("shm", "tcp"))
    assert rollout.fetch().report.transports == {"tcp": SIZE}
    trainer.publish(2, tensors_of(2))
    report = rollout.fetch().report
    assert report.transports == {"shm": SIZE} and report.losses == ()


def test_digests_can_be_switched_off_by_all(stage):
    trainer = stage.client("trainer", verify=False)
    published = trainer.publish(1, tensors_of(1))
    assert not published.manifest.has_digests
    first, second = (stage.client(name, verify=False) for name in ("first", "second"))
    fetched = first.fetch(serve=True)
    assert same_bytes(fetched.tensors(), tensors_of(1))
    trainer.retain(0)
    trainer.unpublish(1)
    again = second.fetch()  # from the first, under the same root
    assert same_bytes(again.tensors(), tensors_of(1)) and list(again.report.sources) == ["first/0"]
    assert again.report.roots == {0: published.manifest.root().hex()}
    with pytest.raises(UsageError, match="published without digests: read with verify=False"):
        stage.client("careful").fetch()
    with pytest.raises(UsageError, match="with other bytes"):  # who can tell?
        trainer.publish(1, tensors_of(1))


def test_a_rank_reads_its_rows_of_what_two_trainer_ranks_hold_in_other_parts(stage):
    whole = torch.arange(4096 * 1024, dtype=torch.int32).reshape(4096, 1024)  # 16 MB, in 64 segments
    for shard in (0, 1):
        rows = slice(2048 * shard, 2048 * (shard + 1))
        trainer = stage.client("trainer", shard=shard, shard_count=2)
        trainer.publish(1, {"w": whole[rows].clone()}, parts={"w": Part((4096, 1024), (2048 * shard, 0))})
    rollout = stage.client("rollout")
    mine = torch.zeros(1024, 1024, dtype=torch.int32)
    report = rollout.replicate({"w": mine}, parts={"w": Part((4096, 1024), (1536, 0))}, serve=False)
    assert torch.equal(mine, whole[1536:2560])
    assert report.sources == {"trainer/0": mine.nbytes // 2, "trainer/1": mine.nbytes // 2}  # and not 16 MB
    columns = torch.zeros(4096, 100, dtype=torch.int32)
    rollout.replicate({"w": columns}, parts={"w": Part((4096, 1024), (0, 7))}, serve=False)
    assert torch.equal(columns, whole[:, 7:107])
    with pytest.raises(UsageError, match="'w' is int32"):
        rollout.replicate({"w": mine}, serve=False)  # not said to be a part


def test_parameters_that_train_and_strided_tensors_arrive_in_place(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    model, other = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    trainer.publish(1, dict(model.named_parameters()))
    rollout.replicate(dict(other.named_parameters()), serve=False)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)
    turned = {"w": torch.randn(30, 40).t()}
    trainer.publish(2, turned, copy=False)
    mine = {"w": torch.zeros(30, 40).t()}
    rollout.replicate(mine, serve=False)
    assert torch.equal(mine["w"], turned["w"])


def test_nothing_to_move_is_a_version_too(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {})
    trainer.publish(2, {"empty": torch.empty(0, 3)})
    assert rollout.fetch(1).tensors() == {} and rollout.fetch(2).tensors()["empty"].shape == (0, 3)
    assert rollout.replicate({"empty": torch.empty(0, 3)}, 2).size_bytes == 0


def test_several_source_shards_to_one_reader(stage):
    expected = tensors_of(1)
    names = sorted(expected)
    for shard in range(3):
        trainer = stage.client("trainer", shard=shard, shard_count=3)
        trainer.publish(1, {name: expected[name] for name in names[shard::3]})
        assert [info.visible for info in trainer.versions()] == [shard == 2]
    rollout, other = stage.client("rollout"), stage.client("other")
    mine = zeros_like(expected)
    report = rollout.replicate(mine)
    assert same_bytes(mine, expected) and sum(report.sources.values()) == report.size_bytes == SIZE
    assert set(report.sources) == {"trainer/0", "trainer/1", "trainer/2"}
    assert holders(rollout, 1) == ("rollout/0", "trainer/0", "trainer/1", "trainer/2")
    part = {"rest": torch.zeros_like(expected["rest"]), "embed": torch.zeros_like(expected["embed"])}
    other.replicate(part)
    assert same_bytes(part, {name: expected[name] for name in part})
    assert all("other/0" not in names for names in other.versions()[0].layouts.values())  # a part is no source
    fetched = other.fetch()
    assert same_bytes(fetched.tensors(), expected)
    with pytest.raises(UsageError, match="came in 3 shards"):
        _ = fetched.slab


def test_waiting_for_what_is_not_there_yet(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    waiting, reading = stage.begin(rollout.wait, newer_than=4), stage.begin(rollout.fetch, 5)
    trainer.publish(4, tensors_of(1))
    trainer.publish(5, tensors_of(2))
    assert waiting.result(SOON_S) == 5 and same_bytes(reading.result(SOON_S).tensors(), tensors_of(2))
    began = time.monotonic()
    for call in (rollout.wait, rollout.fetch):
        with pytest.raises(NotPublished, match="version 9 was not published before the deadline"):
            call(9, timeout_s=0.2)
    assert time.monotonic() - began < LATE_S


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e15])
def test_waiting_for_ever_is_a_deadline_too(stage, timeout_s):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    reading = stage.begin(rollout.fetch, timeout_s=timeout_s)
    waiting = stage.begin(rollout.wait, timeout_s=timeout_s)
    trainer.publish(1, tensors_of(1), timeout_s=timeout_s)
    assert reading.result(SOON_S).version == waiting.result(SOON_S) == 1
    assert rollout.wait(timeout_s=-1.0) == 1
    assert trainer.unpublish(1, timeout_s=timeout_s).version == 1


def test_a_version_that_is_gone_is_said_to_be_gone(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    trainer.publish(2, tensors_of(2))
    trainer.unpublish(1)
    for call in (rollout.wait, rollout.fetch):
        with pytest.raises(VersionGone, match=r"visible now: \[2\]"):
            call(1)


# --- what can never work, in words ---


def test_other_bytes_under_the_same_version(stage):
    trainer, other = stage.client("trainer"), stage.client("other")
    trainer.publish(1, tensors_of(1))
    with pytest.raises(UsageError, match="other bytes are already published.*use a higher version"):
        other.publish(1, tensors_of(2))
    assert other.serving() == [] and holders(trainer, 1) == ("trainer/0",)
    other.publish(1, tensors_of(1))  # the control: the same bytes are welcome
    assert holders(trainer, 1) == ("other/0", "trainer/0")


def test_versions_only_grow(stage):
    trainer = stage.client("trainer")
    trainer.publish(2, tensors_of(1))
    for version in (1, 2):
        with pytest.raises(UsageError, match="unpublish it first|versions only grow"):
            trainer.publish(version, tensors_of(1))
    trainer.publish(2, tensors_of(1), RUNTIME)
    trainer.publish(3, tensors_of(1))
    trainer.unpublish(2)
    with pytest.raises(UsageError, match="version 3 of layout checkpoint was published here before"):
        trainer.publish(2, tensors_of(1))


CHANGES = {
    "missing": (lambda t: t.pop("rest"), "1 missing: 'rest'"),
    "new": (lambda t: t.update({f"new{i}": torch.ones(1) for i in range(7)}), "7 new: 'new0', .*'new4' and 2 more"),
    "dtype": (lambda t: t.update(mask=t["mask"].int()), r"'mask' \(expected bool\[1000\], given int32\[1000\]\)"),
    "shape": (
        lambda t: t.update(empty=torch.empty(7, 0)),
        r"'empty' \(expected float32\[0, 7\], given float32\[7,",
    ),
}


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "adopted"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_than_in_the_version_before(stage, caplog, change, copy):
    client = stage.client("trainer")
    change, words = CHANGES[change]
    client.publish(1, tensors_of(1), copy=copy, strict=True)
    client.publish(2, tensors_of(2), copy=copy)
    other = tensors_of(3)
    change(other)
    before = what_is_there()
    with pytest.raises(UsageError, match=f"{words}.* Nothing was published.* new run or model name.* strict=False"):
        client.publish(3, other, copy=copy, strict=True)
    assert what_is_there() == before and [key.version for key in client.serving()] == [1, 2]
    assert caplog.text == "" and all(slab.specs == spec_table(tensors_of(1)) for slab in client._pool._free)
    client.publish(3, other, "other layout", copy=copy, strict=True)  # the first of it

    client.publish(3, other, copy=copy)
    assert len(caplog.records) == 1 and re.search(words, caplog.text) and "version 3" in caplog.text
    client.publish(4, other, copy=copy, strict=True)  # it is what was published before by now
    assert len(caplog.records) == 1


def spec_table(tensors: dict[str, torch.Tensor]) -> TensorTable:
    return TensorTable.of(spec_of(name, tensor) for name, tensor in tensors.items())


def test_a_shard_of_several_may_hold_other_tensors_but_no_others_of_that_name(stage, caplog):
    tensors = {name: torch.ones(8, 4) for name in ("a", "b", "c")}
    client = stage.client("trainer", shard=0, shard_count=2)
    client.publish(1, {name: tensors[name] for name in ("a", "b")}, strict=True)
    client.publish(2, {name: tensors[name] for name in ("b", "c")}, strict=True)
    rows = {"b": Part((8, 4), (4, 0))}
    client.publish(3, {"b": torch.ones(4, 4)}, parts=rows, strict=True)  # half of it went to the other shard
    with pytest.raises(UsageError, match=r"1 changed: 'b' \(expected float32\[4, 4\] at"):
        client.publish(4, {"b": torch.ones(4, 4)}, strict=True)
    client.publish(4, {"b": torch.ones(4, 4), "c": tensors["c"]}, RUNTIME, strict=True)
    with pytest.raises(UsageError, match="1 missing: 'c'"):  # an engine's own parameters do not move
        client.publish(5, {"b": torch.ones(4, 4)}, RUNTIME, strict=True)
    assert caplog.text == ""


def test_equal_tables_are_never_compared_tensor_by_tensor(stage, monkeypatch):
    client = stage.client("trainer")
    monkeypatch.setattr(reads, "_is_like", None)
    tables = [
        client.publish(version, tensors_of(version), strict=True).manifest.tensors for version in (1, 2, 3)
    ]  # a slab of its own each
    client.unpublish(1)
    tables.append(client.publish(4, tensors_of(4), strict=True).manifest.tensors)
    assert all(table is tables[0] for table in tables)


def test_a_version_taken_back_may_return_with_the_same_bytes(stage):
    """As an engine's does, whose weights leave their memory while it sleeps."""
    engine, other = stage.client("engine"), stage.client("other")
    other.publish(2, tensors_of(1))  # so that the engine's is not the last copy, which would be kept
    engine.publish(2, tensors_of(1))
    engine.unpublish(2)
    with pytest.raises(UsageError, match="version 2 of layout checkpoint was published here before with other bytes"):
        engine.publish(2, tensors_of(2))
    assert holders(other, 2) == ("other/0",)
    engine.publish(2, tensors_of(1))
    assert holders(other, 2) == ("engine/0", "other/0")


@pytest.mark.parametrize(
    ("name", "mine", "words"),
    [
        ("w", torch.zeros(4, 6, dtype=torch.float16), r"'w' is float32\[4, 6\] at the source but float16\[4, 6\]"),
        ("w", torch.zeros(6, 4), r"'w' is float32\[4, 6\] at the source but float32\[6, 4\]"),
        ("w", torch.zeros(6, 4).t(), r"'w' is float32\[4, 6\] at the source but .*strided \(1, 4\)"),
        ("v", torch.zeros(4, 6), r"1 tensors would not be updated.*first \['v'\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(stage, name, mine, words):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"w": torch.ones(4, 6)})
    with pytest.raises(UsageError, match=words):
        rollout.replicate({name: mine})
    assert rollout.serving() == [] and holders(trainer, 1) == ("trainer/0",)
    assert fetch_status(stage.address) and not leases(stage)


def leases(stage: Stage) -> list[dict[str, Any]]:
    return next(x for x in fetch_status(stage.address)["models"] if x["run"] == stage.run)["leases"]


def test_what_cannot_be_a_target_is_refused_before_anything_moves(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    with pytest.raises(UsageError, match="'w'.*pass a contiguous copy"):
        rollout.replicate({"w": torch.zeros(8, 8)[:, ::2]})
    with pytest.raises(UsageError, match="'w'.*meta device"):
        trainer.publish(1, {"w": torch.zeros(8, device="meta")})
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    with pytest.raises(UsageError, match="these tensors are published: unpublish that version before they change"):
        trainer.replicate(live)


class Name(str):
    __slots__ = ()


ONE = torch.ones(2, 2)
BAD_TENSORS = {
    "a list": ([ONE], "the tensors are a list: pass a mapping of name to tensor"),
    "nothing": (None, "the tensors are a NoneType"),
    "a module": (torch.nn.Linear(2, 2), r"the tensors are a Linear: pass its state_dict\(\)"),
    "a number as name": ({3: ONE}, "the name 3 of a tensor is a int: pass a plain str"),
    "names of two kinds": ({3: ONE, "a": ONE}, "the name 3 of a tensor is a int"),
    "bytes as name": ({b"a": ONE}, "the name b'a' of a tensor is a bytes"),
    "another str": ({Name("b"): ONE}, "the name 'b' of a tensor is a Name"),
    "half a surrogate pair": ({"a\ud800": ONE}, r"the name 'a\\ud800' of a tensor holds half a surrogate pair"),
    "no tensor": ({"a": ONE, "extra": None}, "'extra' is a NoneType, not a tensor: leave it out"),
    "an array": ({"a": ONE.numpy()}, "'a' is a ndarray, not a tensor"),
}
BAD_OPTIONS = {
    "no deadline": ({"timeout_s": None}, "timeout_s=None: pass a number of seconds"),
    "a text as deadline": ({"timeout_s": "60"}, "timeout_s='60'"),
    "not a number": ({"timeout_s": float("nan")}, "timeout_s=nan"),
    "half a surrogate pair as layout": ({"layout": "\ud800"}, "layout must be a text"),
    "a list of parts": ({"parts": [1]}, "the parts are a list"),
    "a number as part": ({"parts": {"a": 1}}, "the part of tensor 'a' is a int, not a Part"),
    "a part in floats": ({"parts": {"a": Part((4, 2), (0.0, 0))}}, "tensor 'a' is said to be .*: pass tuples of int"),
    "a part in lists": ({"parts": {"a": Part([4, 2], [0, 0])}}, "tensor 'a' is said to be .*: pass tuples of int"),
}


def test_a_name_of_two_shards_must_have_the_same_bytes(stage):
    """Else one of them would win, by the order in which they came."""
    ranks = [stage.client("trainer", shard=shard, shard_count=2) for shard in (0, 1)]
    reader = stage.client("reader")
    for version, shared in enumerate([(ONE, ONE), (ONE, ONE + 1)], start=1):
        for shard, rank in enumerate(ranks):
            rank.publish(version, {"shared": shared[shard], f"own{shard}": ONE})
        fetched = reader.fetch(version)
        if version == 1:
            assert sorted(fetched.tensors()) == ["own0", "own1", "shared"]
        else:
            with pytest.raises(VersionRefused, match="'shared' is published by shard 0 and by shard 1, with different"):
                fetched.tensors()


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "adopted"])
@pytest.mark.parametrize("bad", [*BAD_TENSORS, *BAD_OPTIONS])
def test_what_cannot_be_published_is_named_and_nothing_of_it_is(stage, bad, copy):
    tensors, words = BAD_TENSORS.get(bad, ({"a": ONE}, ""))
    options, words = BAD_OPTIONS.get(bad, ({}, words))
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"a": ONE}, copy=copy)
    before = what_is_there()
    with pytest.raises(UsageError, match=words):
        trainer.publish(2, tensors, copy=copy, **options)
    assert trainer.serving() == [ShardKey(1, CHECKPOINT)] and rollout.wait() == 1
    assert what_is_there() == before or len(trainer._pool._free) == 1  # which the next version is written into
    with pytest.raises(UsageError, match=words):
        rollout.replicate(tensors, 1, **options)
    trainer.publish(2, {"a": ONE}, copy=copy)  # the control
    assert rollout.fetch(2).tensors()["a"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.publish(0, {}), "positive integer"),
        (lambda c: c.publish(1, {}, layout=""), "layout must be a text of 1 to 256"),
        (lambda c: c.publish(1, {}, layout="x" * 300), "layout must be a text of 1 to 256"),
        (lambda c: c.unpublish("1"), "positive integer"),
        (lambda c: c.replicate({}, version=-1), "positive integer"),
        (lambda c: c.replicate({}, version="newest"), "positive integer"),
        (lambda c: c.replicate({}, layout=""), "layout must be"),
        (lambda c: c.fetch(layouts=()), "a list of 1 to 8 layouts"),
        (lambda c: c.fetch(layouts="checkpoint"), "a list of 1 to 8 layouts"),
        (lambda c: c.fetch(layouts=("x", 7)), "layout must be"),
        (lambda c: c.abandon(0, "x"), "positive integer"),
        (lambda c: c.wait(timeout_s=None), "timeout_s=None: pass a number of seconds"),
        (lambda c: c.replicate({}, timeout_s=None), "timeout_s=None"),
        (lambda c: c.wait(newer_than=-1), "positive integer"),
        (lambda c: c.target(-1), "positive integer"),
        (lambda c: c.target(refused=(0,)), "positive integer"),
        (lambda c: c.pin(0), "positive integer"),
        (lambda c: c.withdraw("newest"), "positive integer"),
        (lambda c: c.retain(-1), "a count of versions from 0 to 1024"),
        (lambda c: c.retain(2000), "a count of versions from 0 to 1024"),
    ],
)
def test_what_makes_no_sense_is_refused_here_and_now(stage, call, words):
    client = stage.client("a")
    began = time.monotonic()
    with pytest.raises(UsageError, match=words):
        call(client)
    assert time.monotonic() - began < LATE_S


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": ""}, "run must be a text"),
        ({"model": "m" * 257}, "model must be a text"),
        ({"replica": None}, "replica must be a text"),
        ({"shard": 2, "shard_count": 2}, "shards count from 0"),
        ({"shard": -1}, "shards count from 0"),
        ({"transports": ()}, "none of the transports"),
        ({"transports": ("tcp", "carrier pigeon")}, "no transport 'carrier pigeon'; known are"),
        ({"address": "nowhere"}, "use tcp://host:port"),
        ({"address": "tcp://no.such.host.invalid:1"}, "correct the host's name"),
        ({"advertise_host": "0.0.0.0"}, "cannot be connected to"),
    ],
)
def test_a_client_that_cannot_work_is_refused(stage, options, words):
    arguments = {"address": stage.address, "run": "r", "model": "m", "replica": "x", **options}
    with pytest.raises(UsageError, match=words):
        Client(arguments.pop("address"), **arguments)


def test_no_hub_at_the_address():
    began = time.monotonic()
    with pytest.raises(HubUnreachable, match="start one with `tensorhub server`"):
        Client("tcp://127.0.0.1:1", run="r", model="m", replica="x", connect_timeout_s=0.3)
    assert time.monotonic() - began < LATE_S


def test_a_closed_client_says_so_and_closing_twice_is_fine(stage):
    client = stage.client("a")
    client.publish(1, tensors_of(1))
    client.close()
    client.close()
    with client:
        pass
    calls: list[Callable[[], Any]] = [
        lambda: client.publish(2, {}),
        lambda: client.unpublish(1),
        lambda: client.replicate({}),
        client.fetch,
        client.wait,
        client.versions,
        client.retain,
        lambda: client.allocate([]),
        lambda: client.abandon(1, "x"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="the client is closed"):
            call()
    assert client.find(ShardKey(1, CHECKPOINT)) is None and client.serving() == []


def test_closing_ends_what_other_threads_do_with_the_client(stage, progress):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading, waiting = stage.begin(rollout.fetch, serve=True), stage.begin(rollout.wait, 9)
    progress.wait("rollout", HELD)
    rollout.close()
    for future in (reading, waiting):
        with pytest.raises(UsageError, match="closed"):
            future.result(SOON_S)


# --- one version for a group, never backwards ---


def test_a_reading_group_agrees_on_one_version_while_a_newer_one_appears(stage, progress):
    trainer = stage.client("trainer")
    group = [stage.client("rollout", shard=shard, shard_count=2) for shard in range(2)]
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    first = stage.begin(group[0].fetch)
    progress.wait("rollout", HELD)
    trainer.publish(2, tensors_of(2))
    second = stage.begin(group[1].fetch)
    progress.wait("rollout", 2 * HELD)  # it reads from the trainer too, which serves no more of version 1
    let_go(trainer, 1)
    assert [first.result(SOON_S).version, second.result(SOON_S).version] == [1, 1]
    assert [client.fetch().version for client in group] == [2, 2]
    alone = stage.client("alone")
    assert alone.fetch().version == 2  # the control: 2 was there to be had


def test_latest_never_goes_backwards_when_the_hub_forgets(stage):
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    older, newer, rollout = stage.client("older"), stage.client("newer"), stage.client("rollout")
    older.publish(1, tensors_of(1))
    newer.publish(2, tensors_of(2))
    assert rollout.fetch().version == 2 and rollout.wait() == 2
    hub.kill()
    newer.close()
    stage.hub(stage.address)
    assert [info.version for info in until(older.versions)] == [1]
    fresh = stage.client("fresh")
    assert fresh.fetch().version == 1  # the control: 1 is the latest there is
    for call in (rollout.fetch, rollout.wait):
        with pytest.raises(NotPublished):
            call(LATEST, timeout_s=0.5)
    older.publish(3, tensors_of(3))
    assert rollout.fetch().version == 3


# --- who converts ---


def test_one_converts_and_the_others_wait_for_it(stage):
    trainer = stage.client("trainer")
    rollouts = [stage.client(f"rollout-{index}") for index in range(3)]
    trainer.publish(1, tensors_of(1))
    fetches = [stage.begin(client.fetch, layouts=(RUNTIME, CHECKPOINT)) for client in rollouts]
    converter = until(lambda: next((i for i, f in enumerate(fetches) if f.done()), None) is not None) and next(
        i for i, f in enumerate(fetches) if f.done()
    )
    fetched = fetches[converter].result()
    assert (fetched.converts, fetched.layout) == (RUNTIME, CHECKPOINT)
    assert not any(f.done() for i, f in enumerate(fetches) if i != converter)
    rollouts[converter].publish(1, {"fused": torch.ones(100_000)}, RUNTIME)
    for index, future in enumerate(fetches):
        if index != converter:
            other = future.result(SOON_S)
            assert (other.converts, other.layout) == (None, RUNTIME)
            assert other.report.sources == {f"rollout-{converter}/0": 400_000}
            assert torch.equal(other.tensors()["fused"], torch.ones(100_000))


def test_a_converter_that_gives_up_is_replaced(stage):
    trainer, first, second = (stage.client(name) for name in ("trainer", "first", "second"))
    trainer.publish(1, tensors_of(1))
    assert first.fetch(layouts=(RUNTIME, CHECKPOINT)).converts == RUNTIME
    waiting = stage.begin(second.fetch, layouts=(RUNTIME, CHECKPOINT))
    with pytest.raises(DeadlineExceeded):
        stage.client("third").fetch(layouts=(RUNTIME, CHECKPOINT), timeout_s=0.3)
    assert not waiting.done()
    first.abandon(1, RUNTIME)
    assert waiting.result(SOON_S).converts == RUNTIME
    assert stage.client("fourth").fetch(layouts=(RUNTIME, CHECKPOINT), converts=False).layout == CHECKPOINT


def test_a_converter_that_is_killed_is_replaced(stage):
    with start_server(limits=HubLimits(grace_s=0.2, heartbeat_s=0.3, session_timeout_s=3.0)) as server:
        stage.address = server.address
        trainer, second = stage.client("trainer"), stage.client("second")
        trainer.publish(1, tensors_of(1))
        first = stage.worker("first")
        assert first.call("fetch", (RUNTIME, CHECKPOINT), SOON_S) == RUNTIME
        waiting = stage.begin(second.fetch, layouts=(RUNTIME, CHECKPOINT))
        with pytest.raises(DeadlineExceeded):
            stage.client("third").fetch(layouts=(RUNTIME, CHECKPOINT), timeout_s=0.3)
        assert not waiting.done()
        first.kill()
        assert waiting.result(SOON_S).converts == RUNTIME
        stage.close()


def test_a_fetch_that_fails_gives_its_claim_back(stage):
    trainer, first, second = (stage.client(name) for name in ("trainer", "first", "second"))
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    with pytest.raises(DeadlineExceeded, match="10 segments were still missing"):
        first.fetch(layouts=(RUNTIME, CHECKPOINT), timeout_s=0.5)
    let_go(trainer, 1)
    assert second.fetch(layouts=(RUNTIME, CHECKPOINT)).converts == RUNTIME


@pytest.mark.parametrize("peer_stays", [True, False])
def test_a_layout_read_in_place_gives_way_to_another_when_its_holders_are_gone(stage, progress, peer_stays):
    trainer, peer, reader = (stage.client(name) for name in ("trainer", "peer", "reader"))
    trainer.publish(1, tensors_of(1))
    fused, mine = {"fused": tensors_of(2)["embed"]}, {"fused": torch.zeros_like(tensors_of(2)["embed"])}
    peer.publish(1, fused, RUNTIME)
    hold_back(peer, 1, 2, RUNTIME)
    reading = stage.begin(reader.fetch, layouts=(RUNTIME, CHECKPOINT), into=mine, serve=True, timeout_s=SOON_S)
    progress.wait("reader", 2)
    assert not mine["fused"].eq(0).all() and not reading.done()
    if peer_stays:
        let_go(peer, 1, RUNTIME)
        fetched = reading.result(SOON_S)
        assert (fetched.layout, fetched.slabs, fetched.converts) == (RUNTIME, {}, None)
        assert same_bytes(mine, fused) and holders(trainer, 1, RUNTIME) == ("peer/0", "reader/0")
    else:
        peer.close()
        fetched = reading.result(SOON_S)  # at once, not at the deadline
        assert (fetched.layout, fetched.converts) == (CHECKPOINT, RUNTIME)
        assert same_bytes(fetched.tensors(), tensors_of(1)) and fetched.report.sources == {"trainer/0": SIZE}
        assert not same_bytes(mine, fused)  # the caller converts
        assert reader.serving() == [ShardKey(1, CHECKPOINT)]


# --- a reader becomes a source ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_reader_serves_on_when_the_publisher_is_gone(stage, transport):
    trainer, first, second = (stage.client(name, transports=(transport,)) for name in ("trainer", "first", "second"))
    trainer.publish(1, tensors_of(1))
    first.fetch(serve=True)
    trainer.close()
    fetched = second.fetch()
    assert fetched.report.sources == {"first/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(1))


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
def test_a_reader_serves_while_it_still_reads(stage, progress, transport):
    trainer = stage.client("trainer", location=FAR, transports=(transport,))
    first, second = stage.client("first", transports=(transport,)), stage.client("second", transports=(transport,))
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(first.fetch, serve=True)
    progress.wait("first", HELD)
    first.versions()  # answered after what it has announced: the hub knows of it
    following = stage.begin(second.fetch, serve=True)
    progress.wait("second", HELD)
    assert not reading.done() and len(progress.of("first")) == HELD  # so these came from a half
    (lease,) = [x for x in leases(stage) if x["reader"] == "second/0"]
    assert lease["sources"] == {"0": "first/0"}
    text = status_text(fetch_status(stage.address))
    assert "lease: second/0 reads version 1 checkpoint from first/0" in text
    assert holders(trainer, 1) == ("trainer/0",)  # a half is no holder
    with pytest.raises(UsageError, match="it is still being read here"):
        first.unpublish(1)
    let_go(trainer, 1)
    assert reading.result(SOON_S).report.sources == {"trainer/0": SIZE}
    fetched = following.result(SOON_S)
    assert fetched.report.sources == {"first/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(1))
    assert until(lambda: holders(trainer, 1) == ("first/0", "second/0", "trainer/0"))


def test_serving_can_be_switched_off(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    rollout.replicate(zeros_like(tensors_of(1)), serve=False)
    assert rollout.serving() == [] and holders(trainer, 1) == ("trainer/0",)


def test_a_source_that_waits_itself_is_not_given_up(stage, progress, monkeypatch):
    monkeypatch.setattr(_wire, "ALIVE_S", 0.2)
    limits = TransferLimits(stall_s=3.0)  # on a busy machine the source may be late by a second
    trainer, rollout = stage.client("trainer"), stage.client("rollout", limits=limits)
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    time.sleep(2 * limits.stall_s)  # nothing may happen, so there is nothing to wait for
    let_go(trainer, 1)
    assert reading.result(SOON_S).report.losses == ()


# --- a source is killed, frozen, cut off ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_source_is_killed_in_the_middle(stage, progress, transport):
    options = {"transports": (transport,)}
    near, far = stage.worker("near", **options), stage.client("far", location=FAR, **options)
    rollout = stage.client("rollout", **options)
    near.call("publish", 1, 1, hold_from=HELD)
    far.publish(1, tensors_of(1))
    mine = zeros_like(tensors_of(1))
    reading = stage.begin(rollout.replicate, mine)
    progress.wait("rollout", HELD)
    near.kill()
    assert progress.of("rollout")[:HELD] == list(range(HELD)) and 1 <= HELD < SEGMENTS  # it hit in the middle
    report = reading.result(SOON_S)
    assert report.sources == {"near/0": HELD * SEGMENT, "far/0": SIZE - HELD * SEGMENT}
    assert sum(report.sources.values()) == report.size_bytes == SIZE
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))  # each once
    assert len(report.losses) == 1 and "near/0" in report.losses[0]
    assert same_bytes(mine, tensors_of(1))


def test_the_only_source_is_killed_in_the_middle(stage, progress):
    near, rollout = stage.worker("near"), stage.client("rollout")
    near.call("publish", 1, 1, hold_from=HELD)
    began = time.monotonic()
    reading = stage.begin(rollout.fetch, timeout_s=2.0)
    progress.wait("rollout", HELD)
    near.kill()
    with pytest.raises(DeadlineExceeded, match="10 segments were still missing; lost .* shard 0 from near/0") as caught:
        reading.result(SOON_S)
    error = caught.value
    assert (error.version, error.peer, error.timeout_s) == (1, "near/0", 2.0) and error.phase
    assert time.monotonic() - began < 2.0 + LATE_S and len(progress.of("rollout")) == HELD
    assert rollout.serving() == [] and not [x for x in leases(stage) if x["reader"] == "rollout/0"]


def test_a_connection_over_a_long_way_is_reset_and_the_transfer_goes_on_where_it_was(stage, progress):
    trainer = stage.client("trainer", location=Location("another dc"))
    rollout = stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    (link,) = rollout._transports["tcp"]._links
    channels = link._channels
    assert len(channels) == tcp.FAR_STREAMS
    reset(channels[1].sock)
    let_go(trainer, 1)
    fetched = reading.result(SOON_S)
    assert same_bytes(fetched.tensors(), tensors_of(1)) and fetched.report.sources == {"trainer/0": SIZE}
    assert len(fetched.report.losses) == 1
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))  # what had arrived was not read again


def reset(sock: socket.socket) -> None:
    """End this TCP connection as a broken middlebox does: connecting to nowhere sends a reset."""
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.connect(sock.fileno(), nowhere, len(nowhere)), os.strerror(ctypes.get_errno())


def test_a_frozen_source_is_left_after_a_while(stage, progress):
    near, far = stage.worker("near"), stage.client("far", location=FAR)
    rollout = stage.client("rollout", limits=TransferLimits(stall_s=1.0))
    near.call("publish", 1, 1, hold_from=HELD)
    far.publish(1, tensors_of(1))
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    near.freeze()
    fetched = reading.result(SOON_S)
    assert fetched.report.sources == {"near/0": HELD * SEGMENT, "far/0": SIZE - HELD * SEGMENT}
    assert "another took over" in fetched.report.losses[0] and same_bytes(fetched.tensors(), tensors_of(1))
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))


def test_one_worker_with_several_shards_is_killed(stage, progress):
    """What it had of every shard is kept; the rest of all comes from elsewhere."""
    trainers = [stage.client("trainer", shard=shard, shard_count=2, location=FAR) for shard in range(2)]
    for shard, trainer in enumerate(trainers):
        trainer.publish(1, {f"{name}.{shard}": t for name, t in tensors_of(shard).items()})
        hold_back(trainer, 1, HELD)
    near, rollout = stage.client("near"), stage.client("rollout")
    relay = stage.begin(near.fetch, serve=True)
    progress.wait("near", 2 * HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", 2 * HELD)
    near.close()
    with pytest.raises(UsageError):
        relay.result(SOON_S)
    for trainer in trainers:
        let_go(trainer, 1)
    report = reading.result(SOON_S).report
    rest = SIZE - HELD * SEGMENT
    assert report.sources == {"near/0": 2 * HELD * SEGMENT, "trainer/0": rest, "trainer/1": rest}
    for shard in range(2):
        assert sorted(s for name, k, s in progress.verified if (name, k) == ("rollout", shard)) == list(range(SEGMENTS))


def test_unpublish_waits_for_a_reader(stage, progress):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    trainer.publish(2, tensors_of(2))
    leaving = stage.begin(trainer.unpublish, 1)
    late = stage.client("late")
    with pytest.raises(VersionGone):  # nobody new is let in
        until(lambda: late.fetch(1, timeout_s=0.3) and None)
    assert not leaving.done() and not reading.done()
    let_go(trainer, 1)
    assert same_bytes(reading.result(SOON_S).tensors(), tensors_of(1))
    report = leaving.result(SOON_S)
    assert (report.cut_off, report.kept) == ((), False)


def test_two_threads_unpublish_the_same_and_it_is_read_again_in_between(stage, monkeypatch):
    """As a kept copy that may go, while its owner gives the version up and then returns to it."""
    trainer, engine = stage.client("trainer"), stage.client("engine")
    trainer.publish(1, tensors_of(1))
    first = engine.fetch(1, serve=True)
    asking, answered = threading.Event(), threading.Event()
    ask = engine._hub.ask

    def ask_and_wait(make: Callable[[int], Any], deadline: float) -> Future[Any]:
        reply = ask(make, deadline)
        if threading.current_thread() is not threading.main_thread():
            reply.result()
            asking.set()
            assert answered.wait(SOON_S)
        return reply

    monkeypatch.setattr(engine._hub, "ask", ask_and_wait)
    other = stage.begin(engine.unpublish, 1)
    assert asking.wait(SOON_S)
    engine.unpublish(1)
    first.release()
    second = engine.fetch(1, serve=True)
    answered.set()
    other.result(SOON_S)
    assert engine.serving() == [ShardKey(1, CHECKPOINT)]
    assert engine.allocate(second.slab.specs) is not second.slab and same_bytes(second.tensors(), tensors_of(1))
    engine.unpublish(1)  # the control: now it is meant
    assert engine.serving() == []


@pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])
def test_unpublish_cuts_off_at_its_deadline_and_the_reader_goes_elsewhere(stage, progress, transport):
    trainer, far, rollout = (
        stage.client(name, location=location, transports=(transport,))
        for name, location in (("trainer", NEAR), ("far", FAR), ("rollout", NEAR))
    )
    trainer.publish(1, tensors_of(1))
    far.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    report = trainer.unpublish(1, timeout_s=0.3)
    assert report.cut_off == ("rollout/0",) and trainer.serving() == []
    fetched = reading.result(SOON_S)
    assert fetched.report.sources == {"trainer/0": HELD * SEGMENT, "far/0": SIZE - HELD * SEGMENT}
    assert same_bytes(fetched.tensors(), tensors_of(1))
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))


# --- a broken contract ---


def break_the_contract(live: dict[str, torch.Tensor]) -> None:
    live["rest"][SEGMENT] += 1


def test_bytes_that_change_while_published_are_never_handed_over(stage, progress):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    break_the_contract(live)
    mine = zeros_like(live)
    with pytest.raises(DeadlineExceeded, match="shard 0 from trainer/0: segment .* arrived corrupt") as caught:
        rollout.replicate(mine, timeout_s=1.0)
    assert caught.value.peer == "trainer/0" and rollout.serving() == [] and len(progress.of("rollout")) < SEGMENTS
    stage.client("good", location=FAR).publish(1, tensors_of(1))
    report = rollout.replicate(mine)
    assert same_bytes(mine, tensors_of(1)) and report.sources["good/0"] >= SEGMENT


def test_without_the_digests_torn_bytes_would_be_handed_over(stage):
    """The control of the test above."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout", verify=False)
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    break_the_contract(live)
    mine = zeros_like(live)
    rollout.replicate(mine)
    assert not same_bytes(mine, tensors_of(1)) and same_bytes(mine, live)


@pytest.mark.parametrize("verify", [True, False])
def test_a_withdrawal_after_the_last_byte_matters_only_without_digests(stage, monkeypatch, verify):
    true_check = memory.MemoryLink.check
    trainer = stage.client("trainer", transports=("memory",))
    rollout = stage.client("r", transports=("memory",), verify=verify)
    trainer.publish(1, tensors_of(1))

    def withdrawn_before(link, *, deadline):
        trainer.find(ShardKey(1, CHECKPOINT)).withdraw()
        return true_check(link, deadline=deadline)

    monkeypatch.setattr(memory.MemoryLink, "check", withdrawn_before)
    if verify:
        assert same_bytes(rollout.fetch().tensors(), tensors_of(1))
    else:
        with pytest.raises(SourceLost, match="withdrew its version while it was read"):
            rollout.fetch()


# --- the last copy ---


def is_open(inode: int) -> bool:
    """Whether this process has that file open: the descriptor itself, or the one behind a mapping."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"/proc/self/fd/{name}").st_ino == inode:
                return True
    return False


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_the_last_copy_is_kept_in_host_memory_until_there_is_a_newer_version(stage, strided):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    live = {"w": torch.randn(300, 400)}
    if strided:
        live["w"] = live["w"].t()
    published = {"w": live["w"].clone(memory_format=torch.preserve_format)}
    trainer.publish(1, live, copy=False)
    report = trainer.unpublish(1)
    assert report.kept and holders(rollout, 1) == ("trainer/0",)
    copy = os.fstat(trainer.find(ShardKey(1, CHECKPOINT)).slab.shared_fd).st_ino
    assert is_open(copy)
    live["w"].zero_()  # it is the caller's again
    mine = {"w": torch.empty_like(published["w"])}
    rollout.replicate(mine, serve=False)
    assert torch.equal(mine["w"], published["w"])
    live["w"].fill_(2.0)
    trainer.publish(2, live, copy=False)
    assert until(lambda: holders(rollout, 1) == ())
    assert until(lambda: [k.version for k in trainer.serving()] == [2])  # the hub knows a moment earlier
    assert until(lambda: not is_open(copy))  # its memory is given back
    with pytest.raises(VersionGone):
        rollout.fetch(1)


def test_retaining_more_keeps_more_and_nothing_keeps_nothing(stage):
    trainer = stage.client("trainer")
    trainer.retain(2)
    for version in (1, 2, 3):
        trainer.publish(version, tensors_of(version))
    assert [trainer.unpublish(version).kept for version in (1, 2, 3)] == [False, True, True]
    trainer.retain(0)
    assert until(lambda: not trainer.versions() or not any(info.visible for info in trainer.versions()))
    assert until(lambda: trainer.serving() == [])


def test_a_kept_copy_is_let_go_when_another_has_it(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    assert trainer.unpublish(1).kept
    rollout.fetch(serve=True)
    assert until(lambda: holders(rollout, 1) == ("rollout/0",)) and until(lambda: trainer.serving() == [])


# --- operators pin and withdraw ---


def test_a_fleet_goes_back_to_what_is_pinned_and_on_when_it_is_not(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.retain(newest=3)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    assert rollout.fetch().version == rollout.target() == 2
    following = stage.begin(rollout.target, 2, timeout_s=SOON_S)
    trainer.pin(1)
    assert following.result(SOON_S) == 1 and same_bytes(rollout.fetch().tensors(), tensors_of(1))
    trainer.publish(3, tensors_of(3))
    with pytest.raises(NotPublished):
        rollout.target(1, timeout_s=0.1)
    assert rollout.wait() == 1 and rollout.wait(3) == 3  # by its number it can be had
    with pytest.raises(NotPublished):
        rollout.wait(newer_than=1, timeout_s=0.1)
    assert rollout.target(1, pins=False) == 3
    following = stage.begin(rollout.target, 1, timeout_s=SOON_S)
    trainer.unpin()
    assert following.result(SOON_S) == rollout.fetch().version == 3
    with pytest.raises(UsageError, match=r"nobody holds it; held: \[1, 2, 3\]"):
        rollout.pin(4)


def test_a_withdrawn_version_is_bad_for_everybody(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.retain(newest=2)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    assert rollout.fetch(serve=True).version == 2
    rollout.withdraw(2)
    assert rollout.target(2) == rollout.fetch().version == 1
    for call in (rollout.fetch, rollout.wait):
        with pytest.raises(VersionGone, match="version 2 was withdrawn"):
            call(2)
    trainer.unpublish(2)
    with pytest.raises(UsageError, match="publish under a higher number"):
        trainer.publish(2, tensors_of(2))
    assert [info.visible for info in trainer.versions()] == [True, False]  # the rollout still has it, for itself
    assert not rollout.unpublish(2).kept
    trainer.publish(3, tensors_of(3))
    assert rollout.target(2) == 3


def test_who_returns_may_publish_what_it_returned_to(stage):
    engine = stage.client("engine")
    for version in (1, 2):
        engine.publish(version, tensors_of(version), RUNTIME)
        engine.unpublish(1, RUNTIME)
    with pytest.raises(UsageError, match="versions only grow"):  # the control
        engine.publish(1, tensors_of(1), RUNTIME)
    engine.withdraw(2)
    engine.publish(1, tensors_of(1), RUNTIME)
    assert engine.wait() == 1


@pytest.mark.parametrize("told", [True, False], ids=["told", "control"])
def test_a_version_is_withdrawn_in_the_middle_of_a_transfer(stage, progress, monkeypatch, told):
    """The reader is told and stops. One that is not, as in the control, reads on to its end."""
    if not told:
        monkeypatch.setattr(Client, "_directed", lambda self, directive: None)
    trainer, rollout, operator = (stage.client(name) for name in ("trainer", "rollout", "operator"))
    trainer.publish(1, tensors_of(1))
    trainer.publish(2, tensors_of(2))
    hold_back(trainer, 2, HELD)
    reading = stage.begin(rollout.fetch, serve=True)
    progress.wait("rollout", HELD)
    operator.withdraw(2)
    if told:
        with pytest.raises(VersionGone, match="withdrawn while it was read"):
            reading.result(SOON_S)
        assert rollout.serving() == [] and until(lambda: leases(stage) == [])
        assert not trainer.unpublish(2, timeout_s=SOON_S).cut_off
    else:
        let_go(trainer, 2)
        assert reading.result(SOON_S).version == 2


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "control"])
def test_a_pin_and_a_withdrawal_outlive_the_hub(stage, kept):
    """Because the workers tell them to the next one. In the control they have forgotten."""
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    trainer = stage.client("trainer")
    workers = [stage.worker(f"rollout-{number}") for number in range(3)]

    def follow() -> set[tuple[int, bool]]:
        return set(stage.threads.map(lambda worker: worker.call("follow", SOON_S), workers))

    trainer.retain(newest=3)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
        assert follow() == {(version, True)}
    workers[0].call("direct", "pin", 1)
    assert follow() == {(1, True)}
    trainer.publish(3, tensors_of(3))

    hub.kill()
    if not kept:
        workers[0].call("forget_directive")
        for worker in workers[1:]:
            worker.call("forget_directive")
        trainer._hub._machine.directive = messages.NO_DIRECTIVE
    stage.hub(stage.address)
    until(lambda: sum(len(model["workers"]) for model in fetch_status(stage.address)["models"]) == 4)
    if not kept:
        assert follow() == {(3, True)}
        return
    fresh = stage.client("fresh")
    assert fresh.wait() == 1 and fresh.target() == 1
    for worker in workers:
        with pytest.raises(RuntimeError, match="NotPublished"):
            worker.call("follow", 0.1)

    workers[1].call("direct", "withdraw", 1)  # which ends the pin
    assert follow() == {(3, True)}
    workers[2].call("direct", "withdraw", 3)
    assert follow() == {(2, True)}
    (model,) = fetch_status(stage.address)["models"]
    assert (model["pinned"], model["withdrawn"]) == (None, [1, 3])


def test_two_operators_pin_at_once_and_everybody_agrees(stage):
    trainer, one, other = (stage.client(name) for name in ("trainer", "one", "other"))
    trainer.retain(newest=3)
    for version in (1, 2, 3):
        trainer.publish(version, tensors_of(version))
    for _ in range(10):
        for pinning in [stage.begin(one.pin, 1), stage.begin(other.pin, 2)]:
            pinning.result(SOON_S)
        pinned = next(m for m in fetch_status(stage.address)["models"] if m["run"] == stage.run)["pinned"]
        assert pinned in (1, 2)
        until(lambda pinned=pinned: {c._hub.directive.pin for c in (trainer, one, other)} == {pinned})
        assert {c.wait() for c in (trainer, one, other)} == {pinned}


def test_the_only_holder_of_a_pinned_version_is_killed(stage):
    limits = HubLimits(grace_s=0.2, session_timeout_s=0.5, heartbeat_s=0.1)
    with start_server(limits=limits) as server:
        stage.address = server.address
        trainer, rollout, holder = stage.client("trainer"), stage.client("rollout"), stage.worker("holder")
        holder.call("publish", 1, 1)
        trainer.publish(2, tensors_of(2))
        trainer.pin(1)
        holder.kill()
        until(lambda: not any(info.visible for info in trainer.versions() if info.version == 1))
        with pytest.raises(VersionGone, match=r"version 1 is pinned and nobody holds it: .*; held: \[2\]"):
            rollout.target(2, timeout_s=0.1)
        with pytest.raises(NotPublished, match="version 1, which is pinned,"):
            rollout.fetch(timeout_s=0.1)
        rollout.unpin()
        assert rollout.fetch().version == 2


# --- the hub is killed ---


def test_the_hub_is_killed_in_the_middle_and_comes_back(stage, progress):
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch, serve=True)
    progress.wait("rollout", HELD)
    hub.kill()
    assert len(progress.of("rollout")) == HELD < SEGMENTS  # it hit in the middle
    let_go(trainer, 1)
    fetched = reading.result(SOON_S)  # there is no hub yet
    assert same_bytes(fetched.tensors(), tensors_of(1)) and fetched.report.losses == ()
    assert fetched.report.sources == {"trainer/0": SIZE}
    with pytest.raises(HubUnreachable):
        rollout.versions(timeout_s=0.1)
    stage.hub(stage.address)
    until(lambda: holders(rollout, 1) == ("rollout/0", "trainer/0"))  # rebuilt from what they say
    trainer.publish(2, tensors_of(2))
    assert same_bytes(rollout.fetch(newest := 2).tensors(), tensors_of(2)) and rollout.wait() == newest
    with pytest.raises(UsageError, match="other bytes are already published"):  # the roots are known again too
        stage.client("other").publish(1, tensors_of(5))


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "control"])
def test_unpublish_right_after_the_hubs_restart_waits_for_who_reads(stage, progress, announced):
    """The lease is in the reader's Hello. The control forgets it, and the reader is cut off."""
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch, timeout_s=SOON_S)
    progress.wait("rollout", HELD)
    trainer.publish(2, tensors_of(2))
    hub.kill()
    if not announced:
        rollout._hub._machine.leases.clear()
    leaving = stage.begin(trainer.unpublish, 1, timeout_s=SOON_S)
    stage.hub(stage.address, grace_s=3.0)
    if announced:
        until(lambda: fetch_status(stage.address)["up_s"] > 3.5)  # past its grace, and a tick
        assert [x["reader"] for x in leases(stage)] == ["rollout/0"] and not leaving.done()
        let_go(trainer, 1)
        fetched = reading.result(SOON_S)
        assert fetched.report.losses == () and same_bytes(fetched.tensors(), tensors_of(1))
        assert leaving.result(SOON_S).cut_off == ()
    else:
        assert leaving.result(SOON_S).cut_off == ()
        with pytest.raises(VersionGone, match="trainer/0"):
            reading.result(SOON_S)


def test_without_a_hub_every_call_ends_by_its_deadline_and_nothing_is_published(stage):
    server = start_server()
    stage.address = server.address
    client = stage.client("a")
    client.publish(1, {"w": torch.ones(10)}, copy=False)
    server.close()
    began = time.monotonic()
    calls: list[Callable[[], Any]] = [
        lambda: client.publish(2, tensors_of(1), timeout_s=0.3),
        lambda: client.replicate(zeros_like(tensors_of(1)), timeout_s=0.3),
        lambda: client.fetch(timeout_s=0.3),
        lambda: client.wait(9, timeout_s=0.3),
        lambda: client.target(9, timeout_s=0.3),
        lambda: client.pin(9, timeout_s=0.3),
        lambda: client.withdraw(9, timeout_s=0.3),
        lambda: client.versions(timeout_s=0.3),
    ]
    futures = [stage.begin(call) for call in calls]
    for future in futures:
        with pytest.raises(HubUnreachable, match="hub"):
            future.result(SOON_S)
    assert client.unpublish(1, timeout_s=0.3).kept  # it may be the last copy: nobody can say
    assert time.monotonic() - began < 3 * LATE_S
    assert client.serving() == [ShardKey(1, CHECKPOINT)]


# --- what is left behind ---


def what_is_there() -> tuple[list[str], list[str], list[str]]:
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except FileNotFoundError:
            continue
    ours = ("tensorhub", str(os.getpid()))  # libraries put their process' number into the name; others run here too
    shared = [name for name in os.listdir("/dev/shm") if any(word in name for word in ours)]
    return sorted(t.name for t in threading.enumerate()), sorted(descriptors), sorted(shared)


def a_busy_life(address: str, run: str) -> None:
    options = {"run": run, "model": "actor", "transports": ("shm", "tcp", "memory")}
    trainer = Client(address, replica="trainer", **options)
    rollout = Client(address, replica="rollout", **options)
    trainer.publish(1, tensors_of(1))
    rollout.replicate(zeros_like(tensors_of(1)))
    trainer.publish(2, tensors_of(2), copy=False)
    fetched = rollout.fetch(serve=True)
    with pytest.raises(UsageError):
        rollout.replicate({"no such": torch.zeros(1)}, 2)
    with pytest.raises(NotPublished):
        rollout.fetch(9, timeout_s=0.1)
    trainer.unpublish(1)
    trainer.unpublish(2)
    fetched.release()
    rollout.close()
    trainer.close()


def test_nothing_is_left_after_close(module_hub):
    a_busy_life(module_hub.address, "warm up")  # what is made once stays
    gc.collect()
    before = what_is_there()
    a_busy_life(module_hub.address, "counted")
    gc.collect()
    until(lambda: what_is_there() == before)
    left = Client(module_hub.address, run="control", model="m", replica="r", transports=("tcp",))
    assert what_is_there() != before
    left.close()
    until(lambda: what_is_there() == before)


def test_a_refused_client_leaves_nothing(module_hub):
    before = what_is_there()
    for _ in range(3):
        with pytest.raises(HubUnreachable):
            Client("tcp://127.0.0.1:1", run="r", model="m", replica="x", connect_timeout_s=0.05)
        with pytest.raises(UsageError):
            Client(module_hub.address, run="r", model="m", replica="x", transports=("none",))
    gc.collect()  # what the test before this one left may go meanwhile
    until(lambda: not any(Counter(now) - Counter(then) for now, then in zip(what_is_there(), before, strict=True)))


def test_a_transfer_says_in_the_log_what_it_lost(stage, progress, caplog):
    caplog.set_level(logging.WARNING, "tensorhub.client")
    near, far, rollout = stage.client("near"), stage.client("far", location=FAR), stage.client("rollout")
    for client in (near, far):
        client.publish(1, tensors_of(1))
    hold_back(near, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    near.close()
    reading.result(SOON_S)
    assert any("rollout/0: version 1: lost shard 0 from near/0" in record.getMessage() for record in caplog.records)
