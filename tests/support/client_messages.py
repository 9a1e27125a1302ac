"""Messages that clients may send, and some that they should not: about few versions and sessions, which interact."""

from __future__ import annotations

import random

from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.protocol.fields import SERIAL_MAX
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey

A, B, C = (letter.encode() * 16 for letter in "abc")
RUNTIME = "runtime:f"
KEYS = [ShardKey(version, layout) for version in (1, 2, 3) for layout in (CHECKPOINT, RUNTIME)]
HUB = b"H" * 16


def hello(replica: str, request_id: int = 1) -> m.Hello:
    held = (m.Holding(KEYS[0], b"r" * 16, 100),)
    lease = m.HeldLease(3, 1, CHECKPOINT, {0: B}, 9.0)
    return m.Hello(
        "run", "actor", replica, 0, 1, Location("dc", "rack", replica), {"tcp": "tcp://1.2.3.4:5"}, held, (lease,),
        (KEYS[1],), 2, request_id, (2,), 1, 1, 1, Directive(3, 1, (7,)), HUB,
    )  # fmt: skip


def client_messages(rng: random.Random) -> list[m.ClientMessage]:
    """Return one of each, about few versions and shards, so that they interact."""
    number, key = rng.randrange(1, 60), rng.choice(KEYS)
    version = rng.choice((0, 1, 2, 3))
    return [
        hello(rng.choice("abc"), number),
        m.Heartbeat(HUB, number, (number,), {number: 1}, rng.choice((0, 77)), rng.choice((0, 78))),
        m.Publish(number, m.Holding(key, b"r" * 16, 100, rng.random() < 0.7, rng.choice(("published", "replicated")))),
        m.Unpublish(number, (key,), rng.choice((0.0, 5.0)), rng.random() < 0.3),
        m.Acquire(
            number, version, 0, rng.choice(((CHECKPOINT,), (RUNTIME, CHECKPOINT))), rng.choice((0.0, 9.0)),
            rng.random() < 0.3, (0,), CHECKPOINT, 1, (A,), (rng.choice((A, B)),) * rng.randrange(2),
            rng.random() < 0.5, (B,) * rng.randrange(2), rng.random() < 0.5,
        ),
        m.Release(number, rng.choice((None, 0)), rng.random() < 0.5, (1,) * rng.randrange(2), number % 2 == 0),
        m.Abandon(number, key),
        m.Wait(number, version, 0, 5.0),
        m.Target(number, version, 5.0, (1,), 2),
        m.Pin(number, version, 5.0),
        m.Withdraw(number, max(1, version), 5.0),
        m.Retain(number, 3),
        m.Begin(number, min(version, 9), 5.0, "word", ("boot pid:[1] 7 8",), True),
        m.AskVersions(number),
        m.AskStatus(number),
        m.Bye(),
    ]  # fmt: skip


def hostile_messages(rng: random.Random, others: list[bytes]) -> list[m.ClientMessage]:
    """Return those, and some that are meant to harm: large numbers, other workers' sessions, names and requests."""
    number, key, other = rng.randrange(1, 60), rng.choice(KEYS), rng.choice(others)
    far = rng.choice((9, 1_000_002, 1 << 47, 1 << 48))
    held = m.Holding(
        ShardKey(far, CHECKPOINT), b"f" * 16, 1, rng.random() < 0.5, rng.choice(("published", "replicated"))
    )
    lease = m.HeldLease(
        number, rng.choice((1, 2, far)), CHECKPOINT, {n: other for n in range(rng.randrange(1, 9))}, 1e6
    )
    forged = m.Hello(
        "run", "actor", rng.choice(("trainer", "reader", "evil")), 0, 1, Location(), {"tcp": "tcp://6.6.6.6:6"},
        (held, m.Holding(key, b"x" * 16, 1)), (lease,) * rng.randrange(4), (key,), rng.choice((None, 0, 1024)), number,
        (number,), far, far, far, Directive(rng.choice((1, SERIAL_MAX)), far, (1, 2)), rng.choice((HUB, b"", None)),
    )  # fmt: skip
    return [
        *client_messages(rng),
        forged,
        m.Publish(number, held),
        m.Publish(number, m.Holding(key, b"x" * 16, 1)),
        m.Unpublish(number, tuple(KEYS), 0.0, True),
        m.Acquire(number, rng.choice((0, 1, 2, far)), far, (CHECKPOINT,), 1e6, True, serve=True),
        m.Acquire(number, 1, 0, (CHECKPOINT,), 1e6, False, (0,) * 99, CHECKPOINT, 1),
        m.Release(number, 0, True, (1, 2, 3)),
        m.Wait(number, far, far, 1e6),
        m.Target(number, far, 1e6, (1, 2), SERIAL_MAX),
        m.Pin(number, far, 0.0),
        m.Withdraw(number, 1, 0.0),
        m.Retain(number, 1024),
    ]
