"""OpenRLHF's own trainers and generators, and our engines, over a real hub: no Ray, no vLLM, no model."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf_fakes import FakeLLM, FakeProgress, make_engine
from ray.exceptions import GetTimeoutError

from tensorhub_plugins.core import Client, TensorHubError, VersionRefused, version_of
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.openrlhf import generation, health, policy_ranks, routing, trainer
from tensorhub_plugins.openrlhf.config import Options
from tensorhub_plugins.vllm.engine.follower import Follower
from tensorhub_plugins.vllm.ray import owned

RUN = "r"
TIMEOUT_S = 60.0  # within which a run that cannot go on ends
PROMPTS = 4  # in a batch
ENGINES = 2
MODES = ("sync", "async", "partial")


class Threads:
    """A Ray over threads, whose references are futures."""

    def wait(self, refs: Sequence[Future[Any]], num_returns: int = 1, timeout: float | None = None) -> Any:
        when = futures.FIRST_COMPLETED if num_returns == 1 else futures.ALL_COMPLETED
        done, _ = futures.wait(refs, timeout, when)
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        """Return the results; the first failure of several ends it, as with Ray."""
        if isinstance(refs, list):
            asked = [ref for ref in refs if isinstance(ref, Future)]
            for ended in futures.wait(asked, None, futures.FIRST_EXCEPTION)[0]:
                ended.result()
            return [self.get(ref) for ref in refs]
        try:
            return refs.result(timeout) if isinstance(refs, Future) else refs
        except futures.TimeoutError:
            raise GetTimeoutError("not there yet") from None

    def put(self, value: Any) -> Any:
        return value

    def kill(self, *_: Any, **__: Any) -> None:
        raise AssertionError("an engine is ended that is well")


class Handle:
    """An actor's handle."""

    def __init__(self, actor: Any, submit: Callable[..., Future[Any]]) -> None:
        self._actor, self._submit = actor, submit

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *a, **k: self._submit(getattr(self._actor, name), *a, **k))


def play_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (health, routing, generation, generation.samples_generator, trainer, ppo_trainer, ppo_trainer_async):
        monkeypatch.setattr(module, "ray", Threads())
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(owned, "ray", SimpleNamespace(get_runtime_context=lambda: here))
    monkeypatch.setattr(generation.Reporter, "start", lambda _: None)
    monkeypatch.setattr(generation.samples_generator, "tqdm", lambda *_, **__: FakeProgress())
    bar = SimpleNamespace(update=lambda _: None, close=lambda: None)
    for module in (ppo_trainer, ppo_trainer_async):
        monkeypatch.setattr(module, "tqdm", lambda *_, **__: bar)


# --- engines ---


class Store(FakeLLM):
    """A vLLM with one worker, whose weights are a number: how many steps they were trained. refuses: versions."""

    def __init__(self, address: str, name: str, refuses: Callable[[int], bool]) -> None:
        super().__init__()
        self.client = Client(address, run=RUN, model="actor", replica=name)
        self.refuses, self.trained, self.version = refuses, 0.0, 0
        self.fetched: Any = None
        self.said: dict[str, Any] = {"state": "ready", "error": None}
        self.answers.set()
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answer = await asyncio.to_thread(getattr(self, method), *args)
        if method == "tensorhub_install":
            self.switch(args[0])
        return [answer]

    async def check_health(self) -> None: ...

    def tensorhub_start_fetch(self, version: int, timeout_s: float, grows: bool = False) -> dict[str, Any]:
        try:
            if self.refuses(version):
                raise VersionRefused("tensor 'layers.0.mlp' is unknown")
            self.fetched = self.client.fetch(version, timeout_s=timeout_s, serve=True)
            self.said = {"state": "ready", "error": None}
        except TensorHubError as error:
            self.said = {"state": "failed", "error": str(error), "error_kind": type(error).__name__}
        return self.said

    def tensorhub_poll(self) -> dict[str, Any]:
        return self.said

    def tensorhub_prepare_install(self, timeout_s: float) -> None: ...

    def tensorhub_install(self, version: int, timeout_s: float) -> dict[str, Any]:
        for key in self.client.serving():
            if key.version != version:
                self.client.unpublish(key.version)
        self.trained, self.version = float(self.fetched.tensors()["layer"][0, 0]), version
        self.fetched.release()
        return {"installed": True, "broken": None, "report": {"sources": {"trainer/0": 128}}}


class OneTurn:
    """An agent whose reward is how many steps the answer's weights were trained."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def execute(self, prompt: str, llm_engine: Any, **_: Any) -> dict[str, Any]:
        await llm_engine.generate([1, 2], SimpleNamespace(max_tokens=6, min_tokens=0))
        said = {"reward": torch.tensor(self.store.trained), "scores": torch.tensor(0.5), "extra_logs": {}}
        tokens = {"observation_tokens": [1, 2, 3], "action_ranges": [(1, 3)], "rollout_log_probs": None}
        return {"prompt": prompt, "label": "", **tokens, **said}


async def need(follower: Follower, version: int) -> None:
    """Wait as a prompt does."""
    async with follower.answering(version):
        pass


class Engine:
    """An engine of ours that follows, with a thread of its own for its event loop."""

    def __init__(self, address: str, number: int, mode: str, refuses: Callable[[int], bool]) -> None:
        self.store = Store(address, f"rollout-{number}", refuses)
        self.client = Client(address, run=RUN, model="actor", replica=f"server-{number}")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.one = self._in_loop(self._make, number, mode).result(TIMEOUT_S)
        self.handle = Handle(self.one, self._in_loop)

    def _in_loop(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        async def call() -> Any:
            answer = method(*args, **kwargs)
            return await answer if asyncio.iscoroutine(answer) else answer

        return asyncio.run_coroutine_threadsafe(call(), self.loop)

    async def _make(self, number: int, mode: str) -> Any:
        one = make_engine(OneTurn(self.store), is_partial=mode == "partial", llm=self.store)
        follower = self.store.follower
        one.worker = follower.worker = f"rollout-{number}/0"
        one.options = Options(hub="tcp://h:1", run=RUN)
        follower.target, follower.pins, follower.timeout_s = self.client.target, mode != "sync", 120.0
        follower.sleep = lambda delay_s: asyncio.sleep(min(delay_s, 0.02))
        one.get_num_unfinished_requests = lambda: 0
        await follower.catch_up()
        self.tasks = [asyncio.create_task(work) for work in (follower.follow(), one.owned.watch())]
        await one.owned.caught_up()
        return one

    def need(self, version: int) -> None:
        """Wait until it has this version or a later one, or refuses it."""
        with contextlib.suppress(VersionRefused):
            self._in_loop(need, self.store.follower, version).result(TIMEOUT_S)

    def close(self) -> None:
        async def end() -> None:
            for task in self.tasks:
                task.cancel()
            await asyncio.wait(self.tasks)

        self._in_loop(end).result(TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.store.client.close()
        self.client.close()


# --- the trainer ---


class Prompts(list):  # type: ignore[type-arg]
    """A stand-in for OpenRLHF's data loader."""

    def state_dict(self) -> dict[str, int]:
        return {"batches": len(self) // PROMPTS}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def prompts_of(batches: int) -> Prompts:
    return Prompts((["d"], [f"p{i}"], [""], [None]) for i in range(batches * PROMPTS))


class Policy:
    """The one rank of the policy, in place of a group of actors. Its weights are how many steps it was trained, and the
    mark of its incarnation, a fraction. wait: before it trains."""

    def __init__(
        self, address: str, disk: dict[str, Any], mark: float, wait: Callable[[], None], in_background: bool
    ) -> None:
        self.trained, self.disk, self.mark, self.wait = 0, disk, mark, wait
        self.rank = policy_ranks.PolicyModelActor.__new__(policy_ranks.PolicyModelActor)
        self.rank._by_parts, self.rank._gathered = False, self._weights
        client = Client(address, run=RUN, model="actor", replica="trainer")
        how: Any = {"keep": 2, "timeout_s": 30, "begins": True, "in_background": in_background}
        self.rank._publisher = Publisher(client, rank=0, ranks=1, worker="trainer/0", **how)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "layer", torch.full((8, 4), self.trained + self.mark)

    def async_run_method(self, method_name: str, **kwargs: Any) -> list[Any]:
        own = getattr(self, method_name, None)
        return [(own or getattr(self.rank, method_name))(**kwargs)]

    def async_run_method_batch(self, method_name: str, experience: Any) -> list[Any]:
        assert method_name == "append"
        return []

    def fit(self, kl_ctl: float) -> dict[str, float]:
        self.wait()
        self.trained += 1
        return {"policy_loss": 0.0}

    def save_checkpoint(self, tag: str, client_states: dict[str, Any], **_: Any) -> None:
        self.disk.update(states=dict(client_states), trained=self.trained)

    def get_checkpoint_states(self) -> dict[str, Any]:
        if not self.disk:
            return {}  # DeepSpeed warns
        self.trained = self.disk["trained"]
        states: dict[str, Any] = self.disk["states"]
        return states


class Log:
    """A stand-in for tensorboard."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}

    def log_train(self, step: int, logs: dict[str, Any]) -> None:
        self.steps[step] = dict(logs)

    def log_eval(self, step: int, logs: dict[str, Any]) -> None:
        self.evaluations[step] = dict(logs)

    def close(self) -> None: ...


class Life:
    """One incarnation of a run in this mode, from its start to its end. disk: its checkpoints.

    Training, generating and pulling proceed in lockstep, so that each batch is of known weights: a batch is trained,
    and so published, when the next one is generated, and an update is over when all engines have it.
    """

    def __init__(
        self,
        address: str,
        mode: str,
        engines: Sequence[Engine],
        disk: dict[str, Any],
        folder: Path,
        *,
        batches: int,
        resumes: bool = False,
        updates: int = 1,
        mark: float = 0.0,
        freezing_steps: int = -1,
        save_steps: float = float("inf"),
        eval_steps: float = float("inf"),
        in_background: bool = False,
    ) -> None:
        (folder / "_actor").mkdir(exist_ok=True)
        self.mode, self.log, self.engines = mode, Log(), engines
        self.policy = Policy(address, disk, mark, self._wait_for_generator, in_background)
        self.batches: list[tuple[int, set[float]]] = []  # the step of each, and how much its weights were trained
        evaluation = prompts_of(1) if eval_steps != float("inf") else None
        self.args = SimpleNamespace(
            train=SimpleNamespace(
                num_episodes=1,
                dynamic_batch_enable=False,
                async_enable=mode != "sync",
                partial_rollout_enable=mode == "partial",
            ),
            rollout=SimpleNamespace(n_samples_per_prompt=2, batch_size=PROMPTS, vllm_generate_batch_size=None),
            algo=SimpleNamespace(
                advantage=SimpleNamespace(is_correction_level="off"),
                dynamic_filtering_enable=False,
                dynamic_filtering_range=(0.0, 1.0),
            ),
            vllm=SimpleNamespace(enable_sleep=False),
            ds=SimpleNamespace(enable_sleep=False),
            critic=SimpleNamespace(freezing_steps=freezing_steps),
            logger=SimpleNamespace(logging_steps=1),
            ckpt=SimpleNamespace(save_steps=save_steps, path=str(folder), load_enable=resumes),
            eval=SimpleNamespace(steps=eval_steps, temperature=1.0, n_samples_per_prompt=2),
        )
        self.prompts, self.evaluation = prompts_of(batches), evaluation
        self.generator = generation.SamplesGenerator(
            options=Options(hub=address, run=RUN),
            is_partial=mode == "partial",
            is_sync=mode == "sync",
            strategy=SimpleNamespace(args=self.args),
            prompts_dataloader=self.prompts,
            eval_dataloader=evaluation,
            tokenizer=None,
            vllm_engines=[one.handle for one in engines],
        )
        self.threads = ThreadPoolExecutor(8)
        self.queue: Any = queue.Queue()
        controller_class: Any = trainer.PPOTrainer if mode == "sync" else trainer.TrainingActor
        self.controller = controller_class.__new__(controller_class)
        self.controller.__dict__.update(
            self._controller(), prompts_dataloader=self.prompts, eval_dataloader=evaluation, generate_kwargs={}
        )
        self.update, self.updates = self.controller.broadcast_to_vllm, updates
        self.controller.broadcast_to_vllm = self._update

    def _update(self) -> None:
        """Run OpenRLHF's update, as often as it is repeated here."""
        for _ in range(self.updates):
            self.update()
        for one in self.engines:
            one.need(version_of(self.controller.tensorhub_attempt, self.controller.tensorhub_version))

    def _wait_for_generator(self) -> None:
        ends = time.monotonic() + TIMEOUT_S
        while self.mode != "sync" and self.queue.empty():
            assert time.monotonic() < ends, "nothing is generated"
            time.sleep(0.002)

    def _controller(self) -> dict[str, Any]:
        return {
            "args": self.args,
            "actor_model_group": self.policy,
            "critic_model_group": None,
            "vllm_engines": True,
            "tokenizer": SimpleNamespace(decode=lambda *_, **__: ["text"]),
            "kl_ctl": SimpleNamespace(value=0.0),
            "experience_maker": SimpleNamespace(make_experience_batch=self._note),
            "samples_generator": self.generator,
            "wandb_logger": None,
            "tensorboard_logger": self.log,
            "best_eval_metric_key": "none",
            "best_eval_metric_value": 0.0,
            "_latest_eval_metric_value": None,
        }

    def _note(self, samples: list[Any]) -> list[Any]:
        self.batches.append((self.controller.tensorhub_version, {float(one.rewards[0]) for one in samples}))
        return samples

    def run(self) -> None:
        """Run OpenRLHF's own `fit` to its end. Any other end is raised within TIMEOUT_S."""
        fit = self.controller.fit if self.mode == "sync" else self._fit_beside_each_other
        self.threads.submit(fit).result(TIMEOUT_S)

    def _fit_beside_each_other(self) -> None:
        generating = trainer.GenerateSamplesActor.__new__(trainer.GenerateSamplesActor)
        slots: Any = queue.Queue()
        slots.put(0)
        lock = threading.Lock()
        shared = {
            "vllm_lock": SimpleNamespace(
                acquire=SimpleNamespace(remote=lock.acquire), release=SimpleNamespace(remote=lock.release)
            ),
            "rollout_queue": self.queue,
            "rollout_slots": slots,
            "_partial_rollout": self.mode == "partial",
        }
        generating.__dict__.update(
            shared,
            args=self.args,
            samples_generator=self.generator,
            prompts_dataloader=self.prompts,
            eval_dataloader=self.evaluation,
            generate_kwargs={},
            _last_eval_step=-1,
            _eval_just_done=False,
        )
        self.controller.__dict__.update(shared)
        whole: Any = trainer._decorated(ppo_trainer_async.PPOTrainerAsync)
        both = whole.__new__(whole)
        both.generator_actor = Handle(generating, self.threads.submit)
        both.trainer_actor = Handle(self.controller, self.threads.submit)
        both.fit()

    def close(self) -> None:
        self.queue.put("done")  # for a trainer without generators
        self.threads.shutdown()
        self.policy.rank._publisher.close()
        self.generator.target.client.close()
