"""Make (or find) an environment under .envs/: `python3.11 recipes/environments/build.py verl-cpu`.

Prints the environment's path on stdout; progress goes to stderr, what pip says to .envs/<name>.log.

The folder's name carries a hash of the requirements and of the Python version, so that a change of either
makes a new environment and never bends an old one. A virtual environment cannot be renamed (its scripts
name its path), so it is built in place and a stamp is written last: without the stamp, a folder is the rest
of a build that was cut off and is thrown away. A file lock lets the second of two builds wait for the first
and find it done.

Only the standard library: this is the first thing that runs on a new machine.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVS = ROOT / ".envs"
PYTHONS = ((3, 11), (3, 12))  # what the pinned packages have wheels for; the library itself also takes 3.10
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
# Fails where torch and vLLM's extensions do not match; vLLM knows which of them this machine runs (AVX-512, AVX2).
CHECK = """
import msgspec, torch, xxhash, zmq
from vllm.platforms import current_platform
current_platform.import_kernels()
"""
QUIET_S = 15.0  # of a command, before its last line is shown
SHOWN_MAX = 100  # characters of it
LOG_TAIL_LINES = 15
# DeepSpeed is built from source: nothing is compiled then (it compiles what it needs when it first runs), and the build
# sees only what it asks for, not our torch, with which it fails.
BUILD_SETTINGS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "PIP_USE_PEP517": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(file.stem for file in HERE.glob("*.txt"))
    parser.add_argument("name", help="which requirements: " + ", ".join(names))
    parser.add_argument("--path", action="store_true", help="only print where it is, or would be")
    options = parser.parse_args()

    requirements = HERE / f"{options.name}.txt"
    if not requirements.exists():
        sys.exit(f"no such environment: {options.name} ({requirements} is missing)")
    if sys.version_info[:2] not in PYTHONS:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        sys.exit(f"this environment needs Python {wanted}; {sys.executable} is {python_version()}")
    path = ENVS / f"{options.name}-{digest(requirements.read_bytes(), python_version().encode())}"
    if not options.path:
        ENVS.mkdir(exist_ok=True)
        with open(f"{path}.lock", "w") as lock:
            wait_for(lock)
            build(path, requirements)
            install_project(path)
    print(path)


def build(path: Path, requirements: Path) -> None:
    stamp = path / ".complete"
    if stamp.exists():
        return
    started = time.monotonic()
    log = open(f"{path}.log", "w")  # noqa: SIM115  (lives as long as the process)
    say(f"building {path.relative_to(ROOT)} with Python {python_version()}, about 4 minutes; log: {log.name}")
    shutil.rmtree(path, ignore_errors=True)

    run([sys.executable, "-m", "venv", str(path)], log, "Debian and Ubuntu: apt install python3-venv")
    lines = requirements.read_text().splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    say(f"[{time.monotonic() - started:4.0f} s] {torch}")
    # First and alone: its build for CPU is the one thing that pip may have to be told where to find.
    install(path, log, *how_to_get_torch(path, torch), torch)
    say(f"[{time.monotonic() - started:4.0f} s] vLLM, the trainer and what they need")
    # The file is complete, so nothing is left for pip to resolve, and what it leaves out stays out.
    install(path, log, "--no-deps", "--no-compile", "-r", str(requirements))
    say(f"[{time.monotonic() - started:4.0f} s] compiling, checking")
    run([python(path), "-m", "compileall", "-q", "-j", "0", str(path / "lib")], log, check=False)
    run([python(path), "-c", CHECK], log, "the packages are there but do not work together")

    stamp.write_text(f"{time.monotonic() - started:.0f} s\n")
    say(f"[{time.monotonic() - started:4.0f} s] done")


def how_to_get_torch(path: Path, torch: str) -> list[str]:
    """Return pip's options: its own choice if that is the CPU build, else the index named to us, else with CUDA."""
    dry_run = ["install", "--quiet", "--dry-run", "--no-deps", "--report", "-", torch]
    found = subprocess.run([python(path), *PIP, *dry_run], capture_output=True, text=True)
    version = ""
    if found.returncode == 0:
        version = json.loads(found.stdout)["install"][0]["metadata"]["version"]
    if "+cpu" in version:
        return ["--no-deps"]
    index = os.environ.get("TORCH_CPU_INDEX_URL")
    if index:
        return ["--no-deps", "--index-url", index]
    say(
        f"pip finds {version or 'no torch'}, not the CPU build: with CUDA's libraries it is some 3 GB more.\n"
        "To take the small one, stop this (ctrl-c), set TORCH_CPU_INDEX_URL to PyTorch's index of CPU\n"
        "wheels (pytorch.org, Get Started, Compute Platform: CPU) and start again."
    )
    return []


def install_project(path: Path) -> None:
    """Install the project itself, editable. Repeated when pyproject.toml (entry points, version) has changed."""
    project = ROOT / "pyproject.toml"
    stamp = path / f".project-{digest(project.read_bytes(), str(ROOT).encode())}"
    if stamp.exists():
        return
    with open(f"{path}.log", "a") as log:
        install(path, log, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    for old in path.glob(".project-*"):
        old.unlink()
    stamp.touch()


def install(path: Path, log, *arguments: str) -> None:
    run([python(path), *PIP, "install", *arguments], log)


def run(command: list[str], log, advice: str = "", check: bool = True) -> None:
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    environment = {**os.environ, **BUILD_SETTINGS}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as process:
        while process.returncode is None:
            try:
                process.wait(QUIET_S)
            except subprocess.TimeoutExpired:  # what pip does now is its last line
                *_, last = Path(log.name).read_text(errors="replace").splitlines()
                say(f"         {last[:SHOWN_MAX]}")
    if process.returncode == 0 or not check:
        return
    lines = Path(log.name).read_text().splitlines()
    say("\n".join([line for line in lines if not line.startswith("WARNING: ")][-LOG_TAIL_LINES:]))
    sys.exit(f"could not build the environment{': ' + advice if advice else ''}; the whole log is {log.name}")


def wait_for(lock) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another build of this environment is under way; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def python(path: Path) -> str:
    return str(path / "bin" / "python")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
