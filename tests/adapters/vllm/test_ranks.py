"""What one data parallel rank asks of the others, over a real store, of cores that only remember it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.vllm.config import StartConfig, WorkerConfig
from tensorhub_plugins.vllm.engine.caches import StaleCaches
from tensorhub_plugins.vllm.engine.ranks import FirstRank, OtherRank, store_of

JOINING = WorkerConfig(hub="tcp://h:1", run="r", model="m", replica="server")
RANKS = 3


class FakeCore:
    """As `Core`; of two workers. wrong: what it cannot do."""

    def __init__(self, rank: int, store: TCPStore, everyone: list[FakeCore], together: threading.Barrier) -> None:
        self.rank, self.dp_store, self.everyone, self.together = rank, store, everyone, together
        self.asked: list[Any] = []
        self.theirs = False
        self.wrong, self.available, self.idle, self.version, self.holds = "", True, True, 0, ""
        self.lost = False

    async def is_available(self) -> bool:
        return self.available

    async def is_idle(self) -> bool:
        return self.idle

    async def held_by(self) -> str:
        return self.holds

    async def look(self) -> tuple[int, bool]:
        return self.version, self.lost

    async def lose(self) -> None:
        self._asked("lose")
        await asyncio.to_thread(self.together.wait, 30)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        self._asked(method, *args)
        return [{"worker": 2 * self.rank + k, "sources": {"trainer/0": 1}} for k in range(2)]

    async def pause(self) -> None:
        self._asked("pause")
        # As vLLM's: done when every rank has been told. The rank that asks has a loop to itself, too.
        await asyncio.to_thread(self.together.wait, 30)

    async def resume(self) -> None:
        self._asked("resume")
        await asyncio.to_thread(self.together.wait, 30)

    async def is_theirs(self) -> bool:
        return self.theirs

    async def stay(self) -> None:
        self._asked("stay")

    def running(self) -> list[str]:
        return [f"request-{self.rank}"]

    def settle(self, version: int) -> None:
        self.version = version

    def _asked(self, *question: Any) -> None:
        self.asked.append(question)
        if self.wrong == question[0]:
            raise RuntimeError(f"{question[0]} went wrong")


@pytest.fixture
def cores() -> Iterator[list[FakeCore]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[FakeCore] = []
    together = threading.Barrier(RANKS)
    made += [FakeCore(rank, store, made, together) for rank in range(RANKS)]
    for core in made[1:]:
        OtherRank(core, store_of(core), core.rank, JOINING, StartConfig(follow="now")).start()
    yield made


def first(cores: list[FakeCore]) -> FirstRank:
    return FirstRank(cores[0], store_of(cores[0]), RANKS)


def test_all_workers_answer_in_the_order_of_their_shards(cores: list[FakeCore]) -> None:
    answers = asyncio.run(first(cores).rpc("tensorhub_install", 7, 60.0))
    assert [answer["worker"] for answer in answers] == list(range(2 * RANKS))
    assert all(core.asked == [("tensorhub_install", 7, 60.0)] for core in cores)


def test_where_a_rank_is_paused_by_another_client_none_resumes(cores: list[FakeCore]) -> None:
    engine = first(cores)
    cores[1].theirs = True
    asyncio.run(engine.resume())
    assert all(core.asked == [("stay",)] for core in cores)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("how", ["lost", "other"])
def test_where_one_rank_has_lost_its_weights_or_has_others_all_stand_still(
    how: str, rank: int, cores: list[FakeCore]
) -> None:
    """The others answered with its experts, as of the version that they have."""
    engine = first(cores)
    engine.settle(5)
    assert asyncio.run(engine.look()) == (5, False) and not any(core.asked for core in cores)  # the control
    cores[rank].lost, cores[rank].version = how == "lost", 5 * (how == "lost")
    assert asyncio.run(engine.look())[1]
    assert all(core.asked == [("lose",)] for core in cores)


def test_ranks_pause_and_resume_together(cores: list[FakeCore]) -> None:
    """Each waits for the others: asked one after the other, the first one would wait for ever."""
    engine = first(cores)
    asyncio.run(engine.pause())
    asyncio.run(engine.resume())
    assert all(core.asked == [("pause",), ("resume",)] for core in cores)
    engine.settle(5)
    assert engine.version == 5 and [core.version for core in cores] == [5] * RANKS


def test_no_rank_is_paused_when_one_is_not_there_for_us(cores: list[FakeCore]) -> None:
    engine = first(cores)
    cores[2].available = False
    with pytest.raises(UsageError, match="another client has paused"):
        asyncio.run(engine.pause())
    assert not any(core.asked for core in cores) and not asyncio.run(engine.is_available())
    cores[2].available = True
    asyncio.run(engine.pause())
    assert all(core.asked == [("pause",)] for core in cores)


@pytest.mark.parametrize("rank", range(RANKS))
def test_no_rank_is_paused_while_something_keeps_blocks_on_one(rank: int, cores: list[FakeCore]) -> None:
    cores[rank].holds = "1 requests (a) wait for KV of another engine"
    with pytest.raises(StaleCaches, match="wait for KV"):
        asyncio.run(first(cores).pause())
    assert not any(core.asked for core in cores)


def test_requests_of_all_ranks_are_the_engines(cores: list[FakeCore]) -> None:
    engine = first(cores)
    assert engine.running() == [f"request-{rank}" for rank in range(RANKS)]
    assert asyncio.run(engine.is_idle())
    cores[1].idle = False
    assert not asyncio.run(engine.is_idle())


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_goes_wrong_on_a_rank_is_said_and_the_next_question_is_answered(rank: int, cores: list[FakeCore]) -> None:
    engine = first(cores)
    cores[rank].wrong = "bad"
    said = ("" if rank == 0 else f"rank {rank}: .*") + "bad went wrong"
    with pytest.raises((RuntimeError, TensorHubError), match=said):
        asyncio.run(engine.rpc("bad"))
    assert all(core.asked == [("bad",)] for core in cores)  # the others were asked, and have answered
    assert len(asyncio.run(engine.rpc("good"))) == 2 * RANKS


@pytest.mark.parametrize("text", ["\udcff", "x" * 1_000_000, "größer"])
def test_an_answer_that_cannot_be_sent_is_an_error_and_no_silence(
    text: str, cores: list[FakeCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = first(cores)

    async def fails(method: str, *args: Any) -> list[Any]:
        raise RuntimeError(text)

    monkeypatch.setattr(cores[1], "rpc", fails)
    with pytest.raises(TensorHubError, match="rank 1: RuntimeError") as raised:
        asyncio.run(engine.rpc("bad"))
    assert len(str(raised.value)) < 5000
    monkeypatch.setattr(cores[1], "rpc", lambda method, *args: [object()])
    with pytest.raises(TensorHubError, match="rank 1: TypeError"):
        asyncio.run(engine.rpc("bad"))
    monkeypatch.undo()
    assert len(asyncio.run(engine.rpc("good"))) == 2 * RANKS


def test_nothing_is_left_in_the_store(cores: list[FakeCore]) -> None:
    engine, store = first(cores), cores[0].dp_store
    before = store.num_keys()
    for version in range(20):
        asyncio.run(engine.rpc("tensorhub_poll"))
        engine.settle(version)
    assert store.num_keys() == before


def test_another_rank_does_only_what_an_engine_is_asked(cores: list[FakeCore]) -> None:
    engine = first(cores)
    asked = engine._ask("_asked", "rpc")
    with pytest.raises(TensorHubError, match="unknown question '_asked'"):
        engine._answers(asked)
    assert not any(core.asked for core in cores)


def test_a_core_without_a_store_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no dp_store"):
        store_of(object())
