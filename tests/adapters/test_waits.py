"""docs/waits.md: what each wait takes at four sizes, and what bounds it. The tables are made here, and must hold."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tensorhub_plugins.core import HubLimits
from tensorhub_plugins.core.deadline import size_s, timeout_for
from tensorhub_plugins.core.folders import TIMEOUT_S as FOLDER_TIMEOUT_S
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.core.work import STILL_S
from tensorhub_plugins.vllm.config import START_TIMEOUT_S, FollowConfig, StartConfig
from tensorhub_plugins.vllm.ray.fleet.state import START_TIMEOUT_S as FLEET_START_TIMEOUT_S
from tensorhub_plugins.vllm.worker.updater import TIMEOUT_S as UPDATE_TIMEOUT_S

PAGE = Path(__file__).resolve().parents[2] / "docs" / "waits.md"
GB = 10**9
LINKS = {"25 Gbit/s": 2.9, "100 Gbit/s": 11.5, "400 Gbit/s": 45.0}  # of a host, in GB/s
PEER = 4.5  # GB/s of one TCP stream's source, and of copies from memory that is not pinned
FRESH, DIGEST = 3.0, 15.0  # GB/s of one thread that writes memory which the kernel hands out; that takes digests
TABLES_S = 25.0  # manifests, plans and the first pages, from 70B on
NO_REPLICA_S = 900.0  # verl/routing.py, which needs verl


class Model(NamedTuple):
    """Sizes in GB: of what is published, of what one host reads of it, and of one worker's slice."""

    name: str
    published: float
    of_host: float
    slice: float


MODELS = (
    Model("7B, TP 1", 15.2, 15.2, 15.2),
    Model("70B, TP 8", 141.0, 141.0, 17.6),
    Model("235B, TP 8", 470.0, 470.0, 59.0),
    Model("671B, TP 16", 1342.0, 671.0, 84.0),
)


def fetch_s(model: Model, rate: float) -> float:
    return model.of_host / min(rate, 2 * PEER) + (TABLES_S if model.published > 100 else 0.0)


def first_install_s(model: Model) -> float:
    """Three copies to the device and three digests, if all of its layers are packed: see conversion.py."""
    return model.slice * (3 / PEER + 3 / DIGEST)


def waits(model: Model) -> list[tuple[str, float, str, float]]:
    """Return (what, seconds it takes, option, seconds that it may take) of each."""
    published = int(model.published * GB)
    run_s, call_s = TrainingOptions.timeout_for(published), timeout_for(None, published)
    all_s = fetch_s(model._replace(of_host=model.published), LINKS["25 Gbit/s"])
    slow, first_s = fetch_s(model, LINKS["25 Gbit/s"]), first_install_s(model)
    return [
        ("a host's first copy, 25 Gbit/s", slow, "timeout_s", run_s),
        ("the same, 100 Gbit/s", fetch_s(model, LINKS["100 Gbit/s"]), "timeout_s", run_s),
        ("the same, 400 Gbit/s", fetch_s(model, LINKS["400 Gbit/s"]), "timeout_s", run_s),
        ("the same, by `Client.fetch`", slow, "its default", call_s),
        ("the same, by vLLM's weight transfer", slow, "its default", UPDATE_TIMEOUT_S + size_s(published)),
        ("the same of all files of a folder", all_s, "constant (folders.py)", FOLDER_TIMEOUT_S + size_s(published)),
        ("the same, `vllm serve`, at the start", slow, "start_timeout_s", StartConfig().wait_s),
        ("the same, later", slow, "constant", FollowConfig().timeout_s),
        ("vLLM's own wait for that start", slow + first_s, "VLLM_ENGINE_READY_TIMEOUT_S", START_TIMEOUT_S),
        ("an engine that joins a run is ready", slow + first_s, "constant", FLEET_START_TIMEOUT_S),
        ("an engine's first install", first_s, "timeout_s", run_s),
        ("what of an install shows nothing", model.slice / PEER, "STILL_S", STILL_S),
        ("fetch and convert, for all", slow + first_s, "claim_s", HubLimits().claim_s + size_s(published)),
        ("all replicas at their first version", slow + first_s, "constant (verl)", NO_REPLICA_S),
    ]


def table() -> list[str]:
    lines = [f"| wait | bounded by | {' | '.join(model.name for model in MODELS)} |", f"| {'--- | ' * 6}".rstrip()]
    for row in zip(*map(waits, MODELS), strict=True):
        cells = [f"{takes:.0f} of {bound:.0f} s" for _, takes, _, bound in row]
        lines.append(f"| {row[0][0]} | {row[0][2]} | {' | '.join(cells)} |")
    return lines


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_default_holds(model: Model) -> None:
    late = [f"{what}: {takes:.0f} of {bound:.0f} s ({by})" for what, takes, by, bound in waits(model) if takes > bound]
    assert not late


def test_the_control_the_defaults_of_before_did_not() -> None:
    """120 s whatever the size, 60 s of vLLM's weight transfer, and whole checkpoints in the trial."""
    large = MODELS[2]
    assert fetch_s(MODELS[1], LINKS["25 Gbit/s"]) > UPDATE_TIMEOUT_S
    assert fetch_s(large, LINKS["25 Gbit/s"]) > 120 and 3 * large.published / FRESH > 120


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    lacking = [line for line in table() if line not in text]
    assert not lacking, "\n".join(["docs/waits.md lacks", *lacking])


def test_a_start_waits_as_long_as_vllm_does() -> None:
    """Read, as importing it takes seconds, where vLLM is installed."""
    if (vllm := find_spec("vllm")) is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    text = (Path(vllm.origin).parent / "envs.py").read_text()
    assert f'"VLLM_ENGINE_READY_TIMEOUT_S", "{START_TIMEOUT_S:.0f}"' in text


def test_verls_wait_is_the_one_of_the_table() -> None:
    """Read, as importing it takes seconds and needs verl."""
    routing = Path(__file__).resolve().parents[2] / "tensorhub_plugins" / "verl" / "routing.py"
    assert f"\nNO_REPLICA_TIMEOUT_S = {NO_REPLICA_S}" in routing.read_text()
