"""A CPU platform for verl 0.9.1, registered from outside (VERL_USE_EXTERNAL_MODULES, VERL_PLATFORM=cpu).

verl knows CUDA and NPU. This gives it the same questions answered for a machine that has neither, so that FSDP, the
rollout servers and the checkpoint engines run unchanged on gloo.
"""

from __future__ import annotations

import random
import types
from contextlib import contextmanager

import psutil
import torch
import torch.distributed.fsdp._init_utils as fsdp_init
import verl.utils.distributed as verl_distributed
from transformers import AutoModelForTokenClassification
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.single_controller.ray.base import RayWorkerGroup


class _CpuModule(types.ModuleType):
    """A torch.cpu with the calls on memory and random state that torch.cuda has and torch.cpu lacks."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def empty_cache(self):
        pass

    def ipc_collect(self):
        pass

    def set_device(self, *_):
        pass

    def synchronize(self, *_):
        pass

    def memory_allocated(self, *_):
        return 0

    def memory_reserved(self, *_):
        return 0

    def max_memory_allocated(self, *_):
        return 0

    def max_memory_reserved(self, *_):
        return 0

    def reset_peak_memory_stats(self, *_):
        pass

    def mem_get_info(self, *_):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, *_):
        return "CPU"

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def get_rng_state(self, *_):
        return torch.get_rng_state()

    def set_rng_state(self, state, *_):
        torch.set_rng_state(state)


class _CpuIndex(str):
    """A device index for verl: Tensor.to() would take an int for cuda:<int>, and it formats it into f"cpu:{index}"."""

    def __format__(self, _):
        return "0"


_MODULE = _CpuModule("recipe_torch_cpu")
_CPU = _CpuIndex("cpu")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _MODULE

    def is_available(self):
        return True

    def current_device(self):
        return _CPU

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        # verl asks Ray for GPUs; the recipe tells ray.init to pretend that there are some (num_gpus=N).
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False  # so verl's stock path hands weights to vLLM through POSIX shared memory, not CUDA IPC

    def cudart(self):
        return None


# Four patches. verl builds the backend "cpu:gloo,<device>:<backend>", which for the device "cpu" names cpu twice, and
# torch refuses that. Its callers import the name from the module after this plug-in ran.
_initialize = verl_distributed.initialize_global_process_group_ray


def _initialize_on_cpu(timeout_second=None, backend=None):
    return _initialize(timeout_second=timeout_second, backend=backend or "cpu:gloo")


verl_distributed.initialize_global_process_group_ray = _initialize_on_cpu

# FSDP1 refuses to synchronise the ranks' first weights on CPU because NCCL could not; gloo can.
fsdp_init._check_module_states_for_sync_module_states = lambda module: None

# verl loads a critic with FlashAttention 2, whatever the configuration says.
_load_critic = AutoModelForTokenClassification.from_pretrained


def _load_critic_on_cpu(*args, **kwargs):
    return _load_critic(*args, **{**kwargs, "attn_implementation": "sdpa"})


AutoModelForTokenClassification.from_pretrained = _load_critic_on_cpu

# verl picks the port where a group of workers meets long before one of them listens there (on two cores: 20 s), and
# from the range of which the system gives every socket without a port: now and then another has it by then. Below that
# range, and above Ray's own, nothing takes a port by itself.
_PORTS = (20_000, 32_768)
_choose_port = RayWorkerGroup._get_master_addr_port


def _choose_quiet_port(self, pg, bundle_index=0, master_port_range=None):
    first = random.SystemRandom().randrange(_PORTS[0], _PORTS[1] - 1_000)  # groups choose at the same time
    return _choose_port(self, pg, bundle_index, master_port_range or [first, _PORTS[1]])


RayWorkerGroup._get_master_addr_port = _choose_quiet_port
