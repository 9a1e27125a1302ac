"""A stand-in for the engine that a follower drives: it records what is done to it, and nothing is under way in it."""

from __future__ import annotations

from typing import Any


class RecordedEngine:
    """As `follower.Engine`, but for `rpc`."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def pause(self) -> None:
        self.log.append("pause")

    async def forget(self) -> None:
        self.log.append("forget")

    async def resume(self) -> None:
        self.log.append("resume")

    async def at_once(self, steps: Any) -> Any:
        return await steps()

    def running(self) -> list[str]:
        return []

    def departed(self) -> list[str]:
        return []
