"""Messages as a stranger might send them: valid ones with something changed, by value or by byte."""

from __future__ import annotations

import random
from typing import Any

import msgspec

NESTED: list[Any] = []
for _ in range(200):
    NESTED = [NESTED]
NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 255, 65536, 1 << 31, 1 << 48, (1 << 48) + 1, (1 << 63) - 1, (1 << 64) - 1),
    *(-(1 << 63), 0.0, -0.0, 0.5, -1.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "x" * 300, "x" * 5000, "\x00", "é", b"", b"x", b"x" * 16, b"y" * 16, b"x" * 17, b"x" * 70000),
    *([], [[]], [0] * 3, [0] * 2000, [[0, 1]] * 2000, {}, {"": 0}, {0: b"x" * 16}, NESTED),
)
BYTES_MAX = 1 << 17  # of what one mutation makes


def mutated(rng: random.Random, body: bytes) -> bytes:
    """Return a msgpack message with one to three changes."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.7:
            try:
                body = msgspec.msgpack.encode(_changed(rng, msgspec.msgpack.decode(body)))
            except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError):
                body = changed_bytes(rng, body)  # it is none any more
        else:
            body = changed_bytes(rng, body)
    return body[:BYTES_MAX]


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the data with some bytes flipped, replaced, removed, repeated, or added."""
    changed = bytearray(data or b"\x00")
    at = rng.randrange(len(changed))
    length = rng.choice((1, 1, 2, 4, 8, 64))
    what = rng.randrange(6)
    if what == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif what == 1:
        changed[at : at + length] = rng.randbytes(length)
    elif what == 2:
        del changed[at : at + length]
    elif what == 3:
        changed[at:at] = changed[at : at + length] * rng.choice((1, 2, 50))
    elif what == 4:
        changed[at:at] = rng.choice(
            (b"\xdd\xff\xff\xff\xff", b"\xdf\x00\x01\x00\x00", b"\xc6\x7f\xff\xff\xff", b"\x91" * 900)
        )
    else:
        changed = changed[:at]
    return bytes(changed)


def _changed(rng: random.Random, value: Any) -> Any:
    """Return a copy of this value with something in it replaced."""
    if isinstance(value, list) and value and rng.random() < 0.85:
        copy = list(value)
        at, what = rng.randrange(len(copy)), rng.random()
        if what < 0.8:
            copy[at] = _changed(rng, copy[at])
        elif what < 0.87:
            del copy[at]
        elif what < 0.94:
            copy.insert(at, copy[at])
        else:
            copy = copy * rng.choice((2, 30))
        return copy[:5000]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: _changed(rng, value[key])}
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.3:
        return max(-(1 << 63), min((1 << 64) - 1, value + rng.choice((-1, 1, 7, -value, value))))
    return rng.choice(NASTY)
