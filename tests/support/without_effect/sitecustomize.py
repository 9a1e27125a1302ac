"""For processes whose PYTHONPATH begins with this folder: see lora_without_effect.py, which is beside it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import lora_without_effect  # noqa: E402, F401
