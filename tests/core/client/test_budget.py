"""What a client offers from memory of its own has a budget; who exceeds it is named."""

from __future__ import annotations

import pytest
import torch
from client_stage import until

from tensorhub_plugins.core import Publisher, TensorSpec, UsageError, resources
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client.budget import Budget
from tensorhub_plugins.core.machine import available_bytes, total_bytes
from tensorhub_plugins.core.operations.problems import find
from tensorhub_plugins.core.options import Need

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


def test_status_names_who_is_above_its_budget(stage, monkeypatch):
    monkeypatch.setattr(resources, "_noted", ("", float("-inf")))
    trainer = stage.client("trainer", memory_budget_bytes=2 * MEGABYTE)

    def problems():
        return "\n".join(problem.what for problem in find(fetch_status(stage.address)))

    for version in range(1, 5):
        if version == 3:
            assert "above its budget" not in problems()
        trainer.publish(version, tensors(version))
    until(lambda: "trainer/0 offers 3 copies of 3.0 MB" in problems() and "above its budget of 2.0 MB" in problems())


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


def test_a_cache_of_deltas_gives_way_to_versions(stage, caplog):
    trainer = stage.client("trainer", memory_budget_bytes=2 * MEGABYTE, over_budget="refuse")
    deltas, delta = trainer.changes.deltas, bytes(MEGABYTE // 2)
    deltas.put(b"a" * 16, b"b" * 16, delta)
    trainer.publish(1, tensors(1))
    assert deltas.size_bytes > len(delta)  # the control: there is room for both
    trainer.publish(2, tensors(2))
    deltas.put(b"a" * 16, b"b" * 16, delta)
    assert deltas.size_bytes == 0 and caplog.text == ""


def test_a_budget_bounds_the_deltas_of_who_allocates_nothing(stage):
    reader = stage.client("reader", memory_budget_bytes=1000)
    reader.changes.deltas.put(b"a" * 16, b"b" * 16, bytes(1000))
    assert reader.changes.deltas.size_bytes == 0


def test_the_default_is_half_of_what_there_is(stage):
    assert stage.client("trainer")._serving._budget.size_bytes == total_bytes() // 2


# --- what is needed is said before it is taken ---


def test_what_a_worker_will_take_is_said(caplog):
    with caplog.at_level("INFO"):
        Budget("trainer/0", 10 * MEGABYTE).check(Need(3 * MEGABYTE, 3), workers=8, mend="less")
    (text,) = caplog.messages
    assert text == (
        "trainer/0 takes up to 9.0 MB of host memory (3 copies of the 3.0 MB that it has of a version), and the 8 of "
        "its host 72.0 MB"
    )
    assert caplog.records[0].levelname == "INFO"


def test_what_is_taken_only_for_a_while_counts_as_well(caplog):
    need = Need(3 * MEGABYTE, 2, 5 * MEGABYTE, "while it thinks")
    Budget("e/0", 10 * MEGABYTE).check(need, mend="think less")
    said = (
        "e/0 takes up to 11.0 MB of host memory (2 copies of the 3.0 MB that it has of a version, and 5.0 MB while it"
    )
    assert f"{said} thinks), above its budget of 10.0 MB: think less" in caplog.text
    caplog.clear()
    Budget("e/0", 10 * MEGABYTE).check(need._replace(more_bytes=0), mend="think less")  # the control
    assert not caplog.text


def test_more_than_the_budget_is_said_or_refused_at_once(caplog):
    need, mend = Need(3 * MEGABYTE, 3), "keep fewer versions"
    Budget("trainer/0", 8 * MEGABYTE).check(need, mend=mend)
    assert "9.0 MB of host memory" in caplog.text and "above its budget of 8.0 MB: keep fewer versions" in caplog.text
    with pytest.raises(UsageError, match=r"trainer/0 takes up to 9.0 MB.*above its budget of 8.0 MB: keep fewer"):
        Budget("trainer/0", 8 * MEGABYTE, refuses=True).check(need, mend=mend)
    Budget("trainer/0", 9 * MEGABYTE, refuses=True).check(need, mend=mend)


def test_more_than_the_host_has_is_refused_whatever_the_budget():
    half = available_bytes() // 2
    with pytest.raises(UsageError, match="are free there: keep fewer"):
        Budget("trainer/0", 1 << 60).check(Need(half, 3), mend="keep fewer versions")
    with pytest.raises(UsageError, match="and the 64 of its host"):
        Budget("trainer/0", 1 << 60).check(Need(half // 16, 1), workers=64, mend="")


@pytest.mark.parametrize("known", [True, False], ids=["at the start", "with the first version"])
def test_a_publisher_that_will_not_fit_is_refused_before_it_takes_anything(known, stage):
    trainer = stage.client("trainer", memory_budget_bytes=2 * MEGABYTE, over_budget="refuse")
    model = [TensorSpec("w", "uint8", (MEGABYTE,), MEGABYTE)] if known else []

    def publish() -> None:
        publisher = Publisher(trainer, rank=0, ranks=1, worker="trainer/0", keep=2, timeout_s=5.0, model=model)
        publisher.publish(1, tensors(1).items())

    with pytest.raises(UsageError, match=r"3.0 MB of host memory \(3 copies of the 1.0 MB.*budget of 2.0 MB: keep few"):
        publish()
    assert trainer.serving() == []
    fits = stage.client("fits", memory_budget_bytes=3 * MEGABYTE, over_budget="refuse")
    publisher = Publisher(fits, rank=0, ranks=1, worker="fits/0", keep=2, timeout_s=5.0, model=model)
    for version in range(1, 5):
        publisher.publish(version, tensors(version).items())
        until(lambda: len(fits.serving()) <= 2)
    publisher.close()
