"""What is known of the endpoints of sources that have several, of both families or of two networks. PURE.

An endpoint that did not let its reader in, while another one did, is asked last for a minute. Of the others the first
that was told counts, unless another one was measured to be clearly faster: the first read of a source gets one segment
over each (`SourceReader._measure`).
"""

from __future__ import annotations

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
        self._shut_until: dict[str, float] = {}
        self._rates: dict[str, tuple[float, float]] = {}  # bytes/s, and until when that counts

    def order(self, endpoints: Sequence[str], now: float) -> list[str]:
        """Return the endpoints of one source in the order in which to try them."""
        fastest = max(self._rate(each, now) for each in endpoints)
        return sorted(endpoints, key=lambda each: (self._is_shut(each, now), self._rate(each, now) * FASTER < fastest))

    def unmeasured(self, endpoints: Sequence[str], now: float) -> list[str]:
        """Return those of one source's endpoints to measure: none when there is nothing to compare."""
        may = [each for each in endpoints if not self._is_shut(each, now)]
        return may if len(may) > 1 and not all(self._rate(each, now) for each in may) else []

    def shut(self, endpoint: str, now: float) -> None:
        """Note that this endpoint did not let us in."""
        _put(self._shut_until, endpoint, now + SHUT_S)

    def measured(self, endpoint: str, bytes_per_s: float, now: float) -> None:
        """Note how fast bytes come from there."""
        _put(self._rates, endpoint, (bytes_per_s, now + MEASURED_S))

    def _is_shut(self, endpoint: str, now: float) -> bool:
        return now < self._shut_until.get(endpoint, now)

    def _rate(self, endpoint: str, now: float) -> float:
        rate, until = self._rates.get(endpoint, (0.0, now))
        return rate if now < until else 0.0


def _put(known: dict[str, T], endpoint: str, value: T) -> None:
    known.pop(endpoint, None)
    known[endpoint] = value
    if len(known) > KNOWN_MAX:
        del known[next(iter(known))]


WAYS = Ways()  # each call is one step, so several threads may use it
