"""Put the Python files of a vLLM that has no build for CPUs over the kernels of one that has.

`python recipes/environments/python_of.py vllm==0.33.0 FOLDER`, in the environment of the latter; then put FOLDER on
PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path


def main(requirement: str, folder: Path) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed here"
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        pip = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--dest", temporary, requirement]
        subprocess.run(pip, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        made = Path(temporary) / "made"
        with zipfile.ZipFile(wheel) as files:
            files.extractall(made, [name for name in files.namelist() if not name.endswith(".so")])
        for kernels in Path(spec.origin).parent.glob("*.so"):
            shutil.copy(kernels, made / "vllm")
        (about,) = made.glob("vllm-*.dist-info")
        metadata, version = about / "METADATA", about.name.removeprefix("vllm-").removesuffix(".dist-info")
        text = metadata.read_text("utf-8")  # by its version vLLM knows what it was built for
        metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), "utf-8")
        about.rename(made / f"vllm-{version}+cpu.dist-info")
        os.rename(made, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
