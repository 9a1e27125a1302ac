"""Real `vllm serve` of several engines or of several hosts: all that is behind one address follows, each part of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("requests")

from vllm_engines import Engine, checkpoint, wait_until
from vllm_servers import Server, make_two_models, serving

from tensorhub_plugins.core import CHECKPOINT, Client
from tensorhub_plugins.core import Server as Hub
from tensorhub_plugins.core.cli import fetch_status

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(600)]

PROMPT, TOKENS = [10, 11, 12, 13, 14, 15], 32
FOLLOW_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_two_models(tmp_path_factory.mktemp("models"))


def fresh(folders: list[Path], workers: int = 1) -> list[list[int]]:
    """What engines that load these from disk answer to PROMPT. Two workers round otherwise than one."""
    answers = []
    for folder in folders:
        how: dict[str, Any] = {"load_format": "tensorhub", "model_loader_extra_config": {"disk": "only"}}
        how["env"] = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with Engine(folder, extension=None, workers=workers, **how) as engine:
            answers += engine.generate([PROMPT], TOKENS)
    assert answers[0] != answers[1]
    return answers


@pytest.fixture
def trainer(hub: Hub) -> Iterator[Client]:
    with Client(hub.address, run="r", model="actor", replica="trainer") as client:
        yield client


def named(hub: Hub) -> dict[str, Any]:
    return {"hub": hub.address, "run": "r", "model": "actor", "replica": "server", "follow": "now"}


def tokens(server: Server, **headers: str) -> list[int]:
    reply = server.complete(PROMPT, TOKENS, headers=headers)
    reply.raise_for_status()
    return list(reply.json()["choices"][0]["token_ids"])


def holders(trainer: Client, version: int) -> set[str]:
    """Of this version in an engine's layout."""
    (info,) = [info for info in trainer.versions() if info.version == version]
    return {worker for layout, workers in info.layouts.items() if layout != CHECKPOINT for worker in workers}


def test_each_data_parallel_rank_of_a_dense_model_follows(
    folders: list[Path], hub: Hub, trainer: Client, tmp_path: Path
) -> None:
    """Under names of their own; each is asked by itself."""

    def answers() -> list[list[int]]:
        return [tokens(server, **{"X-data-parallel-rank": str(rank)}) for rank in (0, 1)]

    expected = fresh(folders)
    trainer.publish(1, checkpoint(folders[0]))
    with serving(folders[0], tmp_path, named(hub), "--data-parallel-size", "2") as server:
        assert holders(trainer, 1) == {"server/0", "server-dp1/0"} and answers() == [expected[0]] * 2
        for version in (2, 3):
            trainer.publish(version, checkpoint(folders[1 - version % 2]))
            wait_until(
                lambda v=version: len(holders(trainer, v)) == 2, f"both hold version {version}", FOLLOW_TIMEOUT_S
            )
            assert answers() == [expected[1 - version % 2]] * 2
        assert server.healthy()


@pytest.mark.timeout(900)
def test_the_data_parallel_ranks_of_experts_update_as_one(
    models: Any, hub: Hub, trainer: Client, tmp_path: Path
) -> None:
    """They step together and share the experts: one that stopped or went on alone would wait for the other for ever.

    Another engine of the same kind starts from the first one's memory, rank by rank, and goes on with it.
    """
    folders = [models("qwen3-moe", seed) for seed in (1, 2)]
    options = ["--data-parallel-size", "2", "--skip-tokenizer-init"]

    def answers(server: Server) -> list[list[int]]:
        return [tokens(server, **{"X-data-parallel-rank": str(rank)}) for rank in (0, 1)]

    (tmp_path / "other").mkdir()
    with serving(folders[1], tmp_path / "other", {"disk": "only"}, *options) as fresh:
        expected = [[], answers(fresh)]
    with serving(folders[0], tmp_path, {**named(hub), "disk": "fallback", "disk_version": 1}, *options) as server:
        expected[0] = answers(server)
        assert expected[0][0] == expected[0][1] != expected[1][0] == expected[1][1]
        assert holders(trainer, 1) == {"server/0", "server/1"}
        bad = checkpoint(folders[1])
        del bad["model.norm.weight"]
        trainer.publish(2, bad)
        wait_until(lambda: "version 2 cannot be installed" in server.log.read_text(), "it is refused")
        assert answers(server) == expected[0] and holders(trainer, 2) == set()
        with ThreadPoolExecutor(4) as clients:
            running = [clients.submit(server.complete, [20 + k], 150) for k in range(8)]
            for version in (3, 4, 5):
                trainer.publish(version, checkpoint(folders[version % 2]))
                wait_until(lambda v=version: len(holders(trainer, v)) == 2, f"both hold {version}", FOLLOW_TIMEOUT_S)
            assert [request.result().status_code for request in running] == [200] * 8
        assert answers(server) == expected[1]
        with serving(folders[0], tmp_path / "other", {**named(hub), "replica": "other"}, *options) as other:
            assert "from server/0" in other.log.read_text() and "from server/1" in other.log.read_text()
            assert answers(other) == expected[1]
            trainer.publish(6, checkpoint(folders[0]))
            wait_until(lambda: len(holders(trainer, 6)) == 4, "all hold version 6", FOLLOW_TIMEOUT_S)
            assert answers(server) == expected[0] == answers(other)
            assert server.healthy() and other.healthy()


def test_the_workers_of_an_engine_on_two_hosts_update_both_or_none(
    folders: list[Path], hub: Hub, trainer: Client, tmp_path: Path
) -> None:
    """By vLLM's own executor of several nodes: no shared memory, and no parent, that both workers have."""
    expected = fresh(folders, workers=2)
    trainer.publish(1, checkpoint(folders[0]))
    options = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    with serving(folders[0], tmp_path, named(hub), *options, hosts=("host-a", "host-b")) as server:
        workers = {w["worker"]: w["location"]["host"] for w in fetch_status(hub.address)["models"][0]["workers"]}
        assert {"server/0": "host-a", "server/1": "host-b"}.items() <= workers.items()
        assert tokens(server) == expected[0]
        bad = checkpoint(folders[1])
        del bad["model.norm.weight"]
        for version, seed in ((2, 2), (3, 1), (5, 2)):
            if version == 5:  # the control: one that both refuse, and that changes nothing
                trainer.publish(4, bad)
                wait_until(lambda: "version 4 was not fetched" in server.log.read_text(), "it is refused")
                assert tokens(server) == expected[0] and holders(trainer, 4) == set()
            trainer.publish(version, checkpoint(folders[seed - 1]))
            wait_until(lambda v=version: len(holders(trainer, v)) == 2, f"both hold {version}", FOLLOW_TIMEOUT_S)
            assert tokens(server) == expected[seed - 1]
