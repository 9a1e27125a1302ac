"""A model together with the MTP heads that draft for it, as one model: what a checkpoint fills, and an update replaces.

vLLM makes two models of such a checkpoint. Each takes what it knows of it, and both share the embeddings and the output
head. So a version holds both or is refused, and both change in the same pause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "tensorhub_draft"  # the draft in the model of both; all other names are the target's


def of_worker(worker: Any) -> torch.nn.Module | None:
    """Return the model that drafts in a vLLM worker; None: there is none."""
    runner = worker.model_runner
    if hasattr(runner, "get_draft_model"):
        model = runner.get_draft_model()
    else:
        model = getattr(getattr(runner, "drafter", None), "model", None)
        model = model if isinstance(model, torch.nn.Module) else getattr(model, "unwrap", lambda: None)()
    return model if isinstance(model, torch.nn.Module) else None


def together(target: torch.nn.Module, draft: torch.nn.Module | None) -> torch.nn.Module:
    """Return a model of both, which shares their layers and tensors; without a draft the target itself."""
    if draft is None:
        return target
    both: torch.nn.Module = object.__new__(type(target))
    vars(both).update(vars(target))
    vars(both)["_modules"] = {**target._modules, NAME: draft}
    vars(both)["load_weights"] = _LoadBoth(target, draft)
    return both


def advice(refusal: str) -> str:
    """Return what to do about a checkpoint that was refused so."""
    if f"{NAME}." not in refusal:
        return ""
    return f'. {NAME} are the MTP heads that draft: publish them with the model, or have them read (draft="disk")'


Weights = Iterable[tuple[str, torch.Tensor]]


class Again:
    """Tensors that are made again each time they are iterated over, so that none is held in between."""

    def __init__(self, make: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._make()


def load(model: Any, weights: Weights) -> None:
    """Have the model's loaders load these, which are iterated over twice for a model of both."""
    model.load_weights(weights if isinstance(model.load_weights, _LoadBoth) else iter(weights))


class _LoadBoth:
    """The loaders of both, one after the other: those of some drafts count what they were given."""

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module) -> None:
        self._target, self._draft = target, draft

    def __call__(self, weights: Weights) -> None:
        load(self._target, weights)
        with _loaded_already(self._target, self._draft):
            load(self._draft, weights)


@contextmanager
def _loaded_already(target: torch.nn.Module, draft: torch.nn.Module) -> Iterator[None]:
    """Have loaders leave alone what the draft shares with the target: a checkpoint may hold it for the draft once more,
    older than the target's."""
    own = {id(module) for module in target.modules()}
    shared = [parameter for module in draft.modules() if id(module) in own for parameter in module._parameters.values()]
    tensors: list[Any] = [each for each in shared if each is not None]
    loaders = [(each, getattr(each, "weight_loader", None)) for each in tensors]
    for parameter, _ in loaders:
        parameter.weight_loader = _leave_alone
    try:
        yield
    finally:
        for parameter, loader in loaders:
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader


def _leave_alone(parameter: torch.Tensor, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """Load nothing."""
