"""Every test runs on the GPU and on its stand-in; where there is no GPU, says so. Figures go to $OUT/gpu.json."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_place import NO_GPU, Place, place_named
from hub_limits import AT_ONCE

from tensorhub_plugins.core import Client, start_server

FIGURES: list[dict[str, Any]] = []
TRANSPORTS = ("cuda_ipc", "shm", "tcp")


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "stand-in"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    with place_named(request.param) as place:
        yield place


@pytest.fixture
def figure(place: Place, request: pytest.FixtureRequest) -> Any:
    """figure("D2H, GB/s", 24.1, limit=25.0): kept for the report; its ratio to the limit."""

    def record(what: str, measured: float, *, limit: float = 0.0) -> float:
        ratio = measured / limit if limit else 0.0
        FIGURES.append(
            {"test": request.node.name, "on": place.name, "what": what, "measured": measured, "limit": limit}
        )
        return ratio

    return record


@pytest.fixture
def clients() -> Iterator[Any]:
    """clients("trainer"): a client of a hub of its own, closed at the end."""
    made: list[Client] = []
    with start_server(limits=AT_ONCE) as server:

        def client(replica: str, **options: Any) -> Client:
            given = {"transports": TRANSPORTS, **options}
            made.append(Client(server.address, run="gpu", model="actor", replica=replica, **given))
            return made[-1]

        yield client
        for each in made:
            each.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no GPU, only this folder's own run (`make test-gpu`) says of each test that it needs one."""
    if not torch.cuda.is_available() and config.rootpath != Path(__file__).parent:
        without = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item not in without]
        config.hook.pytest_deselected(items=without)


def driver_version() -> str:
    """Of NVIDIA's kernel module, as it says so; "": it does not. How it pins depends on it."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return ""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    terminalreporter.write_line(
        f"on {name}, torch {torch.__version__}, Python {sys.version.split()[0]}"
        if name
        else "no CUDA here: nothing has run on a GPU, only what stands for one"
    )
    of_gpu = [figure for figure in FIGURES if figure["on"] == name]
    for figure in of_gpu:
        beside = f", {figure['measured'] / figure['limit']:.2f} of {figure['limit']:.4g}" if figure["limit"] else ""
        terminalreporter.write_line(f"{figure['what']}: {figure['measured']:.4g}{beside}")
    if of_gpu and os.environ.get("OUT"):
        file = Path(os.environ["OUT"]) / "gpu.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        of = {"gpu": name, "torch": torch.__version__, "kernel": platform.release(), "driver": driver_version()}
        file.write_text(json.dumps({**of, "figures": of_gpu}, indent=1))
