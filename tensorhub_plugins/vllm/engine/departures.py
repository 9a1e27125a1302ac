"""Which requests were aborted while an engine stands still: their callers have gone, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tensorhub_plugins.vllm.plugin import around


class Departures:
    """owner: what is asked to `abort_requests`, by clients that leave. running: the requests that there are."""

    def __init__(self, owner: Any, running: Callable[[], Iterable[str]]) -> None:
        self._gone: set[str] | None = None

        def abort_requests(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._gone is None:
                return original(*args, **kwargs)
            before = set(running())
            try:
                return original(*args, **kwargs)
            finally:
                self._gone |= before - set(running())

        around(owner, "abort_requests", abort_requests)

    def begin(self) -> None:
        """Note them from here on."""
        self._gone = set()

    def end(self) -> None:
        self._gone = None

    def take(self) -> list[str]:
        """Return those since the beginning, or since this was asked before."""
        gone = sorted(self._gone or ())
        if self._gone is not None:
            self._gone = set()
        return gone
