"""The loop of docs/loop.md, as it stands there: a thousand versions, and memory stays as it was after the first few."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub_plugins.core import version_of
from tensorhub_plugins.core.hub.server import start_server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loop.md"
VERSIONS, COPIES_MAX = 1000, 4  # one being written, one read, one that is kept for the next, one about to go
LEAVES = re.compile(r"^ *for older in .*\n.*unpublish\(older.*\n", re.MULTILINE)


def loops(address: str) -> tuple[str, str]:
    """The trainer's code and the rollout's, for this hub."""
    trainer, rollout = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    assert "publish(" in trainer and "replicate(" in rollout
    return tuple(code.replace("tcp://hub:7070", address) for code in (trainer, rollout))


def memory_files() -> set[int]:
    """Return the copies of versions that this process has; the rollout's tensors are its own."""
    found = set()  # each once, whoever has it open: the rollout opens those that it reads
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:tensorhub" in os.readlink(f"/proc/self/fd/{descriptor}"):
                found.add(os.fstat(int(descriptor)).st_ino)
    return found


def train(code: str, model: torch.nn.Module, versions: int, readers: Sequence[threading.Thread] = ()) -> list[int]:
    """How many copies there were before each step. readers: end before the trainer does."""
    counted: list[int] = []
    others = memory_files()  # of earlier tests

    def steps() -> Iterator[int]:
        for step in range(1, versions + 1):
            counted.append(len(memory_files() - others))
            with torch.no_grad():
                next(model.parameters()).fill_(float(step))
            yield step

    names: dict[str, Any] = {"steps": steps(), "model": model}
    try:
        exec(code, names)
        for reader in readers:
            reader.join()
        return [*counted, len(memory_files() - others)]
    finally:
        names["trainer"].close()


@pytest.fixture
def model() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_thousand_versions_take_no_more_memory_than_a_few(model: torch.nn.Module) -> None:
    from tensorhub_plugins.vllm import checkpoint_tensors

    tensors = {name: torch.zeros_like(tensor) for name, tensor in checkpoint_tensors(model).items()}
    with start_server() as server:
        trainer, rollout = loops(server.address)
        names: dict[str, Any] = {"Client": None, "tensors": tensors, "last": version_of(0, VERSIONS)}
        exec(trainer.split("\ntrainer =")[0], names)  # its imports
        failed: list[BaseException] = []

        def follow() -> None:
            try:
                exec(rollout, names)
            except BaseException as error:
                failed.append(error)
            finally:
                names["rollout"].close()

        reads = threading.Thread(target=follow)
        reads.start()
        counted = train(trainer, model, VERSIONS, [reads])
        assert failed == []
        assert max(counted) <= COPIES_MAX
        wanted = checkpoint_tensors(model)
        assert names["version"] == VERSIONS and all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.heavy
def test_without_its_last_lines_each_version_keeps_its_copy(model: torch.nn.Module) -> None:
    """The control."""
    with start_server() as server:
        trainer, found = LEAVES.subn("", loops(server.address)[0])
        assert found == 1
        assert train(trainer, model, 20)[-1] == 20
