"""OpenRLHF's SamplesGenerator over engines that may come and go, each at a version of its own.

A prompt goes to an engine that answers. When that engine is lost in the middle, the prompt is asked again elsewhere
at once, and Ray starts the engine again meanwhile. Without partial rollout a batch is answered from the newest version
there is when it is handed out, or a later one: as fresh as OpenRLHF's own lock makes it, without the lock. If operators
have pinned a version, then from that one, except in sync training, which must be on policy. An evaluation sees one
version: the engines stay with it until the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from openrlhf.trainer.ppo_utils import samples_generator
from ray.exceptions import RayActorError

from tensorhub_plugins.core import NotPublished, TensorHubError, VersionGone, record
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf.config import Options
from tensorhub_plugins.openrlhf.health import LOST, Fleet, Member
from tensorhub_plugins.vllm.ray.config import connect

logger = get_logger(__name__)

CHECK_INTERVAL_S = 2.0  # without an answer for this long, the engines are asked whether they live
ASKED_AGAIN_MAX = 20  # times that one prompt may lose its engine: something is wrong with the prompt then


@dataclass
class _Asked:
    """A prompt that an engine is working on."""

    member: Member
    arguments: dict[str, Any]
    times: int = 1


class _Counter:
    """What OpenRLHF's dispatcher sees of an engine: the same two calls. What was asked is noted."""

    def __init__(self, generator: SamplesGenerator, member: Member) -> None:
        self._generator, self._member = generator, member
        self.get_num_unfinished_requests = member.handle.get_num_unfinished_requests
        self.generate_responses = self

    def remote(self, **arguments: Any) -> Any:
        return self._generator.ask(_Asked(self._member, arguments))


class SamplesGenerator(samples_generator.SamplesGenerator):
    vllm_engines: Sequence[Any]

    def __init__(self, *, options: Options, is_partial: bool, is_sync: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_sync = is_sync
        self.fleet = Fleet(list(self.vllm_engines), options.engine_timeout_s)
        self.is_partial = is_partial
        self.newest = 0  # the version to be run, as far as it is known here
        self._evaluating: list[Member] = []
        self._asked: dict[Any, _Asked] = {}
        self._client = connect(options, replica="generator")

    # --- one evaluation, one version ----------------------------------------------------------------------------------

    def generate_eval_samples(self, **kwargs: Any) -> Any:
        live = self.fleet.live()
        self._look_for_newest()
        # Stay where you are; then all go where the first one is, or to the newest.
        held = self._hold(live, 0)
        goal = max(self.newest, *held.values()) if held else self.newest
        goal = min(goal, self._to_run_instead_of(goal) or goal)  # unless operators want an older one
        held = self._hold(live, goal)
        if len(set(held.values())) > 1:  # the goal is gone meanwhile
            goal = max(held.values())
        self._evaluating = [member for member in live if held.get(member.name) == goal]
        record("evaluate", worker="generator/0", version=goal)
        logger.info("evaluation of version %d on %d engines", goal, len(self._evaluating))
        try:
            return super().generate_eval_samples(**kwargs)
        finally:
            self._evaluating = []
            for member in live:
                member.handle.tensorhub_release.remote()

    def _hold(self, members: Sequence[Member], version: int) -> dict[str, int]:
        """The versions at which these engines stay now."""
        refs = [(member, member.handle.tensorhub_hold.remote(version)) for member in members]
        held = {}
        for member, ref in refs:
            try:
                held[member.name] = ray.get(ref)
            except LOST as error:
                logger.warning("%s cannot be held at version %d: %s", member.name, version, error)
        return held

    # --- asking -------------------------------------------------------------------------------------------------------

    def ask(self, asked: _Asked) -> Any:
        """Returns the reference of the answer."""
        version = 0 if self.is_partial or self._evaluating else self.newest
        ref = asked.member.handle.generate_responses.remote(**asked.arguments, min_version=version)
        self._asked[ref] = asked
        return ref

    def _dispatch_prompts_to_vllm(self, prompts: Any, labels: Any, **kwargs: Any) -> Any:
        self._look_for_newest()
        while True:
            members = [m for m in self._evaluating if m.is_live] or self.fleet.live()
            self.vllm_engines = [_Counter(self, member) for member in members]
            try:
                return super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
            except RayActorError as error:  # lost between its last heartbeat and this
                logger.info("an engine was lost while prompts were handed out: %s", error)
                self.fleet.check()

    def _ask_again(self, asked: _Asked, error: Exception) -> Any:
        self.fleet.lost(asked.member, error)
        if asked.times > ASKED_AGAIN_MAX:
            raise error
        members = [m for m in self._evaluating if m.is_live] or self.fleet.live()
        loads = {id(member): 0 for member in members}
        for other in self._asked.values():
            if id(other.member) in loads:
                loads[id(other.member)] += 1
        member = min(members, key=lambda member: loads[id(member)])
        record("request_retried", worker=f"{member.name}/0", reason=f"{asked.member.name} was lost")
        return self.ask(_Asked(member, asked.arguments, asked.times + 1))

    def _look_for_newest(self) -> None:
        if self.is_partial:
            return
        self.newest = self._to_run_instead_of(self.newest)

    def _to_run_instead_of(self, version: int) -> int:
        """What the hub says now; the same one if it says nothing else, 0 when there is nothing to be run."""
        try:
            return self._client.target(version, pins=not self.is_sync, timeout_s=0.0)
        except NotPublished:
            return version
        except VersionGone as error:
            logger.warning("prompts are answered from whatever the engines have: %s", error)
            return 0
        except TensorHubError as error:
            logger.warning("going on with version %d: %s", version, error)
            return version

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: bool, **kwargs: Any) -> Any:
        """Generate as OpenRLHF 0.11.2 does, but a prompt whose engine is lost is asked again."""
        collect = samples_generator._collect_prompt_batch
        prompts, labels, images, exhausted = collect(dataloader_iter, num_prompts)
        if not prompts:
            return [], 0, True
        consumed, accepted = len(prompts), []
        self._asked = {}
        self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
        progress = samples_generator.tqdm(range(len(prompts)), desc="Generate samples")
        while self._asked:
            ready, _ = ray.wait(list(self._asked), num_returns=1, timeout=CHECK_INTERVAL_S)
            if not ready:
                self.fleet.check()
            for ref in ready:
                asked = self._asked.pop(ref)
                try:
                    responses = ray.get(ref)
                except LOST as error:
                    self._ask_again(asked, error)
                    continue
                experiences = [self._process_response_into_experience(response, **kwargs) for response in responses]
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

    def _is_informative(self, experiences: Sequence[Any]) -> bool:
        """Dynamic filtering: whether the mean score is inside the allowed range."""
        if any(experience.scores is None for experience in experiences):
            return True
        scores = [experience.scores[0].item() for experience in experiences]
        low, high = self.args.algo.dynamic_filtering_range
        return bool(low < sum(scores) / len(scores) < high)
