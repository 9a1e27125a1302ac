"""Rollout side: what OpenRLHF asks of an engine that follows by itself (../vllm/engine/follower.py).

Two kinds of training
    partial rollout     requests in flight are kept and go on with the new weights
    otherwise           the samples of a prompt must come from one version: the installation waits at a `Gate` until
                        the prompts inside have been answered, and new ones wait outside meanwhile
An evaluation holds an engine at its version.

When operators pin a version or withdraw one, prompts that were to be answered from a later one than the engines are to
run are answered from that. Sync training is on policy: it needs the newest version, and pins do not apply to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from tensorhub_plugins.core import Deadline, HubUnreachable, NotPublished, VersionGone, VersionRefused
from tensorhub_plugins.openrlhf.versions import bounded
from tensorhub_plugins.vllm.engine import follower
from tensorhub_plugins.vllm.engine.follower import UpdateFailed

ASK_INTERVAL_S = 5.0  # how often one that waits for a version asks whether it is still to come


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
        """Returns when no prompt is inside."""
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
        self._asked_with = 0  # the version that was installed when the last question was asked
        self._one_update = asyncio.Lock()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def answering(self, version: int) -> AsyncIterator[None]:
        """For the time of a prompt, which begins when this version or a later one is installed (`need`)."""
        deadline = Deadline.after(self.timeout_s)
        while True:
            await self._need(version, deadline)
            async with self.gate or nullcontext():
                if not self.is_broken:  # by what it has waited for at the gate: the next installation waits for it
                    yield
                    return

    async def need(self, version: int) -> None:
        """Return when this version or a later one is installed; UpdateFailed when that takes longer than a deadline,
        VersionRefused when it cannot be.

        An older one is enough when that is what operators want to be run.
        """
        await self._need(version, Deadline.after(self.timeout_s))

    async def _need(self, version: int, deadline: Deadline) -> None:
        version = bounded(version, self.until)
        while self.is_broken or self.version < version:
            version = min(version, await self._to_run_instead_of(version))
            refused, why = self.refusal
            if refused >= version > self.version:
                raise VersionRefused(why, version=refused)
            if deadline.expired:
                raise UpdateFailed(
                    f"{self.worker} has version {self.version} and was asked to answer from a later one",
                    version=version,
                    phase="need",
                    timeout_s=self.timeout_s,
                )
            await self._reach(version, min(deadline.remaining(), ASK_INTERVAL_S))

    async def _reach(self, version: int, timeout_s: float) -> None:
        """Wait until it is installed, or refused, at most for so long."""

        def is_decided() -> bool:
            return self.refusal[0] >= version or (self.version >= version and not self.is_broken)

        async with self._changed:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_decided), timeout_s)

    async def _to_run_instead_of(self, version: int) -> int:
        """What the hub says now; the same one if it does not say anything, 0 when there is nothing to be run."""
        try:
            return await asyncio.to_thread(self.target, version, pins=self.pins, timeout_s=0.0)
        except (NotPublished, HubUnreachable):
            return version
        except VersionGone:
            return 0

    async def next_version(self) -> int | None:
        self._asked_with = self.version
        return await super().next_version()

    async def hold(self, version: int = 0) -> int:
        """Stay with the version that is installed, or with `version` if one is given, until `release`. UpdateFailed
        when it cannot; one that is broken goes on following then, to be repaired.
        """
        version = bounded(version, self.until)
        async with self._one_update:
            self.is_held = True
            try:
                if version and (self.is_broken or self.version != version):
                    await self.update(version)
                if self.is_broken:
                    raise UpdateFailed(f"{self.worker} has no whole weights now", version=self.version, phase="hold")
                return self.version
            finally:
                if self.is_broken:
                    await self.release()

    async def release(self) -> None:
        async with self._changed:
            self.is_held = False
            self._changed.notify_all()

    async def take(self, version: int) -> None:
        async with self._changed:
            if self.is_held:
                await self._changed.wait_for(lambda: not self.is_held)
                return  # there may be a newer one by now
        async with self._one_update:
            # It may have been held since, and have got another one: then this answer is an old one.
            if not self.is_held and self.version == self._asked_with:
                await self.update(version)

    async def update(self, version: int) -> None:
        try:
            await super().update(version)
        finally:
            async with self._changed:
                self._changed.notify_all()

    async def install(self, version: int) -> None:
        if self.gate is None:
            await super().install(version)
        else:
            try:
                await self.gate.close()
                await super().install(version)
            finally:
                await self.gate.open()
