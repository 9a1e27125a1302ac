"""A child of this process, as a data loader's worker is one: what it has of ours, it has for as long as it lives."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Fork a child that does nothing until the block ends."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, b"x")
        while True:
            signal.pause()
    try:
        os.close(theirs)
        assert os.read(ours, 1) == b"x"
        yield
    finally:
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
