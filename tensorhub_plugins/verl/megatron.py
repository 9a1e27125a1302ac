"""What each rank of verl's Megatron engine holds: parts of the checkpoint's tensors, found by asking the bridge.

A Megatron parameter is a slice of one or more of the checkpoint's tensors: rows or columns of a matrix, the gate's and
the up projection's rows behind each other, and the query, key and value rows of some heads in turn. verl's bridge
(Megatron-Bridge, or mbridge) knows how: it gathers the slices of all ranks, and converts. That conversion moves
elements and computes nothing. So this module lets it convert numbers instead of weights, once: those of this rank's
elements, beside nothing (NaN) in the place of all other ranks' (`places`). Where a number comes out is where that
element belongs. So names, order of heads and padding are the bridge's own, and no family of models is known here.

A matrix need not be asked as a whole: where rows move, a few columns show it, and the other way round. What comes out
in another way than as such rows or columns (a transposed, scaled or merged tensor) is not known, and is gathered, as
verl does. The ranks agree on that once, when each has asked for what it has: they exchange tables, never weights, and
every one of them checks that each tensor is covered exactly once (`_agreed`).

    engine.module -> sources: parameter, and how the bridge converts it -> places in the checkpoint's tensors
    -> which rank publishes what several hold: data and context parallel ones, and tensor parallel ones of a norm
    -> every version: views of the parameters
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch

from tensorhub_plugins.core import (
    Held,
    Part,
    TensorSpec,
    TensorTable,
    Turns,
    UsageError,
    check_cover,
    contiguous_spec,
    of_all_ranks,
)

log = logging.getLogger(__name__)

PROBED = 8  # columns that are asked for where rows move: more than one, so that their order shows
PROBE_ELEMENTS_MAX = 1 << 27  # 1 GiB of numbers: of a parameter that can only be asked for as a whole, of all ranks
FIRST = 1 << 40  # of the numbers: float64 has all of them exactly, and no smaller type does, to which a bridge may cast
PLACES_MAX = 1024  # of a parameter in a tensor: 128 query groups on one rank are 128
EXPERTS = ".mlp.experts."
OF_EXPERT = re.compile(r"\d+$|(?<=local_experts\.)\d+")  # in a parameter's name: the experts of a layer are alike
FSDP = "Megatron-FSDP cuts parameters in its own way"
FP8 = "the bridge quantizes what it exports"
OTHER_EXPORT = "the bridge has an export of its own"
OTHER_NAMES = "the bridge makes other tensors of it"

Convert: TypeAlias = Callable[[torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


class Place(NamedTuple):
    """A box of a checkpoint's tensor that lies in a parameter: `length` rows (axis 0) or columns (axis 1) from `start`,
    which are those from `source` on in the parameter."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    axis: int
    start: int
    source: int
    length: int


# --- where the elements go: pure -------------------------------------------------------------------------------------


def places(shape: tuple[int, ...], convert: Convert, *, ranks: int = 1) -> list[Place]:
    """Return where the elements of a parameter of this shape belong. Raise UsageError where that is no box of rows or
    columns of a tensor, or would take too much memory to find out. convert: may raise what it likes."""
    rows, columns = shape[0], prod(shape[1:])
    attempts: list[tuple[int, tuple[int, ...]]] = []
    if len(shape) == 2 and min(shape) > PROBED:
        attempts = [(0, (rows, PROBED)), (1, (PROBED, columns))]
    if ranks * rows * columns <= PROBE_ELEMENTS_MAX:
        attempts += [(0, shape)] if len(shape) != 2 else [(0, shape), (1, shape)]
    why = ""
    for axis, asked in attempts:
        try:
            made = list(convert(numbers(asked)))
            return [place for name, tensor in made for place in _boxes(name, tensor, axis, asked, shape)]
        except Exception as error:  # the bridge's own, of any kind, where a few columns are not enough for it
            why = why or (str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}")
    raise UsageError(why or f"it has {rows * columns} elements on each of {ranks} ranks, too many to ask for all")


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of this shape that contains its elements' numbers, from FIRST on."""
    return torch.arange(FIRST, FIRST + prod(shape), dtype=torch.float64).view(shape)


def nothing(like: torch.Tensor) -> torch.Tensor:
    """Return what stands for another rank's part."""
    return torch.full_like(like, float("nan"))


def _boxes(name: str, made: torch.Tensor, axis: int, asked: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Place]:
    """Yield the boxes along this axis in a tensor that the bridge made of the numbers of a parameter of `shape`, asked
    for as one of the shape `asked`. Raise UsageError for what is none."""
    across = asked[1:] if axis == 0 else asked[:1]  # that a row, or a column, consists of
    if made.ndim != len(shape) or tuple(made.shape[1:] if axis == 0 else made.shape[:1]) != across:
        raise UsageError(f"{name}: {list(made.shape)} is made of {list(asked)}")
    lines = made.reshape(made.shape[0], -1) if axis == 0 else made.reshape(made.shape).t()
    step, within = (prod(across), 1) if axis == 0 else (1, asked[1])
    first = lines[:, 0]
    held = ~first.isnan()
    here = first[held]
    expected = here[:, None] + within * torch.arange(lines.shape[1], dtype=torch.float64)
    if (~lines.isnan()).sum() != held.sum() * lines.shape[1] or not torch.equal(lines[held], expected):
        raise UsageError(f"{name}: its elements are not moved as {'rows' if axis == 0 else 'columns'}")
    index = (here - FIRST) / step
    source, total = index.long(), asked[axis]
    if not torch.equal(source.double(), index) or not _are_apart(source, total):
        raise UsageError(f"{name}: its elements are computed, not moved")
    at = held.nonzero().view(-1)
    new = torch.ones(len(at), dtype=torch.bool)
    new[1:] = (at[1:] != at[:-1] + 1) | (source[1:] != source[:-1] + 1)
    ends = [*new.nonzero().view(-1).tolist(), len(at)]
    if len(ends) > PLACES_MAX:
        raise UsageError(f"{name}: its elements go to {len(ends) - 1} places")
    whole = list(made.shape)
    if len(shape) == 2:
        whole[1 - axis] = shape[1 - axis]
    for low, high in pairwise(ends):
        yield Place(name, tuple(whole), axis, int(at[low]), int(source[low]), high - low)


def _are_apart(source: torch.Tensor, total: int) -> bool:
    """Return whether these are different numbers from 0 to `total` - 1."""
    return bool((source >= 0).all() and (source < total).all()) and len(source.unique()) == len(source)


def held_places(tensor: torch.Tensor, found: Iterable[Place]) -> Iterator[Held]:
    """Yield the parts of one tensor that lie in this parameter: views of it."""
    for number, place in enumerate(found):
        whole = contiguous_spec(place.name, tensor.dtype, place.shape)
        view = tensor.detach().narrow(place.axis, place.source, place.length)
        start = tuple(place.start if axis == place.axis else 0 for axis in range(tensor.ndim))
        is_whole = view.shape == whole.shape
        yield Held(whole, view, None if is_whole else Part(place.shape, start, place.name if number else ""))


# --- what verl's engine has ------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A parameter of this rank. names: of the checkpoint's tensors in it. convert: has the bridge make these of it, and
    of nothing on all other ranks. ranks: among how many it may be cut, and this one's number; copies: the same, of the
    ranks that hold what this one does in any case."""

    name: str
    tensor: torch.Tensor
    names: list[str]
    convert: Convert
    ranks: tuple[int, int]
    copies: tuple[int, int]


def why_gathered(engine: Any) -> str:
    """Return why whole tensors are needed of this engine; "" where each rank can publish its parts. The same on all
    ranks, which exchange tables of names, once."""
    if not hasattr(engine, "_tensorhub_shares"):
        engine._tensorhub_shares = _agreed(engine)
        if engine._tensorhub_shares.problem and torch.distributed.get_rank() == 0:
            log.warning("whole tensors are gathered to every trainer rank: %s", engine._tensorhub_shares.problem)
    return engine._tensorhub_shares.problem


def held_by_rank(engine: Any) -> Iterator[Held]:
    """Yield this rank's parts: views of the parameters as they are now. `why_gathered` has nothing against it."""
    shares: Shares = engine._tensorhub_shares
    tensors = {source.name: source.tensor for source in sources(engine)}
    for spec in shares.whole:
        parameter, found = shares.mine.get(spec.name, ("", []))
        if found:
            yield from held_places(tensors[parameter], found)
        else:
            yield Held(spec)


def sources(engine: Any) -> Iterator[Source]:
    """Yield the parameters of this rank, as verl exports them."""
    return _of_mbridge(engine) if engine.vanilla_bridge else _of_megatron_bridge(engine)


def _of_mbridge(engine: Any) -> Iterator[Source]:
    from verl.utils.megatron_utils import unwrap_model

    bridge = engine.bridge
    for model in unwrap_model(list(engine.module)):
        names = bridge._weight_name_mapping_mcore_local_to_global(model)
        tensors = dict(model.named_parameters())
        tensors |= {name: tensor for name, tensor in model.state_dict().items() if name.endswith("expert_bias")}
        for local, tensor in tensors.items():
            # The last stage has the embedding once more, and a checkpoint has not.
            if local == "output_layer.weight" and model.share_embeddings_and_output_weights:
                continue
            name, (ranks, copies) = names[local], _ranks(EXPERTS in local)
            convert = functools.partial(_by_mbridge, bridge, name, tensor, ranks)
            yield Source(name, tensor, bridge._weight_name_mapping_mcore_to_hf(name), convert, ranks, copies)


def _by_mbridge(
    bridge: Any, name: str, tensor: torch.Tensor, ranks: tuple[int, int], asked: torch.Tensor
) -> Iterable[tuple[str, torch.Tensor]]:
    """Do what mbridge's export does, without its collectives."""
    merged, (count, rank) = asked, ranks
    if EXPERTS in name or getattr(tensor, "tensor_model_parallel", False):
        shards = [asked if each == rank else nothing(asked) for each in range(count)]
        merged = bridge._weight_merge_across_tp(name, shards, tensor)
    if asked.ndim == 2 and asked.shape[1] != tensor.shape[1]:  # the bridge takes the number of columns from here
        bridge, config = copy.copy(bridge), copy.copy(bridge.hf_config)
        heads = config.num_attention_heads
        config.head_dim = getattr(config, "head_dim", config.hidden_size // heads)
        config.hidden_size, bridge.hf_config = asked.shape[1], config
    names, made = bridge._weight_to_hf_format(name, merged)
    return zip(names, made, strict=True)


def _of_megatron_bridge(engine: Any) -> Iterator[Source]:
    bridge = engine.bridge._model_bridge
    bridge.hf_config = engine.model_config.hf_config
    for task in engine._mbridge_export_tasks():
        if task is None or task.param_weight is None:  # another pipeline stage's
            continue
        names = task.mapping.hf_param
        ranks, copies = _ranks(task.mapping.is_expert)
        convert = functools.partial(_by_megatron_bridge, bridge, task)
        named = [names] if isinstance(names, str) else list(names.values())
        yield Source(task.global_param_name, task.param_weight, named, convert, ranks, copies)


def _by_megatron_bridge(bridge: Any, task: Any, asked: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Do what Megatron-Bridge's export does, with verl's stand-ins for its collectives."""
    from verl.workers.engine.megatron.delta_export import make_probe

    made = make_probe(_copied(task.mapping), task.megatron_module).megatron_to_hf(asked, task.megatron_module)
    changed = bridge.maybe_modify_converted_hf_weight(task, dict(made), {})
    if {name: id(tensor) for name, tensor in made.items()} != {name: id(tensor) for name, tensor in changed.items()}:
        raise UsageError(OTHER_NAMES)
    return made.items()


def _copied(mapping: Any) -> Any:
    """Return a copy that may be changed: the first collective of the original expects it as it was, on all ranks."""
    made = copy.copy(mapping)
    for name, value in vars(mapping).items():
        if hasattr(value, "megatron_to_hf"):
            setattr(made, name, _copied(value))
    return made


def _ranks(is_expert: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return among how many ranks such a parameter may be cut, and how many have the same of it for sure, each with
    this rank's number."""
    from megatron.core import parallel_state as mpu

    if is_expert:
        cut = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
        return cut, (mpu.get_expert_data_parallel_world_size(), mpu.get_expert_data_parallel_rank())
    cut = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    copies = mpu.get_data_parallel_world_size(with_context_parallel=True)
    return cut, (copies, mpu.get_data_parallel_rank(with_context_parallel=True))


# --- what a rank publishes -------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """What the ranks have agreed on. problem: why whole tensors are gathered; "": they are not. whole: all tensors.
    mine: what this rank publishes of a tensor, as places in a parameter."""

    problem: str
    whole: TensorTable = TensorTable(())
    mine: Mapping[str, tuple[str, list[Place]]] = {}


class Found(NamedTuple):
    """What one rank has found out. problem: see `Shares`. stage: of the pipeline. parts: what it publishes of a tensor,
    after the whole tensor; of one that others publish, nothing. mine: see `Shares`."""

    problem: str
    stage: int = 0
    parts: Mapping[str, list[TensorSpec]] = {}
    mine: Mapping[str, tuple[str, list[Place]]] = {}


def _agreed(engine: Any) -> Shares:
    """Find out where this rank's parameters belong, and compare that with all other ranks."""
    if getattr(engine.engine_config, "use_megatron_fsdp", False):
        return Shares(FSDP)
    if not engine.vanilla_bridge and engine._mbridge_export_tasks() is None:  # a collective, once
        return Shares(FP8)
    try:
        found = _found(engine)
    except Exception as error:  # on some ranks only, perhaps: the others wait for what it has to say
        found = Found(f"{type(engine.bridge).__name__}: {error}")
    return shares_of(of_all_ranks(found._replace(mine={})), found)


def _found(engine: Any) -> Found:
    from megatron.core import parallel_state as mpu

    if engine.vanilla_bridge and not type(engine.bridge).export_weights.__module__.startswith("mbridge.core."):
        return Found(OTHER_EXPORT)
    return found_in(sources(engine), mpu.get_pipeline_model_parallel_rank())


def found_in(given: Iterable[Source], stage: int) -> Found:
    """Return where the parameters of a rank in this pipeline stage belong, and what of them it publishes. Raise
    UsageError for what is not known."""
    turns = Turns(0, 1)
    parts: dict[str, list[TensorSpec]] = {}
    mine: dict[str, tuple[str, list[Place]]] = {}
    known: dict[tuple[str, torch.Size], tuple[list[str], list[Place]]] = {}
    for source in given:
        tensor, (count, rank), (copies, copy_) = source.tensor, source.ranks, source.copies
        if type(tensor.data) is not torch.Tensor:
            raise UsageError(f"{source.name} is a {type(tensor.data).__name__}")
        named, found = _asked(source, known)
        by_name = {name: [place for place in found if place.name == name] for name in named}
        if count > 1 and all(sum(place.length for place in each) == _length(each) for each in by_name.values()):
            copies, copy_ = copies * count, copy_ * count + rank  # it is not cut
        is_mine = turns.is_mine(copy_, copies, tensor.nbytes)
        for name, each in by_name.items():
            if name in parts:
                raise UsageError(f"{name} is in {mine[name][0]} and in {source.name}")
            if not each or not (is_mine or copy_ == 0):
                continue
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            specs = [_spec(held) for held in held_places(like, each)] if is_mine else []
            parts[name] = [contiguous_spec(name, tensor.dtype, each[0].shape), *specs]
            mine[name] = source.name, each if is_mine else []
    return Found("", stage, parts, mine)


def shares_of(all_found: Iterable[Found], own: Found) -> Shares:
    """Return what follows from what all ranks have found, for the rank that found this: the same problem on all."""
    all_found = list(all_found)
    problems = sorted({found.problem for found in all_found if found.problem})
    if problems:
        return Shares(problems[0])
    whole: dict[str, TensorSpec] = {}
    stage: dict[str, int] = {}
    for found in all_found:
        for name, (spec, *_) in found.parts.items():
            if whole.setdefault(name, spec) != spec:
                return Shares(f"{name} is {spec} on one rank and {whole[name]} on another")
            stage[name] = min(found.stage, stage.get(name, found.stage))  # of an embedding that two of them have
    table = TensorTable.of(whole.values())
    tables = {
        rank: TensorTable.of(
            spec for name, each in found.parts.items() if found.stage == stage[name] for spec in each[1:]
        )
        for rank, found in enumerate(all_found)
    }
    try:
        check_cover(tables, table)
    except UsageError as error:
        return Shares(f"what the bridge makes of all ranks' parameters is not the checkpoint: {error}")
    mine = {name: each for name, each in own.mine.items() if own.stage == stage[name]}
    return Shares("", table, mine)


def _asked(
    source: Source, known: dict[tuple[str, torch.Size], tuple[list[str], list[Place]]]
) -> tuple[list[str], list[Place]]:
    """Return the names of the tensors that a parameter is made into, and its places in them; of experts of one layer,
    which are alike, the first one is asked."""
    key = OF_EXPERT.sub("", source.name) if EXPERTS in source.name else source.name, source.tensor.shape
    if key in known and len(known[key][0]) == len(source.names):
        names = dict(zip(known[key][0], source.names, strict=True))
        return source.names, [place._replace(name=names[place.name]) for place in known[key][1]]
    made: list[str] = []

    def convert(asked: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        items = list(source.convert(asked))
        made[:] = [name for name, _ in items]
        return items

    try:
        found = places(tuple(source.tensor.shape), convert, ranks=source.ranks[0])
    except UsageError as error:
        raise UsageError(f"{source.name}: {error}") from error
    if made == source.names:
        known[key] = made, found
    return made, found


def _length(found: list[Place]) -> int:
    """Return the length of the tensor along the axis in which it may be cut; -1 where this rank has none of it."""
    return found[0].shape[found[0].axis] if found else -1


def _spec(held: Held) -> TensorSpec:
    assert held.tensor is not None, "a place is not empty"
    spec = contiguous_spec(held.name, held.tensor.dtype, held.tensor.shape)
    return spec if held.part is None else msgspec.structs.replace(spec, part=held.part)
