"""Attempts of one trainer: which versions count when it has started again at a lower step. PURE.

A trainer that restarts begins an attempt at the step of its checkpoint. Versions of former attempts above that step
are *superseded*: the restart has discarded their steps. Versions are ordered as (attempt, step), so what the attempt
publishes is newer than all before it, whatever its steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

from tensorhub_plugins.core.types import ATTEMPTS_MAX, STEPS_PER_ATTEMPT, attempt_of, step_of

ATTEMPTS_KEPT_MAX = 64  # that supersede others; what older ones have superseded no worker holds any more
Mark = Annotated[bytes, msgspec.Meta(max_length=16)]  # distinguishes two attempts of one number; b"": of no attempt
Step = Annotated[int, msgspec.Meta(ge=0, lt=STEPS_PER_ATTEMPT)]


class Attempt(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """One start of a trainer. step: former attempts are superseded above it."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=ATTEMPTS_MAX)]
    step: Step
    mark: Mark


Lineage: TypeAlias = tuple[Attempt, ...]  # by number, each at a higher step than the one before


def merged(*lineages: Iterable[Attempt]) -> Lineage:
    """Return the union of these lineages, in whatever order they came: attempts that end others, and the newest."""
    known: dict[int, Attempt] = {}
    for attempt in (each for lineage in lineages for each in lineage):
        other = known.get(attempt.number, attempt)  # two hubs may have assigned one number: one mark counts
        known[attempt.number] = Attempt(attempt.number, min(attempt.step, other.step), max(attempt.mark, other.mark))
    kept: list[Attempt] = []
    for number in sorted(known, reverse=True):
        if not kept or known[number].step < kept[-1].step:
            kept.append(known[number])
    return tuple(reversed(kept[:ATTEMPTS_KEPT_MAX]))


def conflicts(one: Lineage, other: Lineage) -> list[tuple[Attempt, Attempt]]:
    """Return the attempts of one number that two trainers have begun, at hubs that did not know of each other: for
    each, the one whose mark counts when both are merged, and the one whose trainer is over."""
    known = {attempt.number: attempt for attempt in one if attempt.mark}
    pairs = [(known[attempt.number], attempt) for attempt in other if attempt.mark and attempt.number in known]
    return [(max(a, b, key=_mark), min(a, b, key=_mark)) for a, b in pairs if a.mark != b.mark]


def _mark(attempt: Attempt) -> bytes:
    return attempt.mark


def is_superseded(version: int, lineage: Lineage) -> bool:
    """Return whether a later attempt began below this version's step."""
    attempt, step = attempt_of(version), step_of(version)
    return any(later.number > attempt and later.step < step for later in lineage)
