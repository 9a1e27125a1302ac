"""OpenRLHF's SamplesGenerator over engines that may come and go, each at a version of its own.

Without partial rollout a batch is answered from the newest version there is when it begins, or a later one: as fresh as
OpenRLHF's own lock makes it, without the lock (targets.py, routing.py). An evaluation sees one version: the engines
that it begins with stay with it until the end, and one that was lost does not come back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils import samples_generator

from tensorhub_plugins.core import VersionRefused, record, step_of
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.openrlhf.health import LOST, Engines
from tensorhub_plugins.openrlhf.prompt_queue import Work
from tensorhub_plugins.openrlhf.routing import Router
from tensorhub_plugins.openrlhf.targets import Target
from tensorhub_plugins.openrlhf.versions import FIRST, LAST, with_logs
from tensorhub_plugins.vllm.ray.config import connect
from tensorhub_plugins.vllm.ray.members import Member
from tensorhub_plugins.vllm.ray.reporting import Reporter

logger = get_logger(__name__)


class SamplesGenerator(samples_generator.SamplesGenerator):
    vllm_engines: Sequence[Any]

    def __init__(self, *, options: config.Options, is_partial: bool, is_sync: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.options = options
        self.engines = Engines(list(self.vllm_engines), options.engine_timeout_s)
        client = connect(options, replica="generator", is_known=True)
        self.target = Target(client, options, is_partial=is_partial, is_sync=is_sync)
        self.router = Router(self.engines, self.target)
        self.evaluation_wait_s = 0.0  # for the engines to have one version, at the last evaluation
        self._nothing = ray.put(0)
        self._tokenizer = ray.put(self.tokenizer)  # megabytes, which OpenRLHF sends along with every prompt
        # Beside this process, which is silent for minutes in sync training while the trainer works.
        self.reporter = Reporter(
            self.engines,
            lambda: self.engines.check(wait_s=0.0),
            self._figures,
            lambda: self.engines.check(wait_s=0.0, joining=True),
        )
        self.reporter.start()

    @classmethod
    def in_place_of(cls, stock: Any, strategy: Any) -> SamplesGenerator:
        """Return one over the same engines and prompts as the one that OpenRLHF made."""
        return cls(
            options=config.parse(strategy.args.vllm.sync_backend),
            is_partial=bool(getattr(strategy.args.train, "partial_rollout_enable", False)),
            is_sync=not strategy.args.train.async_enable,
            strategy=strategy,
            prompts_dataloader=stock.prompts_dataloader,
            eval_dataloader=stock.eval_dataloader,
            tokenizer=stock.tokenizer,
            vllm_engines=stock.vllm_engines,
        )

    # --- one evaluation, one version ----------------------------------------------------------------------------------

    def generate_eval_samples(self, **kwargs: Any) -> Any:
        started, live = time.monotonic(), self.engines.live()
        self.target.look()
        try:
            # Stay where you are; then all go where the first one is, or to the newest.
            held = self._hold(live, 0)
            goal = max(self.target.newest, *held.values()) if held else self.target.newest
            goal = min(goal, self.target.instead_of(goal) or goal)  # unless operators want an older one
            held = self._hold(live, goal)
            if len(set(held.values())) > 1:  # the goal is gone meanwhile
                goal = max(held.values())
            self.router.evaluating = {one.name: one.epoch for one in live if held.get(one.name) == goal}
            self.evaluation_wait_s = time.monotonic() - started
            record("evaluate", worker="generator/0", version=goal)
            logger.info("evaluation of version %d on %d engines", goal, len(self.router.evaluating))
            return super().generate_eval_samples(**kwargs)
        finally:
            self.router.evaluating = {}
            for member in live:
                member.handle.tensorhub_release.remote()

    def _hold(self, members: Sequence[Member], version: int) -> dict[str, int]:
        """Hold these engines; return the versions at which they stay now."""
        refs = [(member, member.handle.tensorhub_hold.remote(version)) for member in members]
        held = {}
        for member, ref in refs:
            try:
                held[member.name] = ray.get(ref)
            except LOST as error:
                logger.warning("%s cannot be held at version %d: %s", member.name, version, error)
        return held

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: bool, **kwargs: Any) -> Any:
        """Generate as OpenRLHF 0.11.2 does, but hand out as answers come, and ask again what an engine has lost."""
        collect = samples_generator._collect_prompt_batch
        prompts, labels, images, exhausted = collect(dataloader_iter, num_prompts)
        if not prompts:
            return [], 0, True
        consumed, accepted = len(prompts), []
        self.router.work = Work(self.options.prompts_per_engine)
        self.target.look_for_published()
        self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
        if not self.router.evaluating:
            with suppress(VersionRefused):  # there may be another version, see `Router._wait_for_able`
                self.engines.live()
        progress = samples_generator.tqdm(range(len(prompts)), desc="Generate samples")
        while self.router.work:
            self.router.hand_out()
            for responses in self.router.answers():
                newest = step_of(max(self.target.published, self.target.newest))  # that of a sample without tokens
                # Samples are the only way to the trainer's log, in async training. OpenRLHF wants all to say the same.
                logs = {FIRST: newest, LAST: newest, **self._figures()}
                samples = [with_logs(response, logs) for response in responses]
                experiences = [self._process_response_into_experience(sample, **kwargs) for sample in samples]
                if dynamic_filtering and not self._is_informative(experiences):
                    experiences = []
                    prompts, labels, images, exhausted = collect(dataloader_iter, 1)
                    consumed += len(prompts)
                    if prompts:
                        self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
                if experiences:
                    accepted.extend(experiences)
                    progress.set_postfix({"prompts_consumed": consumed})
                    progress.update()
        return accepted, consumed, exhausted

    def _dispatch_prompts_to_vllm(self, prompts: Any, labels: Any, **kwargs: Any) -> Any:
        """OpenRLHF makes the arguments of each prompt, for what it takes for an idle engine; they wait here."""
        self.target.look()
        version = 0 if self.router.evaluating else self.target.oldest()

        def collect(**arguments: Any) -> None:
            self.router.collect({**arguments, "hf_tokenizer": self._tokenizer}, version)

        idle = SimpleNamespace(
            get_num_unfinished_requests=SimpleNamespace(remote=lambda: self._nothing),
            generate_responses=SimpleNamespace(remote=collect),
        )
        self.vllm_engines = [idle]
        super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)

    def _is_informative(self, experiences: Sequence[Any]) -> bool:
        """Dynamic filtering: whether the mean score is inside the allowed range."""
        if any(experience.scores is None for experience in experiences):
            return True
        scores = [experience.scores[0].item() for experience in experiences]
        low, high = self.args.algo.dynamic_filtering_range
        return bool(low < sum(scores) / len(scores) < high)

    def _figures(self) -> dict[str, float]:
        told = self.engines.figures(max(self.target.published, self.target.newest))
        return {**told, "tensorhub/validation_wait/seconds": self.evaluation_wait_s}
