"""The codec beside memcpy and beside other encodings of the same change."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from recipes.bench.delta.material import Elements, stepped, version
from tensorhub_plugins.core.deltas import codec, native

COUNT = 2 << 20  # elements of a segment of 4 MiB


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    kernels: dict[str, codec.Kernel] = {"numpy": codec.NUMPY}
    try:
        kernels["native"] = native.compiled()
    except OSError as error:
        print(f"no native form: {error}")
    print("changed  ratio  of the bound | others: " + ", ".join(OTHERS) + " | encode, apply: GB/s, of memcpy")
    if options.real:
        old, new = (np.load(each).view(np.uint16).reshape(-1) for each in options.real)
        count = min(COUNT, old.size)
        pairs = [
            (old[at : at + count].copy(), new[at : at + count].copy()) for at in range(0, old.size - count + 1, count)
        ]
        return [_row("real", pairs[: options.segments], kernels, options.rounds)]
    rows = []
    for clustered in (False, True):
        for percent in options.percent if not clustered else [each for each in options.percent if each <= 30]:
            random = np.random.default_rng(int(percent * 100))
            olds = [version(random, COUNT) for _ in range(options.segments)]
            pairs = [(old, stepped(random, old, percent, clustered=clustered)) for old in olds]
            rows.append(_row(f"{percent:g} %{' clustered' * clustered}", pairs, kernels, options.rounds))
    return rows


def _row(
    name: str, pairs: list[tuple[Elements, Elements]], kernels: dict[str, codec.Kernel], rounds: int
) -> dict[str, Any]:
    size_bytes = sum(new.nbytes for _, new in pairs)
    spans = [codec.Span(0, pairs[0][0].nbytes, 2)]
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
        for kind, kernel in kernels.items():
            made = timed(f"encode {kind}", lambda k=kernel: [codec.encode(old, new, spans, k) for old, new in flat])
            if None in made:
                continue
            for target, (old, _) in zip(targets, flat, strict=True):
                np.copyto(target, old)
            deltas = [delta for delta in made if delta is not None]
            timed(f"apply {kind}", partial(_apply_all, targets, deltas, spans, kernel))
            if not all(np.array_equal(target, new) for target, (_, new) in zip(targets, flat, strict=True)):
                raise RuntimeError(f"{name}: other bytes than were encoded")
    size = sum(new.nbytes if delta is None else len(delta) for delta, (_, new) in zip(made, flat, strict=True))
    bound = sum(map(_bound_bytes, *zip(*pairs, strict=True)))
    others = {kind: size_bytes / sum(encode(old, new) for old, new in pairs) for kind, encode in OTHERS.items()}
    speeds = {what: (size_bytes / s / 1e9, best["memcpy"] / s) for what, s in best.items()}
    row = {"changed": name, "ratio": size_bytes / size, "of_bound": bound / size, "others": others, "speeds": speeds}
    print(
        f"{name:16} {row['ratio']:7.1f} {row['of_bound']:6.2f} | {', '.join(f'{r:.1f}' for r in others.values())} | "
        + ", ".join(f"{what} {gb_s:.2f} ({share:.0%})" for what, (gb_s, share) in speeds.items()),
        flush=True,
    )
    return row


def _apply_all(targets: list[codec.Bytes], deltas: list[bytes], spans: list[codec.Span], kernel: codec.Kernel) -> None:
    for target, delta in zip(targets, deltas, strict=True):
        codec.apply(target, delta, spans, kernel)


def _bound_bytes(old: Elements, new: Elements) -> float:
    """Return the entropy of where elements have changed, each for itself, and of the steps of those that have."""
    changed = old != new
    counts = np.unique(new[changed] - old[changed], return_counts=True)[1]
    bits = sum(float(-(n * np.log2(n / counts.sum()))) for n in counts)
    share = changed.mean()
    if 0 < share < 1:
        bits += old.size * float(-(share * np.log2(share) + (1 - share) * np.log2(1 - share)))
    return bits / 8


def _xor_zlib(old: Elements, new: Elements) -> int:
    return len(zlib.compress((old ^ new).tobytes(), 1))


def _gap16_value_zlib(old: Elements, new: Elements) -> int:
    at = np.flatnonzero(old != new)
    return len(zlib.compress(np.diff(at, prepend=-1).astype(np.uint16).tobytes() + new[at].tobytes(), 1))


def _index_value(old: Elements, new: Elements) -> int:
    return 6 * int(np.count_nonzero(old != new))


OTHERS = {"xor + zlib-1": _xor_zlib, "gap16 + value + zlib-1": _gap16_value_zlib, "index32 + value": _index_value}
