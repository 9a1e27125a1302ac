"""A trainer of two ranks takes its weights back: of the version of its checkpoint, all of them or none.

Ranks are threads, which agree as processes do: each waits for what the others give.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from client_stage import until

from tensorhub_plugins.core import Client, DeadlineExceeded, Publisher, SourceLost, Turns, contiguous_spec, held_run
from tensorhub_plugins.core.client.parts import AllHeld, Held
from tensorhub_plugins.core.client.recovery import SKEW_NS, Recovery

RANKS = 2
TIMEOUT_S = 20.0
SHAPES = {"a.o_proj.weight": (96, 33), "b.weight": (64, 48), "norm": (7,), "scale": ()}


class Model:
    """One rank's part: runs of elements that end anywhere, as FSDP1's and ZeRO-3's, and tensors all have."""

    def __init__(self, rank: int, seed: int | None, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rank, self.parts = rank, {}
        generator = torch.Generator().manual_seed(seed or 0)
        for name, shape in SHAPES.items():
            whole = torch.randn(shape, generator=generator).to(dtype)
            whole = torch.full_like(whole, -1) if seed is None else whole
            cut = 41 if whole.numel() > 41 and name != "norm" else 0  # not at the end of a row
            start, stop = ((0, cut), (cut, whole.numel()))[rank] if cut else (0, whole.numel())
            self.parts[name] = (whole.shape, start, whole.reshape(-1)[start:stop].clone())

    def held(self, turns: Turns) -> Iterator[Held]:
        for name, (shape, start, tensor) in self.parts.items():
            whole = contiguous_spec(name, tensor.dtype, shape)
            if tensor.numel() == shape.numel():
                yield turns.one_of_all(name, tensor.view(shape))
            else:
                yield held_run(whole, tensor, start)

    def equals(self, other: Model, dtype: torch.dtype) -> bool:
        own, others = ([tensor for _, _, tensor in model.parts.values()] for model in (self, other))
        return all(torch.equal(a, b.to(dtype).to(b.dtype)) for a, b in zip(own, others, strict=True))


class Agreement:
    def __init__(self) -> None:
        self.barrier, self.said = threading.Barrier(RANKS), [None] * RANKS

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def all_say(word: Any) -> list[Any]:
            self.said[rank] = word
            self.barrier.wait(TIMEOUT_S)
            said = list(self.said)
            self.barrier.wait(TIMEOUT_S)
            return said

        return all_say


class Life:
    """Both ranks of one start of a trainer."""

    def __init__(self, address: str, stack: ExitStack, mode: Any = "resumed_step", run: str = "r", **options: Any):
        self.agreement, self.pool = Agreement(), stack.enter_context(ThreadPoolExecutor(RANKS))
        self.mode, self.models = mode, [Model(rank, None) for rank in range(RANKS)]
        self.publishers = []
        for rank in range(RANKS):
            client = Client(address, run=run, model="m", replica="trainer", shard=rank, shard_count=RANKS)
            publisher = Publisher(
                client, rank=rank, ranks=RANKS, worker=f"t/{rank}", keep=1, timeout_s=TIMEOUT_S, **options
            )
            self.publishers.append(publisher)
            stack.callback(client.close)

    def of(self, seed: int | None, dtype: torch.dtype = torch.bfloat16) -> Life:
        self.models = [Model(rank, seed, dtype) for rank in range(RANKS)]
        return self

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(call, range(RANKS)))

    def turns(self, rank: int) -> Iterator[Held]:
        return self.models[rank].held(Turns(rank, RANKS))

    def recovery(self, rank: int) -> Recovery:
        return Recovery(
            self.publishers[rank],
            self.mode,
            weights=lambda: self.turns(rank),
            held=lambda: self.models[rank].held(AllHeld(rank, RANKS)),
            by_parts=True,
            gather=self.agreement.gather(rank),
        )

    def publish(self, step: int) -> None:
        self.each(lambda rank: self.publishers[rank].publish_parts(step, self.turns(rank)))

    def note(self, folder: Path) -> None:
        self.each(lambda rank: self.recovery(rank).note(folder))

    def resume(self, folder: Path, timeout_s: float = TIMEOUT_S, **how: bool) -> bool:
        each = [self.recovery(rank) for rank in range(RANKS)]
        (done, other) = self.each(lambda rank: each[rank].resume(folder, timeout_s, **how))
        assert done is other and each[0].is_mixed is each[1].is_mixed, "the ranks do not agree"
        self.is_mixed = each[0].is_mixed
        return bool(done)

    def has(self, seed: int | None, *dtypes: torch.dtype) -> bool:
        """Whether the ranks have these weights, in the first of the dtypes, rounded to the last one."""
        first, last = dtypes[:1] or (torch.bfloat16,), dtypes[-1:] or (torch.bfloat16,)
        return all(model.equals(Model(rank, seed, *first), *last) for rank, model in enumerate(self.models))


@contextmanager
def life(address: str, *arguments: Any, **options: Any) -> Iterator[Life]:
    with ExitStack() as stack:
        yield Life(address, stack, *arguments, **options)


@pytest.fixture
def keeper(address: str) -> Iterator[Client]:
    with Client(address, run="r", model="m", replica="keeper") as client:
        yield client


@pytest.fixture
def killed(address: str, keeper: Client, tmp_path: Path) -> Path:
    """A checkpoint of step 4, written before its weights are published, as verl does. Steps 4 and 5 are held."""
    with life(address) as first:
        first.of(3).publish(3)
        first.of(4).note(tmp_path)
        first.publish(4)
        keeper.fetch(4, serve=True)
        first.of(5).publish(5)
        keeper.fetch(5, serve=True)
    return tmp_path


def test_the_weights_are_those_of_the_checkpoint_and_not_the_newest(address: str, killed: Path) -> None:
    with life(address, begins=True) as second:
        assert second.resume(killed) and second.has(4)
        second.publish(4)  # and the training goes on, in an attempt of its own
        assert second.publishers[0].attempt == 1
        second.note(killed)  # as a checkpoint after an update does
    with life(address) as third:  # whose weights nobody held
        assert not third.resume(killed) and third.has(None)


@pytest.mark.parametrize("grows", [True, False])
def test_the_weights_may_take_as_long_as_they_come_unless_a_time_is_given(
    address: str, killed: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    """With 235B over 25 Gbit/s they take longer than what is asked on the way may."""
    fetch = Client.fetch

    def slow(client: Client, *given: Any, **how: Any) -> Any:
        if how.get("wanted") and not how.get("grows"):
            raise DeadlineExceeded("they are on their way", timeout_s=how["timeout_s"])
        return fetch(client, *given, **how)

    monkeypatch.setattr(Client, "fetch", slow)
    with life(address) as second:
        assert second.resume(killed, grows=grows) == grows and second.has(4 if grows else None)


def test_the_newest_are_taken_where_that_is_asked_for_and_it_is_said_what_is_mixed(
    address: str, killed: Path, keeper: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with life(address, "latest") as second:
        assert second.resume(killed) and second.has(5) and second.is_mixed
        assert "are the checkpoint's, and OLDER than these weights" in caplog.text
        caplog.clear()
        keeper.withdraw(5)
        assert second.of(None).resume(killed) and second.has(4) and not second.is_mixed  # those of the checkpoint
        assert "OLDER" not in caplog.text


def test_ranks_agree_on_the_newest_while_another_trainer_publishes(
    address: str, killed: Path, keeper: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has looked before the last version was there."""
    with life(address, run="r") as other:
        other.of(6).publish(6)
        keeper.fetch(6, serve=True)
    with life(address, "latest") as second:
        client = second.publishers[1].client
        earlier = [each for each in client.versions() if each.version <= 5]
        with monkeypatch.context() as patched:
            patched.setattr(client, "versions", lambda **_: earlier)
            assert second.resume(killed) and second.has(5) and second.is_mixed
        assert second.of(None).resume(killed) and second.has(6)  # the control


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_newest_may_be_of_another_number_of_ranks(address: str, killed: Path, keeper: Client, ranks: int) -> None:
    """As after a run has gone on with fewer or more of them, without a checkpoint of its own."""
    parts = [Model(rank, 7).parts for rank in range(RANKS)]
    whole = {
        name: torch.cat([tensor, *[each[name][2] for each in parts[1:] if start + tensor.numel() < shape.numel()]])
        for name, (shape, start, tensor) in parts[0].items()
    }
    with ExitStack() as stack:
        for rank in range(ranks):
            joined = Client(address, run="r", model="m", replica="trainer", shard=rank, shard_count=ranks)
            client = stack.enter_context(joined)
            publisher = Publisher(client, rank=rank, ranks=ranks, worker=f"t/{rank}", keep=1, timeout_s=TIMEOUT_S)
            publisher.publish(7, [(name, whole[name].view(parts[0][name][0])) for name in whole])
        keeper.fetch(7, serve=True)
    with life(address, "latest") as second:
        assert second.resume(killed) and second.has(7) and second.is_mixed
    with life(address) as third:  # the control
        assert third.resume(killed) and third.has(4) and not third.is_mixed


@pytest.mark.parametrize("retain", [(2, "host"), None])
def test_the_version_of_the_last_checkpoint_is_retained_where_copies_are(
    address: str, tmp_path: Path, keeper: Client, retain: Any
) -> None:
    with life(address, retain=retain, begins=retain is not None) as first:
        for step in (1, 2, 3, 4, 5):
            if step in (2, 4):  # before the update, or, the last time, after it
                first.of(step).note(tmp_path)
            first.of(step).publish(step)
            if step == 4:
                first.note(tmp_path)
        expected = {4, 5} if retain else {5}
        until(lambda: {each.version for each in keeper.versions() if each.visible} == expected)


def test_weights_that_are_older_than_the_checkpoint_are_not_taken(
    address: str, killed: Path, keeper: Client, caplog: pytest.LogCaptureFixture
) -> None:
    (killed / "later").mkdir()
    with life(address) as second:
        assert second.resume(killed)
        second.of(6).publish(6)
        second.of(7).note(killed / "later")
    keeper.withdraw(6)
    for mode in ("latest", "resumed_step"):
        caplog.clear()
        with life(address, mode) as third:
            assert not third.resume(killed / "later") and third.has(None)
        assert "no worker holds" in caplog.text


def test_a_version_of_that_number_with_other_weights_is_not_taken(address: str, tmp_path: Path, keeper: Client) -> None:
    with life(address) as first, life(address, run="other") as other:
        other.of(8).publish(4)
        other.note(tmp_path)
        first.of(4).publish(4)
        keeper.fetch(4, serve=True)
    with life(address) as second:
        assert not second.resume(tmp_path) and second.has(None)


def test_what_cannot_be_exact_is_refused_by_name_and_rounded_if_the_newest_is_asked_for(
    address: str, tmp_path: Path, keeper: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with life(address, dtype=torch.bfloat16) as first:
        first.of(4, torch.float32).note(tmp_path)
        first.publish(4)
        keeper.fetch(4, serve=True)
    with life(address, dtype=torch.bfloat16) as second:
        assert not second.of(None, torch.float32).resume(tmp_path) and second.has(None, torch.float32)
        assert "'a.o_proj.weight' is published in bfloat16 and trained in float32" in caplog.text
    with life(address, "latest", dtype=torch.bfloat16) as third:
        assert third.of(None, torch.float32).resume(tmp_path)
        assert third.has(4, torch.float32, torch.bfloat16) and not third.has(4, torch.float32)
        assert "ROUNDED to bfloat16" in caplog.text


@pytest.mark.parametrize("mode", ["resumed_step", "latest"])
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda note: None, "it has no tensorhub_rank_1.json"),
        (lambda note: note[:20], "Input data was truncated"),
        (lambda note: note.replace(b":2", b":3", 1), "it is of 3 ranks, and there are 2"),
        (lambda note: b"", "Input data was truncated"),
        (lambda note: b'{"ranks":2,"root":7}', "Expected `str`, got `int`"),
        (lambda note: b"\xff" * 5000, "malformed"),
    ],
    ids=["none", "torn", "of another size", "empty", "of other types", "no text"],
)
def test_without_a_good_note_the_checkpoint_is_loaded(
    address: str, killed: Path, caplog: pytest.LogCaptureFixture, broken: Any, reason: str, mode: str
) -> None:
    note = killed / "tensorhub_rank_1.json"
    content = broken(note.read_bytes())
    note.unlink() if content is None else note.write_bytes(content)
    with life(address, mode) as second:
        assert not second.resume(killed) and second.has(None)
    assert reason in caplog.text


@pytest.mark.parametrize("mode", ["resumed_step", "latest"])
def test_a_note_of_a_former_checkpoint_in_the_same_folder_is_not_taken(
    address: str, killed: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """As when a run without notes, or one that was killed before it had left them, saves that step anew."""
    saved, noted_at = killed / "weights.pt", (killed / "tensorhub_rank_0.json").stat().st_mtime_ns
    saved.write_bytes(b"other weights")
    with life(address, mode) as second:
        for later, is_taken in ((SKEW_NS + 1, False), (SKEW_NS, True)):
            os.utime(saved, ns=(noted_at + later, noted_at + later))
            assert second.resume(killed) == is_taken
            assert ("weights.pt was written after tensorhub_rank_0.json" in caplog.text) != is_taken
            caplog.clear()


def test_where_one_rank_gets_nothing_no_rank_writes(
    address: str, killed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with life(address) as second:
        fetch = second.publishers[1].client.fetch

        def lost(*arguments: Any, wanted: Any = (), **options: Any) -> Any:
            if wanted:
                raise SourceLost("the last holder has gone")
            return fetch(*arguments, wanted=wanted, **options)

        monkeypatch.setattr(second.publishers[1].client, "fetch", lost)
        assert not second.resume(killed) and second.has(None)
        assert "t/1: the last holder has gone" in caplog.text
        monkeypatch.undo()
        assert second.resume(killed) and second.has(4)  # the control


def test_what_is_kept_elsewhere_too_is_found_out(address: str, killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with life(address) as second:
        honest = second.models[1].held

        def copies(turns: Turns) -> Iterator[Held]:
            for each in honest(turns):
                is_copied = isinstance(turns, AllHeld) and each.tensor is not None
                yield each._replace(tensor=each.tensor.clone()) if is_copied else each  # type: ignore[union-attr]

        second.models[1].held = copies  # type: ignore[method-assign]
        assert not second.resume(killed)  # the framework overwrites what is there
        assert "is not in the model: it is kept elsewhere, too" in caplog.text


def test_it_ends_in_time_without_a_hub(address: str, killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with life(address) as second:
        for publisher in second.publishers:
            publisher.client._hub.close()
        assert not second.resume(killed, timeout_s=0.5) and second.has(None)


def test_a_note_leaves_the_error_of_a_version_to_the_next_publish(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with life(address, in_background=True) as first:
        with monkeypatch.context() as patch:
            for publisher in first.publishers:
                patch.setattr(publisher.client, "publish", lost_hub)
            first.of(1).publish(1)
            first.note(tmp_path)
        assert len(list(tmp_path.iterdir())) == RANKS
        for rank in range(RANKS):
            with pytest.raises(SourceLost, match="the hub has gone"):
                first.publishers[rank].publish_parts(2, first.turns(rank))
        first.publish(2)
        first.each(lambda rank: first.publishers[rank].settle())


def lost_hub(*_: Any, **__: Any) -> None:
    raise SourceLost("the hub has gone")
