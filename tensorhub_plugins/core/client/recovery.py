"""A trainer that resumes takes its weights from workers that hold them, instead of from its checkpoint.

With each checkpoint every rank leaves a note beside it, after all its files: the root (manifest.py) with which its
share of the weights is published. The version to take is found by that, not by its number, which frameworks count
differently, before and after a restart: in it every rank's shard has the root of its note, so it has the weights of
that checkpoint, bit for bit.

    find      each rank reads its note, and the tables of the versions that are held: the ranks agree on one version
    read      each reads its own parts into host memory, where every segment is verified
    write     once all ranks have theirs, they copy them into their parameters
    compare   each looks at what its model has now, byte for byte

All ranks take part in every step. What fails on one of them, or lasts too long, leads all of them to the checkpoint,
with its reason in one line. Nothing is written before every rank has everything, and loading the checkpoint overwrites
whatever was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch

from tensorhub_plugins.core.client.parts import Held
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.client.reports import Fetched
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import NotPublished, UsageError, VersionGone
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.tensors import contiguous_spec, same_bytes
from tensorhub_plugins.core.options import RecoverWeights
from tensorhub_plugins.core.run_log import record_fetch
from tensorhub_plugins.core.types import CHECKPOINT, version_text

log = get_logger(__name__)

NOTE = "tensorhub_rank_{rank}.json"
NOTE_SIZE_BYTES_MAX = 4096
SKEW_NS = 5 * 10**9  # between the clocks of hosts that write files: less than a trainer takes to start
LOOKED_AT_MAX = 32  # versions, the newest: few are held at a time, and each costs one round trip

T = TypeVar("T")


class Note(msgspec.Struct, frozen=True):
    """What a rank notes beside its part of a checkpoint. root: of its share of the weights, in hex. published: the
    newest version that it had published by then; 0: none. They may be that version's, or the next one's."""

    ranks: int
    root: str
    published: int = 0


class Recovery:
    """The notes of one trainer rank, and its way back.

    publisher: this rank's. weights: what it publishes: for `publish_parts` if by_parts, else for `publish`. held: all
    that this rank has of the model (parts.AllHeld), in the memory that it trains in. gather: returns what all ranks
    gave, in the order of ranks, on every rank. is_mixed: the weights that `resume` took are newer than the rest of the
    checkpoint."""

    def __init__(
        self,
        publisher: Publisher,
        mode: RecoverWeights,
        *,
        weights: Callable[[], Iterable[Any]],
        held: Callable[[], Iterable[Held]],
        by_parts: bool,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._publisher, self._is_off, self._takes_newest = publisher, mode == "off", mode == "latest"
        self.is_mixed = False
        self._weights, self._held, self._by_parts, self._gather = weights, held, by_parts, gather

    def note(self, folder: str | os.PathLike[str]) -> None:
        """Leave this rank's note in the folder of a checkpoint that was just written, unless the mode is "off". Never
        raises: the checkpoint is as good without it."""
        if self._is_off:
            return
        publisher, path = self._publisher, Path(folder, NOTE.format(rank=self._publisher.rank))
        try:
            path.unlink(missing_ok=True)
            root = publisher.root(self._weights(), by_parts=self._by_parts)
            part = path.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(Note(publisher.ranks, root, publisher.newest)))
            part.replace(path)
            publisher.retain_version_of(root)
        except Exception as error:
            log.warning("%s: a run that resumes from %s loads its weights: %s", publisher.worker, folder, error)

    def resume(self, folder: str | os.PathLike[str], timeout_s: float, *, grows: bool = False) -> bool:
        """Put the weights that belong to this checkpoint, or the newest ones, into the parameters. Return False, on
        every rank, if they are to be loaded from the checkpoint. timeout_s: for what is asked and read on the way.
        grows: the weights may take longer, as long as they come."""
        deadline, began = Deadline.after(timeout_s), time.monotonic()
        fetched: list[Fetched] = []  # what is to be released, one at most
        try:
            note = self._together(lambda: self._note_of(Path(folder)))
            self._publisher.retain_version_of(note.root)  # which its first version has, too
            fitting = self._together(lambda: self._fitting(note, deadline))
            common = set(fitting).intersection(*self._gather(fitting))
            if not common:
                raise _NoWeights(f"no worker holds {'newer ones' if self._takes_newest else 'those of its step'}")
            held = self._together(lambda: self._read(max(common), deadline, fetched, grows=grows))
            self._together(lambda: _write(held, fetched[0]))
            self._together(lambda: self._compare(fetched[0]))
            self.is_mixed = not all(self._gather(self._root(fetched[0].manifests) == note.root))
            if self._publisher.rank == 0:
                self._say(fetched[0], held, time.monotonic() - began)
            client, worker = self._publisher.client, self._publisher.worker
            record_fetch(fetched[0].report, client, worker=worker, seconds=time.monotonic() - began)
            return True
        except _NoWeights as error:
            if self._publisher.rank == 0:
                log.warning("the weights are loaded from the checkpoint %s: %s", folder, error)
            return False
        finally:
            for each in fetched:
                each.release()

    def _together(self, step: Callable[[], T]) -> T:
        """Do this on every rank, and return what it returns. Raise _NoWeights on all of them, with the first one's
        reason, if it fails on any."""
        why, done = "", None
        try:
            done = step()
        except Exception as error:  # whatever it is: the checkpoint is there
            why = f"{self._publisher.worker}: {error}"
        for problem in self._gather(why):
            if problem:
                raise _NoWeights(problem)
        return cast(T, done)

    def _note_of(self, folder: Path) -> Note:
        path = folder / NOTE.format(rank=self._publisher.rank)
        if not path.is_file():
            raise UsageError(f"it has no {path.name}: it was written without recover_weights")
        with open(path, "rb") as file:
            note = msgspec.json.decode(file.read(NOTE_SIZE_BYTES_MAX), type=Note)
            noted_at = os.fstat(file.fileno()).st_mtime_ns
        if self._publisher.rank == 0:  # for all: where only some notes are old, no version has the roots of them all
            _check_age(folder, noted_at)
        if note.ranks != self._publisher.ranks:
            raise UsageError(f"it is of {note.ranks} ranks, and there are {self._publisher.ranks}")
        return note

    def _fitting(self, note: Note, deadline: Deadline) -> list[int]:
        """Return the versions to take: those of the checkpoint's weights; or all newer ones, or else the newest one if
        it has the checkpoint's weights."""
        client = self._publisher.client
        held = [
            each.version
            for each in client.versions(timeout_s=deadline.remaining())
            if each.visible and each.layouts.get(CHECKPOINT)
        ]
        newest = sorted(held, reverse=True)[:LOOKED_AT_MAX]
        if self._takes_newest:  # of several, as one may have come between two ranks' looks
            newer = [version for version in newest if version > note.published]
            if newer:
                return newer
            newest = newest[:1]
        fitting = []
        for version in newest:
            gone = contextlib.suppress(NotPublished, VersionGone)  # just now
            with gone, self._tables(version, deadline) as tables:
                if len(tables) == note.ranks and self._root(tables) == note.root:
                    fitting.append(version)
        return fitting

    def _read(self, version: int, deadline: Deadline, fetched: list[Fetched], *, grows: bool) -> list[Held]:
        """Read this rank's parts of the version, and return where they belong."""
        with self._tables(version, deadline) as tables:
            dtypes = {spec.tensor: spec.dtype for manifest in tables.values() for spec in manifest.tensors}
        held = [each for each in self._held() if each.tensor is not None]
        wanted = []
        for each in held:
            name, own = each.whole.name, each.whole.dtype
            if (dtype := dtypes.get(name)) is None:
                raise UsageError(f"version {version_text(version)} has no tensor {name!r}")
            if dtype != own and not self._takes_newest:
                raise UsageError(
                    f"{name!r} is published in {dtype} and trained in {own}, which it cannot be made of: publish in "
                    f"{own}, or train in {dtype}"
                )
            assert each.tensor is not None
            spec = contiguous_spec(name, getattr(torch, dtype), each.tensor.shape)
            wanted.append(msgspec.structs.replace(spec, part=each.part))
        client, timeout_s = self._publisher.client, deadline.remaining()
        fetched.append(client.fetch(version, (CHECKPOINT,), wanted=wanted, timeout_s=timeout_s, grows=grows))
        return held

    def _compare(self, fetched: Fetched) -> None:
        """Raise UsageError if the model, asked anew, has not what was read."""
        tensors = fetched.tensors()
        for each in self._held():
            if each.tensor is not None:
                read = tensors[each.whole.name].view(each.tensor.shape)
                if not same_bytes(each.tensor.detach(), read.to(each.tensor.dtype)):
                    raise UsageError(
                        f"{each.whole.name!r} was read, and is not in the model: it is kept elsewhere, too"
                    )

    @contextlib.contextmanager
    def _tables(self, version: int, deadline: Deadline) -> Iterator[Mapping[int, Manifest]]:
        """Return what every rank has published of a version, without its bytes."""
        client = self._publisher.client
        fetched = client.fetch(version, (CHECKPOINT,), wanted=(), timeout_s=deadline.remaining())
        try:
            yield fetched.manifests
        finally:
            fetched.release()

    def _root(self, manifests: Mapping[int, Manifest]) -> str:
        own = manifests.get(self._publisher.rank)  # None: it was published by fewer ranks
        return "" if own is None else own.root().hex()

    def _say(self, fetched: Fetched, held: list[Held], seconds: float) -> None:
        report = fetched.report
        read = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in fetched.tensors().items()}
        text = (
            f"the weights are those of version {version_text(report.version)}, from {', '.join(report.sources)} in "
            f"{seconds:.1f} s: they were not loaded from the checkpoint"
        )
        rounded = {read[each.whole.name] for each in held if read[each.whole.name] != each.whole.dtype}
        if rounded:
            text = f"{text}, and are ROUNDED to {', '.join(sorted(rounded))}"
        if self.is_mixed:
            text = f"{text}. Optimizer, scheduler, data and step are the checkpoint's, and OLDER than these weights"
        log.log(logging.INFO if not self.is_mixed and not rounded else logging.WARNING, "%s", text)


class _NoWeights(Exception):
    """The weights have to come from the checkpoint."""


def _check_age(folder: Path, noted_at: int) -> None:
    """Raise UsageError if a file of this checkpoint was written after its note: the note is of a former one, which a
    later run has overwritten and not noted. Copies made without the files' times may look so."""
    for path in folder.iterdir():
        if path.is_file() and not path.match("tensorhub_rank_*") and path.stat().st_mtime_ns > noted_at + SKEW_NS:
            raise UsageError(f"{path.name} was written after {NOTE.format(rank=0)}, which is of a former checkpoint")


def _write(held: Iterable[Held], fetched: Fetched) -> None:
    tensors = fetched.tensors()
    with torch.no_grad():
        for each in held:
            assert each.tensor is not None
            each.tensor.detach().copy_(tensors[each.whole.name].view(each.tensor.shape))
