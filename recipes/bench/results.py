"""Where a benchmark leaves its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save(file: Path | None, content: dict[str, Any]) -> None:
    """As JSON, if a file was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1))
