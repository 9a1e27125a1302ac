"""The codec beside memcpy and beside other encodings of the same change."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from recipes.bench.delta.material import Elements, stepped, version
from tensorhub_plugins.core.deltas import codec, native

COUNT = 2 << 20  # elements of a segment of 4 MiB
STEPS = (1, 2, 4, 8, 16)  # between two recorded versions
Spans: TypeAlias = "list[list[codec.Span]]"
PACK: Callable[[bytes], bytes]
try:  # what others use; it is no dependency of ours
    import zstandard

    PACKER, PACK = "zstd-1", zstandard.ZstdCompressor(level=1).compress
except ImportError:
    PACKER, PACK = "zlib-1", partial(zlib.compress, level=1)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    kernels: dict[str, codec.Kernel] = {"numpy": codec.NUMPY}
    try:
        kernels["native"] = native.compiled()
    except OSError as error:
        print(f"no native form: {error}")
    print("changed  ratio  of the bound | others: " + ", ".join(OTHERS) + " | encode, apply: GB/s, of memcpy")
    if options.real:
        return [
            _row(f"{folder.name}, {steps} steps", "real", pairs, kernels, options.rounds)
            for folder in options.real
            for steps, pairs in _recorded(folder, options.segments)
        ]
    rows = []
    for clustered in (False, True):
        for percent in options.percent if not clustered else [each for each in options.percent if each <= 30]:
            random = np.random.default_rng(int(percent * 100))
            olds = [version(random, COUNT) for _ in range(options.segments)]
            pairs = [(old, stepped(random, old, percent, clustered=clustered)) for old in olds]
            kind = "clustered" if clustered else "uniform"
            rows.append(_row(f"{percent:g} % {kind}", kind, pairs, kernels, options.rounds))
    return rows


def _recorded(folder: Path, segments: int) -> Iterator[tuple[int, list[tuple[Elements, Elements]]]]:
    """Yield what a reader asks for that has missed so many steps less one, to the last version that was recorded; in
    segments of which the last one is shorter."""
    found = sorted(folder.glob("[0-9]*.npy"))
    numbers = [int(path.stem) for path in found]
    for steps in STEPS:
        if numbers[-1] - steps in numbers:
            old, new = (np.load(found[numbers.index(number)]) for number in (numbers[-1] - steps, numbers[-1]))
            cuts = range(0, old.size, COUNT)[:segments]
            yield steps, [(old[at : at + COUNT].copy(), new[at : at + COUNT].copy()) for at in cuts]


def _row(
    name: str, kind: str, pairs: list[tuple[Elements, Elements]], kernels: dict[str, codec.Kernel], rounds: int
) -> dict[str, Any]:
    size_bytes = sum(new.nbytes for _, new in pairs)
    spans = [[codec.Span(0, old.nbytes, 2)] for old, _ in pairs]
    flat = [(old.view(np.uint8), new.view(np.uint8)) for old, new in pairs]
    targets = [np.empty_like(old) for old, _ in flat]
    best: dict[str, float] = {}

    def timed(what: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = run()
        best[what] = min(best.get(what, 1e9), time.perf_counter() - began)
        return result

    made: list[bytes | None] = []
    for _ in range(rounds):
        timed("memcpy", lambda: [np.copyto(target, old) for target, (old, _) in zip(targets, flat, strict=True)])
        for form, kernel in kernels.items():
            made = timed(f"encode {form}", partial(_encode_all, flat, spans, kernel))
            if None in made:
                continue
            for target, (old, _) in zip(targets, flat, strict=True):
                np.copyto(target, old)
            deltas = [delta for delta in made if delta is not None]
            timed(f"apply {form}", partial(_apply_all, targets, deltas, spans, kernel))
            if not all(np.array_equal(target, new) for target, (_, new) in zip(targets, flat, strict=True)):
                raise RuntimeError(f"{name}: other bytes than were encoded")
    size = sum(new.nbytes if delta is None else len(delta) for delta, (_, new) in zip(made, flat, strict=True))
    bound = sum(map(_bound_bytes, *zip(*pairs, strict=True)))
    others = {other: size_bytes / sum(encode(old, new) for old, new in pairs) for other, encode in OTHERS.items()}
    speeds = {what: (size_bytes / s / 1e9, best["memcpy"] / s) for what, s in best.items()}
    percent = 100 * sum(int((old != new).sum()) for old, new in pairs) / sum(old.size for old, _ in pairs)
    row = {"changed": name, "kind": kind, "percent": percent, "ratio": size_bytes / size, "of_bound": bound / size}
    row |= {"others": others, "speeds": speeds}
    print(
        f"{name:22} {percent:6.2f} % {row['ratio']:7.1f} {row['of_bound']:6.2f} | "
        + f"{', '.join(f'{r:.1f}' for r in others.values())} | "
        + ", ".join(f"{what} {gb_s:.2f} ({share:.0%})" for what, (gb_s, share) in speeds.items()),
        flush=True,
    )
    return row


def _encode_all(pairs: Sequence[tuple[codec.Bytes, codec.Bytes]], spans: Spans, kernel: codec.Kernel) -> list[Any]:
    return [codec.encode(old, new, own, kernel) for (old, new), own in zip(pairs, spans, strict=True)]


def _apply_all(targets: list[codec.Bytes], deltas: list[bytes], spans: Spans, kernel: codec.Kernel) -> None:
    for target, delta, own in zip(targets, deltas, spans, strict=True):
        codec.apply(target, delta, own, kernel)


def _bound_bytes(old: Elements, new: Elements) -> float:
    """Return the entropy of where elements have changed, each for itself, and of the steps of those that have."""
    changed = old != new
    counts = np.unique(new[changed] - old[changed], return_counts=True)[1]
    bits = sum(float(-(n * np.log2(n / counts.sum()))) for n in counts)
    share = changed.mean()
    if 0 < share < 1:
        bits += old.size * float(-(share * np.log2(share) + (1 - share) * np.log2(1 - share)))
    return bits / 8


def _xor(old: Elements, new: Elements) -> int:
    return len(PACK((old ^ new).tobytes()))


def _gap16_value(old: Elements, new: Elements) -> int:
    at = np.flatnonzero(old != new)
    return len(PACK(np.diff(at, prepend=-1).astype(np.uint16).tobytes() + new[at].tobytes()))


def _index_value(old: Elements, new: Elements) -> int:
    return 6 * int(np.count_nonzero(old != new))


OTHERS = {f"xor + {PACKER}": _xor, f"gap16 + value + {PACKER}": _gap16_value, "index32 + value": _index_value}
