"""The kept mutants of core can be made, and the runner tells one that dies from one that survives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutants import fits, kept, survivors

KEPT_MIN = 60


def test_every_mutant_can_be_made_and_names_a_test_that_there_is() -> None:
    mutants = kept()
    assert [problem for mutant in mutants if (problem := fits(mutant))] == []
    assert len(mutants) >= KEPT_MIN and len({(m.file, m.old, m.new) for m in mutants}) == len(mutants)
    assert all(mutant.old != mutant.new for mutant in mutants)


def test_a_mutant_that_cannot_be_made_is_named() -> None:
    mutant = kept()[0]
    assert "0 times" in str(fits(replace(mutant, old="nowhere in that file")))
    assert "has no" in str(fits(replace(mutant, test=mutant.test + "_")))


@pytest.mark.heavy
def test_the_runner_tells_one_that_dies_from_one_that_survives() -> None:
    mutant = kept()[0]
    alive = replace(mutant, what="nothing is changed", new=mutant.old)
    assert [line.partition(":")[0] for line in survivors([mutant, alive])] == ["nothing is changed"]
