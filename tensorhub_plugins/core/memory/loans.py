"""Memory that other processes of this host use where it lies, so that a host holds one copy of what its workers share.

With the memory's file a borrower gets the end of a pipe, and keeps it for as long as it uses the memory. It closes when
the borrower is done, or dies; until then its lender writes nothing there (`Loans.any`). The lender may die, too: the
memory is the kernel's, and stays as it is until the last of them lets go of it.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
from contextlib import suppress

import numpy as np
import torch

from tensorhub_plugins.core.memory.pinning import Pinned


class Loans:
    """The lender's side, of one block. Any thread may call."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._ends: list[int] = []  # ours, of a pipe for each loan

    def lend(self) -> int:
        """The other end, for a borrower: it counts until that, and every copy of it, is closed. The caller owns it."""
        theirs, ours = os.pipe()
        with self._guard:
            self._ends.append(ours)
        return theirs

    @property
    def any(self) -> bool:
        """Whether somebody still uses the memory."""
        with self._guard:
            over = [end for end in self._ends if is_over(end)]
            for end in over:
                self._ends.remove(end)
                os.close(end)
            return bool(self._ends)

    def close(self) -> None:
        """The memory is not ours any more, whoever uses it. Idempotent."""
        with self._guard:
            ends, self._ends = self._ends, []
        for end in ends:
            os.close(end)


class Borrowed:
    """The borrower's side: a block of another process, as long as it is used. Takes the descriptors over.

    memory: uint8, all of it, mapped; nothing may be written to it where `is_shared`, and what is written to other
    mappings stays here. fd: of its file. owner_liveness_fd: hangs up when the block is closed, or its owner dies: a
    mapping that is kept for later is to be let go then. loan_fd: see `Loans.lend`. pinned: for which device it is.
    """

    def __init__(
        self, memory: torch.Tensor, fd: int, owner_liveness_fd: int, loan_fd: int, pinned: Pinned | None = None
    ) -> None:
        self.memory = memory
        self.fd, self.owner_liveness_fd = fd, owner_liveness_fd
        self.pinned = pinned
        self._loan_fd = loan_fd
        self._guard = threading.Lock()

    def lend(self) -> int:
        """For one more borrower of the same owner's memory."""
        with self._guard:
            return os.dup(self._loan_fd)

    def close(self) -> None:
        """Its owner may write there again. Idempotent."""
        with self._guard:
            fds = (self.fd, self.owner_liveness_fd, self._loan_fd)
            self.fd = self.owner_liveness_fd = self._loan_fd = -1
            self.memory = torch.empty(0, dtype=torch.uint8)  # whoever still knows the slab must not keep it mapped
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, TypeError):  # half made, or at the interpreter's end
            self.close()


def is_over(fd: int) -> bool:
    """Whether nobody has the other end of this pipe any more."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


@torch.inference_mode(False)
def bytes_over(memory: memoryview) -> torch.Tensor:
    """uint8 over mapped memory, also over some that must not be written, of which torch would warn."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    buffer = (ctypes.c_char * len(memory)).from_address(address)
    buffer.keeps = memory  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)
