"""A checkpoint into a live model: by vLLM's layerwise reload, or by plain copies where those are shown to do the same.

The engine stands still for it. The reload works through every layer in Python, and for most layers it comes down to
writing boxes of tensors where the plan says (plan.py). But a model may rename, permute and scale what it loads and
derive more from it, loaders may read what no rehearsal showed, and a reload may leave behind what it derived the first
time. So the first conversion of a checkpoint is a trial

    reload the checkpoint      state 1
    copy noise                 state 2, where copies are possible at all
    reload noise               state 3
    install the checkpoint     state 4: copies for the layers that are right in state 2, a reload of all others; and of
                               the checkpoint only the regions that the plan needs, with nonsense around them
    reload the checkpoint      state 5, only if 4 is not 1

of the digests of all weights, and of every other tensor and number reachable from the model (hidden.py).
    2 equals 3      in all weights of a layer: copies do there what a reload does, and are used from now on
    1 equals 4      nothing else of the checkpoint is needed: from now on only those regions are fetched
    1 equals the last      an install leaves nothing of the version before, or the model is refused
    1 unlike 3      in every weight that is derived from others, or the model is refused
    hidden, 1 unlike 3      derived, and no part of a raw copy: raw copies are not exchanged with peers

A first checkpoint of which only those regions have come, because a rehearsal without its bytes has named them, goes the
same way: around them state 1 has zeros and state 4 nonsense. Where these are not equal, all of it must come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from tensorhub_plugins.core import Slab, UsageError, copy_all, flat_bytes, progress, without_aliases, work
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.worker import online, reload, weights
from tensorhub_plugins.vllm.worker.contract import some
from tensorhub_plugins.vllm.worker.filler import BLOCK_SIZE_BYTES_MAX, NONSENSE, ZERO, Noise
from tensorhub_plugins.vllm.worker.hidden import walk
from tensorhub_plugins.vllm.worker.plan import (
    Box,
    Given,
    Held,
    Piece,
    Plan,
    Region,
    Shapes,
    in_order,
    layer_of,
    place_in,
    view,
    whole_region,
)
from tensorhub_plugins.vllm.worker.votes import ALONE, Steps

logger = get_logger(__name__)

WORTH_IT = 0.95  # of the checkpoint's bytes: fetching regions must save more than some tiny tensors

Weights = Iterable[tuple[str, torch.Tensor]]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # target and source of a copy
_Lies = tuple[Region, tuple[int, ...]]  # a region, and the strides of its tensor
_Place = tuple[str, Box, int, Box | None]  # target, box in it, index of the held region, box in that (None: all of it)


class NotEnough(Exception):
    """More of a checkpoint is needed than what is here; the weights are mixed."""


@dataclass(frozen=True)
class _State:
    """The digests, or values, by name."""

    weights: dict[str, bytes]
    hidden: dict[str, object]


class Conversion:
    """The conversion of checkpoints. hidden: what the model derives and no raw copy carries, known after a trial."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, steps: Steps = ALONE) -> None:
        """Begin without a trial. steps: with the workers that this one makes scales together with (online.py)."""
        self._model, self._vllm_config, self._steps = model, vllm_config, steps
        self._tried: Shapes | None = None  # the shapes of the checkpoint that was tried
        self._copies_are_right = False  # for all layers
        self._plan: Plan | None = None  # proved to be sufficient
        self._process: frozenset[str] = frozenset()  # with a plan: the layers that are reloaded, the others are copied
        self._places: Places | None = None  # the copies of the plan
        self.hidden: tuple[str, ...] = ()

    def install(self, checkpoint: Mapping[str, torch.Tensor] | Given) -> Literal["copy", "reload"]:
        """Replace all weights of the model by these, under their Hugging Face names. Return how: "reload" also if only
        some layers need it.

        Raises NotEnough for a first checkpoint that has to arrive whole, whatever a loader raises, or UsageError for a
        model whose updates are shown to be wrong; its weights are mixed then.
        """
        given = checkpoint if isinstance(checkpoint, Given) else Given.of(checkpoint)
        if not self._steps.all("a checkpoint like the last", self._tried == given.shapes):
            self._try(given)
            self._tried = given.shapes
        else:
            self._install(given)
        return "copy" if self._copies_are_right else "reload"

    def wanted(self) -> Plan | None:
        """Return what of the next checkpoint to fetch: only what this plan needs; None: all of it."""
        return worth_it(self._plan)

    def fits(self, shapes: Shapes) -> bool:
        """Return whether a checkpoint of these shapes was tried."""
        return self._tried == shapes

    def _install(self, given: Given) -> None:
        if self._plan is not None or self._copies_are_right:
            self._copy(given.held.items())
            if self._plan is not None and self._process:
                self._reload(self._whole(given, self._plan.sources_of(self._process)), self._process)
        else:
            self._reload(self._whole(given))

    def _try(self, given: Given) -> None:
        plan = given.plan
        if not given.is_whole:
            given = given.with_filler(ZERO)
            if plan is None:
                raise NotEnough("only a whole checkpoint can be put to the test without a plan")
        self._copies_are_right, self._plan, self._process, self.hidden = False, None, frozenset(), ()
        self._reload(self._whole(given))
        first, noisy = self._state(), None
        try:
            copied, noise = None, noise_like(given, plan)
            if self._can_copy(given.shapes, plan):
                self._plan = plan
                self._copy(noise.held.items())
                copied = self._state()
            self._plan = None
            self._reload(self._whole(noise))
            noisy = self._state()
            self._compare(first, copied, noisy, plan)
        except Exception:
            self._plan = None
            logger.exception("how this model follows updates was not put to the test, so raw copies are not traded")
        last = self._as_needed(first, noisy, given)
        if not self._steps.all("all that is needed", last is not None):
            self._copies_are_right, self._plan, self._process = False, None, frozenset()
            if not self._steps.all("a whole checkpoint", given.is_whole):
                raise NotEnough("the model takes more of the checkpoint than its loaders were seen to take")
            self._reload(self._whole(given))
            last = None
        self._judge(first, noisy, last or self._state())
        how = "plain copies" if self._copies_are_right else "vLLM's reload"
        if self._plan is not None and self._process:
            how = f"plain copies, and by vLLM's reload of {len(self._process)} layers, {some(sorted(self._process))}"
        logger.info("checkpoints become live weights by %s", how)
        if (plan := self.wanted()) is not None:
            logger.info("%.1f of %.1f MB are needed here", plan.needed_bytes / 1e6, plan.checkpoint_bytes / 1e6)

    def _compare(self, first: _State, copied: _State | None, noisy: _State, plan: Plan | None) -> None:
        """Decide how checkpoints are installed, by comparing copies of noise with a reload of it."""
        wrong = _differ({} if copied is None else copied.weights, noisy.weights)
        derived = _differ(first.hidden, noisy.hidden)
        # Derived values outside the weights show that copies are not enough, but not for which layer.
        lags = copied is not None and any(copied.hidden.get(name) != noisy.hidden.get(name) for name in derived)
        if not wrong and not lags:
            self._copies_are_right, self._plan = True, plan
        elif plan is not None:
            layers = {name for name, _ in self._model.named_modules()}
            self._process = frozenset(layers) if lags else plan.process | {layer_of(name) for name in wrong}
            self._plan = plan

    def _as_needed(self, first: _State, noisy: _State | None, given: Given) -> _State | None:
        """Install only what the plan needs, and return the state; None: it is not that of a reload of everything."""
        plan = self._plan
        if plan is None:
            if self._copies_are_right:
                self._install(given)
            return self._state() if self._copies_are_right else None
        try:
            self._install(given.cut(plan.needed, filler=NONSENSE))
        except Exception:
            logger.warning("what was seen to be needed of a checkpoint is not enough to install it", exc_info=True)
            return None
        now = self._state()
        derived = [] if noisy is None else _differ(first.hidden, noisy.hidden)
        wrong = _differ(first.weights, now.weights) + [n for n in derived if first.hidden.get(n) != now.hidden.get(n)]
        if wrong:
            logger.info("what was seen to be needed of a checkpoint is not enough for %s", some(sorted(wrong)))
        return None if wrong else now

    def _judge(self, first: _State, noisy: _State | None, last: _State) -> None:
        stale = _differ(first.weights, last.weights)
        if noisy is None:
            self.hidden = ("what has not been put to the test",)
        else:
            derived = reload.derived(self._model)
            stale += [name for name in derived if noisy.weights.get(name) == first.weights.get(name)]
            # Derived values return with the checkpoint, or lag one install behind; counters and scratch do neither.
            self.hidden = tuple(
                name
                for name in _differ(first.hidden, noisy.hidden)
                if last.hidden.get(name) in (first.hidden.get(name), noisy.hidden.get(name))
            )
        if stale:
            raise UsageError(
                f"{len(stale)} tensors of this model do not follow an update: {some(sorted(stale))}. It cannot be "
                "updated in place with this vLLM: start a new engine for every version"
            )
        if self.hidden:
            logger.info(
                "derived and kept beside the weights, so raw copies are not traded: %s", some(sorted(self.hidden))
            )

    def _can_copy(self, shapes: Shapes, plan: Plan | None) -> bool:
        if plan is not None:
            return bool(plan.pieces)
        targets = {name: target for name, target in self._targets().items() if name in shapes}
        return bool(targets) and all(
            target.shape == shapes[name][1] and shapes[name][0].is_floating_point for name, target in targets.items()
        )

    def _copy(self, checkpoint: Iterable[tuple[str, Sequence[Held]]]) -> None:
        copies = self._copies()
        with torch.no_grad():
            copy_all(pair for name, held in work.counted(checkpoint) for pair in copies(name, held))
        weights.refresh_scalars(self._model)

    def _copies(self) -> Callable[[str, Sequence[Held]], Pairs]:
        """Return a function that gives the copies for a tensor of the checkpoint."""
        plan = self._plan
        if plan is None:
            targets = self._targets()
            return lambda name, held: [(targets[name], held[0].tensor)] if name in targets else []
        if self._places is None or not self._places.are_of(plan, self._process):
            self._places = Places(plan, self._process)
        return partial(self._places.pairs, weights.by_name(self._model))

    def _targets(self) -> dict[str, torch.Tensor]:
        """Return where the tensors of a checkpoint go without a plan; {} if copies are impossible."""
        of_names = weights.checkpoint_view(self._model, self._vllm_config) or {}
        return without_aliases(of_names)  # a tied head is listed under the embedding's name, which is first

    def _reload(self, checkpoint: Weights, *layers: frozenset[str]) -> None:
        with online.in_step(self._model, self._steps):
            reload.reload_checkpoint(self._model, self._vllm_config, checkpoint, *layers)

    def _whole(self, given: Given, names: Sequence[str] | None = None) -> Weights:
        """Return the whole tensors, in the same order in all workers that quantize together."""
        names = given.names if names is None else names
        whole = given.whole(sorted(names) if self._steps.together else names)
        return work.counted(progress.of(whole, "the checkpoint is converted", len(names), "tensors"))

    def _state(self) -> _State:
        live = weights.tensors(self._model)
        own = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
        hidden: dict[str, object] = {}
        for name, value in work.counted(walk(self._model)):
            if isinstance(value, torch.Tensor):
                if value.untyped_storage().data_ptr() not in own:
                    hidden[name] = _digests_of(value.contiguous())
            elif not weights.is_refreshed(name):
                hidden[name] = repr(value)  # NaN is equal to itself there
        return _State({name: _digests_of(tensor) for name, tensor in work.counted(live.items())}, hidden)


class Places:
    """A cache of where the pieces of a plan lie in a checkpoint and in the parameters: numbers that stay the same from
    version to version. Finding them takes many times as long as making the views, while the engine is paused."""

    def __init__(self, plan: Plan, process: frozenset[str]) -> None:
        self._plan, self._process = plan, process
        self._pieces = plan.by_source(without=process)
        self._known: dict[str, tuple[list[_Lies], list[_Place]]] = {}  # by tensor: as it arrived the last time

    def are_of(self, plan: Plan, process: frozenset[str]) -> bool:
        """Return whether these are the places of this plan, except for these layers."""
        return self._plan is plan and self._process == process

    def pairs(self, live: Mapping[str, torch.Tensor], name: str, held: Sequence[Held]) -> Pairs:
        """Return the copies of this tensor of the checkpoint."""
        lies = [(region, tensor.stride()) for region, tensor in held]
        known = self._known.get(name)
        if known is None or known[0] != lies:
            known = self._known[name] = lies, [self._place(piece, held) for piece in self._pieces(name)]
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


def noise_like(given: Given, plan: Plan | None) -> Given:
    """Return noise for all tensors of a checkpoint, the same every time and no two regions alike: of those that take
    much memory only what the plan needs, with zeros around it. Integers are kept: they may be indices."""
    regions: list[tuple[str, torch.dtype, Region]] = []
    for name, (dtype, shape) in sorted(given.shapes.items()):
        if dtype.is_floating_point:
            is_large = dtype.itemsize * shape.numel() > BLOCK_SIZE_BYTES_MAX
            needed = (whole_region(shape),) if plan is None or not is_large else plan.needed.get(name, ())
            regions += [(name, dtype, region) for region in needed]
    noise = Noise((dtype, torch.Size(region.shape).numel()) for _, dtype, region in regions)
    held = {name: given.held[name] for name in given.held if not given.shapes[name][0].is_floating_point}
    for number, (name, dtype, region) in enumerate(regions):
        held[name] = (*held.get(name, ()), Held(region, noise.of(number, dtype, torch.Size(region.shape))))
    return Given(held, given.shapes, filler=ZERO)
