"""The server actor of one pull-mode replica: verl's vLLM server over an engine that follows, and a heartbeat for the
router.

One that was started again fetches the version to run, and only then says that it is ready. Nothing in verl waits for
a replica to reach a step, so the trainer goes on when operators pin a version or withdraw one; the samples say which
steps they are of. Drop-in mode (trainer.py) asks for every step by its number: pins do not apply to it.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from contextlib import suppress
from typing import Any

import msgspec
import ray
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.exceptions import EngineDeadError

from tensorhub_plugins.core import Deadline, TensorHubError, VersionRefused, run_log, step_of
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl import config, hub
from tensorhub_plugins.verl.hub import POLL_INTERVAL_S
from tensorhub_plugins.verl.routing import NO_REPLICA_TIMEOUT_S, ReplicaLost
from tensorhub_plugins.verl.versions import told, version_of_step
from tensorhub_plugins.vllm.config import FollowConfig
from tensorhub_plugins.vllm.engine import compiled
from tensorhub_plugins.vllm.engine.spans import PREFIX
from tensorhub_plugins.vllm.engine.status import Status
from tensorhub_plugins.vllm.lora import for_adapter
from tensorhub_plugins.vllm.ray import secret
from tensorhub_plugins.vllm.ray.config import connect, worker_config
from tensorhub_plugins.vllm.ray.health import exit_on_error, own_engines
from tensorhub_plugins.vllm.ray.hub import START_TIMEOUT_S
from tensorhub_plugins.vllm.ray.members import Heartbeat
from tensorhub_plugins.vllm.ray.owned import OwnedEngine
from tensorhub_plugins.vllm.ray.replica_metrics import why_stuck

logger = get_logger(__name__)


class TensorHubServer(vLLMHttpServer):
    """Runs a vLLM server that pulls versions. For hybrid replicas, which share the trainer's GPUs, it is verl's own."""

    global_steps: int | None  # of hybrid replicas
    is_spare = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own_engines()
        self.options = config.parse(self.config.checkpoint_engine.engine_kwargs.get(config.BACKEND))
        self._name = f"rollout-{self.replica_rank}"
        self.worker = f"{self._name}/0"
        self._gives_back = False  # this replica leaves the run
        self._owned: OwnedEngine | None = None  # once there is an engine
        self._launch: asyncio.Task[None] | None = None
        self._has_router = False  # one of ours has asked
        self._joins = asyncio.Event()
        self._waits = False  # for that, as a spare
        if not self.is_spare:
            self._joins.set()

    @property
    def follows(self) -> bool:
        return self.rollout_mode == RolloutMode.STANDALONE

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        joining = None
        if self.follows:
            with suppress(TensorHubError, ray.exceptions.RayError):  # the first engines start before the hub
                options, _ = await self._store(hub_timeout_s=0.0)
                joining = self._joining(options)
        with compiled.announced(joining):
            await super().launch_server(*args, **kwargs)
        if self.follows and self.node_rank == 0:
            if self._has_adapter:
                self.engine.generate = for_adapter(self.engine.generate, self.options.model, lambda: True)
            self._owned = OwnedEngine(self.engine, self.worker)
            self._owned.keep(self._start_following(self._owned))

    @property
    def _has_adapter(self) -> bool:
        return bool(super().lora_as_adapter)

    @property
    def lora_as_adapter(self) -> bool:
        """Have verl ask for its own adapter; one that follows has the store's instead."""
        return self._has_adapter and not self.follows

    def _get_worker_extension_cls(self) -> str:
        if not self.follows:
            return str(super()._get_worker_extension_cls())
        return "tensorhub_plugins.verl.worker.TensorHubVerlWorkerExtension"

    # --- following ----------------------------------------------------------------------------------------------------

    async def _start_following(self, owned: OwnedEngine) -> None:
        """Follow from when there is a hub: the manager starts it at its first update, maybe much later than this."""
        until = self.options.pull_until
        how = FollowConfig(
            worker=self.worker,
            timeout_s=self.options.timeout_s,
            grows=self.options.timeout_grows,
            until=None if until is None else version_of_step(until),
            staleness_s=self.options.staleness_s,
            pause_mode=self.options.pause_mode,
            recompute=self.options.recompute,
        )
        while True:
            try:
                options, known = await self._store()
                visitor = await asyncio.to_thread(connect, options, replica=f"server-{self.replica_rank}")
                break
            except (TensorHubError, ray.exceptions.RayError) as error:  # or Ray's head is busy
                logger.warning("%s: no hub yet: %s", self.worker, error)
                await asyncio.sleep(1.0)
        await asyncio.gather(asyncio.to_thread(visitor.close), self._joins.wait())
        await owned.follow(self._joining(options), known, how)
        await owned.watch()

    async def tensorhub_join(self) -> None:
        self._joins.set()

    async def _store(self, *, hub_timeout_s: float = START_TIMEOUT_S) -> tuple[config.Options, str | None]:
        """Return the options with what is known of the store by now, and its secret; wait for its hub until then."""
        address = await hub.find(self.options, timeout_s=hub_timeout_s)
        options = msgspec.structs.replace(self.options, hub=address, run=hub.run_name(self.options))
        return options, await asyncio.to_thread(secret.learn)

    def _joining(self, options: config.Options) -> dict[str, Any]:
        return worker_config(options, replica=self._name, adapter=self._has_adapter)

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        if not self.follows:
            return await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        if not self._status.version:
            await self._first_version()
        assert self._owned is not None
        if self._status.why_not:
            raise ReplicaLost(self._status.why_not)
        started = time.monotonic()
        name = f"{PREFIX}{uuid.uuid4().hex}"  # verl's is the same in each turn of a sample
        try:
            output = await super().generate(prompt_ids, sampling_params, name, **kwargs)
            tokens = len(output.token_ids)
            spans = await self._owned.spans(name, tokens)
        except EngineDeadError as error:
            run_log.record_request(self.worker, started, "error")
            self._owned.lifeline.die(error)
            raise ReplicaLost(f"{self.worker}: {error}") from error
        if self._gives_back and output.stop_reason == "aborted" and self.options.spans != "split":
            # verl's client here would take the part for the whole
            raise ReplicaLost(f"{self.worker} leaves the run")
        if not tokens:  # it may have been aborted before its engine had heard of it
            spans = spans or ((self._status.version, 0),)
        if not spans or not all(version for version, _ in spans):
            raise ReplicaLost(f"{self.worker} cannot tell the version of an answer")
        output.extra_fields.update(told(spans, split=self.options.spans == "split"))
        outcome = {"completed": "stop", "aborted": "abort"}.get(str(output.stop_reason), str(output.stop_reason))
        run_log.record_request(self.worker, started, outcome, [step_of(version) for version, _ in spans], tokens)
        return output

    async def _first_version(self) -> None:
        """Wait for it. Raise ReplicaLost where there is a router of ours, which asks another one; a router of the
        user's, or verl's own, would fail the sample. Raise VersionRefused where it will not come."""
        deadline = Deadline.after(NO_REPLICA_TIMEOUT_S)
        while not self._status.version:
            if self._has_router or deadline.remaining() <= 0:
                raise ReplicaLost(f"{self.worker} has no weights yet")
            if self._status.refusal[0]:
                raise VersionRefused(why_stuck({self.worker: self._status.refusal}))
            self._launch_again()
            await asyncio.sleep(POLL_INTERVAL_S)

    # --- health -------------------------------------------------------------------------------------------------------

    def _launch_again(self) -> None:
        """Launch the engine of a server that Ray has started again."""
        if not hasattr(self, "engine") and self._launch is None:
            logger.warning("%s was started again: launching its engine", self.worker)
            self._launch = asyncio.create_task(self.launch_server())
            self._launch.add_done_callback(exit_on_error)

    async def tensorhub_heartbeat(self) -> Heartbeat:
        """Answer the router, which asks every second."""
        owned, self._has_router = self._owned, True
        self._launch_again()
        own: Any = {
            "worker": self.worker,
            "follows": self.follows,
            "stays": self._status.stays or not self.follows,
            "timeout_s": self.options.replica_timeout_s,
            "events": self.options.events,
            # verl itself puts hybrid replicas to sleep.
            "engine_timeout_s": self.options.engine_timeout_s if self.follows else math.inf,
            "why": self._status.why_not,
            "spare": self._waits and not self._joins.is_set(),
        }
        if owned is None:  # verl itself puts hybrid replicas in and out of rotation
            version = 0 if self.global_steps is None else version_of_step(self.global_steps)
            ready = hasattr(self, "engine") and not self.follows
            node = ray.get_runtime_context().get_node_id()
            own |= {"version": version, "ready": ready, "node": node}
            return own
        is_able = owned.status.version > 0 and not owned.lifeline.is_dying
        return owned.heartbeat(**own, ready=is_able and not own["why"])

    @property
    def _status(self) -> Status:
        """Return the status of its engine's follower; version 0: it has none yet."""
        return Status() if self._owned is None else self._owned.status

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def tensorhub_give_back(self) -> None:
        """Leave what is under way to others: with the tokens so far, where verl's client can go on from there."""
        self._gives_back = True
        await self.abort_all_requests(reject_request=True)

    async def tensorhub_leave(self) -> None:
        """Follow no more, and say so: the hub forgets this replica at once. The process is ended from outside."""
        if self._owned is not None:
            await self._owned.leave()

    # --- what verl's own manager would do to all replicas at once -----------------------------------------------------

    async def set_global_steps(self, global_steps: int) -> None:
        if not self.follows:
            await super().set_global_steps(global_steps)


class SpareServer(TensorHubServer):
    """A server that holds dummy weights and follows nothing until `tensorhub_join`; so does one that Ray has started
    again."""

    is_spare = True

    async def _start_following(self, owned: OwnedEngine) -> None:
        await owned.warm_up()  # which an engine that compiles may not answer for minutes
        self._waits = True
        await super()._start_following(owned)
