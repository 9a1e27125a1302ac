"""verl's CheckpointEngine over the store: `backend=tensorhub`.

verl makes one of these in every trainer rank (`send_weights`) and, when verl's own manager moves the weights (the
drop-in use), one in every rollout worker (`receive_weights`). Where verl's engines build a process group of all of them
for every update, these exchange nothing but the hub's address: a version is published and each rollout reads it from
the nearest worker that has it, other rollouts first.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from typing import Any

import msgspec
import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils import device

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    Fetched,
    Publisher,
    TensorHubError,
    UsageError,
    VersionGone,
    run_log,
    version_of,
)
from tensorhub_plugins.core.options import Need
from tensorhub_plugins.verl import checks, config, hub, loading, parts, recovery, trainer_hooks, worker_stub
from tensorhub_plugins.verl.versions import version_of_step
from tensorhub_plugins.vllm.lora import CONFIG
from tensorhub_plugins.vllm.ray.actor_handles import answer
from tensorhub_plugins.vllm.ray.config import connect, publisher_of
from tensorhub_plugins.vllm.ray.hub import unanswered

FIGURES_TIMEOUT_S = 1.0  # the trainer does not wait for what is only shown


@CheckpointEngineRegistry.register(config.BACKEND)
class TensorHubCheckpointEngine(CheckpointEngine):
    """`is_master` is given in trainer ranks only (true on rank 0); rollout workers are made without it."""

    def __init__(self, bucket_size: int, is_master: bool | None = None, **engine_kwargs: Any) -> None:
        self._bucket_size_bytes = bucket_size  # the store moves segments; verl's buckets come after receive_weights
        self.options = config.parse(engine_kwargs)
        config.check_verl(self.options)
        self.is_trainer, self.is_master = is_master is not None, bool(is_master)
        self._client: Client | None = None
        self._publisher: Publisher | None = None
        self._published = 0  # the last version that this trainer has published
        self._received: Fetched | None = None  # the version that this rollout worker serves
        if self.is_trainer:
            parts.watch()
        if self.options.hub is not None and self.is_trainer:
            self._connect(self.options.hub)  # a wrong address is found here, before the first step

    # --- what verl's manager calls around every update ----------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        return {"options": self.options}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the topology. Runs in the manager's process, which therefore owns the embedded hub."""
        address = hub.ensure(metadata[0]["options"])
        step: list[Any] = [trainer_hooks.of_update()] * actor_wg_world_size
        return {"address": [address] * actor_wg_world_size, "step": step}, {"address": [address] * rollout_world_size}

    def init_process_group(self, address: str, step: int = 0) -> None:
        """Tell trainer ranks the step. step: of the weights that come next."""
        if self._client is None:
            self._connect(address)
        if not self.is_trainer:
            loading.watch()
        if self._publisher is not None and self._publisher.attempt is None:
            self._begin(self._publisher, step)

    def finalize(self) -> None:
        """Tear down nothing: the published snapshot lives on."""

    # --- trainer ------------------------------------------------------------------------------------------------------

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        assert self._publisher is not None, "init_process_group comes before send_weights"
        step, seen = version_of_step(global_steps or 0), self._ask_figures()
        if self.options.parts and isinstance(weights, parts.Weights):  # nothing is gathered: see parts.py
            return await self._told(step, self._publisher.publish_parts(step, weights.held()), seen)
        return await self._told(step, self._publisher.publish(step, _whole(weights)), seen)

    def _begin(self, publisher: Publisher, step: int) -> None:
        """Begin an attempt on all ranks, before verl moves any weights. What a former incarnation of this run has
        published is over, from the weights of this step on: they come next."""
        publisher.begin(version_of_step(step) - 1)
        if self.is_master and publisher.attempt and ray.is_initialized():
            with contextlib.suppress(ValueError):  # no replicas that pull
                began = ray.get_actor(worker_stub.NAME).began.remote(publisher.attempt)
                answer(began, "told the replicas of the new attempt", timeout_s=self.options.timeout_s)

    def _ask_figures(self) -> Any:
        """Ask how the replicas that pull do, before the next version; None where verl's manager moves the weights."""
        if self.is_master and ray.is_initialized():  # else Ray would start a cluster, or look for one that is gone
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                return ray.get_actor(worker_stub.NAME).figures.remote(self._published)
        return None

    async def _told(self, step: int, metrics: dict[str, float], asked: Any) -> dict[str, float]:
        """Return what goes into verl's log, which keeps one rank's of every name."""
        assert self._publisher is not None
        self._published = self._publisher.version(step)
        if not self.is_master:
            return {}
        if metrics:
            metrics["tensorhub/publish/bytes"] = float(self._publisher.whole_size_bytes)
        return {**metrics, **await _figures(asked)}

    # --- rollout, drop-in ---------------------------------------------------------------------------------------------

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield views into this worker's copy, which stays published (and unchanged) until the next version.

        verl packs them into a bucket. It hands on what is larger by pickling its whole storage, for a view that of all
        tensors, or on a GPU by its handle: such a tensor is copied into memory of its own there until the next is asked
        for. Raise UsageError, before the first one, where verl has no handles to give."""
        tensors = await asyncio.to_thread(self._receive, version_of_step(global_steps or 0))
        if CONFIG in tensors:
            raise UsageError(checks.DROP_IN)
        large = {name for name, tensor in tensors.items() if tensor.nbytes > self._bucket_size_bytes}
        if large and not device.is_support_ipc():
            raise _too_large({name: tensors[name].nbytes for name in large}, self._bucket_size_bytes)
        for name, tensor in tensors.items():
            yield name, tensor.to(_device(), copy=True) if name in large else tensor

    def _receive(self, step: int) -> dict[str, torch.Tensor]:
        """Read the step's weights, together with all rollouts: those that have a part serve it on to the others while
        the rest arrives.

        By its number: what is pinned does not matter here, and a version that was withdrawn is an error. One that this
        worker has is given again: verl's fully_async asks for its last one once more when the training ends."""
        client, timeout_s, grows = self._client, self.options.timeout_s, self.options.timeout_grows
        assert client is not None, "init_process_group comes before receive_weights"
        version = self._wait(client, step)  # the trainer is still gathering
        if self._received is not None and version == self._received.version:
            return self._received.tensors()
        started = time.monotonic()
        if self._received is None:
            tables = client.fetch(version, (CHECKPOINT,), timeout_s=timeout_s, wanted=(), grows=grows)
            size_bytes = sum(manifest.size_bytes for manifest in tables.manifests.values())
            tables.release()
            # Two copies on this host: all but one of its workers borrow.
            client.budget.check(Need(size_bytes, 2), mend="use pull mode, in which a worker reads its own slice")
        fetched = client.fetch(version, (CHECKPOINT,), timeout_s=timeout_s, serve=True, borrow=True, grows=grows)
        run_log.record_fetch(fetched.report, client, worker=self._worker, seconds=time.monotonic() - started)
        if self._received is not None:
            client.unpublish(self._received.version, CHECKPOINT, timeout_s=timeout_s)
            self._received.release()
        self._received = fetched
        return fetched.tensors()

    def _wait(self, client: Client, step: int) -> int:
        """Return this step's version, in the attempt that the trainer has begun, which this worker may just learn."""
        attempt = client.attempt
        try:
            return client.wait(version_of(attempt, step), timeout_s=self.options.timeout_s)
        except VersionGone:
            if client.attempt == attempt:
                raise
            return client.wait(version_of(client.attempt, step), timeout_s=self.options.timeout_s)

    # --- both ---------------------------------------------------------------------------------------------------------

    def _connect(self, address: str) -> None:
        distributed = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed and self.is_trainer else 0
        ranks = torch.distributed.get_world_size() if distributed and self.is_trainer else 1
        replica = config.TRAINER if self.is_trainer else replica_name(_actor_name())
        self._worker = f"{replica}/{rank}"
        try:
            self._client = connect(
                msgspec.structs.replace(self.options, hub=address, run=hub.run_name(self.options)),
                replica=replica,
                shard=rank,
                shard_count=ranks,
                is_known=self.options.hub is None,
            )
        except TensorHubError as error:
            if self.options.hub is None:  # none was configured that could be wrong
                raise
            raise unanswered(error, address, config.NO_HUB) from error
        if self.is_trainer:
            self._publisher = self._make_publisher(self._client)
            if self.options.recover_weights != "off":
                recovery.watch(self._publisher, self.options)

    def _make_publisher(self, client: Client) -> Publisher:
        dtype = self.options.dtype
        return publisher_of(
            client,
            self.options,
            dtype=None if dtype is None else getattr(torch, dtype),
            keeps_dtype=parts.keeps_dtype,
            slices=self.options.slices or 1,
            slices_experts=bool(self.options.slices_experts),
        )


def _device() -> str:
    """Return the device where verl's engines compute, of this process."""
    return f"{device.get_device_name()}:{device.get_device_id()}"


def _too_large(sizes: dict[str, int], bucket_size_bytes: int) -> UsageError:
    name = max(sizes, key=lambda each: sizes[each])
    needed = -(-sizes[name] >> 20)
    return UsageError(
        f"{len(sizes)} tensors are larger than verl's bucket of {bucket_size_bytes >> 20} MiB, the largest is {name} "
        f"({needed} MiB): set {checks.ENGINE}.update_weights_bucket_megabytes={needed}"
    )


def _whole(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return these weights. Raise UsageError for those of a LoRA run that verl has not merged: they never change."""
    for name, tensor in weights:
        if ".base_layer." in name or ".lora_" in name:
            raise UsageError(f"verl gives the base weights of a LoRA run ({name}), which never change: {config.MERGE}")
        yield name, tensor


async def _figures(asked: Any) -> dict[str, float]:
    try:
        return {} if asked is None else dict(await asyncio.wait_for(asked, FIGURES_TIMEOUT_S))
    except (asyncio.TimeoutError, ray.exceptions.RayError):
        return {}


def replica_name(actor: str) -> str:
    """Return "rollout-1.0.0" for verl's "rollout_standalone_1CheckpointEngineWorker_0:0" (replica, node, local rank).

    Every rollout worker reads all weights, whatever the tensor parallelism, so each is a replica of its own."""
    found = re.fullmatch(r"rollout_(?!reward_|teacher_)\w+?_(\d+)\D.*_(\d+):(\d+)", actor)
    return f"rollout-{'.'.join(found.groups())}" if found else f"rollout-{actor}"


def _actor_name() -> str:
    """Return the name of this worker: verl names its rollout workers; two runs never share a history, so it is unique
    in the run's."""
    context = ray.get_runtime_context()
    return str(context.get_actor_name() or context.get_actor_id())
