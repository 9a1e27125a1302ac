"""The server actor of one pull-mode replica: verl's vLLM server plus a Follower, and a heartbeat for the router.

One that was started again fetches the version to run, and only then says that it is ready. Nothing in verl waits for
a replica to reach a step, so the trainer goes on when operators pin a version or withdraw one; the samples say which
steps they are of. Drop-in mode (trainer.py) asks for every step by its number: pins do not apply to it.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from typing import Any

import msgspec
import ray
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.exceptions import EngineDeadError

from tensorhub_plugins.core import Client, TensorHubError, record, step_of
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl import config, hub
from tensorhub_plugins.verl.routing import ReplicaLost
from tensorhub_plugins.verl.versions import told, version_of_step, waits_for_trainer
from tensorhub_plugins.vllm.engine.follower import Follower, LastUpdate
from tensorhub_plugins.vllm.engine.owned import OwnedEngine
from tensorhub_plugins.vllm.engine.spans import PREFIX
from tensorhub_plugins.vllm.engine.staleness import Staleness
from tensorhub_plugins.vllm.ray import secret
from tensorhub_plugins.vllm.ray.config import connect, worker_config
from tensorhub_plugins.vllm.ray.health import Lifeline, exit_on_error, own_engines

logger = get_logger(__name__)


class TensorHubServer(vLLMHttpServer):
    """With hybrid replicas (they share the trainer's GPUs and get weights by verl's own way) it is verl's server."""

    global_steps: int | None  # of hybrid replicas

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own_engines()
        self.options = config.parse(self.config.checkpoint_engine.engine_kwargs.get(config.BACKEND))
        self.worker = f"rollout-{self.replica_rank}/0"
        self.follower: Follower | None = None
        self._client: Client | None = None
        self._staleness: Staleness | None = None  # once there is a client
        self._gives_back = False  # this replica leaves the run
        self._lifeline: Lifeline | None = None  # once there is an engine
        self._owned: OwnedEngine | None = None  # the same
        self._launch: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def follows(self) -> bool:
        return self.rollout_mode == RolloutMode.STANDALONE

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)
        if self.follows and self.node_rank == 0:
            self._lifeline = Lifeline(self.engine, self.worker)
            mode, recompute = self.options.pause_mode, self.options.recompute
            self._owned = OwnedEngine(self.engine, self._lifeline.rpc, mode=mode, recompute=recompute)
            for work in (self._start_following(self._owned), self._lifeline.probe()):
                task = asyncio.create_task(work)
                task.add_done_callback(exit_on_error)
                self._tasks.append(task)

    def _get_worker_extension_cls(self) -> str:
        if not self.follows:
            return str(super()._get_worker_extension_cls())
        return "tensorhub_plugins.verl.worker.TensorHubVerlWorkerExtension"

    # --- following ----------------------------------------------------------------------------------------------------

    async def _start_following(self, owned: OwnedEngine) -> None:
        """The manager starts the hub at its first update, which may come much later than this."""
        while True:
            try:
                options = msgspec.structs.replace(
                    self.options, hub=await hub.find(self.options), run=hub.run_name(self.options)
                )
                # It only waits; the vLLM workers are the replica's shards.
                self._client = await asyncio.to_thread(connect, options, replica=f"server-{self.replica_rank}")
                break
            except TensorHubError as error:
                logger.warning("%s: no hub yet: %s", self.worker, error)
                await asyncio.sleep(1.0)
        client = self._client
        self._staleness = Staleness(lambda: client.hub_silent_s, options.staleness_s, worker=self.worker)
        self._tasks.append(asyncio.create_task(self._staleness.watch()))
        worker = worker_config(options, replica=f"rollout-{self.replica_rank}")
        await owned.rpc("tensorhub_connect", worker, await asyncio.to_thread(secret.learn))
        until = self.options.pull_until
        self.follower = Follower(
            owned,
            self._client.target,
            worker=self.worker,
            timeout_s=self.options.timeout_s,
            until=None if until is None else version_of_step(until),
        )
        await self.follower.follow()

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        if not self.follows:
            return await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        if self._owned is None or not self._version:
            raise ReplicaLost(f"{self.worker} has no weights yet")  # the router asks another one
        if self._why_not():
            raise ReplicaLost(self._why_not())
        started = time.monotonic()
        name = f"{PREFIX}{uuid.uuid4().hex}"  # verl's is the same in each turn of a sample
        try:
            output = await super().generate(prompt_ids, sampling_params, name, **kwargs)
            tokens = len(output.token_ids)
            spans = await self._owned.spans(name, tokens)
        except EngineDeadError as error:
            record("request", worker=self.worker, seconds=time.monotonic() - started, outcome="error")
            if self._lifeline is not None:
                self._lifeline.die(error)
            raise ReplicaLost(f"{self.worker}: {error}") from error
        if self._gives_back and output.stop_reason == "aborted" and self.options.spans != "split":
            # verl's client here would take the part for the whole
            raise ReplicaLost(f"{self.worker} leaves the run")
        if not tokens:  # it may have been aborted before its engine had heard of it
            spans = spans or ((self._version, 0),)
        if not spans or not all(version for version, _ in spans):
            raise ReplicaLost(f"{self.worker} cannot tell the version of an answer")
        output.extra_fields.update(told(spans, split=self.options.spans == "split"))
        record(
            "request",
            worker=self.worker,
            seconds=time.monotonic() - started,
            outcome={"completed": "stop", "aborted": "abort"}.get(str(output.stop_reason), str(output.stop_reason)),
            versions=[step_of(spans[0][0]), step_of(spans[-1][0])],
            tokens=tokens,
        )
        return output

    # --- health -------------------------------------------------------------------------------------------------------

    async def tensorhub_heartbeat(self) -> dict[str, Any]:
        """What the router asks every second. Also how a server that Ray has started again comes back to life."""
        if not hasattr(self, "engine"):
            if self._launch is None:
                logger.warning("%s was started again: launching its engine", self.worker)
                self._launch = asyncio.create_task(self.launch_server())
                self._launch.add_done_callback(exit_on_error)
            return self._heartbeat(ready=False, silent_s=0.0)
        if not self.follows:  # verl itself puts hybrid replicas in and out of rotation
            return self._heartbeat(ready=True, silent_s=0.0)
        follower, lifeline = self.follower, self._lifeline
        if lifeline is None:
            return self._heartbeat(ready=False, silent_s=0.0)
        ready = follower is not None and follower.version > 0 and follower.is_whole and not lifeline.is_dying
        ready = ready and not self._why_not()
        return self._heartbeat(ready=ready, silent_s=lifeline.silent_s(follower))

    def _heartbeat(self, *, ready: bool, silent_s: float) -> dict[str, Any]:
        last = LastUpdate() if self.follower is None else self.follower.last_update
        return {
            "refusal": (0, "") if self.follower is None else self.follower.refusal,
            "worker": self.worker,
            "node": ray.get_runtime_context().get_node_id(),
            "follows": self.follows,
            "ready": ready,
            "version": self._version or (0 if self.global_steps is None else version_of_step(self.global_steps)),
            "stays": self._stays(),
            "silent_s": silent_s,
            "timeout_s": self.options.replica_timeout_s,
            # verl itself puts hybrid replicas to sleep.
            "engine_timeout_s": self.options.engine_timeout_s if self.follows else math.inf,
            "pull_s": last.pull_s,
            "pause_s": last.pause_s,
            "sources": last.sources,
            "why": self._why_not(),
        }

    @property
    def _version(self) -> int:
        """That it follows."""
        return 0 if self.follower is None else self.follower.version

    def _stays(self) -> bool:
        """Whether it will not go on to the trainer's newest version: verl, an operator or an option decides."""
        if not self.follows or self._client is None or self.follower is None:
            return not self.follows
        done = self.follower.until is not None and step_of(self.follower.version) >= self.follower.until
        return done or self.follower.refusal[0] > 0 or self._client.pinned is not None

    def _why_not(self) -> str:
        """It takes no new work, though it could answer."""
        if self._version and self._client is not None and self._client.pinned is None:
            former = waits_for_trainer(self._version, self._client.attempt)
            if former:
                return f"{self.worker} {former}"
        return "" if self._staleness is None else self._staleness.why_not()

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def tensorhub_give_back(self) -> None:
        """Leave what is under way to others: with the tokens so far, where verl's client can go on from there."""
        self._gives_back = True
        await self.abort_all_requests(reject_request=True)

    async def tensorhub_leave(self) -> None:
        """Follow no more, and say so: the hub forgets this replica at once. The process is ended from outside."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._owned is not None:
            await self._owned.rpc("tensorhub_close")
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    # --- what verl's own manager would do to all replicas at once -----------------------------------------------------

    async def set_global_steps(self, global_steps: int) -> None:
        if not self.follows:
            await super().set_global_steps(global_steps)
