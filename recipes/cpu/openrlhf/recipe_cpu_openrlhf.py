"""OpenRLHF 0.11.2 on a machine without a GPU: stand-ins for the CUDA calls it makes without asking.

Found through the metadata beside this file when this folder is on PYTHONPATH: torch calls `install` at the end of
`import torch`, in every process of the run. Everything else is patched right after the module that needs it is
imported. With RECIPE_CPU_STOCK=1 OpenRLHF's own way of moving weights works too, on gloo.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import sys

STOCK = "RECIPE_CPU_STOCK"
RAY_INIT = "RECIPE_RAY_INIT"  # arguments for ray.init as JSON: how many GPUs it is to pretend, where its files go


def install() -> None:
    import torch

    _patch_torch(torch)
    patches = {"ray": _patch_ray}
    if os.environ.get(STOCK) == "1":
        patches["vllm.model_executor.layers.utils"] = _patch_vllm_linears
        patches["openrlhf.utils.distributed_util"] = _patch_distributed
        patches["openrlhf.trainer.ray.vllm_worker_wrap"] = _patch_worker
    for name in [name for name in patches if name in sys.modules]:  # OpenRLHF's driver imports Ray before torch
        patches.pop(name)(sys.modules[name])
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(patches))


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import hook that calls a function with a module once that is imported."""

    def __init__(self, patches) -> None:
        self.patches = patches

    def find_spec(self, name, path=None, target=None):
        patch = self.patches.pop(name, None)
        spec = importlib.util.find_spec(name) if patch else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


class _Device(str):
    """A device index for OpenRLHF, which passes it to Tensor.to() and formats it into f"cuda:{device}"."""

    def __format__(self, _):
        return "0"


def _patch_torch(torch) -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: _Device("cpu")
    # One function each: torch's compiler refuses to know the same function by two names.
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda *_: None
    cuda.current_stream = lambda *_: None

    import torch.distributed.device_mesh as meshes

    make = meshes.init_device_mesh

    def init_device_mesh(device_type, *args, **kwargs):
        return make("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    meshes.init_device_mesh = torch.distributed.init_device_mesh = init_device_mesh


def _patch_ray(ray) -> None:
    given = os.environ.get(RAY_INIT)
    if not given:
        return
    init = ray.init

    @functools.wraps(init)
    def init_with_recipe(*args, **kwargs):
        return init(*args, **{**json.loads(given), **kwargs})

    ray.init = init_with_recipe


# --- for OpenRLHF's own way of moving weights ---


def _patch_vllm_linears(module) -> None:
    """Keep linears plain. vLLM's CPU build packs them: `model.load_weights` would then change nothing."""
    import torch

    def keep_plain(layer, remove_weight):
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, layer.weight, bias)

    module.dispatch_cpu_unquantized_gemm = keep_plain


class _GlooGroup:
    """The subset of vLLM's PyNcclCommunicator that OpenRLHF uses."""

    def __init__(self, group) -> None:
        self.group = group

    def broadcast(self, tensor, src, stream=None):
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor.data], options).wait()


def _patch_distributed(module) -> None:
    def stateless_init_process_group(master_address, master_port, rank, world_size, device):
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group as make

        return _GlooGroup(make(master_address, master_port, rank, world_size, "gloo"))

    module.stateless_init_process_group = stateless_init_process_group


def _patch_worker(module) -> None:
    def update_weight(self, name, dtype, shape, empty_cache=False):
        import torch

        assert dtype == self.model_config.dtype
        weight = torch.empty(shape, dtype=dtype, device=self.device)
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    module.WorkerWrap.update_weight = update_weight
