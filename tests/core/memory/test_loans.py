"""Loans, and who outlives them."""

from __future__ import annotations

import os

import pytest
import torch
from forks import forked

from tensorhub_plugins.core.memory.loans import Loan, is_over
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, for what this is about


@pytest.fixture
def slab():
    with Slab.allocate([spec_of("a", torch.zeros(1000))], pin=False) as slab:
        yield slab


@pytest.mark.parametrize("whose", ["the lender's", "a borrower's", "a further borrower's"])
def test_a_loan_ends_though_a_child_that_was_forked_meanwhile_lives(slab, whose):
    """Nobody would write to the memory again. The control: a descriptor that the child keeps."""
    loan = slab.lend()  # about to be sent, or received
    if whose == "a borrower's":
        sent, loan = loan, Loan(os.dup(loan.fileno()))
        sent.close()
    elif whose == "a further borrower's":
        first, loan = loan, loan.lend()
        first.close()
    kept = os.dup(loan.fileno())
    with forked():
        os.close(kept)
        loan.close()
        assert slab.is_lent
    assert not slab.is_lent
    loan = slab.lend()
    with forked():
        assert slab.is_lent
        loan.close()
        assert not slab.is_lent


def test_readers_hear_of_the_end_of_a_slab_though_a_child_of_its_owner_lives(slab):
    """They keep the memory mapped until then."""
    seen = os.dup(slab.owner_liveness_fd)
    with forked():
        assert not is_over(seen)
        slab.close()
        assert is_over(seen)
    os.close(seen)


def test_a_child_that_closes_what_it_has_inherited_closes_nothing_else(slab):
    """The numbers are those of other files there by then."""
    loan = slab.lend()
    child = os.fork()
    if not child:
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
        loan.close()
        slab.close()
        os._exit(0 if [os.fstat(other).st_rdev for other in others] == [os.stat("/dev/null").st_rdev] * 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slab.is_lent
    loan.close()
