"""For runs where verl itself loads weights into vLLM (stock, drop-in): keep linears loadable on CPU.

vLLM's CPU build packs every linear for oneDNN and leaves an empty Parameter without `weight_loader` behind, so that
verl's `model.load_weights` ends in "'Parameter' object has no attribute 'weight_loader'". The store needs none of
this: its worker side knows the CPU build. Loaded as a vLLM general plug-in; acts only if RECIPE_CPU_STOCK=1.
"""

from __future__ import annotations

import os


def register() -> None:
    if os.environ.get("RECIPE_CPU_STOCK") != "1":
        return
    import torch
    import vllm.model_executor.layers.utils as utils

    def keep_plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_plain
