"""What each rank of a Megatron trainer publishes, from configurations alone: its own parts, beside a gather of all.

Megatron cuts matrices by tensor parallelism: queries, keys, values, gates and up projections by rows, output and down
projections by columns; it keeps each expert whole on one expert parallel rank, and each layer on one pipeline stage.
A query, key or value matrix lies there in as many parts as its rank has query groups. What several ranks hold alike,
data parallel ones or all of a stage, one of them publishes, in turns (verl/megatron.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from recipes.bench.sizes.models import LAYER, MODELS, Model, deepened
from recipes.bench.sizes.predict import EXPERT, KEEP, experts_in
from recipes.bench.sizes.slices import shapes_of_config
from tensorhub_plugins.core import Turns
from tensorhub_plugins.vllm.worker.plan import Shapes, specs_of, whole_region

# Of each model: the sizes of the tensor, pipeline and expert parallel groups.
GROUPS = {
    "Qwen2.5-7B": [(2, 1, 1), (4, 2, 1)],
    "Llama-3-70B": [(8, 1, 1), (8, 4, 1)],
    "Qwen3-235B-A22B": [(4, 2, 8), (4, 2, 32)],
    "DeepSeek-V3": [(8, 8, 32)],
}
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}  # tensors of one parameter
PROJECTION = re.compile(r"(.*\.)(\w+)_proj\.(weight|bias)")
WHOLE = {("q_a", "weight"), ("o", "bias"), ("down", "bias")}  # beside what is no such projection


class Groups(NamedTuple):
    """The sizes of a trainer's groups. ranks: of all; what is left of it is data parallel."""

    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass
class Published:
    """What one rank publishes of a version: bytes, and parts of tensors."""

    size_bytes: int = 0
    parts: int = 0


def rows(names: str | None) -> Iterator[tuple[str, int, Published]]:
    """Yield a name, the bytes of the whole model and what the rank with the most bytes publishes, and the most parts
    of any rank: for each of the models' groups."""
    for name in names.split(",") if names else MODELS:
        model = MODELS[name]
        shapes, groups = shapes_of(model), model.figures[4]
        whole = sum(specs_of(name, *each, [whole_region(each[1])])[0].size_bytes for name, each in shapes.items())
        for tp, pp, ep in GROUPS[name]:
            ranks = published(shapes, Groups(model.ranks, tp, pp, ep), groups, model.layers)
            most = Published(max(each.size_bytes for each in ranks), max(each.parts for each in ranks))
            yield f"{name}, {model.ranks} ranks: TP {tp}, PP {pp}, EP {ep}", whole, most


def shapes_of(model: Model) -> Shapes:
    few = min(max(model.unlike, 1) + 2, model.layers)
    return deepened(shapes_of_config(model.config(few)), few, model.layers)


def table(names: str | None) -> dict[str, dict[str, int]]:
    """Print and return the rows, in bytes, but parts; gathered: what each rank receives where all is gathered to it."""
    columns = ["trainer", "the model", "a rank's part", "its memory", "parts", "gathered, as before"]
    print("|", " | ".join(columns), "|\n|", " | ".join(["---"] * len(columns)), "|")
    figures = {}
    for name, whole, most in rows(names):
        part = most.size_bytes
        found = {
            "whole": whole,
            "part": part,
            "memory": (KEEP + 1) * part,
            "parts": most.parts,
            "gathered": whole - part,
        }
        figures[name] = found
        shown = [f"{value:,}" if key == "parts" else f"{value / 1e9:.1f}" for key, value in found.items()]
        print("|", " | ".join([name, *shown]), "|", flush=True)
    return figures


def published(shapes: Shapes, groups: Groups, query_groups: int, layers: int) -> list[Published]:
    """Return what each rank publishes of a model of these tensors, in the order of stages."""
    parameters: dict[str, list[tuple[str, int]]] = {}  # of a stage: their tensors, and bytes
    for name, (dtype, shape) in shapes.items():
        (whole,) = specs_of(name, dtype, shape, [whole_region(shape)])
        parameters.setdefault(_parameter(name), []).append((name, whole.size_bytes))
    of_stages: list[list[str]] = [[] for _ in range(groups.pp)]
    for parameter in parameters:
        of_stages[_stage(parameters[parameter][0][0], groups.pp, layers)].append(parameter)
    return [
        _of_rank(number, [parameters[each] for each in stage], groups, query_groups)
        for stage in of_stages
        for number in range(groups.ranks // groups.pp)
    ]


def _of_rank(number: int, parameters: Iterable[list[tuple[str, int]]], groups: Groups, query_groups: int) -> Published:
    """Return what the rank of this number of a stage publishes: tensor parallel ranks come first."""
    turns, found, ranks = Turns(0, 1), Published(), groups.ranks // groups.pp
    count = experts_in(name for tensors in parameters for name, _ in tensors)
    for tensors in parameters:
        name, size_bytes, pieces = tensors[0][0], sum(size for _, size in tensors), 1
        if expert := EXPERT.fullmatch(name):
            among = groups.ep
            if int(expert[2]) // -(-count[expert[1]] // groups.ep) != number % groups.ep:
                continue
        elif cut := _pieces(name, query_groups // groups.tp):
            among, size_bytes, pieces = groups.tp, size_bytes // groups.tp, cut
        else:
            among = 1
        if turns.is_mine(number // among, ranks // among, size_bytes):
            found.size_bytes, found.parts = found.size_bytes + size_bytes, found.parts + pieces * len(tensors)
    return found


def _parameter(name: str) -> str:
    """Return the name of Megatron's parameter that this tensor lies in."""
    projection = PROJECTION.fullmatch(name)
    return name if projection is None else f"{projection[1]}{FUSED.get(projection[2], projection[2])}.{projection[3]}"


def _stage(name: str, stages: int, layers: int) -> int:
    layer = LAYER.fullmatch(name)
    if layer is None:
        return 0 if "embed" in name else stages - 1
    return int(layer["number"]) // -(-layers // stages)


def _pieces(name: str, query_groups: int) -> int:
    """Return in how many parts a tensor parallel rank has its slice of this tensor; 0: every rank has all of it."""
    projection = PROJECTION.fullmatch(name)
    if projection is None:
        return int("embed" in name or "lm_head" in name)
    if (projection[2], projection[3]) in WHOLE:
        return 0
    return query_groups if FUSED.get(projection[2]) == "qkv" else 1
