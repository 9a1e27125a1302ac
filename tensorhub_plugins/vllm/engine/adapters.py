"""An engine that follows LoRA adapters: one follower (core_follower.py) for each, over one engine core.

Each follows the history of its adapter at its own pace. From pause to resume it has the engine to itself; the others
wait. The weights stay what the engine was started with.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec

from tensorhub_plugins.vllm.config import FollowConfig, WorkerConfig
from tensorhub_plugins.vllm.engine.core import Core
from tensorhub_plugins.vllm.engine.core_follower import CoreFollower
from tensorhub_plugins.vllm.engine.follower import POLL_INTERVAL_S
from tensorhub_plugins.vllm.engine.spans import Spans
from tensorhub_plugins.vllm.engine.status import Following, lag_of


class OneAdapter:
    """The engine as the follower of one adapter sees it: `Core`, with that adapter in the place of the weights."""

    def __init__(self, core: Core, name: str, turn: threading.Lock) -> None:
        """Take part in turns. turn: the same for all adapters of the engine; held from pause to resume."""
        self._core, self._name, self._turn = core, name, turn
        self._has_turn = False
        self.is_available, self.is_idle, self.held_by = core.is_available, core.is_idle, core.held_by
        self.forget, self.running, self.departed, self.at_once = core.forget, core.running, core.departed, core.at_once
        core.spans.setdefault(name, Spans())

    @property
    def version(self) -> int:
        return self._core.version_of(self._name)

    @property
    def is_paused_by_another(self) -> bool:
        return self._core.is_paused_by_another

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        return await self._core.rpc(method, *args, target=self._name)

    async def look(self) -> tuple[int, bool]:
        return await self._core.ask(lambda: self.version), False

    async def pause(self) -> None:
        while not self._turn.acquire(blocking=False):  # its holder runs in another thread
            await asyncio.sleep(POLL_INTERVAL_S)
        try:
            await self._core.pause()
        except BaseException:
            self._turn.release()
            raise
        self._has_turn = True

    async def resume(self) -> None:
        await self._core.resume()
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    def settle(self, version: int) -> None:
        self._core.settle(version, self._name)


class AdapterFollowers:
    """The followers of all adapters of an engine, as core_follower.py has one."""

    def __init__(self, core: Core, joining: WorkerConfig, how: FollowConfig) -> None:
        turn = threading.Lock()
        self.each = {
            name: CoreFollower(
                OneAdapter(core, name, turn),
                msgspec.structs.replace(joining, model=name),
                msgspec.structs.replace(how, worker=f"{joining.replica}.{name}"),
            )
            for name in joining.lora
        }

    def start(self) -> None:
        for follower in self.each.values():
            follower.start()

    def close(self) -> None:
        for follower in self.each.values():
            follower.close()

    def status(self) -> Following:
        """Return what the one that is furthest behind says, and what all say by adapter."""
        said = {name: follower.status() for name, follower in self.each.items()}
        worst = max(said.values(), key=lambda each: (each["broken"], not each["version"], lag_of(each)))
        return {**worst, "adapters": said}

    def take_updates(self) -> list[tuple[float, float]]:
        return [update for follower in self.each.values() for update in follower.take_updates()]
