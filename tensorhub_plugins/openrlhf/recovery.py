"""A trainer of OpenRLHF that resumes takes its weights from the store (../core/client/recovery.py).

DeepSpeed saves the bfloat16 weights in the model's file, which every rank reads whole, and their float32 masters with
the optimizer. With ZeRO-3 it saves the masters only, and makes the weights of them.

    resumed_step  the masters come with the optimizer, and belong to the weights that come from the store; config.py
                  refuses ZeRO-3, whose weights come with the masters
    latest        weights that are newer than the masters replace them: these are rounded to bfloat16
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tensorhub_plugins.core import Held, contiguous_spec
from tensorhub_plugins.vllm import checkpoint_names
from tensorhub_plugins.vllm.checkpoint_names import Step
from tensorhub_plugins.vllm.plugin import replaced

MODEL = "model_states.pt"  # DeepSpeed's files of the model end so


def folder_of(path: str) -> Path:
    """Return the folder of the checkpoint that DeepSpeed loads from here."""
    latest = Path(path, "latest")
    return Path(path, latest.read_text(encoding="utf-8").strip()) if latest.is_file() else Path(path)


def held_whole(model: torch.nn.Module, steps: Iterable[Step]) -> Iterator[Held]:
    """Yield the tensors of a model that every rank has whole, in its own memory, under the names of a checkpoint."""
    own = model.state_dict(keep_vars=True)
    for step in steps:
        tensors = {name: own[name].data.detach() for name in step.sources}
        for name, tensor in checkpoint_names.convert(model, tensors).items():
            yield Held(contiguous_spec(name, tensor.dtype, tensor.shape), tensor)


def load_rest(engine: Any, path: str, steps: Iterable[Step], *, is_mixed: bool) -> Any:
    """Have DeepSpeed load a checkpoint but for the weights of these steps, which are in place, and return what it does.
    The file of the model is mapped, and what is not used of it is not read."""
    own = engine.module.state_dict(keep_vars=True)
    taken = {id(own[name]) for step in steps for name in step.sources}  # of tied ones the steps have one name

    def load_others(src: dict[str, Any], dst: torch.nn.Module) -> None:
        others = {name: tensor for name, tensor in src.items() if name not in own or id(own[name]) not in taken}
        dst.load_state_dict(others, strict=False)

    with _mapped(engine.checkpoint_engine):
        found = engine.load_checkpoint(path, custom_load_fn=load_others)
    if is_mixed:
        engine.optimizer.refresh_fp32_params()
    load_path, states = found
    return load_path, copy.deepcopy(states)  # what is mapped ends with the file


def load_below(load_ckpt: Callable[[], Any], optimizer: Any, held: Callable[[], Iterable[Held]]) -> Any:
    """Have DeepSpeed load a checkpoint of ZeRO-3, which makes weights of its masters, and return what it does. Then
    put this rank's pieces back, which are newer, and make the masters of them."""
    newer = {each.name: each.tensor.clone() for each in held() if each.tensor is not None}
    found = load_ckpt()
    optimizer.checkpoint_event_prologue()  # small parameters are kept whole, too: that is freed
    for each in held():
        if each.tensor is not None:
            each.tensor.copy_(newer[each.name])
    optimizer.refresh_fp32_params()
    optimizer.checkpoint_event_epilogue()  # and gathered
    return found


def _mapped(files: Any) -> contextlib.AbstractContextManager[None]:
    load = files.load

    def load_mapped(path: str, map_location: Any = None) -> Any:
        if str(path).endswith(MODEL):
            with contextlib.suppress(RuntimeError):  # of a file in torch's old format, or a place that maps none
                return torch.load(path, map_location=map_location, weights_only=False, mmap=True)
        return load(path, map_location=map_location)

    return replaced(files, load=load_mapped)
