"""Compiles all kernels for GPUs of some kinds, where there is none: a program, as the interpreter is chosen by process.

Prints one JSON object: by kernel and kind of GPU, the size of the machine code, or what is wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tensorhub_plugins.core.device.kernels import by_triton

KINDS = (80, 90)  # A100, H100
WARP = 32
ALIGNED = [["tt.divisibility", 16]]  # as pointers and sizes mostly are: it is then that loads become wide

# By kernel: what its launches pass, and how many warps they take.
LAUNCHES: list[tuple[str, dict[str, str], dict[str, Any], int]] = [
    (
        "_lanes",
        {"addresses": "*i64", "table": "*i64", "out": "*i64", "count": "i32", "blocks": "i32"},
        {"AT_ONCE": 4},
        1,
    ),
    ("_copy", {"rows": "*i64"}, {"WORD": tl.int64, "SIZE": 1024}, 4),
    ("_copy", {"rows": "*i64"}, {"WORD": tl.uint8, "SIZE": 8192}, 4),
    (
        "_cast",
        {
            "source": "*i32",
            "table": "*i64",
            "target": "*i16",
            "sums": "*i64",
            "head": "i32",
            "count": "i32",
            "first": "i32",
            "whole": "i32",
        },
        {"AT_ONCE": by_triton.BLOCKS_AT_ONCE},
        4,
    ),
    ("_sum_up", {"rows": "*i64", "table": "*i64"}, {"AT_ONCE": by_triton.BLOCKS_AT_ONCE}, 4),
    ("_mix", {"sums": "*i64", "table": "*i64", "out": "*i64", "count": "i32", "blocks": "i32"}, {"AT_ONCE": 4}, 1),
]
CALLED = {"_sums_of"}  # by other kernels


@triton.jit
def _broken(rows):  # type: ignore[no-untyped-def]
    """Sum with a type that changes on the way, which the interpreter accepts. This is the control."""
    found = tl.full((1,), 0, tl.uint64)
    for _ in range(tl.load(rows)):
        found = found.to(tl.float32) + 0.5
    tl.store(rows + tl.arange(0, 1), found.to(tl.int64))


def compiled(kernel: Any, given: dict[str, str], fixed: dict[str, Any], warps: int, kind: int) -> int | str:
    """Return the size of the machine code, in bytes; else what is wrong."""
    signature = {**given, **dict.fromkeys(fixed, "constexpr")}
    aligned = {(position,): ALIGNED for position, name in enumerate(signature) if name not in ("first", *fixed)}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    try:
        made = triton.compile(source, target=GPUTarget("cuda", kind, WARP), options={"num_warps": warps})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return len(made.asm["cubin"])


def main() -> None:
    known = {name for name, kernel in vars(by_triton).items() if isinstance(kernel, JITFunction)}
    found: dict[str, int | str] = {}
    for name, given, fixed, warps in LAUNCHES:
        for kind in KINDS:
            found[f"{name} {given} {fixed} sm_{kind}"] = compiled(getattr(by_triton, name), given, fixed, warps, kind)
    json.dump(
        {
            "found": found,
            "left_out": sorted(known - CALLED - {name for name, *_ in LAUNCHES}),
            "control": compiled(_broken, {"rows": "*i64"}, {}, 1, KINDS[-1]),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
