"""Plans of reads. PURE: source table x target table -> moves, which say which bytes go where.

A tensor may be a part of a larger one, at the source, at the target, or at both. The intersection of two boxes is a
box, and a box is a number of runs that are contiguous in both. Rows of a row-major tensor are one run; columns are one
for each row. A part may also be a run by itself, of consecutive elements of the larger tensor. Runs that follow each
other in both streams are one move: equal shards are read in a single move.

A worker of a large engine may read from hundreds of shards that have a million entries together, most of which are
slices for other workers. So disjoint parts are rejected first, and the plan of two tables is cached for the next
version, which almost always has the same ones.

What cannot be placed is an error that names it, never a tensor left as it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain, pairwise, product
from math import prod
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import msgspec

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest, Part, TensorSpec, TensorTable, holds_run

BESIDE_MAX = 256  # parts of a tensor of three or more axes that share a row: each is compared with the others
NAMES_SHOWN_MAX = 5  # the first ones, in an error's message


class Move(NamedTuple):
    """`size_bytes` bytes from the offset `source` of the source's stream to the offset `target` of the target's."""

    source: int
    target: int
    size_bytes: int


Box: TypeAlias = tuple[tuple[int, int], ...]  # [start, stop) in elements, by axis
Paced: TypeAlias = Callable[[Iterable[Any]], Iterable[Any]]  # wraps a long loop's iterable, and may end the loop


def plan(
    source: TensorTable, target: TensorTable, *, without: Collection[str] = (), paced: Paced = iter
) -> Sequence[Move]:
    """Return the moves from source to target, in the source's order; those of tensors `without` are left out.

    Raise UsageError when a target tensor cannot be a part of the same whole as the source's, or two of them overlap."""
    if source == target and not without:
        return [Move(0, 0, source.size_bytes)] if source.size_bytes else []
    of_target = _plans.setdefault(target, WeakKeyDictionary())
    found = of_target.get(source)
    if found is None or (found[0] is not without and set(found[0]) != set(without)):
        found = of_target[source] = without, _plan_by_tensor(source, target, without, paced)
    return found[1]


_Planned: TypeAlias = "tuple[Collection[str], list[Move]]"  # the names left out, and the moves of the rest
_plans: WeakKeyDictionary[TensorTable, WeakKeyDictionary[TensorTable, _Planned]] = WeakKeyDictionary()


def _plan_by_tensor(source: TensorTable, target: TensorTable, without: Collection[str], paced: Paced) -> list[Move]:
    moves: list[Move] = []
    ends = (0, -1)  # of the last move, in both streams
    for spec, start in paced(zip(source.specs, source.offsets, strict=True)):
        positions = target.of_tensor.get(spec.tensor)
        if positions is None or spec.name in without:
            continue
        found = [runs for position in positions if (runs := _within(spec, target, position))]
        runs = found[0] if len(found) == 1 else sorted(chain.from_iterable(found))
        if any(one.source + one.size_bytes > other.source for one, other in pairwise(runs) if len(found) > 1):
            raise UsageError(f"two parts of tensor {spec.tensor!r} that are wanted have something in common")
        for at, to, size_bytes in runs:
            at += start
            if ends == (at, to):
                moves[-1] = Move(moves[-1].source, moves[-1].target, moves[-1].size_bytes + size_bytes)
            else:
                moves.append(Move(at, to, size_bytes))
            ends = at + size_bytes, to + size_bytes
    return moves


def _within(spec: TensorSpec, target: TensorTable, position: int) -> Sequence[Move]:
    """Return the moves between a source's tensor and this one of the target, from its own beginning into the stream."""
    mine = target.specs[position]
    if _are_apart(spec, mine):
        return ()
    if spec.size_bytes and mine.size_bytes:
        offset = target.offsets[position]
        return [Move(at, offset + to, size_bytes) for at, to, size_bytes in _runs(spec, mine)]
    if mine != spec:
        _check_same_whole(spec, mine)
    return ()


def _are_apart(one: TensorSpec, other: TensorSpec) -> bool:
    """Return whether these are two disjoint boxes of the same whole; False may mean unknown. This quickly rejects
    nearly all of what a source has and a worker does not want."""
    mine, theirs = one.part, other.part
    if mine is None or theirs is None or mine.global_shape != theirs.global_shape or one.dtype != other.dtype:
        return False
    if len(mine.start) != len(mine.global_shape) or len(theirs.start) != len(theirs.global_shape):
        return False  # runs
    for start, size, at, length in zip(mine.start, one.shape, theirs.start, other.shape, strict=True):  # noqa: SIM110
        if start + size <= at or at + length <= start:
            return True
    return False


def needed(manifest: Manifest, moves: Sequence[Move]) -> tuple[int, ...]:
    """Return the segments that hold a wanted byte, in order: a digest covers a whole segment."""
    wanted: list[int] = []
    size, after = manifest.segment_size_bytes, 0
    for start, _, size_bytes in moves:
        first, after = max(start // size, after), (start + size_bytes - 1) // size + 1
        wanted += range(first, after)
    return tuple(wanted)


def whole(manifest: Manifest, moves: Sequence[Move]) -> frozenset[int]:
    """Return the segments of which every byte is wanted."""
    size, start, end = manifest.segment_size_bytes, 0, 0
    found: list[int] = []
    for move in (*moves, Move(manifest.size_bytes + 1, 0, 0)):  # the last one ends the run before it
        if move.source != end:
            found += range(-(-start // size), manifest.segment_count if end == manifest.size_bytes else end // size)
            start = move.source
        end = move.source + move.size_bytes
    return frozenset(found)


def check_cover(sources: Mapping[int, TensorTable], target: TensorTable, paced: Paced = iter) -> None:
    """Raise UsageError unless every byte of the target comes from exactly one of the source shards."""
    if list(sources.values()) == [target]:
        return
    found: dict[str, list[tuple[int, TensorSpec]]] = {}
    for shard, table in sources.items():
        for spec in paced(table.specs):
            positions = target.of_tensor.get(spec.tensor)
            if positions is None:
                continue
            beside = found.setdefault(spec.tensor, [])
            meeting = [mine for position in positions if not _are_apart(spec, mine := target.specs[position])]
            for mine in meeting:
                if spec != mine:
                    _check_same_whole(spec, mine)
            if meeting:
                beside.append((shard, spec))
    missing = {spec.tensor for spec in target if spec.tensor not in found}
    missing = missing or {spec.tensor for spec in paced(target) if not _is_covered(spec, found[spec.tensor])}
    if missing:
        raise UsageError(
            f"{len(missing)} tensors would not be updated, or not all of them, because no source shard has them, first "
            f"{sorted(missing)[:NAMES_SHOWN_MAX]}: compare the published names and parts with the ones asked for"
        )


def _is_covered(target: TensorSpec, sources: Sequence[tuple[int, TensorSpec]]) -> bool:
    """Return whether these parts of the same whole cover all of this one. Raise UsageError if two of them overlap."""
    sources = [(shard, spec) for shard, spec in sources if spec.size_bytes]
    if not target.size_bytes or (len(sources) == 1 and sources[0][1].part in (None, target.part)):
        return True
    wanted, boxes = _boxes(target), [(shard, _boxes(spec)) for shard, spec in sources]
    for area in wanted:
        common = [(shard, box) for shard, each in boxes for one in each if (box := common_box(one, area)) is not None]
        _check_disjoint(target.tensor, common)
        if sum(_volume(box) for _, box in common) < _volume(area):
            return False
    return True


def _check_disjoint(name: str, boxes: Sequence[tuple[int, Box]]) -> None:
    """Raise UsageError if two of these boxes of one tensor have an element in common.

    This sweeps along the first axis. The boxes that are open where another begins are disjoint there. So in a matrix
    only two of them can overlap it, the neighbours of its columns: there may be a million parts."""
    open_: list[tuple[Box, int]] = []  # without their rows, in order
    ends: list[tuple[int, Box]] = []  # a heap: where they close
    for shard, box in sorted(boxes, key=lambda each: each[1]):
        (start, stop), across = box[0], box[1:]
        while ends and ends[0][0] <= start:
            del open_[bisect_left(open_, (heappop(ends)[1], -1))]
        at = bisect_left(open_, (across, -1))
        if len(box) > 2 and len(open_) >= BESIDE_MAX:
            raise UsageError(f"more than {BESIDE_MAX} parts of tensor {name!r} lie beside each other in the same rows")
        for beside, other in open_[max(at - 1, 0) : at + 1] if len(box) <= 2 else open_:
            if common_box(across, beside) is not None:
                raise UsageError(f"tensor {name!r} is published by shard {other} and by shard {shard}")
        open_.insert(at, (across, shard))
        heappush(ends, (stop, across))


def _boxes(spec: TensorSpec) -> list[Box]:
    """Return the elements of the whole tensor that this one has, [start, stop) on each axis. A run that starts and ends
    within rows is several boxes: a row's end, whole rows, a row's start; and so on for further axes."""
    whole = _whole(spec)
    if spec.part is None or not spec.part.is_run:
        return [_box(spec) or ((0, 1),)]
    return [tuple(box) for box in _boxes_of_run(spec.part.start[0], spec.part.start[0] + spec.shape[0], whole)]


def _box(spec: TensorSpec) -> Box:
    return tuple((start, start + size) for start, size in zip(_start(spec), spec.shape, strict=True))


def _boxes_of_run(start: int, stop: int, whole: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    if len(whole) == 1:
        yield [(start, stop)]
        return
    row = prod(whole[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from ([(last, last + 1), *box] for box in _boxes_of_run(start - last * row, stop - last * row, whole[1:]))
        return
    if start < first * row:
        yield from ([(first - 1, first), *box] for box in _boxes_of_run(start - (first - 1) * row, row, whole[1:]))
    if first < last:
        yield [(first, last), *((0, size) for size in whole[1:])]
    if last * row < stop:
        yield from ([(last, last + 1), *box] for box in _boxes_of_run(0, stop - last * row, whole[1:]))


def common_box(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of one tensor; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(low < high for low, high in common) else None


def _volume(box: Box) -> int:
    return prod(high - low for low, high in box)


def difference(before: TensorTable, after: TensorTable, *, may_move: bool = False) -> str:
    """Describe what differs between two versions of a table, for messages; empty if nothing does.

    may_move: it is one shard of several, and tensors or parts of them may have moved to another: then all that can be
    judged is whether a tensor that is still here has kept its dtype and its whole shape."""
    if before == after:
        return ""
    missing = [spec.name for spec in before if spec.name not in after.positions and not may_move]
    new = [spec.name for spec in after if spec.name not in before.positions and not may_move]
    changed = [
        f"{spec.name!r} (expected {_text(spec)}, given {_text(given)})"
        for spec in before
        if (given := after.get(spec.name)) is not None and not _is_like(spec, given, may_move=may_move)
    ]
    parts = [_first("missing", [repr(name) for name in missing]), _first("new", [repr(name) for name in new])]
    return "; ".join(filter(None, [*parts, _first("changed", changed)]))


def with_parts(specs: Iterable[TensorSpec], parts: Mapping[str, Part] | None, paced: Paced = iter) -> TensorTable:
    """Return the table of these tensors, with the given parts. Raise UsageError for a part that is impossible."""
    if parts is not None and not isinstance(parts, Mapping):
        raise UsageError(f"the parts are a {type(parts).__name__}: pass a mapping of tensor name to Part")
    if not parts:
        return TensorTable.of(specs)
    described = []
    left = dict(parts)
    for spec in paced(specs):
        part = left.pop(spec.name, None)
        if part is not None:
            _check_part(spec, part)
            if part.global_shape != spec.shape or part.tensor not in ("", spec.name):
                spec = msgspec.structs.replace(spec, part=part)
        described.append(spec)
    if left:
        raise UsageError(f"parts are given for tensors that are not there: {sorted(left)[:NAMES_SHOWN_MAX]}")
    return TensorTable.of(described)


def _check_part(spec: TensorSpec, part: object) -> None:
    if not isinstance(part, Part):
        raise UsageError(f"what is given as the part of tensor {spec.name!r} is a {type(part).__name__}, not a Part")
    if any(
        type(numbers) is not tuple or set(map(type, numbers)) - {int} for numbers in (part.global_shape, part.start)
    ):
        raise UsageError(f"tensor {spec.name!r} is said to be {part}: pass tuples of int")
    bounds = zip(part.start, spec.shape, part.global_shape, strict=False)
    alike = len(part.start) == len(spec.shape) == len(part.global_shape)
    fits = alike and all(start >= 0 and start + size <= whole for start, size, whole in bounds)
    if not (holds_run(part, spec.shape) if part.is_run else fits):
        raise UsageError(f"tensor {spec.name!r} {_text(spec)} is no part of {list(part.global_shape)} at {part.start}")
    if spec.stride is not None:
        raise UsageError(f"tensor {spec.name!r} is a part and strided {spec.stride}: pass a contiguous copy")


def _runs(source: TensorSpec, target: TensorSpec) -> Iterable[Move]:
    """Return the moves between two parts of one whole, within their own bytes."""
    if source == target:
        return [Move(0, 0, source.size_bytes)]
    _check_same_whole(source, target)
    element = source.size_bytes // prod(source.shape)
    if any(spec.part is not None and spec.part.is_run for spec in (source, target)):
        return _common(_runs_of(source), _runs_of(target), element)
    common = common_box(_box(source), _box(target))
    if common is None:
        return []
    low, high = zip(*common, strict=True) if common else ((), ())
    # The last dimensions that are complete in both form one run together with the one before them.
    depth = len(low) - 1
    while depth > 0 and high[depth] - low[depth] == source.shape[depth] == target.shape[depth]:
        depth -= 1
    length = element * (high[depth] - low[depth]) * prod(source.shape[depth + 1 :])
    (at, from_), (to, into) = (_corner_of(spec, low, element) for spec in (source, target))
    if not depth:
        return [Move(at, to, length)]
    outer = [range(b - a) for a, b in zip(low[: depth - 1], high[: depth - 1], strict=True)]
    rows, step, stride = range(high[depth - 1] - low[depth - 1]), from_[depth - 1], into[depth - 1]
    runs: list[Move] = []
    for place in product(*outer):  # one for a matrix, whose rows may be many
        first = at + sum(each * by for each, by in zip(place, from_, strict=False))
        there = to + sum(each * by for each, by in zip(place, into, strict=False))
        runs += [Move(first + row * step, there + row * stride, length) for row in rows]
    return runs


def _corner_of(spec: TensorSpec, low: Sequence[int], element: int) -> tuple[int, list[int]]:
    """Return the byte offset of an element of the whole within a box, and the distance of neighbours on each axis."""
    steps = [element * step for step in _steps(spec.shape)]
    return sum(step * (at - start) for step, at, start in zip(steps, low, _start(spec), strict=True)), steps


def _runs_of(spec: TensorSpec) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the whole, start in this part, count) of each run contiguous in both, in the whole's order."""
    part = spec.part
    if part is None or part.is_run:
        yield (part.start[0] if part else 0), 0, prod(spec.shape)
        return
    depth = len(spec.shape) - 1  # the dimensions after it are there in full
    while depth > 0 and spec.shape[depth] == part.global_shape[depth]:
        depth -= 1
    steps = _steps(part.global_shape)
    count = prod(spec.shape[depth:])
    first = sum(start * step for start, step in zip(part.start, steps, strict=True))
    for number, outer in enumerate(product(*map(range, spec.shape[:depth]))):
        yield first + sum(at * step for at, step in zip(outer, steps, strict=False)), number * count, count


def _common(source: Iterator[tuple[int, int, int]], target: Iterator[tuple[int, int, int]], element: int) -> list[Move]:
    """Return the moves common to two sequences of runs, each in the whole's order. element: size in bytes."""
    found: list[Move] = []
    mine, theirs = next(source, None), next(target, None)
    while mine is not None and theirs is not None:
        low, high = max(mine[0], theirs[0]), min(mine[0] + mine[2], theirs[0] + theirs[2])
        if low < high:
            found.append(
                Move(
                    element * (mine[1] + low - mine[0]), element * (theirs[1] + low - theirs[0]), element * (high - low)
                )
            )
        if mine[0] + mine[2] <= theirs[0] + theirs[2]:
            mine = next(source, None)
        else:
            theirs = next(target, None)
    return found


def _check_same_whole(source: TensorSpec, target: TensorSpec) -> None:
    whole, mine = _whole(source), _whole(target)
    strided = source.stride != target.stride or (source.stride and source != target)
    if source.dtype != target.dtype or whole != mine or strided:
        raise UsageError(
            f"tensor {source.tensor!r} is {_text(source)} at the source but {_text(target)} here: "
            "publish and replicate the same dtype, shape and stride (tensor.contiguous()), or another layout"
        )


def _is_like(spec: TensorSpec, other: TensorSpec, *, may_move: bool) -> bool:
    return spec == other or (may_move and (spec.dtype, _whole(spec)) == (other.dtype, _whole(other)))


def _first(what: str, which: Sequence[str]) -> str:
    if not which:
        return ""
    more = f" and {len(which) - NAMES_SHOWN_MAX} more" if len(which) > NAMES_SHOWN_MAX else ""
    return f"{len(which)} {what}: {', '.join(which[:NAMES_SHOWN_MAX])}{more}"


def _whole(spec: TensorSpec) -> tuple[int, ...]:
    return spec.part.global_shape if spec.part else spec.shape


def _start(spec: TensorSpec) -> tuple[int, ...]:
    return spec.part.start if spec.part else (0,) * len(spec.shape)


def _steps(shape: Sequence[int]) -> list[int]:
    """Return the strides of a row-major tensor, in elements."""
    return [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]


def _text(spec: TensorSpec) -> str:
    stride = "" if spec.stride is None else f" strided {spec.stride}"
    part = "" if spec.part is None else f" at {list(spec.part.start)} of {list(spec.part.global_shape)}"
    return f"{spec.dtype}{list(spec.shape)}{stride}{part}"
