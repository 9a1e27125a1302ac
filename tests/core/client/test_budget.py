"""What a client offers from memory of its own has a budget; who exceeds it is named."""

from __future__ import annotations

import pytest
import torch

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.core.memory.machine import total_bytes

MEGABYTE = 1_000_000


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((MEGABYTE,), seed, dtype=torch.uint8)}


def test_versions_that_are_never_taken_back_are_said_to_add_up(stage, caplog):
    trainer = stage.client("trainer", memory_budget_bytes=3 * MEGABYTE)
    for version in range(1, 4):
        trainer.publish(version, tensors(version))
    assert caplog.text == ""
    for version in range(4, 9):
        trainer.publish(version, tensors(version))
    (record,) = caplog.records  # not once for every version
    text = record.getMessage()
    assert "trainer/0 offers 3 copies of 3.0 MB, and 1.0 MB more are above its budget of 3.0 MB" in text
    assert "version 1 checkpoint 1.0 MB; version 2 checkpoint 1.0 MB; version 3" in text
    for version in range(1, 8):
        trainer.unpublish(version)
    trainer.publish(9, tensors(9))
    for version in range(10, 13):
        trainer.publish(version, tensors(version))
    assert len(caplog.records) == 2  # it was below meanwhile


def test_it_can_be_refused_and_nothing_is_published(stage, caplog):
    trainer = stage.client("trainer", memory_budget_bytes=2 * MEGABYTE, over_budget="refuse")
    trainer.publish(1, tensors(1))
    trainer.publish(2, tensors(2))
    specs = trainer.find(trainer.serving()[0]).slab.specs
    for attempt in (lambda: trainer.publish(3, tensors(3)), lambda: trainer.allocate(specs)):
        with pytest.raises(UsageError, match="above its budget of 2.0 MB.*Unpublish versions that are over"):
            attempt()
    assert [key.version for key in trainer.serving()] == [1, 2] and caplog.text == ""
    trainer.publish(3, tensors(3), copy=False)  # the caller's own memory
    trainer.unpublish(1)
    trainer.publish(4, tensors(4))


def test_what_is_retained_counts_and_is_kept_nevertheless(stage, caplog):
    trainer = stage.client("trainer", memory_budget_bytes=MEGABYTE // 2, over_budget="refuse")
    trainer.publish(1, tensors(1), copy=False)
    assert trainer.unpublish(1).kept and "above its budget" in caplog.text
    with pytest.raises(UsageError, match="version 1 checkpoint 1.0 MB, retained"):
        trainer.publish(2, tensors(2))
    reader = stage.client("reader", memory_budget_bytes=MEGABYTE // 2, over_budget="refuse")
    assert torch.equal(reader.fetch(1, serve=True).tensors()["w"], tensors(1)["w"])  # a read is not refused


def test_the_default_is_half_of_what_there_is(stage):
    assert stage.client("trainer")._serving._budget_bytes == total_bytes() // 2
