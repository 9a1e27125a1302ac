"""OpenRLHF's SamplesGenerator over engines that may come and go, each at a version of its own.

A batch is handed out as answers come (prompt_queue.py). When an engine is lost in the middle, its prompts are asked
again elsewhere at once, and Ray starts the engine again meanwhile. Without partial rollout a batch is answered from the
newest version there is when it begins, or a later one: as fresh as OpenRLHF's own lock makes it, without the lock. If
operators have pinned a version, then from that one, except in sync training, which must be on policy. A version that
all engines refuse ends the run with their reason, unless what is asked may come from the one before. An evaluation
sees one version: the engines that it begins with stay with it until the end, and one that was lost does not come back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils import samples_generator

from tensorhub_plugins.core import NotPublished, TensorHubError, VersionGone, VersionRefused, record
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf.config import Options
from tensorhub_plugins.openrlhf.health import LOST, Engines
from tensorhub_plugins.openrlhf.partial_answers import GivenBack
from tensorhub_plugins.openrlhf.prompt_queue import Place, Prompt, Work
from tensorhub_plugins.openrlhf.versions import with_logs
from tensorhub_plugins.vllm.engine.follower import bounded
from tensorhub_plugins.vllm.ray.config import connect
from tensorhub_plugins.vllm.ray.members import Member
from tensorhub_plugins.vllm.ray.reporting import Reporter

logger = get_logger(__name__)

ANSWER_INTERVAL_S = 2.0  # without an answer for this long, the engines are asked whether they live
HANDED_OUT_MAX = 64  # prompts at a time: each is a call of some milliseconds, and the fleet is told between them
REQUESTS_MAX = 256  # vLLM's own default of max_num_seqs
LOSSES_MAX = 20  # engines that one prompt may lose: something is wrong with the prompt then


class SamplesGenerator(samples_generator.SamplesGenerator):
    vllm_engines: Sequence[Any]

    def __init__(self, *, options: Options, is_partial: bool, is_sync: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.options, self.is_sync = options, is_sync
        self.engines = Engines(list(self.vllm_engines), options.engine_timeout_s)
        self.is_partial = is_partial
        self.newest = 0  # the version to be run, as far as it is known here
        self.published = 0  # the newest one, whatever is to be run
        self.evaluation_wait_s = 0.0  # for the engines to have one version, at the last evaluation
        self._first: int | None = None  # the version with which this run began; 0: none, None: not looked for yet
        self.resumes = False  # from a checkpoint, whose weights are published before anything is generated
        self.work = Work()
        self._dispatched = 0  # prompts since the run began
        self._evaluating: dict[str, int] = {}  # engines, each in the epoch in which it began
        self._nothing = ray.put(0)
        self._tokenizer = ray.put(self.tokenizer)  # megabytes, which OpenRLHF sends along with every prompt
        self._client = connect(options, replica="generator", is_known=True)
        # Beside this process, which is silent for minutes in sync training while the trainer works.
        self.reporter = Reporter(
            self.engines,
            lambda: self.engines.check(wait_s=0.0),
            self._figures,
            lambda: self.engines.check(wait_s=0.0, joining=True),
        )
        self.reporter.start()

    # --- one evaluation, one version ----------------------------------------------------------------------------------

    def generate_eval_samples(self, **kwargs: Any) -> Any:
        started, live = time.monotonic(), self.engines.live()
        self._look_for_newest()
        try:
            # Stay where you are; then all go where the first one is, or to the newest.
            held = self._hold(live, 0)
            goal = max(self.newest, *held.values()) if held else self.newest
            goal = min(goal, self._to_run_instead_of(goal) or goal)  # unless operators want an older one
            held = self._hold(live, goal)
            if len(set(held.values())) > 1:  # the goal is gone meanwhile
                goal = max(held.values())
            self._evaluating = {member.name: member.epoch for member in live if held.get(member.name) == goal}
            self.evaluation_wait_s = time.monotonic() - started
            record("evaluate", worker="generator/0", version=goal)
            logger.info("evaluation of version %d on %d engines", goal, len(self._evaluating))
            return super().generate_eval_samples(**kwargs)
        finally:
            self._evaluating = {}
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

    # --- asking -------------------------------------------------------------------------------------------------------

    def _dispatch_prompts_to_vllm(self, prompts: Any, labels: Any, **kwargs: Any) -> Any:
        """OpenRLHF makes the arguments of each prompt, for what it takes for an idle engine; they wait here."""
        self._look_for_newest()
        version = 0 if self._evaluating else self._look_for_first() if self.is_partial else self.newest

        def collect(**arguments: Any) -> None:
            arguments["hf_tokenizer"] = self._tokenizer
            self.work.waiting.append(Prompt(arguments, version, number=self._dispatched))
            self._dispatched += 1

        idle = SimpleNamespace(
            get_num_unfinished_requests=SimpleNamespace(remote=lambda: self._nothing),
            generate_responses=SimpleNamespace(remote=collect),
        )
        self.vllm_engines = [idle]
        super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)

    def _hand_out(self) -> None:
        for name in self._forgotten():
            self.work.abandon(name)
        while self.work.waiting and self._hand_out_some():
            pass

    def _hand_out_some(self) -> int:
        """Hand out some of what waits; return how many have been asked."""
        version = self._wait_for_able()
        with self.engines.lock:  # the fleet hears of an engine as it is after this
            live = self.engines.table.able(version)
            evaluating = [m for m in live if self._evaluating.get(m.name) == m.epoch]
            if self._evaluating and not evaluating:
                logger.warning("the evaluation goes on with other versions: all engines that it began with are lost")
                self._evaluating = {}
            members = {member.name: member for member in evaluating or live}
            places = [Place(one.name, one.heartbeat.get("requests_max", REQUESTS_MAX)) for one in members.values()]
            given = self.work.hand_out(places, HANDED_OUT_MAX)
            for name, prompt in given:
                if prompt.lost:
                    record("request_retried", worker=f"{name}/0", reason=f"{prompt.lost[-1]} was lost")
                ask = members[name].handle.generate_responses.remote
                asked = replace(prompt, epoch=members[name].epoch)
                self.work.note(ask(**prompt.arguments, min_version=prompt.version), name, asked)
            self._tell()
        return len(given)

    def _wait_for_able(self) -> int:
        """Wait until an engine can answer what waits; return from which version. Raise VersionRefused when none ever
        will, nor one that is to be run instead."""
        while True:
            version = bounded(self.work.version, self.options.pull_until)
            try:
                self.engines.ready(version)
                return version
            except VersionRefused:
                now = bounded(self._to_run_instead_of(version), self.options.pull_until)
                if now == version:
                    raise
                self.work.ask_for(now)

    def _forgotten(self) -> set[str]:
        with self.engines.lock:
            forgotten, self.engines.forgotten = self.engines.forgotten, set()
        return forgotten

    def _tell(self) -> None:
        self.engines.in_flight, self.engines.waiting = dict(self.work.in_flight), len(self.work.waiting)

    def _answers(self) -> list[Any]:
        """Return what has been answered since, the samples of each prompt; those of lost engines wait again."""
        ready, _ = ray.wait(list(self.work.asked), num_returns=1, timeout=ANSWER_INTERVAL_S)
        if not ready:
            self.engines.check()
        answers = []
        for ref in ready:
            try:
                answer = ray.get(ref)
            except VersionRefused as error:
                self.engines.refused_by_name(self.work.asked[ref][0], error)
                self.work.given_back(ref)
                continue
            except LOST as error:
                prompt = self.work.lost(ref)
                self.engines.lost_by_name(prompt.lost[-1], prompt.epoch, error)
                if len(prompt.lost) > LOSSES_MAX:
                    raise
                continue
            if isinstance(answer, GivenBack):
                record("request_given_back", worker=f"{self.work.asked[ref][0]}/0", tokens=answer.tokens)
                self.work.given_back(ref, journals=answer.journals)
            else:
                name, prompt = self.work.answered(ref)
                self.engines.answered_by_name(name, prompt.version)
                record("prompt", worker=f"{name}/0", number=prompt.number, samples=len(answer))
                answers.append(answer)
        self._tell()
        return answers

    def _look_for_newest(self) -> None:
        if self.is_partial:
            return
        self.newest = self._to_run_instead_of(self.newest)

    def _look_for_first(self) -> int:
        """Return what partial rollout asks for at least: an engine with less has weights of a former incarnation of
        this run. Less only when operators say so."""
        first = 0 if self._first is None else self._first
        if first or self._first is None:
            now = self._to_run_instead_of(first)
            self._first = min(first, now) if first else now
        return self._first or 0

    def _figures(self) -> dict[str, float]:
        told = self.engines.figures(max(self.published, self.newest))
        return {**told, "tensorhub/validation_wait/seconds": self.evaluation_wait_s}

    def _to_run_instead_of(self, version: int) -> int:
        """Return what the hub says now; the same one if it says nothing else, 0 when there is nothing to be run.

        The version with which a run resumes is waited for: engines may have what is on their disk, or a former one."""
        timeout_s, self.resumes = 0.0 if version or not self.resumes else self.options.timeout_s, False
        try:
            return self._client.target(version, pins=not self.is_sync, timeout_s=timeout_s)
        except VersionGone as error:
            logger.warning("prompts are answered from whatever the engines have: %s", error)
            return 0
        except TensorHubError as error:
            if timeout_s:
                raise
            if not isinstance(error, NotPublished):
                logger.warning("going on with version %d: %s", version, error)
            return version

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: bool, **kwargs: Any) -> Any:
        """Generate as OpenRLHF 0.11.2 does, but hand out as answers come, and ask again what an engine has lost."""
        collect = samples_generator._collect_prompt_batch
        prompts, labels, images, exhausted = collect(dataloader_iter, num_prompts)
        if not prompts:
            return [], 0, True
        consumed, accepted = len(prompts), []
        self.work = Work(self.options.prompts_per_engine)
        with suppress(TensorHubError):  # the hub is away, or knows no newer one
            self.published = self._client.target(self.published, pins=False, timeout_s=0.0)
        self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
        if not self._evaluating:
            with suppress(VersionRefused):  # there may be another version, see `_wait_for_able`
                self.engines.live()
        progress = samples_generator.tqdm(range(len(prompts)), desc="Generate samples")
        while self.work:
            self._hand_out()
            for responses in self._answers():
                logs = self._figures()  # samples are the only way to the trainer's log, in async training
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

    def _is_informative(self, experiences: Sequence[Any]) -> bool:
        """Dynamic filtering: whether the mean score is inside the allowed range."""
        if any(experience.scores is None for experience in experiences):
            return True
        scores = [experience.scores[0].item() for experience in experiences]
        low, high = self.args.algo.dynamic_filtering_range
        return bool(low < sum(scores) / len(scores) < high)
