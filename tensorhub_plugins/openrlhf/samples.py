"""The samples that an engine makes, whose question one is, and which versions have answered a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tensorhub_plugins.core import TensorHubError, step_of
from tensorhub_plugins.openrlhf.partial_answers import Journal
from tensorhub_plugins.openrlhf.versions import FIRST, LAST


@dataclass(eq=False)
class Sample:
    """One sample of a prompt, while its agent makes it."""

    errors: list[TensorHubError]  # why questions were not answered, of all samples of its prompt
    journal: Journal | None  # None: no other engine would go on with it
    steps: list[int] = field(default_factory=list)  # of the versions that its answers came from
    has_ended: bool = False


# A task has its own context, which those that it begins inherit.
_asking: ContextVar[Sample | None] = ContextVar("the sample that this task makes, or is begun by", default=None)


def asking() -> Sample | None:
    """Return the sample that this task makes, or is begun by; None where that has ended, or there is none."""
    sample = _asking.get()
    return None if sample is None or sample.has_ended else sample


class Samples:
    """Those that are being made. What is said of a question is said of the sample that asks, or of all of them: an
    agent may have a task, a thread, or a server in the place of the engine, that an earlier sample has begun.

    An agent may make an answer or an error of its own of a question that was broken off, which is neither a sample nor
    the end of the run: see `Sample.errors`."""

    def __init__(self) -> None:
        self._being_made: dict[Sample, asyncio.Task[Any] | None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # the actor's

    def begin(
        self,
        make: Callable[[], Awaitable[dict[str, Any]]],
        errors: list[TensorHubError],
        journal: Journal | None = None,
    ) -> asyncio.Task[dict[str, Any]]:
        """Return the task that makes a sample, which says of which versions its answers are."""
        sample = Sample(errors, journal)
        self._loop = asyncio.get_running_loop()

        async def made() -> dict[str, Any]:
            _asking.set(sample)
            self._being_made[sample] = asyncio.current_task()
            try:
                response = await make()
            finally:
                del self._being_made[sample]
                sample.has_ended = True
            if sample.steps:
                logs = response.get("extra_logs") or {}
                response["extra_logs"] = {**logs, FIRST: min(sample.steps), LAST: max(sample.steps)}
            return response

        return asyncio.ensure_future(made())

    def break_off(self, error: TensorHubError) -> None:
        """End all that are still being made, as in their environments: their prompts are asked elsewhere, for this."""
        for sample, task in list(self._being_made.items()):
            sample.errors.append(error)
            if task is not None:
                task.cancel()

    def came_from(self, *versions: int) -> None:
        """Note that the tokens just made are of these versions."""
        for sample in self._asking():
            sample.steps.extend(step_of(version) for version in versions)

    def note(self, error: TensorHubError) -> TensorHubError:
        """Note why a question was not answered, and return it. The sample may go on when its prompt is asked elsewhere
        already."""
        for sample in self._asking():
            sample.errors.append(error)
        return error

    def _asking(self) -> list[Sample]:
        sample = asking()
        return list(self._being_made) if sample is None else [sample]

    async def in_own_loop(self, question: Coroutine[Any, Any, Any]) -> Any:
        """Return what this question is answered, in the actor's own loop: the sockets to vLLM are of one thread, and an
        agent may ask from another one, as OpenRLHF's example of a server in the engine's actor."""
        loop = self._loop
        if loop is None or loop is asyncio.get_running_loop():
            return await question
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, loop))


async def whole(
    samples: Sequence[asyncio.Task[dict[str, Any]]], errors: Sequence[TensorHubError]
) -> list[dict[str, Any]] | None:
    """Return the samples of a prompt; or None where questions of theirs were broken off: what the agent makes of these
    counts for nothing."""
    try:
        answers = await asyncio.gather(*samples)
    except (Exception, asyncio.CancelledError):  # an agent's, which has cancelled what else it had asked
        if not errors:
            raise
    return None if errors else list(answers)
