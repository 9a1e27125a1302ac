"""A checkpoint into a live model: by vLLM's layerwise reload, or by plain copies where those are shown to do the same.

The engine stands still for it. The reload works through every layer in Python, and for most layers it comes down to
writing boxes of tensors where the plan says (plan.py). But a model may rename, permute and scale what it loads and
derive more from it, loaders may read what no rehearsal showed, and a reload may leave behind what it derived the first
time. So the first conversion of a checkpoint is a trial, over what this worker takes of it and no more

    reload the checkpoint           state 1, unless no layer is known to be packed, cast or derived
    reload noise                    state 2; each piece of the plan is compared with the live weights
    install the checkpoint          state 3: copies for the layers of pieces, a reload of the others; with no others,
                                    a reload of all

A state is the digests of all weights that are not pieces, and of every other tensor and number reachable from the model
(reachable_tensors.py). Layers that consist of pieces are loaded where they are: they take two writes, a comparison.
    each piece of noise is there    copies do in its layer what a reload does, and are used from now on
    2 equals 1 (or 3) beside them   the same; if not, that layer is reloaded, and the trial begins again
    hidden, 2 unlike 1 (or 3)       derived; it may be from any layer, so all are reloaded, and the trial begins
                                    again. Then it is no part of a raw copy, and these are not exchanged with peers
    1 equals 3                      an install leaves nothing of the version before, and needs what the plan says; if
                                    not, all of the checkpoint must come, and if not even then, the model is refused
    2 unlike 3                      in every weight that is derived from others, or the model is refused

Of layers that are reloaded in any case only the first and the last of each kind are put to the test (kinds.py): the
others are reloaded once, in state 3. Whether layers of a kind are copies is asked of one of them before the trial.

Loaders get no numbers but those that the plan names (partial.py): one that reads more raises NotEnough, and then all of
the checkpoint must come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tensorhub_plugins.core import Slab, TensorHubError, UsageError, copy_all, flat_bytes, progress, work
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.worker import cpu, draft, kinds, online_quantization, partial, reload, weights
from tensorhub_plugins.vllm.worker.checkpoint_contract import some
from tensorhub_plugins.vllm.worker.partial import NotEnough as NotEnough
from tensorhub_plugins.vllm.worker.plan import (
    Given,
    Held,
    Piece,
    Plan,
    Region,
    Shapes,
    Strided,
    in_order,
    layer_of,
    place_in,
    view,
    whole_region,
)
from tensorhub_plugins.vllm.worker.reachable_tensors import walk
from tensorhub_plugins.vllm.worker.votes import ALONE, Steps

logger = get_logger(__name__)

WORTH_IT = 0.95  # of the checkpoint's bytes: fetching regions must save more than some tiny tensors

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # target and source of a copy
_Lies = tuple[Region, tuple[int, ...]]  # a region, and the strides of its tensor
_Place = tuple[
    str, Strided, int, Strided | None
]  # target, box in it, index of the held region, box in that (None: all of it)


@dataclass(frozen=True)
class State:
    """The digests, or values, by name."""

    weights: dict[str, bytes]
    hidden: dict[str, object]


class Conversion:
    """The conversion of checkpoints. hidden: what the model derives and no raw copy carries, known after a trial."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, steps: Steps = ALONE) -> None:
        """Begin without a trial. steps: with the workers that share its scales (online_quantization.py)."""
        self._model, self._vllm_config, self._steps = model, vllm_config, steps
        self._tried: Shapes | None = None  # the shapes of the checkpoint that was tried
        self._plan: Plan | None = None  # proved to be sufficient
        self._lacks = False  # the plan lacked something
        self._process: frozenset[str] = frozenset()  # with a plan: the layers that are reloaded, the others are copied
        self._places: Places | None = None  # the copies of the plan
        self._kinds: kinds.Kinds  # in a trial: of the layers that it may reload
        self.hidden: tuple[str, ...] = ()

    def install(self, checkpoint: Mapping[str, torch.Tensor] | Given) -> Literal["copy", "reload"]:
        """Replace all weights of the model by these, under their Hugging Face names. Return how: "reload" also if only
        some layers need it.

        Raises NotEnough for a checkpoint that has to arrive whole, whatever a loader raises, or UsageError for a model
        whose updates are shown to be wrong; its weights are mixed then."""
        given = checkpoint if isinstance(checkpoint, Given) else Given.of(checkpoint)
        if not self._steps.all("a checkpoint like the last", self._tried == given.shapes):
            self._try(given)
        else:
            self._install(given)
        return "reload" if self._plan is None or self._process else "copy"

    def wanted(self) -> Plan | None:
        """Return what of the next checkpoint to fetch: only what this plan needs; None: all of it."""
        return None if self._tried is None else worth_it(self._plan)

    def fits(self, shapes: Shapes) -> bool:
        """Return whether a checkpoint of these shapes was tried."""
        return self._tried == shapes

    def state(self) -> State:
        """Return the state of all weights, and of what is beside them."""
        return self._state(_Pieces(self._model, None, frozenset()))

    def changed_since(self, before: State) -> list[str]:
        """Return the names of what is not as it was then."""
        now = self.state()
        return [*_differ(now.weights, before.weights), *_differ(now.hidden, before.hidden)]

    def _install(self, given: Given) -> None:
        if self._plan is None:
            self._reload(given, given.held)
            return
        self._copy(given.held.items())
        if self._process:
            self._reload(given, self._plan.sources_of(self._process), self._process)

    def _try(self, given: Given) -> None:
        if self._tried is not None:
            self._tried, self._lacks = None, False
        self.hidden, plan = (), given.plan
        if plan is None and not given.is_whole:
            raise NotEnough("only a whole checkpoint can be put to the test without a plan")
        is_enough = self._steps.all("a plan", plan is not None and not self._lacks)
        if plan is None or not is_enough or not self._steps.all("what is needed", self._is_enough(given, plan)):
            if not self._steps.all("a whole checkpoint", given.is_whole):
                raise NotEnough("the model takes more of the checkpoint than its loaders were seen to take")
            self._prove(given, None)
        self._tried = given.shapes
        how = "vLLM's reload" if self._plan is None else "plain copies"
        if self._plan is not None and self._process:
            how = f"plain copies, and by vLLM's reload of {len(self._process)} layers, {some(sorted(self._process))}"
        logger.info("checkpoints become live weights by %s", how)
        if (plan := self.wanted()) is not None:
            logger.info("%.1f of %.1f MB are needed here", plan.needed_bytes / 1e6, plan.checkpoint_bytes / 1e6)

    def _is_enough(self, given: Given, plan: Plan) -> bool:
        """Install what the plan needs, and put it to the test. Return False, with mixed weights, if it lacks anything
        that loaders want, or noise could not be loaded."""
        try:
            self._prove(given, plan)
        except TensorHubError:
            raise
        except Exception as error:
            if not isinstance(error, NotEnough) and not plan.is_cut:
                raise
            logger.warning("what was seen to be needed of a checkpoint is not enough to install it", exc_info=True)
            self._lacks = True
            return False
        return True

    def _prove(self, given: Given, plan: Plan | None) -> None:
        """Install a checkpoint, and find out how later ones are. plan: what to take of it; None: all."""
        every = frozenset(name for name, _ in self._model.named_modules())
        derived = frozenset(reload.derived(self._model))
        process = every
        if plan is not None:
            process = plan.process.union(cpu.packed_experts(self._model), map(layer_of, derived))
            self._kinds = kinds.Kinds(self._model, process.union(layer_of(piece.target) for piece in plan.pieces))
            process |= self._packed(given, plan, process)
        while True:
            first, noisy, last, wrong = self._trial(given, plan, process)
            hides = _differ((first or last).hidden, noisy.hidden) if noisy is not None else []
            more = (every if hides else wrong) - process
            if self._steps.all("what is copied", not more):
                break
            process |= more
        stale = [] if first is None else _differ(first.weights, last.weights)
        if (
            plan is not None
            and first is not None
            and (stale or any(first.hidden.get(name) != last.hidden.get(name) for name in hides))
        ):
            raise NotEnough(f"it is not enough for {some(sorted([*stale, *hides]))}")
        if noisy is None:
            self.hidden = ("what has not been put to the test",)
        else:  # derived values return with the checkpoint, or lag one install behind; counters and scratch do neither
            before = last if first is None else first
            values = {name: (before.hidden.get(name), noisy.hidden.get(name)) for name in hides}
            self.hidden = tuple(name for name in hides if last.hidden.get(name) in values[name])
            tested = noisy.weights.keys() & before.weights.keys()
            stale += [name for name in tested.intersection(derived) if noisy.weights[name] == before.weights[name]]
        if stale:
            raise UsageError(
                f"{len(stale)} tensors of this model do not follow an update: {some(sorted(stale))}. It cannot be "
                "updated in place with this vLLM: start a new engine for every version"
            )
        if self.hidden:
            logger.info(
                "derived and kept beside the weights, so raw copies are not traded: %s", some(sorted(self.hidden))
            )

    def _trial(
        self, given: Given, plan: Plan | None, process: frozenset[str]
    ) -> tuple[State | None, State | None, State, frozenset[str]]:
        """Install the checkpoint as one with this plan, whose other layers are copied, and return states 1 to 3 (None:
        there is none, or noise could not be loaded), and the layers in which copies are wrong."""
        pieces = _Pieces(self._model, plan, process)
        self._plan, self._process, first, noisy, wrong = plan, process, None, None, frozenset[str]()
        names, untested = self._to_test(given, plan, process)
        if process:
            self._reload(given, names, in_place=pieces.filled, without=untested)
            first = self._state(pieces, without=untested)
        try:
            noise = noise_like(given, plan, weights.device_of(self._model))
            self._reload(noise, names, in_place=pieces.filled, without=untested)
            wrong = pieces.wrong(noise)
            made = frozenset(map(layer_of, reload.derived(self._model)))
            noisy = self._state(pieces, without=process - made | untested)
            del noise
        except NotEnough:
            raise
        except Exception as error:
            logger.exception("how this model follows updates was not put to the test, so raw copies are not traded")
            if plan is not None:
                raise NotEnough("noise could not be loaded") from error
        if plan is not None and process:
            self._install(given.cut(plan.needed))
        else:
            self._reload(given, given.shapes, in_place=pieces.filled)
        last = self._state(pieces, without=untested)
        if plan is not None and noisy is not None:
            wrong |= frozenset(map(layer_of, _differ((first or last).weights, noisy.weights)))
        return first, noisy, last, wrong

    def _to_test(
        self, given: Given, plan: Plan | None, process: frozenset[str]
    ) -> tuple[Collection[str], frozenset[str]]:
        """Return the tensors to load in a trial, and the layers that need none: others of their kind have one."""
        every = sum(1 for _ in self._model.modules())
        if plan is None or len(process) == every or self._steps.together:  # ranks that load together load the same
            return given.shapes, frozenset()
        untested = self._kinds.between(process)
        return plan.sources_beside(untested), untested

    def _packed(self, given: Given, plan: Plan, process: frozenset[str]) -> frozenset[str]:
        """Return the layers that seem to be pieces and are not, as noise shows in one of each kind: if only the trial
        found that, it would begin again. Empty if noise could not be loaded."""
        modules = dict(self._model.named_modules())
        copied = {layer_of(piece.target) for piece in plan.pieces} - process
        known = self._kinds.of_layers([name for name in copied if kinds.may_pack(modules[name])])
        asked = {names[0]: names for names in known if len(names) > 2}
        if not asked or self._steps.together:
            return frozenset()
        others = frozenset(modules.keys() - asked.keys())
        pieces = _Pieces(self._model, plan, others)
        sources = {piece.source for piece in plan.pieces if layer_of(piece.target) in asked}
        try:
            noise = noise_like(given, plan, weights.device_of(self._model), sources)
            self._reload(noise, noise.held.keys(), in_place=pieces.filled, without=others)
            wrong = pieces.wrong(noise)
        except Exception:
            logger.debug("layers were not asked for what they make of noise", exc_info=True)
            return frozenset()
        return frozenset(name for first in wrong for name in asked[first])

    def _copy(self, checkpoint: Iterable[tuple[str, Sequence[Held]]]) -> None:
        copies = self._copies()
        with torch.no_grad():
            copy_all(pair for name, held in work.counted(checkpoint) for pair in copies(name, held))
        weights.refresh_derived(self._model)

    def _copies(self) -> Callable[[str, Sequence[Held]], Pairs]:
        """Return a function that gives the copies for a tensor of the checkpoint."""
        assert self._plan is not None
        if self._places is None or not self._places.are_of(self._plan, self._process):
            self._places = Places(self._plan, self._process)
        places, live = self._places, weights.by_name(self._model)
        return lambda name, held: places.pairs(live, name, held)

    def _reload(
        self,
        given: Given,
        names: Collection[str],
        layers: frozenset[str] | None = None,
        in_place: frozenset[str] = frozenset(),
        without: frozenset[str] = frozenset(),
    ) -> None:
        """Reload these tensors, in the same order in all workers that quantize together. layers: those that get any;
        None: all, except `without`."""
        if without:
            layers = frozenset(name for name, _ in self._model.named_modules()) - without
        how: dict[str, Any] = {} if layers is None else {"layers": layers}
        how |= {"in_place": in_place} if in_place else {}
        with online_quantization.in_step(self._model, self._steps):
            reload.reload_checkpoint(
                self._model, self._vllm_config, draft.Again(lambda: self._given(given, names)), **how
            )

    def _given(self, given: Given, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        whole = partial.whole(given, sorted(names) if self._steps.together else names, weights.device_of(self._model))
        return work.counted(progress.of(whole, "the checkpoint is converted", len(names), "tensors"))

    def _state(self, pieces: _Pieces, without: frozenset[str] = frozenset()) -> State:
        """Return the state of all that is not a piece, and no weight of these layers."""
        live = weights.tensors(self._model)
        own = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
        hidden: dict[str, object] = {}
        for name, value in work.counted(walk(self._model)):
            if isinstance(value, torch.Tensor):
                if value.untyped_storage().data_ptr() not in own:
                    hidden[name] = _digests_of(value.contiguous())
            elif name.rpartition(".")[2] not in weights.REFRESHED_SCALARS:
                hidden[name] = repr(value)  # NaN is equal to itself there
        counting = [(name, tensor) for name, tensor in live.items() if layer_of(name) not in without]
        around = ((name, pieces.around(tensor)) for name, tensor in work.counted(counting))
        found = {name: _digests_of(tensor) for name, tensor in around if tensor is not None}
        return State(found, hidden)


class _Pieces:
    """The pieces of a plan in a live model, except those of these layers. filled: parameters that are pieces, all of
    their elements."""

    def __init__(self, model: torch.nn.Module, plan: Plan | None, process: frozenset[str]) -> None:
        self._live, self._places = weights.by_name(model), None if plan is None else Places(plan, process)
        self._boxes: dict[int, list[Strided]] = {}  # by address: tied parameters have several names
        left = Counter({name: tensor.numel() for name, tensor in self._live.items()})
        copied = [] if plan is None else [piece for piece in plan.pieces if layer_of(piece.target) not in process]
        for piece in copied:
            self._boxes.setdefault(self._live[piece.target].data_ptr(), []).append(piece.written)
            left[piece.target] -= torch.Size(piece.written[1]).numel()
        self.filled = frozenset(piece.target for piece in copied if not left[piece.target])
        self._full = {self._live[name].data_ptr() for name in self.filled}

    def wrong(self, noise: Given) -> frozenset[str]:
        """Return the layers in which an element is not what a copy of this noise would write there."""
        places = self._places
        if places is None:
            return frozenset()
        found: set[str] = set()
        for name, held in work.counted(noise.held.items()):
            pairs = places.pairs(self._live, name, held)
            targets = (piece.target for piece in places.pieces(name))
            found |= {layer_of(to) for to, pair in zip(targets, pairs, strict=True) if not _same(*pair)}
        return frozenset(found)

    def around(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what of a live tensor is no piece, as a copy with zeros; None: nothing."""
        boxes = self._boxes.get(tensor.data_ptr())
        if boxes is None or tensor.data_ptr() in self._full:
            return tensor if boxes is None else None
        rest = tensor.clone()
        for box in boxes:
            view(rest, box).zero_()
        return rest


class Places:
    """A cache of where the pieces of a plan lie in a checkpoint and in the parameters: numbers that stay the same from
    version to version. Finding them takes many times as long as making the views, while the engine is paused."""

    def __init__(self, plan: Plan, process: frozenset[str]) -> None:
        self._plan, self._process = plan, process
        self.pieces = plan.by_source(without=process)
        self._known: dict[str, tuple[list[_Lies], list[_Place]]] = {}  # by tensor: as it arrived the last time

    def are_of(self, plan: Plan, process: frozenset[str]) -> bool:
        """Return whether these are the places of this plan, except for these layers."""
        return self._plan is plan and self._process == process

    def pairs(self, live: Mapping[str, torch.Tensor], name: str, held: Sequence[Held]) -> Pairs:
        """Return the copies of this tensor of the checkpoint."""
        lies = [(region, tensor.stride()) for region, tensor in held]
        known = self._known.get(name)
        if known is None or known[0] != lies:
            known = self._known[name] = lies, [self._place(piece, held) for piece in self.pieces(name)]
        whole = self._plan.shapes[name][1]
        return [
            (view(live[target], written), held[i].tensor if taken is None else view(in_order(held[i], whole), taken))
            for target, written, i, taken in known[1]
        ]

    def _place(self, piece: Piece, held: Sequence[Held]) -> _Place:
        index, taken = place_in(held, self._plan.shapes[piece.source][1], piece.taken)
        tensor = held[index].tensor
        is_all = taken == (0, tuple(tensor.shape), tensor.stride())
        return piece.target, piece.written, index, None if is_all else taken


def worth_it(plan: Plan | None) -> Plan | None:
    """Return the plan, if fetching only what it needs pays."""
    return plan if plan is not None and plan.needed_bytes < WORTH_IT * plan.checkpoint_bytes else None


def _differ(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


def _digests_of(tensor: torch.Tensor) -> bytes:
    """Return the digests of its segments: taken on its device, or by several threads."""
    return Slab.adopt({"": flat_bytes(tensor)}).manifest().root()


def _same(live: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a copy would change nothing, not a bit."""
    if (source.device, source.dtype) != (live.device, live.dtype):
        copied = torch.empty_like(live)
        copy_all([(copied, source)])
        source = copied
    return torch.equal(live.view(BITS[live.itemsize]), source.view(BITS[live.itemsize]))


def noise_like(given: Given, plan: Plan | None, device: torch.device, names: Collection[str] | None = None) -> Given:
    """Return noise for what the plan needs of a checkpoint (None: for all), always the same, and no two regions alike.
    Integers are kept: they may be indices. names: of these tensors only."""
    regions: list[tuple[str, torch.dtype, Region]] = []
    names = given.shapes if names is None else names
    for name in sorted(names):
        dtype, shape = given.shapes[name]
        if dtype.is_floating_point:
            needed = (whole_region(shape),) if plan is None else plan.needed.get(name, ())
            regions += [(name, dtype, region) for region in needed]
    noise = Noise(((dtype, torch.Size(region.shape).numel()) for _, dtype, region in regions), device)
    integers = [name for name in names if name in given.held and not given.shapes[name][0].is_floating_point]
    held = {name: given.held[name] for name in integers}
    for number, (name, dtype, region) in enumerate(regions):
        held[name] = (*held.get(name, ()), Held(region, noise.of(number, dtype, torch.Size(region.shape))))
    return Given(held, given.shapes)


# --- noise to load instead of a checkpoint ----------------------------------------------------------------------------

# Views of one block: memory of its own for each tensor would be a pass over what the worker takes, while the engine
# stands still.
NOISE_LENGTH = 1_048_583  # elements; a prime, so that rows and blocks of a weight do not repeat with it
NOISE_STEP = 7_919  # offset between the noise of one tensor and of the next


class Noise:
    """Blocks of noise, the same every time, of which tensors are views."""

    def __init__(self, lengths: Iterable[tuple[torch.dtype, int]], device: torch.device) -> None:
        """Make them long enough for tensors of these dtypes and lengths, on this device if it has room."""
        longest: dict[torch.dtype, int] = {}
        for dtype, length in lengths:
            longest[dtype] = max(longest.get(dtype, 0), length)
        values = torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(0))
        self._blocks: dict[torch.dtype, torch.Tensor] = {}
        for dtype, length in longest.items():
            try:
                self._blocks[dtype] = _repeated(values.to(dtype), NOISE_LENGTH + length, device)
            except torch.OutOfMemoryError:
                logger.debug("no room for %d numbers of noise on %s", length, device)
                self._blocks[dtype] = _repeated(values.to(dtype), NOISE_LENGTH + length, values.device)

    def of(self, number: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return a contiguous tensor, for each number another. Do not write into it: others are views of its memory."""
        first = number * NOISE_STEP % NOISE_LENGTH
        return self._blocks[dtype][first : first + shape.numel()].view(shape)


def _repeated(values: torch.Tensor, length: int, device: torch.device) -> torch.Tensor:
    block = torch.empty(length, dtype=values.dtype, device=device)
    copy_all((part, values[: len(part)]) for part in torch.split(block, len(values)))
    return block
