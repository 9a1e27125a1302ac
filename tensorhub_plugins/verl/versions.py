"""PURE: verl's steps and the store's versions, and which versions a sample's tokens came from.

verl counts steps from 0 (the weights before training); the store's are positive: one more. In the trainer's first
attempt that is the version, too; a trainer that starts again has others (`core.version_of`).

An engine that keeps its requests while its weights change gives samples whose tokens come from several versions. A
`Span` says so exactly. verl's accounting reads `min_global_steps` and `max_global_steps` of a sample, which two clients
fill in: `LLMServerClient` takes what the server gives. `FullyAsyncLLMServerClient` (separate_async, fully_async) knows
one step per answer, and takes the first and last of several answers when a request was interrupted: what it knows is
corrected when it has the whole sample (`routing.watch_client`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tensorhub_plugins.core import attempt_of, step_of, version_text


def version_of_step(step: int) -> int:
    return step + 1


def step_of_version(version: int) -> int:
    return step_of(version) - 1


def waits_for_trainer(version: int, attempt: int) -> str:
    """Why a replica with this version takes no work: the trainer's newest attempt is this one. "": it does.

    A version of a former life may be far behind the step from which the trainer resumes, or of a past that did not
    happen. The first of the new life comes at once."""
    if attempt_of(version) >= attempt:
        return ""
    return f"has version {version_text(version)}, and waits for the first of attempt {attempt}"


class Span(NamedTuple):
    """`tokens` tokens in a row that one step's weights produced."""

    step: int
    tokens: int


class Ledger:
    """What an engine's running requests have produced so far, step by step."""

    def __init__(self) -> None:
        self._closed: dict[str, list[Span]] = {}

    def switched(self, old_step: int, produced: Mapping[str, int]) -> None:
        """The weights change now. produced: tokens that each running request has so far."""
        for request, total in produced.items():
            spans = self._closed.get(request, [])
            new = total - sum(span.tokens for span in spans)
            if new > 0:
                self._closed[request] = [*spans, Span(old_step, new)]

    def finished(self, request: str, total: int, step: int) -> tuple[Span, ...]:
        """The spans of a request that ended with `total` tokens while `step` was live."""
        spans = self._closed.pop(request, [])
        rest = total - sum(span.tokens for span in spans)
        if rest > 0:
            spans = [*spans, Span(step, rest)]
        return tuple(spans)

    def forget(self, request: str) -> None:
        """The request failed; it will never be reported."""
        self._closed.pop(request, None)
