"""The output of a benchmark's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save(file: Path | None, content: dict[str, Any]) -> None:
    """Write the content as JSON, if a file was requested."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1))
