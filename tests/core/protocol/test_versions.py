"""Versions are ordered by attempt, then by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.types import (
    ATTEMPTS_MAX,
    STEPS_PER_ATTEMPT,
    VERSION_MAX,
    attempt_of,
    check_version,
    parse_version,
    step_of,
    version_label,
    version_of,
    version_text,
)

attempts = st.one_of(st.integers(0, 3), st.integers(0, ATTEMPTS_MAX - 1))
steps = st.one_of(st.integers(1, 9), st.integers(1, STEPS_PER_ATTEMPT - 1))


@given(attempts, steps, attempts, steps)
def test_versions_are_ordered_as_attempt_and_step(a: int, i: int, b: int, j: int) -> None:
    one, other = version_of(a, i), version_of(b, j)
    assert (attempt_of(one), step_of(one)) == (a, i)
    assert (one < other) == ((a, i) < (b, j))
    assert check_version(one) <= VERSION_MAX


@given(attempts, steps)
def test_people_read_and_write_attempt_and_step(attempt: int, step: int) -> None:
    version = version_of(attempt, step)
    assert parse_version(version_label(version)) == parse_version(str(version)) == version
    assert version_label(version) == (f"{attempt}/{step}" if attempt else str(step))
    assert version_text(version) == (f"{step} of attempt {attempt}" if attempt else str(step))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "1/",
        "/6",
        "six",
        "-1",
        "1/6/7",
        "1 / 6",
        "+1",
        "\u0661",
        "0",
        "1.5",
        pytest.param("1" * 5000, id="long"),
    ],
)
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="version|step"):
        parse_version(text)


def test_a_plain_step_is_a_version_of_attempt_0() -> None:
    assert version_of(0, 7) == 7
    assert (attempt_of(7), step_of(7)) == (0, 7)


@pytest.mark.parametrize(("attempt", "step"), [(0, -1), (-1, 1), (0, STEPS_PER_ATTEMPT), (ATTEMPTS_MAX, 1)])
def test_what_no_version_can_hold_is_refused(attempt: int, step: int) -> None:
    with pytest.raises(UsageError, match="an attempt below"):
        version_of(attempt, step)
