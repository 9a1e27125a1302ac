"""Rollout side: what OpenRLHF asks of an engine that follows the newest version (../vllm/follower.py).

Two kinds of training
    partial rollout     requests in flight are kept and go on with the new weights
    otherwise           the samples of a prompt must come from one version: the installation waits at a `Gate` until
                        the prompts inside have been answered, and new ones wait outside meanwhile
An evaluation holds an engine at its version.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tensorhub_plugins.vllm import follower
from tensorhub_plugins.vllm.follower import UpdateFailed


class Gate:
    """Prompts go in and out; while it is closed, those inside finish and the others wait."""

    def __init__(self) -> None:
        self.inside = 0
        self.is_closed = False
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_closed)
            self.inside += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self.inside -= 1
            self._changed.notify_all()

    async def close(self) -> None:
        """Returns when nobody is inside."""
        async with self._changed:
            self.is_closed = True
            await self._changed.wait_for(lambda: self.inside == 0)

    async def open(self) -> None:
        async with self._changed:
            self.is_closed = False
            self._changed.notify_all()


class Follower(follower.Follower):
    """gate: None with partial rollout."""

    def __init__(self, *args: Any, gate: Gate | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = gate
        self.is_held = False  # stay with this version, for evaluation
        self._one_update = asyncio.Lock()
        self._changed = asyncio.Condition()

    async def need(self, version: int) -> None:
        """Return when this version or a later one is installed; UpdateFailed when that takes longer than a deadline."""
        if self.until is not None:
            version = min(version, self.until)
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self.version >= version and not self.is_broken), self.deadline_s
                )
            except asyncio.TimeoutError:
                raise UpdateFailed(
                    f"{self.worker} has version {self.version} and was asked to answer from a later one",
                    version=version,
                    phase="need",
                    deadline_s=self.deadline_s,
                ) from None

    async def hold(self, version: int = 0) -> int:
        """Stay with the version that is installed, or with `version` where that is later, until `release`."""
        if self.until is not None:
            version = min(version, self.until)
        async with self._one_update:
            self.is_held = True
            if self.version < version:
                await self.update(version)
            return self.version

    async def release(self) -> None:
        async with self._changed:
            self.is_held = False
            self._changed.notify_all()

    async def take(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_held)
        async with self._one_update:
            if not self.is_held and (version > self.version or self.is_broken):
                await self.update(version)

    async def install(self, version: int) -> None:
        if self.gate is None:
            await super().install(version)
        else:
            try:
                await self.gate.close()
                await super().install(version)
            finally:
                await self.gate.open()
        async with self._changed:
            self._changed.notify_all()
