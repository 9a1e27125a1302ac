"""The actor that owns what a fleet has started, so that the fleet's own actor may be killed and come back.

Ray ends what an actor has made together with that actor. So this one does what the fleet says, keeps the fleet's state
for it, and decides nothing. If it is lost, its replicas are lost with it, and the fleet starts others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine
from typing import Any

from tensorhub_plugins.vllm.ray.actor_handles import seal, unseal
from tensorhub_plugins.vllm.ray.fleet.types import Launcher

CANCEL_TIMEOUT_S = 30.0  # for a start to notice that it is not wanted any more


class Starter:
    """Every call may be repeated: nothing is started or stopped twice. Handles travel sealed (actor_handles.py)."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._starts: dict[str, asyncio.Task[Any]] = {}  # the results of those that are done are kept
        self._stops: dict[str, asyncio.Task[None]] = {}
        self._saved: Any = None
        self._is_settled = False

    async def start(self, name: str, rank: int, avoid: Collection[str], spare: bool) -> bytes:
        return await self._started(name, self._launcher.start(name, rank, avoid, spare))

    async def join(self, name: str, handle: bytes) -> None:
        await self._launcher.join(name, unseal(handle))

    async def start_external(self, name: str, url: str) -> bytes:
        return await self._started(name, self._launcher.start_external(name, url))

    async def abort(self, name: str, handle: bytes) -> None:
        await self._launcher.abort(name, unseal(handle))

    async def stop(self, name: str, handle: bytes | None) -> None:
        """See `Launcher`; ends a start that is under way first."""
        if name not in self._stops:
            self._stops[name] = asyncio.create_task(self._stop(name, handle))
            self._stops[name].add_done_callback(lambda _: self._stops.pop(name))
        await asyncio.shield(self._stops[name])

    async def slots(self, avoid: Collection[str]) -> tuple[int, bool]:
        """Return how many members there is room for, and whether a state is kept here."""
        return await asyncio.to_thread(self._launcher.slots, avoid), self._saved is not None

    async def save(self, state: Any) -> None:
        """Keep the fleet's state, until the next one."""
        self._saved = state
        if state.is_known and not self._is_settled:
            self._is_settled = True
            self._launcher.settle(state.members.keys())

    async def saved(self) -> Any:
        """Return what was kept; None at the beginning."""
        return self._saved

    async def _started(self, name: str, start: Coroutine[Any, Any, Any]) -> bytes:
        if name in self._starts:
            start.close()
        else:
            self._starts[name] = asyncio.create_task(start)
        return seal(await asyncio.shield(self._starts[name]))

    async def _stop(self, name: str, sealed: bytes | None) -> None:
        handle = None if sealed is None else unseal(sealed)
        start = self._starts.get(name)
        if start is not None:
            if not start.done():
                start.cancel()
                await asyncio.wait({start}, timeout=CANCEL_TIMEOUT_S)
            with contextlib.suppress(asyncio.CancelledError, asyncio.InvalidStateError):
                handle = start.result() if start.exception() is None else handle
        await self._launcher.stop(name, handle)
        self._starts.pop(name, None)
