"""PURE: which version each token of a request came from, as the engine core saw it.

The engine core is the one place where requests and weights change one after the other: a request is added, the weights
are switched while nothing runs, and the scheduler knows how many tokens every request has by then. So this is exact,
also where requests outlive a change of the weights ("follow": "now", or "idle" when its patience ends).

Only requests whose name asks for it (`NAMED`) are remembered. The caller keeps the request's name; vLLM adds to it
as well which of several prompts and which of `n` answers one is: of these each has its own versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PREFIX = "tensorhub-"
NAMED = re.compile(rf"(?:^([0-9]{{1,9}})_.*?)?({PREFIX}[0-9a-f]{{32}})(?:[-_]([0-9]{{1,7}})(?:-|$))?")  # RANDOM has 8
REQUESTS_MAX = 100_000  # answers remembered; beyond that those of the oldest are forgotten, and not used

Start = tuple[int, int]  # a version, and the first token that came from it
Span = tuple[int, int]  # a version, and how many tokens in a row came from it
Place = tuple[int, int]  # of an answer among those of its request: which prompt, which of `n`


class Spans:
    """version: of the tokens that come now; 0 while it is not known."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self.version = 0
        self._is_known = False  # also that they are of no version
        self._requests_max = requests_max
        self._starts: dict[str, dict[Place, list[Start]]] = {}  # none: of an answer that is not known
        self._requests: dict[str, dict[Place, str]] = {}  # vLLM's names of these
        self._count = 0  # of answers

    def added(self, request: str) -> None:
        """Note that a request has come, under vLLM's name for it."""
        found = _named(request)
        if found is None:
            return
        name, place = found
        answers = self._starts.setdefault(name, {})
        self._count += place not in answers
        is_first = self._requests.setdefault(name, {}).setdefault(place, request) == request
        answers[place] = [(self.version, 0)] if is_first else []
        while self._count > self._requests_max:
            self.pop(next(iter(self._starts)))

    def switched(self, version: int, produced: Mapping[str, int]) -> None:
        """Note that the weights are another version from here on. produced: the tokens that each unfinished request
        has."""
        for request, tokens in produced.items():
            found = _named(request)
            starts = None if found is None else self._starts.get(found[0], {}).get(found[1])
            if not starts:
                continue
            if starts[-1][1] == tokens:  # none came from the version before
                starts.pop()
            if not starts or starts[-1][0] != version:
                starts.append((version, tokens))
        self.version, self._is_known = version, True

    def settle(self, version: int, produced: Mapping[str, int]) -> None:
        """Note that the weights turn out to be this version. What came before that was known came from it, too."""
        if not self._is_known:
            for starts in (starts for answers in self._starts.values() for starts in answers.values() if starts):
                starts[:] = [(version, 0)]
            self.version, self._is_known = version, True
        elif self.version != version:
            self.switched(version, produced)

    def of(self, name: str) -> list[tuple[Place, list[Start]]]:
        """Return where the versions of each answer of this request start, in tokens. Missing, or none: it is not
        known."""
        return sorted((place, list(starts)) for place, starts in self._starts.get(name, {}).items())

    def pop(self, name: str) -> list[tuple[Place, list[Start]]]:
        """Do as `of`, and forget the request."""
        found = self.of(name)
        self._count -= len(self._starts.pop(name, ()))
        self._requests.pop(name, None)
        return found


def spans_of(starts: Sequence[Sequence[int]], tokens: int) -> tuple[Span, ...]:
    """Return the spans of an answer that was read up to `tokens`: they add up to that, and there is at least one."""
    ends = [start for _, start in starts[1:]] + [tokens]
    spans = [(version, min(end, tokens) - start) for (version, start), end in zip(starts, ends, strict=True)]
    return tuple(span for span in spans if span[1] > 0) or ((starts[0][0], 0),)


def _named(request: str) -> tuple[str, Place] | None:
    """Return the name in vLLM's name of an answer, `[SAMPLE_]cmpl-NAME[-PROMPT]-RANDOM` (or `_PROMPT`), and its
    place."""
    found = NAMED.search(request)
    return None if found is None else (found[2], (int(found[3] or 0), int(found[1] or 0)))
