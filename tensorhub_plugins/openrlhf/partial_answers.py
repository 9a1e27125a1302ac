"""What a sample has got so far, so that another engine can go on with it: the answers of its engine, call by call.

An agent asks its engine once or in several turns. An engine that has to leave in partial rollout gives its prompts back
with a journal of every sample (`GivenBack`). The next engine runs the agent again: as long as it asks the same, the
journal answers, at once and with the tokens, log-probabilities and versions of then; the last answer, which was broken
off, is continued. From the first question that differs (an environment with chance in it) the sample is made anew.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

from tensorhub_plugins.core import TensorHubError


@dataclass
class Call:
    """One question to an engine. output: vLLM's CompletionOutput, whole or broken off."""

    prompt: tuple[int, ...]
    output: Any
    versions: tuple[int, ...]  # that its tokens came from, in order
    is_whole: bool


@dataclass
class Journal:
    calls: list[Call] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.calls, self._replayed = state["calls"], 0

    def __post_init__(self) -> None:
        self._replayed = 0

    def find(self, prompt: Sequence[int]) -> Call | None:
        """Return what was answered when this was asked; from the first question that differs on, nothing."""
        if self._replayed == len(self.calls):
            return None
        call = self.calls[self._replayed]
        if call.prompt != tuple(prompt):
            del self.calls[self._replayed :]
            return None
        self._replayed += call.is_whole  # one that was broken off stays until it is noted with what comes to it
        return call

    def note(self, call: Call) -> None:
        """Note the answer of this engine, in the place of one that was broken off."""
        self.calls[self._replayed :] = [call]
        self._replayed = len(self.calls)


@dataclass
class GivenBack:
    """Instead of answers: this prompt is to be asked elsewhere. journals: of its samples, in order; None: from the
    beginning."""

    journals: list[Journal] | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens that are kept."""
        return sum(len(call.output.token_ids) for journal in self.journals or () for call in journal.calls)


class Leaving(TensorHubError):
    """Inside an engine: this request was broken off because the engine has to leave."""


class Journals:
    """Of the samples of one prompt, which begin in order."""

    def __init__(self, given: Sequence[Journal] | None, count: int) -> None:
        self.all = list(given) if given else [Journal() for _ in range(count)]
        self._begun = 0

    def begin(self) -> None:
        """Note that the task that makes the next sample has begun."""
        _of_task.set(self.all[self._begun])
        self._begun += 1


of_prompt: contextvars.ContextVar[Journals | None] = contextvars.ContextVar("journals of the prompt", default=None)
_of_task: contextvars.ContextVar[Journal | None] = contextvars.ContextVar("journal of the sample", default=None)


def of_sample() -> Journal | None:
    """Return the journal of the sample that this task makes; None where no other engine would go on with it."""
    return _of_task.get()


def rest_of(params: Any, call: Call) -> Any | None:
    """Return vLLM's sampling parameters for what is missing; None: nothing is. PURE."""
    done = len(call.output.token_ids)
    if params.max_tokens is not None and params.max_tokens <= done:
        return None
    rest = deepcopy(params)
    rest.min_tokens = max(0, (params.min_tokens or 0) - done)
    if params.max_tokens is not None:
        rest.max_tokens = params.max_tokens - done
    return rest


def joined(call: Call, rest: Any) -> Any:
    """Return what was there and what has come to it, as one output of vLLM. PURE."""
    whole = copy(rest)
    whole.token_ids = [*call.output.token_ids, *rest.token_ids]
    whole.text = call.output.text + rest.text
    if rest.logprobs is not None:
        whole.logprobs = [*(call.output.logprobs or []), *rest.logprobs]
    if None not in (call.output.cumulative_logprob, rest.cumulative_logprob):
        whole.cumulative_logprob = call.output.cumulative_logprob + rest.cumulative_logprob
    return whole
