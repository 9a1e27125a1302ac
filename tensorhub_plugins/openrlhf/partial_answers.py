"""What a sample has got so far, so that another engine can go on with it: the answers of its engine, call by call.

An agent asks its engine once or in several turns. An engine that has to leave in partial rollout gives its prompts back
with a journal of every sample (`GivenBack`). The next engine runs the agent again: as long as it asks the same, the
journal answers, at once and with the tokens, log-probabilities and versions of then; the last answer, which was broken
off, is continued. From the first question that differs (an environment with chance in it) the sample is made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import pickle
from collections.abc import Coroutine, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from tensorhub_plugins.core import TensorHubError

# Of vLLM's sampling parameters: what looks at all tokens of an answer, and would begin again with the rest of one.
OF_WHOLE_ANSWERS = (
    *("structured_outputs", "bad_words", "presence_penalty", "frequency_penalty"),
    *("thinking_token_budget", "repetition_detection"),
)


@dataclass
class Call:
    """One question to an engine. output: vLLM's CompletionOutput, whole or broken off."""

    prompt: tuple[int, ...]
    output: Any
    versions: tuple[int, ...]  # that its tokens came from, in order
    is_whole: bool
    beside: str = ""  # what was asked with the prompt, see `beside`
    told: dict[str, Any] = field(default_factory=dict)  # what else vLLM's RequestOutput says

    @property
    def answer(self) -> Any:
        """Return what an agent reads of vLLM's RequestOutput."""
        return _own(SimpleNamespace(**{**self.told, "outputs": [_own(self.output)]}))


def _own(given: Any) -> Any:
    """Return a copy whose lists an agent may change: what is noted stays as it was."""
    own = copy(given)
    vars(own).update({name: copy(value) for name, value in vars(given).items()})
    return own


def beside(params: Any, images: Any) -> str:
    """Return what tells a question from others with the same prompt: images, above all, are the same tokens there."""
    how = repr(msgspec.to_builtins(params, enc_hook=repr))  # vLLM's own text leaves out some of them
    return hashlib.sha256(pickle.dumps((how, images))).hexdigest()


@dataclass
class Journal:
    calls: list[Call] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.calls, self._replayed = state["calls"], 0

    def __post_init__(self) -> None:
        self._replayed = 0

    def find(self, prompt: Sequence[int], beside: str = "") -> Call | None:
        """Return what was answered when this was asked, once; from the first question that differs on, nothing. What
        was broken off stays until it is noted with what comes to it."""
        if self._replayed == len(self.calls):
            return None
        call = self.calls[self._replayed]
        if (call.prompt, call.beside) != (tuple(prompt), beside):
            del self.calls[self._replayed :]
            return None
        self._replayed += 1
        return call

    def note(self, call: Call, before: Call | None = None) -> None:
        """Note the answer of this engine, in the place of what `find` has returned, which was broken off."""
        for place, each in enumerate(self.calls):
            if each is before:
                self.calls[place] = call
                return
        self.calls.append(call)
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


class BrokenOff:
    """The questions that an engine could not answer, of each prompt that it has. An agent may make an answer or an
    error of its own of one, which is neither a sample nor the end of the run."""

    def __init__(self) -> None:
        self._prompts: list[list[TensorHubError]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # the actor's

    @contextlib.contextmanager
    def of_prompt(self) -> Iterator[list[TensorHubError]]:
        """Yield what is noted while this prompt is answered."""
        noted: list[TensorHubError] = []
        self._loop = asyncio.get_running_loop()
        self._prompts.append(noted)
        try:
            yield noted
        finally:
            self._prompts = [each for each in self._prompts if each is not noted]

    async def in_own_loop(self, question: Coroutine[Any, Any, Any]) -> Any:
        """Return what this question is answered, in the actor's own loop: the sockets to vLLM are of one thread, and an
        agent may ask from another one, as OpenRLHF's example of a server in the engine's actor."""
        loop = self._loop
        if loop is None or loop is asyncio.get_running_loop():
            return await question
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, loop))

    def note(self, error: TensorHubError) -> TensorHubError:
        """Note this for the prompt of the sample that this task makes, or is begun by, and return it. The sample may go
        on when its prompt is asked elsewhere already. For all prompts where it has ended, or there is none: an agent
        may have a task, or a server in the place of the engine, that an earlier sample has begun."""
        noted, sample = _of_sample.get(([], None))
        for each in self._prompts if sample is None or sample.done() else [noted]:
            each.append(error)
        return error


def begin_sample(making: Coroutine[Any, Any, dict[str, Any]], errors: list[TensorHubError]) -> asyncio.Task[Any]:
    """Return the task that makes this sample of a prompt. errors: that prompt's, see `BrokenOff`."""

    async def make() -> dict[str, Any]:
        _of_sample.set((errors, asyncio.current_task()))
        return await making

    return asyncio.ensure_future(make())


async def whole_samples(
    samples: Sequence[asyncio.Task[dict[str, Any]]], errors: list[TensorHubError]
) -> list[dict[str, Any]] | None:
    """Return the samples of a prompt; or None where questions of theirs were broken off, which are in `errors` then:
    what the agent makes of these counts for nothing."""
    try:
        answers = await asyncio.gather(*samples)
    except (Exception, asyncio.CancelledError):  # an agent's, which has cancelled what else it had asked
        if not errors:
            raise
    return None if errors else list(answers)


_of_sample: contextvars.ContextVar[Any] = contextvars.ContextVar("errors of the prompt, and the sample's task")


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
    """Return the journal of the sample that this task makes, or is begun by; None where that has ended, or no other
    engine would go on with it."""
    _, sample = _of_sample.get(([], None))
    return None if sample is None or sample.done() else _of_task.get()


def rest_of(params: Any, call: Call) -> Any | None:
    """Return vLLM's sampling parameters for what is missing; None: an answer to these would be another one than one
    that was not broken off. PURE."""
    done, stop = len(call.output.token_ids), getattr(params, "stop", None) or ()
    stops = [stop] if isinstance(stop, str) else stop
    is_in_one = any(call.output.text.endswith(each[:end]) for each in stops for end in range(1, len(each)))
    is_drawn = getattr(params, "seed", None) is not None  # with the numbers of the beginning again
    if is_in_one or is_drawn or any(getattr(params, name, None) for name in OF_WHOLE_ANSWERS):
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
