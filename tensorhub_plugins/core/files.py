"""Files that a user or an environment names: a pipe, a device or a huge file is refused at once, never waited for."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


@contextmanager
def opened(path: Path, size_bytes_max: float = float("inf")) -> Iterator[BinaryIO]:
    """Open a file to read it within the block. Raise OSError, with the reason in `strerror`, for what is no regular
    file, is larger, or cannot be opened."""
    path = Path(os.path.expanduser(path))
    try:  # before it is opened: to open a pipe has an effect at its other end
        _check(path, path.stat(), size_bytes_max)
    except ValueError as error:  # a null character in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        _check(path, os.fstat(file.fileno()), size_bytes_max)
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, or write one anew. Raise OSError as `opened` does."""
    if path.exists():
        _check(path, path.stat(), float("inf"))
    path.write_text(text, encoding="utf-8")


def _check(path: Path, status: os.stat_result, size_bytes_max: float) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, and no regular file", str(path))
    if status.st_size > size_bytes_max:
        why = f"it has {status.st_size} bytes, of at most {size_bytes_max:.0f}"
        raise OSError(errno.EFBIG, why, str(path))
