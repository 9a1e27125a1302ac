"""Deltas are taken where a read by them was not slower than one of whole segments, from end to end."""

from __future__ import annotations

import pytest

from tensorhub_plugins.core.deltas.pace import CLEARLY, TRIED_AGAIN_AFTER, TRIED_AGAIN_AFTER_MAX, Pace


@pytest.mark.parametrize("whole_s", [10.0, CLEARLY + 0.1])
def test_where_deltas_were_clearly_faster_they_are_always_taken(whole_s):
    pace = Pace()
    pace.read(1000, 0, whole_s)
    for _ in range(100):
        assert pace.takes_deltas()
        pace.read(1000, 1000, 1.0)


def test_where_they_were_slower_they_are_tried_more_and_more_rarely():
    pace, tries = Pace(), []
    pace.read(1000, 0, 1.0)
    for number in range(10_000):
        if pace.takes_deltas():
            tries.append(number)
            pace.read(1000, 1000, 2.0)
        else:
            pace.read(1000, 0, 1.0)
    pauses = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
    assert pauses[:3] == [TRIED_AGAIN_AFTER, 2 * TRIED_AGAIN_AFTER, 4 * TRIED_AGAIN_AFTER]
    assert max(pauses) == TRIED_AGAIN_AFTER_MAX and len(tries) < 20


def test_a_link_that_has_become_slower_takes_them_again():
    pace = Pace()
    pace.read(1000, 0, 1.0)
    pace.read(1000, 1000, 2.0)
    for _ in range(TRIED_AGAIN_AFTER - 1):
        assert not pace.takes_deltas()
        pace.read(1000, 0, 10.0)
    assert pace.takes_deltas()
    pace.read(1000, 1000, 3.0)
    assert pace.takes_deltas()


def test_milliseconds_are_chance():
    pace = Pace()
    pace.read(1000, 0, 0.001)
    pace.read(1000, 0, 0.001)
    pace.read(1000, 1000, 0.005)
    assert pace.takes_deltas()
    pace.read(1000, 1000, 0.007)
    assert not pace.takes_deltas()


def test_a_mixture_says_nothing():
    pace = Pace()
    pace.read(1000, 0, 1.0)
    pace.read(1000, 400, 100.0)
    assert pace.takes_deltas() and pace.whole == 1000.0


def test_a_first_read_that_was_slow_for_once_is_measured_again():
    """Its memory is new, and the connection: by that alone deltas would pass for faster on every free link."""
    pace, took = Pace(), []
    pace.read(1000, 0, 3.0)
    for _ in range(8):
        took.append(pace.takes_deltas())
        pace.read(1000, 1000 * took[-1], 2.0 if took[-1] else 1.0)
    assert took == [True, False, True, *5 * [False]]
