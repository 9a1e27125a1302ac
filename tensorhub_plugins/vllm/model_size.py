"""How large a checkpoint is that lies on this machine: from the heads of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

HEAD_SIZE_BYTES_MAX = 100 << 20  # safetensors' own limit


def elements_of(folder: object) -> int | None:
    """How many numbers the checkpoint in this folder has; None: it is not here, or no safetensors."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return (
            sum(prod(tensor["shape"]) for file in Path(str(folder)).glob("*.safetensors") for tensor in _head(file))
            or None
        )
    return None


def _head(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as opened:
        size_bytes = int.from_bytes(opened.read(8), "little")
        head = json.loads(opened.read(min(size_bytes, HEAD_SIZE_BYTES_MAX)))
    yield from (tensor for name, tensor in head.items() if name != "__metadata__")
