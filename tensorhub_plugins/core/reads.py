"""Read planning. PURE: source manifest x target manifest -> where every source tensor goes.

A tensor that cannot be placed is an error that names it, never a tensor left as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.values import TensorSpec, stream_offsets

NOT_WANTED = -1


def plan(source: tuple[TensorSpec, ...], target: tuple[TensorSpec, ...]) -> list[int]:
    """For every source tensor its stream offset in the target, or NOT_WANTED.

    Raise UsageError when a target tensor differs from the source's tensor of the same name.
    """
    offsets = dict(zip((t.name for t in target), stream_offsets(target), strict=True))
    wanted = {t.name: t for t in target}
    placement = []
    for spec in source:
        mine = wanted.get(spec.name)
        if mine is not None and mine != spec:
            raise UsageError(
                f"tensor {spec.name!r} is {_text(spec)} at the source but {_text(mine)} here: "
                "publish and replicate the same dtype, shape and stride, or another layout"
            )
        placement.append(NOT_WANTED if mine is None else offsets[spec.name])
    return placement


def check_cover(sources: Mapping[int, Iterable[str]], target: Iterable[str]) -> None:
    """Raise UsageError unless every target tensor comes from exactly one of the source shards."""
    owner: dict[str, int] = {}
    for shard, names in sources.items():
        for name in names:
            if name in owner:
                raise UsageError(f"tensor {name!r} is published by shard {owner[name]} and by shard {shard}")
            owner[name] = shard
    missing = sorted(set(target) - owner.keys())
    if missing:
        raise UsageError(
            f"{len(missing)} tensors would not be updated because no source shard has them, first {missing[:5]}: "
            "compare the published names with the ones asked for"
        )


def _text(spec: TensorSpec) -> str:
    stride = "" if spec.stride is None else f" strided {spec.stride}"
    return f"{spec.dtype}{list(spec.shape)}{stride}"
