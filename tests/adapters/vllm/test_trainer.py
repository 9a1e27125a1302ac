"""The trainer's side of vLLM's weight transfer: what it published outlives it, if anybody wants it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from client_stage import until
from vllm.distributed.weight_transfer import ModuleSource
from vllm.distributed.weight_transfer.base import ParamMeta

from tensorhub_plugins.core import Client, HubUnreachable, Server, UsageError, version_of
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.vllm.weight_transfer import (
    CheckpointSource,
    Declared,
    FollowingEngines,
    TensorHubTrainerEngine,
    TensorHubTrainerInitInfo,
)


def trainer(hub: Server, linger_s: float) -> TensorHubTrainerEngine:
    info = TensorHubTrainerInitInfo(hub=hub.address, model="actor", rank=0, linger_s=linger_s)
    source = ModuleSource(torch.nn.Linear(4, 4))
    return TensorHubTrainerEngine.trainer_init(info, client=FollowingEngines(), source=source)


def test_a_trainer_stays_until_somebody_else_holds_its_last_version(hub: Server) -> None:
    engine = trainer(hub, linger_s=60.0)
    engine.send_weights()
    engine.send_weights()
    leaving = threading.Thread(target=engine.shutdown)
    leaving.start()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        fetched = reader.fetch(2, serve=True)
        leaving.join(60.0)
        assert not leaving.is_alive()
        assert fetched.report.sources.keys() == {"trainer/0"}
        assert reader.versions()[-1].layouts == {"checkpoint": ("reader/0",)}


def test_a_trainer_whom_nobody_reads_leaves_all_the_same(hub: Server, caplog: pytest.LogCaptureFixture) -> None:
    engine = trainer(hub, linger_s=0.3)
    engine.send_weights()
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began >= 0.3
    assert "leaving with version 1: it is the last copy" in caplog.text
    with Client(hub.address, run="default", model="actor", replica="late") as late:
        assert not any(info.visible for info in late.versions())


def test_a_publish_has_as_long_as_its_size_needs(hub: Server) -> None:
    class Large(Since033):
        metadata = [SimpleNamespace(name="a", dtype=torch.bfloat16, shape=(1000, 1000, 1000))]  # noqa: RUF012

        def __init__(self) -> None:
            pass

    for source, timeout_s in ((Large(), 124.0), (Since033(()), 120.0)):
        info = TensorHubTrainerInitInfo(hub=hub.address, model="actor", rank=0, linger_s=0.0)
        engine = TensorHubTrainerEngine.trainer_init(info, client=FollowingEngines(), source=source)
        assert engine._publisher is not None and engine._publisher.timeout_s == pytest.approx(timeout_s)
        engine.shutdown()


@pytest.mark.slow
def test_a_trainer_without_a_version_or_a_hub_leaves_at_once(hub: Server) -> None:
    trainer(hub, linger_s=600.0).shutdown()
    engine = trainer(hub, linger_s=600.0)
    engine.send_weights()
    hub.close()
    engine.shutdown()


def test_a_trainer_whose_model_has_changed_is_refused(hub: Server) -> None:
    engine = trainer(hub, linger_s=0.0)
    engine.send_weights()
    engine.source = ModuleSource(torch.nn.Linear(4, 5, bias=False))
    words = r"1 missing: 'bias'; 1 changed: 'weight' \(expected float32\[4, 4\], given float32\[5, 4\]\)"
    with pytest.raises(UsageError, match=words):
        engine.send_weights()
    engine.source = ModuleSource(torch.nn.Linear(4, 4))  # the control: the version itself is as good as before
    engine.send_weights(2)
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert reader.wait(timeout_s=10.0) == 2
    engine.shutdown()


def test_a_version_that_could_not_be_published_does_not_count(hub: Server) -> None:
    engine = trainer(hub, linger_s=0.0)
    engine.send_weights()
    good = engine.source
    engine.source = ModuleSource(torch.nn.Linear(4, 5, bias=False))
    with pytest.raises(UsageError, match="1 missing: 'bias'"):
        engine.send_weights()
    engine.source = good
    engine.send_weights()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert reader.wait(timeout_s=10.0) == 2
        until(lambda: [info.version for info in reader.versions() if info.visible] == [2])
    engine.shutdown()


def test_a_version_whose_source_fails_does_not_count(hub: Server) -> None:
    class Fails(Since033):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().iter_full()
            raise RuntimeError("injected")

    engine = trainer(hub, linger_s=0.0)
    good, engine.source = engine.source, Fails(("a",))
    with pytest.raises(RuntimeError, match="injected"):
        engine.send_weights()
    engine.source = good
    engine.send_weights()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert reader.wait(timeout_s=10.0) == 1
    engine.shutdown()


def test_a_trainer_whose_engines_refuse_leaves_the_store(hub: Server) -> None:
    """Else each try would leave a client that counts as the trainer, and lives on."""

    class Refuses(FollowingEngines):
        def init_weight_transfer_engine(self, *given: object) -> None:
            raise RuntimeError("injected")

    info = TensorHubTrainerInitInfo(hub=hub.address, model="actor", rank=0, linger_s=0.0)
    with pytest.raises(RuntimeError, match="injected"):
        TensorHubTrainerEngine.trainer_init(info, client=Refuses(), source=Since033(("a", "b")))
    until(lambda: not fetch_status(hub.address)["models"])
    engine = trainer(hub, linger_s=0.0)  # the control
    assert fetch_status(hub.address)["models"]
    engine.shutdown()


def test_of_two_threads_that_send_at_once_one_is_refused_and_the_next_is_sent(hub: Server) -> None:
    engine, entered, go_on = trainer(hub, linger_s=0.0), threading.Event(), threading.Event()

    class Waits(Since033):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            entered.set()
            go_on.wait(60)
            return super().iter_full()

    good, engine.source = Since033(("a", "b")), Waits(("a", "b"))
    refused: list[BaseException] = []

    def send() -> None:
        try:
            engine.send_weights()
        except UsageError as error:
            refused.append(error)

    other = threading.Thread(target=send)
    other.start()
    entered.wait(60)
    engine.source = good
    engine.send_weights()
    go_on.set()
    other.join(60)
    assert len(refused) == 1
    engine.send_weights()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert reader.wait(newer_than=1) == 2
    engine.shutdown()


def test_a_trainer_with_own_numbers_starts_again_and_is_rolled_back(hub: Server) -> None:
    """As Publisher's: each start is an attempt, whose first number may be one that was published before."""

    def held() -> list[int]:
        with Client(hub.address, run="default", model="actor", replica="reader") as reader:
            return [info.version for info in reader.versions() if info.visible]

    first = trainer(hub, linger_s=0.0)
    for version in (40, 50):
        first.send_weights(version)
    until(lambda: held() == [50])
    with Client(hub.address, run="default", model="actor", replica="engine") as engine:
        engine.fetch(50, serve=True)
        first.shutdown()
        second = trainer(hub, linger_s=0.0)
        second.send_weights(version=41)
        until(lambda: held() == [version_of(1, 41)])  # 50 is superseded
        assert engine.wait() == version_of(1, 41)
    second.send_weights()
    until(lambda: held() == [version_of(1, 42)])
    with pytest.raises(UsageError, match="grow"):  # the control: without a new attempt
        second.send_weights(41)
    second.begin(10)
    second.send_weights()
    until(lambda: held() == [version_of(2, 11)])
    with pytest.raises(UsageError, match=r"step must be a positive integer .*, not 0"):
        trainer(hub, linger_s=0.0).send_weights(0)
    second.shutdown()


@pytest.mark.parametrize("error", [HubUnreachable("injected"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("reached", [True, False])
def test_a_version_that_may_have_been_seen_counts(hub: Server, error: BaseException, reached: bool) -> None:
    """The next one has other weights, and a version never changes."""
    engine = trainer(hub, linger_s=0.0)
    assert engine._publisher is not None
    store = engine._publisher.client
    publish = store.publish

    def fails(*given: object, **options: object) -> None:
        if reached:
            publish(*given, **options)  # type: ignore[arg-type]
        raise error

    store.publish = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(type(error)):
        engine.send_weights()
    store.publish = publish  # type: ignore[method-assign]
    engine.source = ModuleSource(torch.nn.Linear(4, 4))
    engine.send_weights()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert reader.wait() == 2
    engine.shutdown()


def test_a_version_that_the_engines_did_not_take_counts_and_the_next_replaces_it(hub: Server) -> None:
    """A loop that goes on all the same: its memory is bounded."""
    engine = trainer(hub, linger_s=0.0)
    engine.send_weights()

    class Refuses(FollowingEngines):
        def update_weights(self, update_info: object) -> None:
            raise RuntimeError("injected")

    following, engine.client = engine.client, Refuses()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        for newest in (2, 3, 4):
            with pytest.raises(RuntimeError, match="injected"):
                engine.send_weights()
            until(lambda: [info.version for info in reader.versions() if info.visible] == [newest])  # noqa: B023
        engine.client = following
        engine.send_weights()
        assert reader.fetch().version == 5
    engine.shutdown()


class OneRound(FollowingEngines):
    """An engine with vLLM's rule: a round begins when the last one is over, and one that has failed is over."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open, self.cut, self.taken = is_open, [], []

    def start_weight_update(self) -> None:
        if self.is_open:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.taken.append(update_info["version"])
        if self.cut:
            raise self.cut.pop()  # the engine does not hear of it

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if not self.is_open:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.is_open = False


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("injected")], ids=repr)
def test_a_round_that_was_left_open_is_ended_before_the_next(hub: Server, error: BaseException) -> None:
    engine = trainer(hub, linger_s=0.0)
    engine.client = engines = OneRound(is_open=True)  # by a trainer that was killed in it
    engine.send_weights()
    engines.cut.append(error)
    with pytest.raises(type(error)):
        engine.send_weights()
    engine.send_weights()
    assert engines.taken == [1, 2, 3] and not engines.is_open
    engines.is_open = True  # the control: by another trainer, whose round is its own
    with pytest.raises(RuntimeError, match="already active"):
        engine.send_weights()
    assert engines.is_open
    engine.shutdown()


def test_a_part_of_the_last_version_elsewhere_is_no_copy_of_it(hub: Server, caplog: pytest.LogCaptureFixture) -> None:
    """As the first of two workers of an engine has it, when the other one has failed."""
    engine = trainer(hub, linger_s=0.2)
    engine.send_weights()
    part = {"engine.weight": torch.zeros(3)}
    with Client(hub.address, run="default", model="actor", replica="engine", shard=0, shard_count=2) as half:
        half.publish(1, part, "runtime-of-two")
        engine.shutdown()
        assert "leaving with version 1: it is the last copy" in caplog.text
    caplog.clear()
    again = trainer(hub, linger_s=60.0)
    again.send_weights()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:  # the control
        reader.fetch(reader.wait(timeout_s=10.0), serve=True)
        again.shutdown()
    assert "leaving with" not in caplog.text


class Since033:
    """A source as vLLM 0.33 wants it: its metadata is a property, and iter_full gives what this rank owns."""

    def __init__(self, owned: tuple[str, ...]) -> None:
        self._owned = owned
        self.metadata = [SimpleNamespace(name=name, dtype=torch.float32, shape=(3,)) for name in "ab"]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, torch.full((3,), float(ord(name)))) for name in self._owned)


@pytest.mark.parametrize("owned", [("a", "b"), ("a",)])
def test_a_source_of_a_newer_vllm_is_read_and_one_in_parts_refused(hub: Server, owned: tuple[str, ...]) -> None:
    info = TensorHubTrainerInitInfo(hub=hub.address, model="actor", rank=0, linger_s=0.0)
    engine = TensorHubTrainerEngine.trainer_init(info, client=FollowingEngines(), source=Since033(owned))
    if len(owned) == 1:
        with pytest.raises(UsageError, match="declares b, and 0 more, that rank 0 got nothing of"):
            engine.send_weights()
    else:
        engine.send_weights()
        with Client(hub.address, run="default", model="actor", replica="reader") as reader:
            tensors = reader.fetch(1).tensors()
            assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"a": [97.0] * 3, "b": [98.0] * 3}
    engine.shutdown()


@pytest.mark.parametrize("asks", ["property", "method"])
def test_a_source_of_ours_is_what_older_and_newer_vllm_ask_for(asks: str) -> None:
    declared = Declared([ParamMeta("a", torch.float32, (3,))])
    assert [meta.name for meta in (declared if asks == "property" else declared())] == ["a"]
    assert isinstance(vars(CheckpointSource)["metadata"], cached_property)  # or vLLM 0.33 refuses the class
    assert CheckpointSource.iter_full is CheckpointSource.__iter__
