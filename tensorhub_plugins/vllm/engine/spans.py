"""PURE: which version each token of a request came from, as the engine core saw it.

The engine core is the one place where requests and weights change one after the other: a request is added, the weights
are switched while nothing runs, and the scheduler knows how many tokens every request has by then. So this is exact,
also where requests outlive a change of the weights ("follow": "now", or "idle" when its patience ends).

Only requests whose name asks for it (`NAMED`) are remembered. Who asked keeps the request's name; vLLM adds to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "tensorhub-"
NAMED = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
REQUESTS_MAX = 100_000  # remembered; beyond that the oldest are forgotten, and their answers are not used

Start = tuple[int, int]  # a version, and the first token that came from it


class Spans:
    """version: of the tokens that come now; 0 while it is not known."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self.version = 0
        self._requests_max = requests_max
        self._starts: dict[str, list[Start]] = {}

    def added(self, request: str) -> None:
        """A request has come, under vLLM's name for it."""
        found = NAMED.search(request)
        if found is None:
            return
        self._starts[found.group()] = [(self.version, 0)]
        while len(self._starts) > self._requests_max:
            del self._starts[next(iter(self._starts))]

    def switched(self, version: int, produced: Mapping[str, int]) -> None:
        """The weights are another version from here on. produced: the tokens that each unfinished request has."""
        for request, tokens in produced.items():
            found = NAMED.search(request)
            starts = self._starts.get(found.group()) if found is not None else None
            if starts is None:
                continue
            if starts[-1][1] == tokens:  # none came from the version before
                starts.pop()
            if not starts or starts[-1][0] != version:
                starts.append((version, tokens))
        self.version = version

    def settle(self, version: int, produced: Mapping[str, int]) -> None:
        """The weights turn out to be this version. What came before anybody knew came from it, too."""
        if self.version == 0:
            self._starts = {name: [(version, 0)] for name in self._starts}
            self.version = version
        elif self.version != version:
            self.switched(version, produced)

    def of(self, name: str) -> list[Start] | None:
        """Where the versions of this request start, in tokens; None: it is not known (any more)."""
        starts = self._starts.get(name)
        return None if starts is None else list(starts)
