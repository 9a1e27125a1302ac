"""What a checkpoint must contain for this model, and the refusal of one that does not, before the engine pauses.

Two questions, and when they are asked
    Is it like the last one?    `check`, in the thread that fetched it: names, shapes and kinds of number against the
                                first checkpoint that was accepted. Costs nothing.
    Would it fill the model?    `rehearse`, for the first checkpoint: vLLM's own loaders run over it while every
                                parameter is a stand-in without memory. What they write is recorded, box by box. The
                                model is put back untouched. `rehearse_shapes` does so before any byte of it is here.
What the rehearsal refuses
    a tensor that a loader does not take (unknown name, wrong shape), a parameter that is not filled to its last
    element, a number of another kind (an integer, or FP8, for a bfloat16; bfloat16 for FP8).
A tensor that no loader takes anything from is allowed in the first checkpoint (a draft head, for example) and may be
missing later. Any other difference from the first one is refused: vLLM itself would leave old values where a bias or an
expert is missing, or fail half way through.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub_plugins.core import VersionRefused, same_bytes
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.worker import draft, online_quantization
from tensorhub_plugins.vllm.worker.fingerprint import ends_of, parallel_ranks
from tensorhub_plugins.vllm.worker.plan import (
    Piece,
    Plan,
    Region,
    Shapes,
    Strided,
    filled,
    is_view,
    layer_of,
    regions_of,
    shapes_of,
    whole_region,
)
from tensorhub_plugins.vllm.worker.preserved import Untouched, preserved

logger = get_logger(__name__)

NAMES_SHOWN_MAX = 5
BLOCK_LENGTH = 1 << 20  # elements that are converted at once to be compared
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# An attention layer makes them for checkpoints that have them, and works without.
OPTIONAL_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
# vLLM's reload leaves these on the live tensors; a rehearsal must not.
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight")
LIVE_IN_RELOADS = ("bias", "e_score_correction_bias")


_Where = tuple[int, int]  # memory (0: real memory), address in bytes


@dataclass(frozen=True)
class Rehearsal:
    """The record of what the loaders did with a checkpoint of these shapes.

    used: the tensors from which they took something. tied: two that fill the same place, so that they must be equal.
    ignored: biases of layers that have none here although their weights were used, so that they must be zero (or the
    same as another that is used). plan: what this worker needs of them, and where it goes; None: unknown."""

    shapes: Shapes
    used: frozenset[str]
    tied: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    plan: Plan | None = None


class Contract:
    """The tensors that one model accepts. `check` may run in any thread, `rehearse` only where the model is idle."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model, self._vllm_config = model, vllm_config
        self._rehearsed: Rehearsal | None = None
        self._accepted: Rehearsal | None = None

    def check(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Raise VersionRefused if a checkpoint was accepted and these are not its tensors.

        shapes: the published ones, where only a region of some tensors is here."""
        accepted = self._accepted
        if accepted is None:
            return
        shapes = shapes_of(tensors) if shapes is None else shapes
        if accepted.shapes != shapes:
            _compare(accepted, shapes)
        _check_values(accepted, tensors)

    def rehearse(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Raise VersionRefused, with the model untouched, for a first checkpoint that would not fill it."""
        if self._accepted is not None:
            self.check(tensors, shapes)
            return
        shapes = shapes_of(tensors) if shapes is None else shapes
        if self._rehearsed is None or self._rehearsed.shapes != shapes:
            is_whole = shapes == shapes_of(tensors)
            self._rehearsed = rehearse(self._model, self._vllm_config, tensors if is_whole else without_memory(shapes))
        _check_values(self._rehearsed, tensors)

    def rehearse_shapes(self, shapes: Shapes) -> Plan | None:
        """Return how a checkpoint of these shapes would be used, before any of its bytes is here; None if that depends
        on its bytes, or it would not fill the model."""
        try:
            self._rehearsed = rehearse(self._model, self._vllm_config, without_memory(shapes))
        except Exception as error:  # whatever a loader raises when it finds no numbers
            logger.info("what is needed of a checkpoint is found out when all of it is here: %s", error)
            return None
        return self._rehearsed.plan

    def plan_for(self, shapes: Shapes) -> Plan | None:
        """Return the plan from the rehearsal of a checkpoint of these shapes, or None."""
        known = (self._accepted, self._rehearsed)
        return next((one.plan for one in known if one is not None and one.shapes == shapes), None)

    def accept(self) -> None:
        """Compare later versions with the rehearsed one from now on: all workers of the engine have installed it."""
        if self._accepted is None and self._rehearsed is not None:
            self._accepted = self._rehearsed
            unused = sorted(self._accepted.shapes.keys() - self._accepted.used)
            if unused:
                logger.info("%d tensors of the checkpoint are not used here: %s", len(unused), some(unused))


def without_memory(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in shapes.items()}


def _check_values(rehearsal: Rehearsal, tensors: Mapping[str, torch.Tensor]) -> None:
    for one, other in rehearsal.tied:
        if one in tensors and other in tensors and not _same_values(tensors[one], tensors[other]):
            raise VersionRefused(
                f"{one} and {other} are one parameter of this model, and differ: publish one of them, or give the "
                "engine a configuration that does not tie them"
            )
    for name in rehearsal.ignored:
        if name in tensors and bool(tensors[name].float().any()) and not _is_said_elsewhere(name, rehearsal, tensors):
            raise VersionRefused(
                f"{name} is not zero, and vLLM's model has no bias there: train without it, or give the engine the "
                "configuration of the model that is trained"
            )


def _is_said_elsewhere(name: str, rehearsal: Rehearsal, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a bias that is used is equal: BERT's head has one, under two names."""
    others = [other for other in rehearsal.used if other.endswith("bias") and other in tensors]
    return any(_same_values(tensors[name], tensors[other]) for other in others)


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return same_bytes(one, other)  # NaN is equal to itself there
    blocks = zip(one.flatten().split(BLOCK_LENGTH), other.flatten().split(BLOCK_LENGTH), strict=True)
    return all(torch.equal(mine.double(), theirs.double()) for mine, theirs in blocks)


def _compare(accepted: Rehearsal, shapes: Shapes) -> None:
    """Raise VersionRefused unless these shapes fill the model as the accepted ones did."""
    wanted_shapes = accepted.shapes
    twins = {name: other for pair in accepted.tied for name, other in (pair, pair[::-1])}
    surplus = [name for name in shapes if name not in wanted_shapes]
    missing = [
        name for name in wanted_shapes if name not in shapes and name in accepted.used and twins.get(name) not in shapes
    ]
    changed = [
        f"{name} is {_text(*shapes[name])}, not {_text(*wanted)}"
        for name, wanted in wanted_shapes.items()
        if name in shapes and (shapes[name][1] != wanted[1] or kind(shapes[name][0]) != kind(wanted[0]))
    ]
    said = [
        ("are missing", [f"{name} {_text(*wanted_shapes[name])}" for name in missing]),
        ("are unknown", [f"{name} {_text(*shapes[name])}" for name in surplus]),
        ("have changed", changed),
    ]
    if any(texts for _, texts in said):
        raise VersionRefused(
            "not the tensors that this engine was given before; "
            + "; ".join(f"{len(texts)} tensors {how}: {some(texts)}" for how, texts in said if texts)
            + ". Publish the same tensors again, or restart the engine for another model"
        )


def rehearse(model: torch.nn.Module, vllm_config: Any, tensors: Mapping[str, torch.Tensor]) -> Rehearsal:
    """Run the model's loaders over these tensors without changing the model.

    Raise VersionRefused, naming the tensor or the parameter, for a checkpoint that would not fill the model."""
    from vllm.config import set_current_vllm_config

    ends = partial(ends_of, parallel_ranks(vllm_config))
    config = getattr(vllm_config.model_config, "hf_text_config", None)
    heads = bool(getattr(config, "tie_word_embeddings", False))
    try:
        with torch.no_grad(), set_current_vllm_config(vllm_config), _stand_ins(model) as places:
            return rehearse_in(places, partial(draft.load, model), tensors, ends=ends, heads=heads)
    except VersionRefused as error:
        advice = online_quantization.advice(model, vllm_config, tensors) or draft.advice(error.message)
        raise VersionRefused(error.message + advice) from error


def rehearse_in(
    places: dict[int, Place],
    load_weights: Callable[[draft.Weights], Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    ends: Callable[[str], tuple[bool, bool]],
    heads: bool = False,
) -> Rehearsal:
    """Do as `rehearse` with loaders that write into these places, by storage, which have no memory. ends: is this the
    first, and the last, of the ranks that share a tensor. heads: the output head is the embedding."""
    recorder = _Recorder(places)
    with recorder:
        try:
            load_weights(draft.Again(partial(recorder.watched, tensors)))
        except Exception as error:
            raise VersionRefused(recorder.explain(error)) from error
    if recorder.wrong_kinds:
        raise VersionRefused(
            f"{len(recorder.wrong_kinds)} tensors are not the kind of number that the model holds: "
            f"{some(recorder.wrong_kinds)}"
        )
    empty = _not_filled(places)
    if empty:
        raise VersionRefused(
            f"{len(empty)} parameters of the model would not be filled: {some(empty)}. "
            "Publish every tensor of the model under its Hugging Face name"
        )
    if recorder.copies:
        raise VersionRefused(
            f"{len(recorder.copies)} parameters are made from other parameters while the model loads, which an update "
            f"cannot repeat: {some(recorder.copies)}. Publish them under names of their own, or start a new engine "
            "for every version"
        )
    left = recorder.left_over(ends)
    if left:
        raise VersionRefused(
            f"{len(left)} tensors are larger than what the model takes of them: {some(left)}. "
            "Give the engine the configuration of the model that is trained"
        )
    tied, ignored = recorder.tied(heads=heads), recorder.ignored_biases()
    plan = recorder.plan(tied, ignored)
    return Rehearsal(shapes_of(tensors), frozenset(recorder.used), tied, ignored, plan)


@dataclass
class Place:
    """A parameter or buffer of the model, as it is before anything is loaded."""

    name: str
    layer: torch.nn.Module
    shape: torch.Size
    dtype: torch.dtype
    size: int  # elements of its storage that it spans
    live: torch.Tensor | None  # the tensor that the model computes with
    must_be_filled: bool = True  # not a buffer, which a model may compute by itself
    boxes: set[Strided] = field(default_factory=set)
    pieces: dict[Strided, Piece] = field(default_factory=dict)  # the last piece written there
    constants: set[Strided] = field(default_factory=set)  # set to a number from no tensor, such as padding
    is_made: bool = False  # something else than a piece of a tensor was written
    is_contiguous: bool = True

    @property
    def address(self) -> int:
        """Return the address of the live memory, which tied parameters share; 0 if there is none."""
        if self.live is None or not self.live.numel():
            return 0
        return _storage(self.live) if self.live.is_meta else self.live.data_ptr()

    @property
    def filled(self) -> int:
        """Return the number of elements that were written at least once."""
        return filled(self.size, self.boxes)

    @property
    def is_pieces(self) -> bool:
        """Return whether it consists of pieces only, one for each element, and the live tensor has the same layout."""
        live = self.live
        if self.is_made or not self.is_contiguous or live is None or not live.is_contiguous():
            return False
        if (live.shape, live.dtype, self.shape.numel()) != (self.shape, self.dtype, self.size):
            return False
        count = sum(torch.Size(shape).numel() for _, shape, _ in (*self.pieces, *self.constants))
        return count == self.filled == self.size


class _Recorder(TorchDispatchMode):
    """A recorder of all operations of the loaders: what is written into which parameter, and from which tensor."""

    def __init__(self, places: dict[int, Place]) -> None:
        super().__init__()
        self.used: set[str] = set()
        self.wrong_kinds: list[str] = []
        self.cast_to_fp8: set[str] = set()
        self.copies: list[str] = []  # parameters that are written from other parameters of the model
        self._places = places
        self._origins: dict[int, frozenset[str]] = {}  # storage of a derived tensor -> names of its origins
        self._made_of: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}  # it, and the parameters
        self._given: list[tuple[_Where, int, str]] = []  # the given tensors: start, size in bytes, name
        self._current = ""  # the tensor that the loaders asked for last
        self._number_was_read = False  # a number of it was read: constants written from now on may be that number
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._taken: dict[str, set[Strided]] = {}  # by tensor, counted from its own beginning
        self._writers: dict[tuple[int, Strided], set[str]] = {}  # by live parameter and box: tensors that fill it alone

    def watched(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to the loaders. They may share one storage, and a loader may ask for all of them first."""
        self._tensors = tensors
        self._given = sorted((_where(t), t.nbytes, name) for name, t in tensors.items() if t.numel())
        for name, tensor in tensors.items():
            self._current, self._number_was_read = name, False
            yield name, tensor
        self._current = ""

    def left_over(self, ends: Callable[[str], tuple[bool, bool]]) -> list[str]:
        """Return the tensors of which the loaders took only a part, although no other rank takes the rest.

        Of a tensor that ranks share, the first one takes the first element and the last one the last."""
        found = []
        for name, boxes in self._taken.items():
            size = self._tensors[name].numel()
            taken = [
                (start, start + sum((n - 1) * step for n, step in zip(*dims, strict=True))) for start, *dims in boxes
            ]
            is_first, is_last = ends(name)
            ends_are_taken = min(taken)[0] == 0 or not is_first, max(end for _, end in taken) == size - 1 or not is_last
            whole = all(ends_are_taken) and not (is_first and is_last and filled(size, boxes) < size)
            if name in self.used and not whole:
                found.append(f"{name} {_text(self._tensors[name].dtype, self._tensors[name].shape)}")
        return found

    def tied(self, *, heads: bool) -> tuple[tuple[str, str], ...]:
        """Return pairs of tensors that fill exactly the same place. heads: the output head is the embedding."""
        pairs = {pair for names in self._writers.values() for pair in combinations(sorted(names), 2)}
        # The loaders skip a head that is the embedding itself.
        skipped = [name for name in self._tensors if name.endswith("lm_head.weight") and name not in self.used]
        for head in skipped if heads else ():
            embeddings = [name for name in self.used if name.endswith(EMBEDDINGS)]
            pairs |= {(head, name) for name in embeddings if self._tensors[name].shape == self._tensors[head].shape}
        return tuple(sorted(pairs))

    def ignored_biases(self) -> tuple[str, ...]:
        """Return biases that no loader took, of layers whose weights were taken."""
        biases = [name for name in self._tensors if name.endswith("bias") and name not in self.used]
        return tuple(name for name in biases if f"{name.removesuffix('bias')}weight" in self.used)

    def _given_at(self, tensor: torch.Tensor) -> str:
        """Return the name of the tensor of which this one is a view, or ""."""
        if not tensor.numel():
            return ""
        memory, address = _where(tensor)
        before = bisect_right(self._given, ((memory, address), float("inf"))) - 1
        if before < 0:
            return ""
        (of_memory, start), size_bytes, name = self._given[before]
        return name if of_memory == memory and address < start + size_bytes else ""

    def _origin(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the names of the tensors from which this one was made, or of which it is a part."""
        name = self._given_at(tensor)
        return frozenset([name]) if name else self._origins.get(_storage(tensor), frozenset())

    def _parameters(self, tensors: Sequence[torch.Tensor]) -> frozenset[str]:
        """Return the names of the parameters of the model from which these were made, or of which they are a part."""
        found: set[str] = set()
        for storage in map(_storage, tensors):
            if storage in self._places:
                found.add(self._places[storage].name)
            elif storage in self._made_of:
                found |= self._made_of[storage][1]
        return frozenset(found)

    def _note_made(self, tensor: torch.Tensor, parameters: frozenset[str]) -> None:
        """Record that it was made from these. It is kept, without memory as they are: else its id might be reused."""
        if parameters:
            self._made_of[_storage(tensor)] = tensor, parameters

    def _take(self, tensor: torch.Tensor) -> None:
        """Record that elements of this view of a given tensor are read."""
        name = self._given_at(tensor)
        whole = self._tensors.get(name)
        if whole is None or not whole.is_contiguous():
            return
        box = self._box_in(tensor, whole) or (0, tuple(whole.shape), tuple(whole.stride()))
        self._taken.setdefault(name, set()).add(box)

    def _box_in(self, tensor: torch.Tensor, whole: torch.Tensor) -> Strided | None:
        """Return the box of a view within a given tensor; None if its elements are of another size."""
        if tensor.element_size() != whole.element_size():
            return None
        start = (_where(tensor)[1] - _where(whole)[1]) // whole.element_size()
        return start, tuple(tensor.shape), tuple(tensor.stride())

    def _piece(self, func: Any, place: Place, box: Strided, target: torch.Tensor, read: list[torch.Tensor]) -> None:
        """Record what this writes there, as far as a copy can repeat it."""
        if func is torch.ops.aten.copy_.default and len(read) == 1:
            name = self._given_at(read[0])
            whole = self._tensors.get(name)
            taken = self._box_in(read[0], whole) if whole is not None and whole.is_contiguous() else None
            alike = whole is not None and read[0].dtype == whole.dtype and kind(whole.dtype) == kind(target.dtype)
            if taken is not None and alike and read[0].shape == target.shape:
                place.pieces[box] = Piece(name, taken, place.name, box)
                return
        if read or self._number_was_read:
            place.is_made = True
        else:
            place.constants.add(box)

    def plan(self, tied: Sequence[tuple[str, str]], ignored: Sequence[str]) -> Plan | None:
        """Return the plan, or None if a tensor is not contiguous: parts of it cannot be read."""
        if any(not tensor.is_contiguous() for tensor in self._tensors.values()):
            return None
        places = [place for place in self._places.values() if place.boxes]
        process = frozenset(layer_of(place.name) for place in places if not place.is_pieces)
        pieces = tuple(piece for place in places if place.is_pieces for piece in place.pieces.values())
        needed: dict[str, tuple[Region, ...]] = {}
        for name in self.used | self._taken.keys():
            shape = self._tensors[name].shape
            is_cut = name in self._taken and len(shape) > 1
            needed[name] = regions_of(self._taken[name], shape) if is_cut else (whole_region(shape),)
        for one, other in tied:  # they are compared, so both need the same region
            for name, twin in ((one, other), (other, one)):
                if twin in needed and name in self._tensors:
                    needed.setdefault(name, needed[twin])
            if needed.get(one) != needed.get(other) or len(needed.get(one, ())) > 1:
                needed |= {name: (whole_region(self._tensors[name].shape),) for name in (one, other)}
        needed |= {name: (whole_region(self._tensors[name].shape),) for name in ignored}
        return Plan(shapes_of(self._tensors), pieces, dict(sorted(needed.items())), process)

    def explain(self, error: Exception) -> str:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        if not self._current:
            return f"vLLM cannot load this checkpoint: {said}"
        tensor = self._tensors[self._current]
        return f"vLLM cannot load tensor {self._current} {_text(tensor.dtype, tensor.shape)}: {said}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._foreach_copy_.default:  # each is a piece of its own
            for pair in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(torch.ops.aten.copy_.default, types, pair)
            return None
        result = func(*args, **kwargs)
        if is_view(func) and isinstance(result, torch.Tensor) and _storage(result) == _storage(args[0]):
            return result  # nearly everything that loaders do: it reads and writes nothing
        arguments = func._schema.arguments
        given = [(arguments[k], value) for k, value in enumerate(args)]
        given += [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
        written = [v for a, v in given if isinstance(v, torch.Tensor) and a.alias_info and a.alias_info.is_write]
        read = [t for a, v in given if not (a.alias_info and a.alias_info.is_write) for t in _tensors_in(v)]
        names: frozenset[str] = frozenset().union(*map(self._origin, read))
        for tensor in written:
            self._written(func, tensor, read, names)
        known = {_storage(tensor) for tensor in (*read, *written)}
        made = _tensors_in(result)
        self._number_was_read |= bool(names) and not made and not written
        for tensor in made:
            if _storage(tensor) not in known:  # new memory: its former contents do not count
                self._origins[_storage(tensor)] = names
                self._note_made(tensor, frozenset() if _reads_no_number(func) else self._parameters(read))
        if written or not made or any(_storage(tensor) not in known for tensor in made):  # more than a view
            for tensor in read:
                self._take(tensor)
        return result

    def _written(self, func: Any, tensor: torch.Tensor, read: list[torch.Tensor], names: frozenset[str]) -> None:
        storage = _storage(tensor)
        place = self._places.get(storage)
        if place is None:
            self._origins[storage] = self._origins.get(storage, frozenset()) | names
            self._note_made(tensor, self._parameters([tensor, *read]))
            return
        box = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        place.boxes.add(box)
        self._piece(func, place, box, tensor, read)
        if len(names) == 1 and tensor.numel() > 1 and tensor.dtype in FLOATS and "scale" not in place.name:
            where = place.address or storage
            self._writers.setdefault((where, box), set()).update(names)
        others = self._parameters(read) - {place.name}
        self.copies += [f"{place.name} from {other}" for other in sorted(others)]
        if not names:  # a number that was read, or a constant: attributed to the current tensor, if there is one
            names = frozenset([self._current] if self._current else self._tensors)
        self.used |= names
        for source in read:
            if kind(source.dtype) != kind(tensor.dtype):
                of = ", ".join(sorted(names)) or "a tensor"
                if source.dtype in FLOATS and tensor.dtype == torch.float8_e4m3fn:
                    self.cast_to_fp8 |= names
                self.wrong_kinds.append(f"{of} is {_dtype(source.dtype)}, {place.name} is {_dtype(tensor.dtype)}")


@contextmanager
def _stand_ins(model: torch.nn.Module) -> Iterator[dict[int, Place]]:
    """Replace the model's own tensors by ones without memory, and yield these by storage; afterwards restore all."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

    places: dict[int, Place] = {}
    with Untouched(model), preserved(model, always=True):
        for prefix, layer in model.named_modules():
            live = dict(layer._parameters)
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for owned in (layer._parameters, layer._buffers):
                for name, tensor in owned.items():
                    if tensor is None:
                        continue
                    if not tensor.is_meta and (owned is layer._parameters or name in LIVE_IN_RELOADS):
                        tensor = owned[name] = to_meta_tensor(tensor)
                    _unwrap_loader(tensor)
                    if tensor.is_meta:
                        places[_storage(tensor)] = Place(
                            f"{prefix}.{name}" if prefix else name,
                            layer,
                            tensor.shape,
                            tensor.dtype,
                            tensor.untyped_storage().nbytes() // tensor.element_size(),
                            live.get(name),
                            must_be_filled=owned is layer._parameters,
                            is_contiguous=tensor.is_contiguous(),
                        )
        yield places


def _unwrap_loader(tensor: Any) -> None:
    """Remove the wrapper that a former reload may have left around the model's own loader."""
    wrapped: Any = getattr(tensor, "weight_loader", None)
    loader = wrapped
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    if loader is not wrapped:
        tensor.weight_loader = loader


def _not_filled(places: Mapping[int, Place]) -> list[str]:
    filled: set[int] = set()  # addresses of live parameters that receive new bytes
    lacking: list[tuple[Place, int]] = []
    for place in places.values():
        count, done = place.shape.numel(), place.filled
        if done:
            filled.add(place.address)
        if done < count and place.must_be_filled and not _is_optional(place):
            lacking.append((place, done))
    # A tied head receives nothing, and shares what its embedding receives.
    return [
        f"{place.name} {_text(place.dtype, place.shape)} gets {done} of {place.shape.numel()} elements"
        for place, done in lacking
        if done or not place.address or place.address not in filled
    ]


def _is_optional(place: Place) -> bool:
    if place.name.rpartition(".")[2] not in OPTIONAL_SCALES:
        return False
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    is_attention = isinstance(place.layer, AttentionLayerBase | MMEncoderAttention)
    return is_attention and hasattr(place.layer, "process_weights_after_loading")  # as vLLM's own do, from 0.28 on


# --- small things ---


def kind(dtype: torch.dtype) -> torch.dtype | str:
    """Return the kind of number. A loader's copy converts within a kind; others would be truncated or made up."""
    return "float" if dtype in FLOATS else dtype


def _reads_no_number(func: Any) -> bool:
    """Return whether this makes a tensor that only looks like another one: `empty_like`, `new_zeros`, ..."""
    name = str(func._schema.name).partition("::")[2]
    return name.endswith("_like") or name.startswith("new_")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _where(tensor: torch.Tensor) -> _Where:
    """Return where a tensor lies: storage and offset in bytes if it has no memory, else 0 and its address."""
    if tensor.is_meta:
        return _storage(tensor), int(tensor.storage_offset()) * tensor.element_size()
    return 0, tensor.data_ptr()


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors_in(each)] if isinstance(value, (list, tuple)) else []


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{_dtype(dtype)}{list(shape)}"


def some(names: Sequence[str]) -> str:
    """Return the first names, for a message."""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")
