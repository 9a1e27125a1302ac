"""Prompts go to engines that live. A batch is handed out as answers come (prompt_queue.py).

When an engine is lost in the middle, its prompts are asked again elsewhere at once, and Ray starts the engine again
meanwhile. A version that all engines refuse ends the run with their reason, unless what is asked may come from the one
before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray

from tensorhub_plugins.core import VersionRefused, record
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf.health import LOST, Engines
from tensorhub_plugins.openrlhf.partial_answers import GivenBack
from tensorhub_plugins.openrlhf.prompt_queue import Place, Prompt, Work
from tensorhub_plugins.openrlhf.targets import Target

logger = get_logger(__name__)

ANSWER_INTERVAL_S = 2.0  # without an answer for this long, the engines are asked whether they live
HANDED_OUT_MAX = 64  # prompts at a time: each is a call of some milliseconds, and the fleet is told between them
REQUESTS_MAX = 256  # vLLM's own default of max_num_seqs
LOSSES_MAX = 20  # engines that one prompt may lose: something is wrong with the prompt then


class Router:
    """What the engines are asked, a batch at a time."""

    def __init__(self, engines: Engines, target: Target) -> None:
        self.engines, self._target = engines, target
        self.work = Work()
        self.evaluating: dict[str, int] = {}  # engines that alone are asked, each in the epoch in which it began
        self._collected = 0  # prompts since the run began

    def collect(self, arguments: dict[str, Any], version: int) -> None:
        """Let this prompt wait for an engine. version: the oldest it may be answered from."""
        self.work.waiting.append(Prompt(arguments, version, number=self._collected))
        self._collected += 1

    def hand_out(self) -> None:
        with self.engines.lock:
            forgotten, self.engines.forgotten = self.engines.forgotten, set()
        for name in forgotten:
            self.work.abandon(name)
        while self.work.waiting and self._hand_out_some():
            pass

    def _hand_out_some(self) -> int:
        """Hand out some of what waits; return how many have been asked."""
        version = self._wait_for_able()
        with self.engines.lock:  # the fleet hears of an engine as it is after this
            live = self.engines.table.able(version)
            evaluating = [m for m in live if self.evaluating.get(m.name) == m.epoch]
            if self.evaluating and not evaluating:
                logger.warning("the evaluation goes on with other versions: all engines that it began with are lost")
                self.evaluating = {}
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
            version = self._target.bounded(self.work.version)
            try:
                self.engines.ready(version)
                return version
            except VersionRefused:
                now = self._target.bounded(self._target.instead_of(version))
                if now == version:
                    raise
                self.work.ask_for(now)

    def _tell(self) -> None:
        self.engines.in_flight, self.engines.waiting = dict(self.work.in_flight), len(self.work.waiting)

    def answers(self) -> list[Any]:
        """Return what has been answered since, the samples of each prompt; those of lost engines wait again."""
        ready, _ = ray.wait(list(self.work.asked), num_returns=1, timeout=ANSWER_INTERVAL_S)
        if not ready:
            self.engines.check()
        answers = []
        for ref in ready:
            name, asked = self.work.asked[ref]
            try:
                answer = ray.get(ref)
            except VersionRefused as error:
                self.engines.refused_by_name(name, error)
                self.work.given_back(ref)
                continue
            except LOST as error:
                prompt = self.work.lost(ref)
                self.engines.lost_by_name(prompt.lost[-1], prompt.epoch, error)
                if len(prompt.lost) > LOSSES_MAX:
                    raise
                continue
            if isinstance(answer, GivenBack):
                self.work.given_back(ref, journals=answer.journals)
                self.engines.leaves_by_name(name, asked.epoch)
                record("request_given_back", worker=f"{name}/0", tokens=answer.tokens)
            else:
                self.work.answered(ref)
                self.engines.answered_by_name(name, asked.version)
                record("prompt", worker=f"{name}/0", number=asked.number, samples=len(answer))
                answers.append(answer)
        self._tell()
        return answers
