"""What is known of the endpoints of sources that have several, of both families or of two networks. PURE.

An endpoint that did not let its reader in, while another one did, or over which a source was lost, is asked last for a
minute, and of several of those the one that failed first is asked before the others. Of the rest the first that was
told counts, unless another one was measured to be clearly faster: the first read of a source gets one segment over each
(`SourceReader._measure`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SHUT_S = 60.0  # how long an endpoint that did not answer is asked last
MEASURED_S = 600.0  # how long a measurement counts: networks change
FASTER = 1.25  # by which another endpoint must be faster: less is noise
KNOWN_MAX = 4096  # endpoints; the oldest are forgotten


class Ways:
    """The endpoints of all sources of this process. `now`: of time.monotonic()."""

    def __init__(self) -> None:
        self._shut_until: OrderedDict[str, float] = OrderedDict()
        self._rates: OrderedDict[str, tuple[float, float]] = OrderedDict()  # bytes/s, and until when that counts

    def order(self, endpoints: Sequence[str], now: float) -> list[str]:
        """Return the endpoints of one source in the order in which to try them."""
        fastest = max(self._rate(each, now) for each in endpoints)
        return sorted(endpoints, key=lambda each: (self._shut(each, now), self._rate(each, now) * FASTER < fastest))

    def unmeasured(self, endpoints: Sequence[str], now: float) -> list[str]:
        """Return those of one source's endpoints to measure: none when there is nothing to compare."""
        may = [each for each in endpoints if not self._shut(each, now)]
        return may if len(may) > 1 and not all(self._rate(each, now) for each in may) else []

    def shut(self, endpoint: str, now: float) -> None:
        """Note that this endpoint did not let us in, or that nothing comes from there."""
        _put(self._shut_until, endpoint, now + SHUT_S)

    def measured(self, endpoint: str, bytes_per_s: float, now: float) -> None:
        """Note how fast bytes come from there."""
        _put(self._rates, endpoint, (bytes_per_s, now + MEASURED_S))

    def _shut(self, endpoint: str, now: float) -> float:
        """Return until when it is asked last; 0.0: it is not."""
        until = self._shut_until.get(endpoint, 0.0)
        return until if now < until else 0.0

    def _rate(self, endpoint: str, now: float) -> float:
        rate, until = self._rates.get(endpoint, (0.0, now))
        return rate if now < until else 0.0


def _put(known: OrderedDict[str, T], endpoint: str, value: T) -> None:
    known.pop(endpoint, None)
    known[endpoint] = value
    while len(known) > KNOWN_MAX:
        known.popitem(last=False)  # one step: going through a dict would be many, and other threads put into it


WAYS = Ways()  # each call is one step, so several threads may use it
