"""Fixtures of the tests of adapters."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorhub_plugins.core import HubLimits, Server, UsageError, start_server
from tensorhub_plugins.vllm import names

# Engines of the CPU build compile parts of their sampler, on which no test here depends: up to half a minute a start.
# The demos, and the test of compiled files, do as users do.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


@pytest.fixture(autouse=True)
def logs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters log below "vllm", and vLLM keeps that from the root logger, where `caplog` listens."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole engines run in the process of these tests: what they warn of is not ours to mend, and what we do is."""
    for item in items:
        if item.get_closest_marker("heavy") or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.filterwarnings("default", r"error:::tensorhub_plugins\."))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The folder of a tiny model of this kind whose random weights come from this seed."""
    from vllm_engines import make_model, why_not

    made: dict[tuple[str, int], Path] = {}

    def get(kind: str, seed: int) -> Path:
        if reason := why_not(kind):
            pytest.skip(reason)
        if (kind, seed) not in made:
            made[kind, seed] = make_model(kind, tmp_path_factory.mktemp(f"{kind}-{seed}"), seed)
        return made[kind, seed]

    return get


@pytest.fixture(scope="module")
def bare(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model's folder without its weights: what an engine needs to start from the store."""

    def get(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-bare")
        for file in models(kind, 1).iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
        return folder

    return get


@pytest.fixture(scope="session")
def weight_transfer() -> None:
    """Skip where the installed vLLM is older than the weight transfer that the adapter is written for."""
    version = names.installed_version()
    assert version is not None
    try:
        names.check_version(version, first=names.WEIGHT_TRANSFER_FIRST, what="its weight transfer")
    except UsageError as refusal:
        pytest.skip(str(refusal))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts and compiled extensions of OpenRLHF's runs."""
    return Path(os.environ.get("OUT") or tmp_path_factory.mktemp("openrlhf"))


@pytest.fixture
def hub() -> Iterator[Server]:
    """Yield a hub that waits for nobody who knew one before it: else each test's first conversion begins after 3 s."""
    server = start_server(limits=HubLimits(grace_s=0.1))
    yield server
    server.close()


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Ray's processes of this test record."""
    monkeypatch.setenv("TENSORHUB_EVENTS", str(tmp_path / "events"))
    return tmp_path / "events"


@pytest.fixture
def one_node(events: Path) -> Iterator[Any]:
    """Ray on this machine, with room for five engines without vLLM."""
    from fleet_run import cluster

    with cluster(5) as made:
        yield made
