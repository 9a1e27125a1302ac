"""The data parallel ranks of a mixture of experts as one engine: what its follower asks of an engine, it asks of all.

Each rank has a core with a scheduler of its own, and all step together, since they share the experts. vLLM's pause is
complete when every rank has been told to, and its resume when every rank has: meanwhile the others go on. So the first
rank follows (core_follower.py) and tells the others, over the store that vLLM's ranks met in:

    ask/N            the first rank's N-th question: a method of `Core` and its arguments
    answer/N/RANK    what came of it; the question goes when all have answered

Ranks live and die together, which is vLLM's doing.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.config import StartConfig, WorkerConfig
from tensorhub_plugins.vllm.engine.caches import StaleCaches
from tensorhub_plugins.vllm.engine.core import LOOP_TIMEOUT_S, Core
from tensorhub_plugins.vllm.engine.status import Following, Status, following

logger = get_logger(__name__)

QUESTIONS = frozenset(
    {
        "is_available", "is_idle", "look", "lose", "rpc", "held_by", "pause", "let_go", "forget", "is_theirs",
        "resume", "stay", "running", "departed", "settle",
    }
)  # fmt: skip
LOOK_S = 3600.0  # for a question; torch logs each wait that ends in vain
ERROR_LENGTH_MAX = 4000
ANSWER_TIMEOUT_S = LOOP_TIMEOUT_S + 30.0  # the rank itself says what it has waited for in vain


def store_of(core: Any) -> Store:
    """Return a connection of our own to where this core's ranks have met: one is used by one thread at a time."""
    if not hasattr(core, "dp_store"):
        raise UsageError(
            "vLLM's engine core has no dp_store, by which its data parallel ranks would be told of new versions: use a "
            'version that the store was tested with, or start without "follow"'
        )
    return PrefixStore("tensorhub", core.dp_store.clone())


class FirstRank:
    """All ranks, as their follower sees them: `Core`, of all of them."""

    def __init__(self, core: Core, store: Store, ranks: int) -> None:
        self._core, self._store, self._ranks = core, store, ranks
        self._asked = 0

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def is_paused_by_another(self) -> bool:
        return self._core.is_paused_by_another

    async def is_available(self) -> bool:
        return all(await self._all("is_available"))

    async def is_idle(self) -> bool:
        return all(await self._all("is_idle"))

    async def look(self) -> tuple[int, bool]:
        """Return the same. Where one rank has lost its weights, or has others, all have lost them: each answers with
        the experts of all."""
        looks = await self._all("look")
        version: int = looks[0][0]
        is_lost = any([*look] != [version, False] for look in looks)
        if is_lost:
            await self._all("lose")
        return version, is_lost

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Return all workers' answers: those of the first rank, then of the second, and so on, as their shards are."""
        return [worker for rank in await self._all("rpc", method, *args) for worker in rank]

    async def at_once(self, steps: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await steps()  # each is one of all ranks, which wait for each other in it

    async def held_by(self) -> str:
        return "; ".join(filter(None, await self._all("held_by")))

    async def pause(self) -> None:
        # A rank that is asked alone would wait for the others.
        if not await self.is_available():
            raise UsageError("another client has paused this engine, or put it to sleep")
        held_by = await self.held_by()
        if held_by:
            raise StaleCaches(held_by)
        try:
            await self._all("pause")
        except Exception:  # another client was quicker on one of them
            await self._all("let_go")
            raise

    async def forget(self) -> None:
        await self._all("forget")

    async def resume(self) -> None:
        stay = any(await self._all("is_theirs"))  # all resume, or none does: each would wait for the others
        await self._all("stay" if stay else "resume")

    def running(self) -> list[str]:
        return [*self._core.running(), *(name for rank in self._answers(self._ask("running")) for name in rank)]

    def departed(self) -> list[str]:
        return [*self._core.departed(), *(name for rank in self._answers(self._ask("departed")) for name in rank)]

    def settle(self, version: int) -> None:
        asked = self._ask("settle", version)
        self._core.settle(version)
        self._answers(asked)

    async def _all(self, question: str, *args: Any) -> list[Any]:
        """Return the answers in the order of ranks; when all have answered, whatever failed."""
        asked = self._ask(question, *args)
        mine = getattr(self._core, question)(*args)
        others = asyncio.to_thread(self._answers, asked)
        done = await asyncio.gather(mine, others, return_exceptions=True)
        for failed in done:
            if isinstance(failed, BaseException):
                raise failed
        return [done[0], *done[1]]

    def _ask(self, question: str, *args: Any) -> int:
        self._asked += 1
        self._store.set(f"ask/{self._asked}", msgspec.json.encode((question, args)).decode())
        return self._asked

    def _answers(self, asked: int) -> list[Any]:
        """Return the answers. Raise TensorHubError: a rank could not, or did not answer."""
        keys = [f"answer/{asked}/{rank}" for rank in range(1, self._ranks)]
        try:
            self._store.wait(keys, timedelta(seconds=ANSWER_TIMEOUT_S))
        except DistStoreError as error:
            raise TensorHubError(f"a data parallel rank of this engine does not answer: {error}") from error
        answers = [msgspec.json.decode(self._store.get(key)) for key in keys]
        for key in (*keys, f"ask/{asked}"):
            self._store.delete_key(key)
        failed = [f"data parallel rank {rank}: {error}" for rank, (error, _) in enumerate(answers, 1) if error]
        if failed:
            raise TensorHubError("; ".join(failed))
        return [answer for _, answer in answers]


class OtherRank:
    """A rank that does what the first one asks, in a thread beside its core's loop."""

    def __init__(self, core: Core, store: Store, rank: int, joining: WorkerConfig, start: StartConfig) -> None:
        self._core, self._store, self._rank, self._joining, self._start = core, store, rank, joining, start
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tensorhub-rank", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def status(self) -> Following:
        """Return the status: whether the weights are broken, and how long the hub has been silent, the first rank
        knows."""
        return following(self._joining, self._start.follow, Status(version=self._core.version), 0.0)

    def close(self) -> None:
        self._closed = True

    def _run(self) -> None:
        number = 1
        while not self._closed:
            try:
                self._store.wait([f"ask/{number}"], timedelta(seconds=LOOK_S))
            except DistStoreError:
                continue
            except Exception as error:
                if not self._closed:
                    logger.error("data parallel rank %d: the first one cannot be heard: %s", self._rank, error)
                return
            answer = self._answer(*msgspec.json.decode(self._store.get(f"ask/{number}")))
            self._store.set(f"answer/{number}/{self._rank}", answer)
            number += 1

    def _answer(self, question: str, args: list[Any]) -> str:
        """Return why not, or ""; and what is answered."""
        try:
            if question not in QUESTIONS:
                raise UsageError(f"unknown question {question!r}")
            answer = getattr(self._core, question)(*args)
            answer = asyncio.run(_of(answer)) if inspect.isawaitable(answer) else answer
            return msgspec.json.encode(("", answer)).decode()
        except Exception as error:
            text = ascii(f"{type(error).__name__}: {error}")[1:-1]  # whatever is in it
            return msgspec.json.encode((text[:ERROR_LENGTH_MAX], None)).decode()


async def _of(answer: Any) -> Any:
    return await answer
