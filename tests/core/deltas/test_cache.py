"""The cache of deltas: bounded, each made once, chains instead of what nobody has, and no time spent in vain."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core.deltas.cache import ENTRY_SIZE_BYTES, TRIED_AGAIN_AFTER, Deltas
from tensorhub_plugins.core.deltas.frame import CHAIN_MAX, Step, frame_of, links_of, steps_of

A, B, C, D, E, F = (bytes([number]) * 16 for number in range(6))


def test_it_is_bounded_and_forgets_the_oldest():
    deltas = Deltas(3 * (100 + ENTRY_SIZE_BYTES))
    for base in (A, B, C):
        deltas.put(base, F, b"x" * 100)
    assert deltas.chain([A], F, 1000) == [Step(A, b"x" * 100)]  # used, so the newest
    deltas.put(D, F, b"x" * 100)
    assert deltas.chain([B], F, 1000) is None and deltas.chain([A], F, 1000) is not None
    assert deltas.size_bytes <= 3 * (100 + ENTRY_SIZE_BYTES)
    deltas.put(E, F, b"x" * 10_000)  # larger than all of it
    assert deltas.size_bytes == 0
    deltas.fit(8 * 20_000)
    deltas.put(E, F, b"x" * 10_000)
    assert deltas.chain([E], F, 10_000) == [Step(E, b"x" * 10_000)]


def test_the_shortest_chain_that_is_small_enough_is_taken():
    deltas = Deltas()
    for base, made in ((A, B), (B, C), (C, D), (D, E), (E, F)):
        deltas.put(base, made, base[:1] * 10)
    assert deltas.chain([C], E, 20) == [Step(C, C[:1] * 10), Step(D, D[:1] * 10)]
    assert deltas.chain([C], E, 19) is None
    assert deltas.chain([A], F, 1000) is None  # more than CHAIN_MAX
    assert len(deltas.chain([B], F, 1000) or []) == CHAIN_MAX
    assert deltas.chain([B], F, 1000, CHAIN_MAX - 1) is None and deltas.chain([A, F], F, 1000) == []
    deltas.put(B, F, b"short")
    assert deltas.chain([A, B], F, 1000) == [Step(B, b"short")]
    deltas.drop(B, F)
    deltas.drop(D, E)
    assert deltas.chain([B], F, 1000) is None


def test_many_that_ask_at_once_have_it_made_once():
    deltas, made, begun = Deltas(), [], threading.Barrier(8)

    def make() -> bytes:
        made.append(1)
        return b"delta"

    def ask() -> bytes | None:
        begun.wait()
        return deltas.made(A, B, make, rate=0.0)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask) for _ in range(8)]
    assert [answer.result() for answer in answers] == [b"delta"] * 8 and len(made) == 1


def test_one_that_fails_keeps_nobody_waiting():
    deltas = Deltas()
    with pytest.raises(RuntimeError):
        deltas.made(A, B, lambda: (_ for _ in ()).throw(RuntimeError()), rate=0.0)
    assert deltas.made(A, B, lambda: b"delta", rate=0.0) == b"delta"


def test_what_was_not_worth_it_is_not_tried_again():
    deltas, tried = Deltas(), []
    for _ in range(3):
        assert deltas.made(A, B, lambda: tried.append(1), rate=0.0) is None
    assert len(tried) == 1


def test_none_is_made_that_takes_longer_than_it_saves():
    """At 1 GB/s of segments, of which 99 % are saved, a link of 0.9 GB/s gains and one of 1.1 does not."""
    deltas = Deltas()
    for _ in range(50):
        deltas.took(1000, 1e-6, b"x" * 10)
    assert deltas.made(A, B, lambda: b"delta", rate=0.9e9) == b"delta"
    assert deltas.made(A, C, lambda: b"delta", rate=1.1e9) is None
    assert deltas.made(A, B, lambda: b"other", rate=1.1e9) == b"delta"  # it is there already
    tries = [deltas.made(A, bytes([9, k]) * 8, lambda: b"delta", rate=1.1e9) for k in range(2 * TRIED_AGAIN_AFTER)]
    assert 0 < sum(each is not None for each in tries) <= 3  # now and then: it may have become faster
    for _ in range(50):
        deltas.took(1000, 1e-6, None)
    assert deltas.made(A, D, lambda: b"delta", rate=0.0) is None  # nothing was saved, however slow the link may be


def test_a_chain_comes_back_from_its_frame():
    steps = [Step(A, b"one"), Step(B, b""), Step(C, b"three")]
    assert steps_of(memoryview(b"".join(frame_of(steps)))) == steps
    assert links_of(steps, D) == [(A, B), (B, C), (C, D)]


@given(st.binary(max_size=200))
def test_nonsense_is_no_chain(frame):
    try:
        steps = steps_of(memoryview(frame))
    except ValueError:
        return
    assert b"".join(frame_of(steps)) == frame and 0 < len(steps) <= CHAIN_MAX


def test_too_long_a_chain_is_refused():
    with pytest.raises(ValueError):
        steps_of(memoryview(b"".join(frame_of([Step(A, b"")] * (CHAIN_MAX + 1)))))


def test_a_chain_is_looked_for_once_along_each_delta():
    """A peer may name what it likes between the first and the last; there were as many ways as it took."""

    class Looked(list[bytes]):
        count = 0

        def __contains__(self, digest: object) -> bool:
            self.count += 1
            return super().__contains__(digest)

    deltas, wide, deep = Deltas(), 10, 5
    names = [[bytes([layer, each] * 8) for each in range(wide)] for layer in range(deep)]
    for older, newer in pairwise(names):
        for base, made in product(older, newer):
            deltas.put(base, made, b"delta")
    bases = Looked([b"n" * 16])
    assert deltas.chain(bases, names[-1][0], 1000) is None
    assert bases.count <= wide * wide * (deep - 1)
