"""Where the bytes of one read go: into the caller's tensors, or into memory of the client's own; and what of it is
served meanwhile. The shell of a `Transfer` asks for memory and reports what has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import torch

from tensorhub_plugins.core.client.changes import Bases
from tensorhub_plugins.core.client.serving import Serving
from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.manifest import Manifest, Part, TensorTable
from tensorhub_plugins.core.memory import moves
from tensorhub_plugins.core.memory.assembly import check_size, has_parts, view_of, whole_of
from tensorhub_plugins.core.memory.claims import Claim, claim
from tensorhub_plugins.core.memory.contents import Contents
from tensorhub_plugins.core.memory.loans import Borrowed
from tensorhub_plugins.core.memory.moves import Move, Paced, check_cover, with_parts
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tied import LiveTensors
from tensorhub_plugins.core.transports.read_plan import ReadPlan
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey

T = TypeVar("T")

COMPARED_AT_ONCE = 256  # segments that may be in place, between two looks at the clock and reports that work is done


class LiveMemory:
    """The caller's tensors, read into in place. repairs: what they hold already need not be read. deadline: that of
    `live`, for what is compared here; it moves as that of the read does.

    parts: their positions in larger ones. wanted: the same, of all of them, as a table. With either, nothing of it can
    be served to others, and one slab is for all source shards.

    Raise UsageError for what cannot be a target, before anything moves; DeadlineExceeded when checking takes too long.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        parts: Mapping[str, Part] | None = None,
        *,
        repairs: bool = False,
        wanted: TensorTable | None = None,
        deadline: float = NEVER,
    ) -> None:
        self.repairs = repairs
        self.check_cover: Callable[[Mapping[int, TensorTable], TensorTable, Paced], None] = check_cover
        self.live = LiveTensors(tensors, deadline)
        whole = self.live.adopt()
        self._whole: Slab | None = whole  # until it was assigned to a source shard
        self._wanted = whole.specs if wanted is None else wanted
        if parts is not None and wanted is None:
            self._wanted = with_parts(whole.specs, parts, self._paced)
        self.in_part = bool(parts) or wanted is not None
        if self.in_part:
            whole.specs = self._wanted
        self._sources: dict[int, TensorTable] = {}

    def _paced(self, items: Iterable[T]) -> Iterator[T]:
        return until(self.live.deadline, items)

    def of(self, key: ShardKey, manifest: Manifest) -> Slab:
        """Return the tensors that this source shard has. Raise UsageError for some that do not fit, or are missing."""
        self._sources[key.shard] = manifest.tensors
        if len(self._sources) == key.shard_count or key.layout != CHECKPOINT:
            self.check_cover(self._sources, self._wanted, self._paced)
        if self.in_part and self._whole is not None:
            return self._whole
        slab, self._whole = self._whole, None
        if slab is not None and slab.specs == manifest.tensors:
            return slab  # a shortcut, which need not compare thousands of names
        mine = self._wanted.of_tensor
        names = [self._wanted[k].name for name in manifest.tensors.of_tensor for k in mine.get(name, ())]
        if slab is None or len(names) < len(self._wanted):  # else one source shard has all of it
            slab = self.live.adopt(names)
        return slab

    def restart(self) -> None:
        """Forget what was read: other source shards will come."""
        self._sources.clear()


class Destinations:
    """The memory of one read, until the deadline.

    into: tensors for `in_place` (a layout; None: whichever is read); everything else gets memory from the pool.
    wanted: all that is read of a checkpoint, into memory from the pool. serve: what arrives is offered to others.
    for_others: it is read for them only, see requested_copies.py. borrows: memory of another worker of this host may be
    used instead of the pool's, and is not written to."""

    def __init__(
        self,
        serving: Serving,
        deadline: float = NEVER,
        *,
        serve: bool,
        into: LiveMemory | None = None,
        in_place: str | None = None,
        wanted: TensorTable | None = None,
        for_others: bool = False,
        borrows: bool = False,
    ) -> None:
        if into is not None and wanted is not None:
            raise UsageError("into= and wanted= are two places to read into: pass one of them")
        if into is not None:
            into.check_cover = serving.check_cover
        self.serve, self.for_others, self.borrows = serve, for_others, borrows
        self.worker, self._deadline = serving.worker, deadline
        self._deadline_of_read: Callable[[], float] = lambda: deadline  # it moves with `Client.fetch(grows=True)`
        self._serving, self._into, self._in_place = serving, into, in_place
        self._wanted = wanted
        self._read = 0  # the number of this read on the shelf
        self._claims: dict[Slab, Claim] = {}
        self._room = Room()
        self._offered: dict[int, ShardKey] = {}  # source shards that this read serves to others
        self._manifests: dict[int, Manifest] = {}
        self._bases: dict[int, Bases] = {}
        self._contents: dict[int, Contents] = {}  # by source shard
        self._live: LiveMemory | None = None  # `into`, once it is read into
        self.slabs: dict[int, Slab] = {}  # by source shard
        # From the pool: by source shard, and under negative numbers tensors of which several shards hold parts.
        self.allocated: dict[int, Slab] = {}
        self._parted: dict[int, TensorTable] = {}  # source shards that hold parts
        self._placed: dict[str, int] = {}  # whole tensors of which parts come: the negative number of their slab

    @property
    def deadline(self) -> float:
        """Return the deadline of what is done here now: that of the read, where that has moved."""
        return max(self._deadline, self._deadline_of_read())

    def begin(self, deadline_of_read: Callable[[], float]) -> None:
        """Prepare for the request for sources. Raise UsageError when the memory is read into already, or published."""
        self._deadline_of_read = deadline_of_read
        if self._into is not None:
            self._claim(self._into.live.whole)
        if self.borrows:
            self._serving.release_borrowed()
        if self._into is not None:
            self._into.live.settle()
        if self.serve:
            self._read = self._serving.begin_read(for_others=self.for_others)

    # --- for the transfer ---

    @property
    def in_part(self) -> bool:
        """Return whether a checkpoint is read in part: nothing of it can be served to others."""
        return self._wanted is not None or (self._into is not None and self._into.in_part)

    @property
    def takes_deltas(self) -> bool:
        return self._serving.changes.is_on

    def announce_read(self, key: ShardKey) -> None:
        if self.serve:
            self._serving.decide(lambda shelf: shelf.grant(self._read, key))

    def prepare(self, key: ShardKey, manifest: Manifest, loan: Borrowed | None = None) -> Slab:
        slab = self.slabs[key.shard] = self._memory_for(key, manifest, loan)
        in_part = self._wanted is not None and key.layout == CHECKPOINT  # in one slab for all source shards
        if self.serve and not in_part and slab.specs == manifest.tensors:
            if slab.kind == "view":
                self._serving.lend(slab, self.allocated.values())
            if self._serving.prepare(self._read, key, manifest, slab):
                self._offered[key.shard] = key
        return slab

    def missing(
        self, key: ShardKey, manifest: Manifest, needed: tuple[int, ...], planned: Sequence[Move], paced: Paced
    ) -> tuple[int, ...]:
        """Return those that are not in place already, by their digests; the others are served from now on."""
        slab = self.slabs[key.shard]
        contents = self._serving.contents.of(slab, manifest, key.shard)
        if contents is None:
            return needed
        is_alike = slab.specs == manifest.tensors
        self._manifests[key.shard], self._contents[key.shard] = manifest, contents
        contents.whole = range(manifest.segment_count) if is_alike else moves.whole(manifest, planned)
        repairs = self._live is not None and self._live.repairs and is_alike
        noted = (segment for segment in needed if contents.get(segment) == manifest.digest(segment))
        hoped = needed if repairs else tuple(noted)
        in_place = self._present(slab, manifest, planned, hoped, paced) if hoped else frozenset()
        for segment in sorted(in_place):
            self.verified(key.shard, segment)
        missing = tuple(segment for segment in needed if segment not in in_place)
        bases = self._serving.changes.bases(key, manifest, slab, contents.forget(missing))
        if bases is None:
            return missing
        self._bases[key.shard] = bases
        copied = frozenset(filter(bases.copy_equal, paced(missing)))
        for segment in sorted(copied):
            self.verified(key.shard, segment)
        return tuple(segment for segment in missing if segment not in copied)

    def _present(
        self, slab: Slab, manifest: Manifest, planned: Sequence[Move], hoped: tuple[int, ...], paced: Paced
    ) -> frozenset[int]:
        """Return those of these segments whose bytes in the slab have the right digest."""
        if slab.specs != manifest.tensors:
            return frozenset(filter(ReadPlan(manifest, slab, planned).is_there, paced(hoped)))
        if len(hoped) == manifest.segment_count:  # these are digested by several threads
            return frozenset(hoped) - frozenset(slab.damaged(manifest, deadline=self.deadline))
        some_at_a_time = (hoped[first : first + COMPARED_AT_ONCE] for first in range(0, len(hoped), COMPARED_AT_ONCE))
        damaged = (slab.damaged(manifest, some, deadline=self.deadline) for some in paced(some_at_a_time))
        return frozenset(hoped).difference(*damaged)

    def bases(self, shard: int) -> Bases | None:
        return self._bases.get(shard)

    def verified(self, shard: int, segment: int) -> None:
        if shard in self._contents:
            self._contents[shard].note(segment, self._manifests[shard].digest(segment))
        if shard in self._offered:
            self._serving.decide(lambda shelf: shelf.verified(self._read, self._offered[shard], segment))

    def restart(self) -> None:
        self._drop(restarts=True)

    # --- the end ---

    def complete(self, version: int, layout: str) -> None:
        """Finish the read: everything has arrived. Raise UsageError when it cannot stay as it is (see tied.py)."""
        if self._live is not None and self._live.live.tied:
            self._live.live.deadline = self.deadline
            self._live.live.check(version)
            for offer in self._serving.arriving(self._read) if self.serve else ():
                offer.move(self._live.live.settled(offer.slab))
        if self._parted:
            self._serving.check_parts(self._parted, self.deadline)
        names = {name for table in self._parted.values() for name in table.of_tensor}
        for number, slab in self.allocated.items():
            slab.mark_written(None if number >= 0 else names)
        self._serving.holds_fetched(self.allocated.values(), version, layout)
        if self.serve:
            self._serving.complete(self._read)

    def fail(self) -> None:
        """Discard all that was prepared: it will not be completed."""
        self._drop(restarts=False)

    def end(self) -> None:
        """Release the memory for other reads: nothing writes there any more, however it ended. Idempotent."""
        for mine in self._claims.values():
            mine.end()

    def take_back(self) -> None:
        """Withdraw what has arrived: its caller was interrupted."""
        self._serving.take_back(self._offered.values())
        self._serving.releaser(self.allocated.values())()

    # --- inside ---

    def _claim(self, slab: Slab, *, is_pooled: bool = False) -> Slab:
        """Claim this memory, so that nothing else reads into it until the end."""
        what = f"{self.worker} is reading into"
        self._claims[slab] = claim(slab, what, is_written=True, is_pooled=is_pooled, deadline=self.deadline)
        return slab

    def _memory_for(self, key: ShardKey, manifest: Manifest, loan: Borrowed | None) -> Slab:
        if self._into is not None and self._in_place in (None, key.layout):
            self._live, self._into.live.deadline = self._into, self.deadline
            return self._into.of(key, manifest)
        if key.layout == CHECKPOINT and self._wanted is not None:
            return self._place_wanted(self._wanted).of(key, manifest)
        if key.layout == CHECKPOINT and has_parts(manifest.tensors):
            return self._place_parts(key.shard, manifest.tensors)
        if loan is None:
            slab = self._take(manifest.tensors)
        else:
            slab = self._serving.pool.keep(Slab.borrow(manifest.tensors, loan, deadline=self.deadline))
        self.allocated[key.shard] = slab
        return slab

    def _place_wanted(self, wanted: TensorTable) -> LiveMemory:
        """Return the memory for it, taken at the first source shard that comes."""
        if self._live is None:
            plain = (msgspec.structs.replace(spec, part=None) for spec in wanted)
            self.allocated[0] = slab = self._take(TensorTable.of(plain))
            self._live = LiveMemory(slab.tensors(), wanted=wanted, deadline=self.deadline)
            self._live.check_cover = self._serving.check_cover
        self._live.live.deadline = self.deadline
        return self._live

    def _place_parts(self, shard: int, table: TensorTable) -> Slab:
        """Return a view of the whole tensors, with memory for those whose first part this is."""
        self._parted[shard] = table
        wholes = {spec.tensor: spec for spec in table if spec.part is not None and spec.tensor not in self._placed}
        if wholes:
            missing = [whole_of(spec) for spec in until(self.deadline, wholes.values())]
            check_size(missing)
            wanted = TensorTable.of(missing)
            number = min((0, *self.allocated)) - 1
            if number == -1:  # all that came in parts the last time, so that it fits the slabs in the pool
                wanted = self._serving.parts_as_before(shard, table) or wanted
            self.allocated[number] = self._take(wanted)
            self._placed.update(dict.fromkeys(wanted.positions, number))
        # Only the slabs of its own tensors: with all of them, each of hundreds of shards would search hundreds.
        numbers = {self._placed[name] for name in table.of_tensor if name in self._placed}
        blocks = [self.allocated[number] for number in sorted(numbers, reverse=True)]
        alone = TensorTable.of(spec for spec in table if spec.part is None)
        if alone:
            self.allocated[shard] = slab = self._take(alone)
            blocks.insert(0, slab)
        return view_of(table, blocks, self.deadline)

    def _take(self, table: TensorTable) -> Slab:
        slab = self._serving.take(table, self.deadline, is_read=True, for_others=self.for_others, of_read=self._room)
        return self._claim(slab, is_pooled=True)

    def _drop(self, *, restarts: bool) -> None:
        if self.serve:
            hub = self._serving.hub
            self._serving.decide(
                lambda shelf: shelf.drop(self._read, restarts_after=hub.last_request_id + 1 if restarts else None)
            )
        for slab in self.allocated.values():
            if slab in self._claims:
                self._claims.pop(slab).end()
            self._serving.recycle(slab)
        self._serving.forget_tables()  # they may be the reason why it failed
        if self._live is not None:
            self._live.restart()
        self._live, self._room = None, Room()
        held = (self._manifests, self._contents, self._bases)
        for each in (self._offered, self.slabs, self.allocated, self._parted, self._placed, *held):
            each.clear()
