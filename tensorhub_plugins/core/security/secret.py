"""Sources of a process's secret: an argument, a file or the environment. `ps` would show a command line."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO

from tensorhub_plugins.core import files
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.security.keys import KEY_SIZE_BYTES, TEXT_LENGTH_MAX, Keys

FILE_VARIABLE = "TENSORHUB_SECRET_FILE"
SECRET_VARIABLE = "TENSORHUB_SECRET"
SIZE_BYTES_MAX = 4 * TEXT_LENGTH_MAX + 2  # of characters of four bytes, and the end of a line

log = logging.getLogger("tensorhub.client")


def generate() -> Keys:
    """Return a new secret."""
    return Keys.of(os.urandom(KEY_SIZE_BYTES))


def given(keys: Keys | None) -> Keys | None:
    """Return these keys; None: the environment's. Raise UsageError for anything else."""
    if keys is not None and not isinstance(keys, Keys):
        raise UsageError(f"keys: a {type(keys).__name__} is no key: `keys_from_environment` reads a secret's file")
    return from_environment() if keys is None else keys


def from_environment() -> Keys | None:
    """Return the keys that TENSORHUB_SECRET_FILE or TENSORHUB_SECRET give; None: neither is set. Raise UsageError."""
    path = os.environ.get(FILE_VARIABLE)
    if path:
        return read(Path(path), where=f"{FILE_VARIABLE}={path}")
    text = os.environ.get(SECRET_VARIABLE)
    return _parsed(os.fsencode(text).decode(errors="replace"), SECRET_VARIABLE) if text else None


def read(path: Path, *, where: str = "") -> Keys:
    """Return the secret, or a role's key, in a file. Raise UsageError; where: the user's name for it."""
    where = where or f"the secret file {path}"
    try:
        with files.opened(path, SIZE_BYTES_MAX) as file:
            warn_if_shared(file, where)
            content = file.read(SIZE_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    return _parsed(content.decode(errors="replace"), where)


def warn_if_shared(file: BinaryIO, what: str) -> None:
    """Log that other users can read a secret's open file, where they can."""
    if os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s can be read by other users of this host: chmod 600 it", what)


def write(path: Path, keys: Keys) -> None:
    """Write a new file that only its owner can read. Raise UsageError if it exists: it may be in use."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already, and a running hub may use it: name another file") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with open(fd, "wb") as file:
            file.write(f"{keys.text()}\n".encode())
    except OSError as error:
        path.unlink(missing_ok=True)  # a part of it is no secret
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _parsed(text: str, where: str) -> Keys:
    try:
        return Keys.parse(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}") from error
