"""The parts that verl's router and fleet deal with, as real actors without an engine."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

TOKENS = 8  # of every answer


class Server:
    """A server that returns a prompt's tokens, one after the other, until it is told to return what is under way."""

    def __init__(self, name: str, version: int = 1) -> None:
        self.name, self.version, self.leaves, self.seconds = name, version, asyncio.Event(), 0.0

    async def tensorhub_heartbeat(self) -> dict[str, Any]:
        return {
            "worker": f"{self.name}/0",
            "node": ray.get_runtime_context().get_node_id(),
            "ready": self.version > 0,
            "version": self.version,
            "silent_s": 0.0,
            "timeout_s": 10.0,
        }

    async def set(self, version: int, seconds: float = 0.0) -> int:
        self.version, self.seconds = version, seconds
        return os.getpid()

    async def generate(self, prompt_ids: list[int], request_id: str, **others: Any) -> TokenOutput:
        done = 0
        first = prompt_ids[0]
        left = TOKENS - (len(prompt_ids) - 1)
        while done < left and not self.leaves.is_set():
            await asyncio.sleep(self.seconds)
            done += 1
        start = len(prompt_ids) - 1
        tokens = [first + start + position for position in range(done)]
        reason = "completed" if done == left else "aborted"
        return TokenOutput(
            token_ids=tokens,
            log_probs=[0.0] * done,
            stop_reason=reason,
            extra_fields={"global_steps": self.version - 1, "tensorhub_spans": [(self.version - 1, done)]},
        )

    async def last_output(self, otherwise: Any = TokenOutput) -> Any:
        """Name one of verl's types in the signature, as verl's own methods do: Ray keeps it with every handle."""

    async def tensorhub_give_back(self) -> None:
        self.leaves.set()


class Launched:
    """A replica as verl starts it, without an engine."""

    def __init__(self, workers: list[Any], cuda_visible_devices: str, **_: Any) -> None:
        self.workers, self.devices = workers, cuda_visible_devices

    def given(self) -> tuple[list[Any], str]:
        return self.workers, self.devices

    def get_master_address(self) -> tuple[str, int, int]:
        return "10.0.0.1", 1, 2

    def launch_server(self, **_: Any) -> None:
        """Launch at once."""

    def get_server_address(self) -> tuple[str, int]:
        return "10.0.0.1", 80


class Launcher:
    async def start(self, name: str, rank: int, avoid: Any, spare: bool = False) -> Any:
        return server(name, version=0)

    async def abort(self, name: str, handle: Any) -> None:
        await handle.tensorhub_give_back.remote()

    async def stop(self, name: str, handle: Any | None) -> None:
        if handle is not None:
            ray.kill(handle)

    def settle(self, names: Any) -> None:
        """Do nothing: there are no places."""

    def slots(self, avoid: Any) -> int:
        return 4


def server(name: str, version: int = 1) -> Any:
    return ray.remote(Server).options(name=name, num_cpus=0, max_concurrency=100).remote(name, version)
