"""Checks that a model computes with the memory that an install writes, and the refusal of one that does not.

An install writes the tensors of the model's modules. A mechanism that moves weights while the engine runs (an offloader
that refills a buffer from host memory before each layer, a cache that several engines map) computes with other bytes,
or overwrites the new ones, without any error. So
    `check_config`    refuses by name what vLLM has for that, at the start
    `Addresses`       remembers where the weights were when the worker joined, and refuses a model that has moved them
    `check_copies`    refuses a model that holds a weight's values a second time, where no install writes them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.worker import weights
from tensorhub_plugins.vllm.worker.checkpoint_contract import some
from tensorhub_plugins.vllm.worker.reachable_tensors import walk

SEARCHES = 3  # for copies: as the first version comes, after the warm-up, and when the engine has computed
COPY_ELEMENTS_MIN = 64  # fewer may be equal by chance, as flags and counters are
BLOCK_LENGTH = 1 << 20  # elements that are summed at once
HASH_FACTOR, HASH_SHIFT = 0x9E3779B97F4A7C15 - (1 << 64), 29  # Fibonacci hashing; int64 wraps around

# (where in VllmConfig, whether that value moves weights, what it does, vLLM's option)
ELSEWHERE: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("offload_config.prefetch.offload_group_size", bool, "layers are refilled from host memory", "offload-group-size"),
    ("offload_config.uva.cpu_offload_gb", bool, "weights stay in host memory", "cpu-offload-gb"),
    ("engram_config", bool, "embeddings stay in host memory, or are shared by engines", "engram-config"),
    ("kernel_config.monokernel", bool, "kernels read weights that they have packed for themselves", "monokernel"),
    ("load_config.load_format", "ipc_cache".__eq__, "the weights are memory of all engines here", "load-format"),
    ("cache_config.calculate_kv_scales", bool, "KV is scaled by what the first weights made", "calculate-kv-scales"),
    ("compilation_config.inductor_compile_config.freezing", bool, "compiled code has weights in it", "freezing"),
)


def check_config(vllm_config: Any) -> None:
    """Raise UsageError for an option by which vLLM computes with memory that its modules do not show."""
    for path, moves_weights, what, option in ELSEWHERE:
        value: Any = vllm_config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        if value is not None and moves_weights(value):
            raise UsageError(f"{what}, which an update would not reach: start without --{option} {value}".rstrip())
    offloader = _offloader()
    if offloader is not None:
        raise UsageError(
            f"vLLM's {type(offloader).__name__} moves weights while the engine runs, where an update would not reach "
            "them: start without weight offloading"
        )


def _offloader() -> Any:
    """Return this process's offloader, or None if it does nothing."""
    from vllm.model_executor import offloader

    current = offloader.get_offloader()
    return None if isinstance(current, offloader.NoopOffloader) else current


class Addresses:
    """The addresses of a model's weights. Raises what `check_copies` does."""

    def __init__(self, model: torch.nn.Module, *, eager: bool = False) -> None:
        """Record the addresses. eager: no graphs are captured, so new tensors may replace those that vLLM derives."""
        self._model = model
        self._known = {
            name: where
            for name, where in _addresses(model)
            if not (eager and name.rpartition(".")[2] in weights.PLAIN_ATTRIBUTES)
        }
        self._searches_left = SEARCHES
        self._picture = _picture(model)
        self._tensors: dict[str, torch.Tensor] | None = None
        check_copies(model)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `weights.tensors` of the model as the last check has seen it. To look takes a tenth of their time."""
        if self._tensors is None:
            self._tensors = weights.tensors(self._model)
        return self._tensors

    def check(self, *, search: bool = True) -> None:
        """Raise UsageError if a weight has moved: captured graphs and peers would go on using the old memory. The first
        calls also search for copies."""
        if (picture := _picture(self._model)) != self._picture:
            self._check_names()
            self._picture, self._tensors = picture, None
        if search and self._searches_left:
            self._searches_left -= 1
            check_copies(self._model)

    def _check_names(self) -> None:
        now = dict(_addresses(self._model))
        moved = [name for name, where in self._known.items() if now.get(name) != where]
        if moved:
            raise UsageError(
                f"{len(moved)} weights of this engine are not where they were when it joined the store: {some(moved)}. "
                "Something moves them while it runs (offloading, a swapped or shared module), and an update would not "
                "reach what it computes with: start without it"
            )


def _addresses(model: torch.nn.Module) -> Iterator[tuple[str, tuple[torch.device, int]]]:
    for name, tensor in weights.all_tensors(model):
        yield name, (tensor.device, tensor.data_ptr())


def _picture(model: torch.nn.Module) -> list[object]:
    """Return all by which names lead to addresses: as long as it is the same, so are these."""
    modules = weights.modules_of(model)
    held = [each for module in modules for each in (module._parameters, module._buffers, weights.plain_of(module))]
    tensors = [tensor for each in held for tensor in each.values() if tensor is not None]
    return [
        [dict(module._modules) for module in modules],
        [tuple(each) for each in held],
        [(id(tensor), tensor.device, tensor.data_ptr()) for tensor in tensors],
    ]


def check_copies(model: torch.nn.Module) -> None:
    """Raise UsageError for a tensor besides the weights that holds the values of one of them, in any order."""
    sinks = [name for name, layer in model.named_modules() if type(layer).__name__ == "StaticSinkAttention"]
    if sinks:
        raise UsageError(
            f"{some(sinks)} wrote weights into the KV cache in the first step, where no update reaches them"
        )
    live = dict(weights.all_tensors(model))
    own = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    sizes = {tensor.numel() for tensor in live.values()}
    beside = {
        name: value
        for name, value in walk(model)
        if isinstance(value, torch.Tensor)
        and value.numel() in sizes
        and value.numel() >= COPY_ELEMENTS_MIN
        and value.untyped_storage().data_ptr() not in own
    }
    alike = {tensor.numel() for tensor in beside.values()}
    known = {_values(tensor): name for name, tensor in live.items() if tensor.numel() in alike}
    known.pop(None, None)
    found = [f"{name} of {known[values]}" for name, tensor in beside.items() if (values := _values(tensor)) in known]
    if found:
        raise UsageError(
            f"{len(found)} tensors beside this engine's weights hold the same values, and no update is known to reach "
            f"them: {some(found)}. Start without what keeps them (offloading, a cache of weights)"
        )


def _values(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return a key, equal for tensors of the same numbers in any order and float type; None if all are equal."""
    if tensor.dtype.is_complex or bool((tensor == tensor.flatten()[0]).all()):
        return None
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for block in tensor.flatten().split(BLOCK_LENGTH):
        numbers = (block.float().view(torch.int32) if block.is_floating_point() else block).long()
        mixed = numbers * HASH_FACTOR
        mixed = (mixed ^ (mixed >> HASH_SHIFT)) * HASH_FACTOR
        sums += torch.stack([mixed.sum(), (mixed ^ (mixed >> HASH_SHIFT)).sum()])
    one, other = sums.tolist()
    return one, other
