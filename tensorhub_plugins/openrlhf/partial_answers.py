"""What a sample has got so far, so that another engine can go on with it: the answers of its engine, call by call.

An agent asks its engine once or in several turns. An engine that has to leave in partial rollout gives its prompts back
with a journal of every sample (`GivenBack`). The next engine runs the agent again: as long as it asks the same, the
journal answers, at once and with the tokens, log-probabilities and versions of then; the last answer, which was broken
off, is continued. From the first question that differs (an environment with chance in it) the sample is made anew.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from tensorhub_plugins.core import TensorHubError

# Of vLLM's sampling parameters: what looks at all tokens of an answer, and would begin again with the rest of one.
OF_WHOLE_ANSWERS = (
    *("structured_outputs", "bad_words", "presence_penalty", "frequency_penalty", "repetition_detection"),
    *("extra_args", "trace_decode_token_ids"),
)
NUMBERS = ("seed", "thinking_token_budget")  # the same, of which 0 is one
CUT_OFF = "\ufffd"  # how a tokenizer writes a character of which bytes are missing


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


def rest_of(params: Any, call: Call, tokenizer: Any) -> Any | None:
    """Return vLLM's sampling parameters for what is missing; None: an answer to these would be another one than one
    that was not broken off. PURE."""
    tokens, stop = list(call.output.token_ids), getattr(params, "stop", None) or ()
    stops = [stop] if isinstance(stop, str) else stop
    is_in_one = any(call.output.text.endswith(each[:end]) for each in stops for end in range(1, len(each)))
    is_counted = any(getattr(params, name, None) is not None for name in NUMBERS)
    if not tokens or is_in_one or is_counted or any(getattr(params, name, None) for name in OF_WHOLE_ANSWERS):
        return None
    skips = bool(getattr(params, "skip_special_tokens", True))
    if tokenizer.decode(tokens, skip_special_tokens=skips).endswith(CUT_OFF):
        return None  # vLLM would take all of the prompt for text of the answer, and look for stop strings there
    rest = deepcopy(params)
    rest.min_tokens = max(0, (params.min_tokens or 0) - len(tokens))
    if params.max_tokens is not None:
        rest.max_tokens = params.max_tokens - len(tokens)
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
