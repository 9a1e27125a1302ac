"""The parts that vLLM's CPU build lacks. Loaded as a vLLM general plug-in.

For mixtures of experts whose data parallel ranks share them: the CPU's communicator has no `all_gatherv` and no
`reduce_scatterv`, by which ranks with different numbers of tokens hand these to the experts and get them back.

For runs where verl itself loads weights into vLLM (stock, drop-in), if RECIPE_CPU_STOCK=1: it packs every linear for
oneDNN and leaves an empty Parameter without `weight_loader` behind, so that verl's `model.load_weights` ends in
"'Parameter' object has no attribute 'weight_loader'". The store needs none of this, since its workers know that build.
"""

from __future__ import annotations

import os


def register() -> None:
    _share_experts()
    if os.environ.get("RECIPE_CPU_STOCK") != "1":
        return
    import torch
    import vllm.model_executor.layers.utils as utils

    def keep_plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_plain


def _share_experts() -> None:
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(group, tensor, sizes):
        if not sizes:
            sizes = [len(tensor)] * group.world_size
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        everyone = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(everyone, padded, group=group.device_group)
        return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)])

    def all_gatherv(self, input_, dim=0, sizes=None):
        assert dim == 0
        if isinstance(input_, torch.Tensor):
            return gather(self, input_, sizes)
        return [gather(self, tensor, sizes) for tensor in input_]

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        assert dim == 0
        if not sizes:
            sizes = [len(input_) // self.world_size] * self.world_size
        total = input_.contiguous()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group].clone()

    for method in (all_gatherv, reduce_scatterv):
        if method.__name__ not in vars(CpuCommunicator):
            setattr(CpuCommunicator, method.__name__, method)
