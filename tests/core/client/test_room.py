"""Room is asked for before memory is taken: what cannot be held is refused, and not mapped until a deadline ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from client_processes import same_bytes, tensors_of

from tensorhub_plugins.core import Part, Slab, TensorSpec, UsageError, machine
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.manifest import SHARD_SIZE_BYTES_MAX

MEGABYTE = 1_000_000
WORDS = r"GB of host memory are needed, and this process may take .* GB more"


def mapped_bytes():
    """Of memory files, in this process's address space."""
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "tensorhub" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in (line.split("-") for line in lines))


@pytest.mark.parametrize("size_bytes", [200 * 10**9, SHARD_SIZE_BYTES_MAX])
@pytest.mark.parametrize("way", ["fetch", "wanted", "for others"])
def test_a_manifest_that_claims_more_than_there_is_is_refused_before_it_is_mapped(stage, size_bytes, way):
    """200 GB and 16 TiB, of which the source has no byte: its file is sparse."""
    options = {"verify": False, "transports": ("tcp",)}
    trainer, rollout = stage.client("trainer", **options), stage.client("rollout", **options)
    spec = TensorSpec("w", "uint8", (size_bytes,), size_bytes)
    with Slab.allocate([spec], pin=False) as slab:
        slab.mark_written()
        trainer.publish(1, slab)
        before = mapped_bytes()
        with pytest.raises(UsageError, match=WORDS if way != "for others" else "and room for"):
            if way == "for others":
                rollout._copy(1)
            else:
                rollout.fetch(1, timeout_s=20, wanted=[spec] if way == "wanted" else None)
        assert mapped_bytes() == before and rollout.serving() == []
        with pytest.raises(UsageError, match=WORDS):
            rollout.allocate([spec])
        trainer.close()


@pytest.mark.parametrize("parted", [False, True], ids=["shards", "parts"])
@pytest.mark.parametrize("fits", [False, True])
def test_the_shards_of_one_read_count_together(stage, monkeypatch, parted, fits):
    """Each of the two fits, and its pages are made later. The control: there is room for both."""
    rollout = stage.client("rollout")
    trainers = [stage.client("trainer", shard=shard, shard_count=2) for shard in range(2)]
    for shard, trainer in enumerate(trainers):
        parts = {"w": Part((2 * MEGABYTE,), (shard * MEGABYTE,))} if parted else None
        trainer.publish(1, {"w" if parted else f"w{shard}": torch.ones(MEGABYTE, dtype=torch.uint8)}, parts=parts)
    monkeypatch.setattr(machine, "free_bytes", lambda _: (3 if fits else 1) * MEGABYTE + MEGABYTE // 2)
    if fits:
        assert sum(int(tensor.sum()) for tensor in rollout.fetch(1).tensors().values()) == 2 * MEGABYTE
    else:
        with pytest.raises(UsageError, match=WORDS):
            rollout.fetch(1)


def test_memory_that_is_used_again_needs_no_room(stage, monkeypatch):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    trainer.publish(2, tensors_of(2))
    rollout.fetch(1).release()
    monkeypatch.setattr(machine, "free_bytes", lambda _: 1)
    assert same_bytes(rollout.fetch(2).tensors(), tensors_of(2))


def test_further_names_of_live_memory_need_room(stage, monkeypatch):
    """They are read into memory of their own first."""
    rollout, weight = stage.client("rollout"), torch.zeros(1000)
    monkeypatch.setattr(machine, "free_bytes", lambda _: 3999)
    with pytest.raises(UsageError, match=WORDS):
        rollout.replicate({"embed": weight, "head": weight}, 1)


def test_where_the_system_does_not_say_what_is_free_the_machine_is_the_limit(monkeypatch):
    """It says 0 as well where a control group has nothing left."""
    monkeypatch.setattr(machine, "free_bytes", lambda _: None)
    Room().take(MEGABYTE)
    with pytest.raises(UsageError, match=WORDS):
        Room().take(machine.total_bytes() + 1)
