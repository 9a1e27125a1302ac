"""What operators and trainers have decided about the versions of one history. PURE."""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec

from tensorhub_plugins.core.protocol.fields import Count, Number, Serial
from tensorhub_plugins.core.protocol.lineage import ATTEMPTS_KEPT_MAX, Attempt, is_superseded, merged

WITHDRAWN_MAX = 256  # versions that a directive names, the newest: older ones have long lost their last holder


class Directive(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """What operators have decided about the versions of one history.

    pin: the version that all followers are to run; 0: the newest. withdrawn: versions that are bad, in order. attempts:
    which its trainers have begun, see lineage.py. The hub sends it to every worker of the history, and every worker
    announces it in its Hello, so that it outlives the hub. Each decision takes the next serial."""

    serial: Serial = 0
    pin: Count = 0
    withdrawn: Annotated[tuple[Number, ...], msgspec.Meta(max_length=WITHDRAWN_MAX)] = ()
    attempts: Annotated[tuple[Attempt, ...], msgspec.Meta(max_length=ATTEMPTS_KEPT_MAX)] = ()

    @property
    def mark(self) -> bytes:
        """Return the mark of the newest attempt; b"": none was begun."""
        return self.attempts[-1].mark if self.attempts else b""

    def is_over(self, version: int) -> bool:
        """Return whether this version must not be read or run any more: it was withdrawn, or is superseded."""
        return version in self.withdrawn or is_superseded(version, self.attempts)


NO_DIRECTIVE = Directive()


def merge(one: Directive, other: Directive) -> Directive:
    """Return the union of both, whatever the order in which they came.

    The pin is that of the higher serial, or the higher one if two hubs have assigned the same serial, of which the
    second one did not know yet. A withdrawal is never undone. A version that is over is not pinned."""
    if one == other:
        return one
    serial, pin = max((one.serial, one.pin), (other.serial, other.pin))
    withdrawn = tuple(sorted({*one.withdrawn, *other.withdrawn})[-WITHDRAWN_MAX:])
    both = Directive(serial, pin, withdrawn, merged(one.attempts, other.attempts))
    return msgspec.structs.replace(both, pin=0) if both.is_over(pin) else both


def directive_checksum(directive: Directive) -> int:
    """Return a number by which two sides check that they know the same directive."""
    return 1 + zlib.crc32(msgspec.msgpack.encode(directive))
