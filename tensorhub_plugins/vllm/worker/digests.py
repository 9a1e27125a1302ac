"""Digests of what a model actually holds: for its owner, and to prove that it is what was received."""

from __future__ import annotations

from typing import Any

import torch

from tensorhub_plugins.core import Slab, run_log
from tensorhub_plugins.vllm.worker import weights
from tensorhub_plugins.vllm.worker.update_state import Staged


def of_live(model: torch.nn.Module, vllm_config: Any) -> dict[str, Any]:
    """Return runtime: {name: hex}; checkpoint: {Hugging Face name: hex}, or None where the names are unknown."""
    view = weights.checkpoint_view(model, vllm_config)
    return {
        "runtime": {name: weights.digest(tensor) for name, tensor in weights.tensors(model).items()},
        "checkpoint": None if view is None else {name: weights.digest(tensor) for name, tensor in view.items()},
    }


def verify(worker: str, model: torch.nn.Module, layout: str, shard: int, shards: int, installed: Staged) -> bool:
    """Record the digests of what was installed; return False if the live weights are not what a peer has sent.

    The caller ensures that nothing writes the weights meanwhile."""
    version, report = installed.version, installed.report
    algorithms = {} if report is None else report.algorithms
    live = Slab.adopt(weights.tensors(model))
    described = live.manifest(algorithm=algorithms[shard]) if shard in algorithms else live.manifest()
    root = described.root().hex()
    run_log.record(
        "digests", worker=worker, version=version, layout=layout, digests={run_log.root_key(shard, shards): root}
    )
    if report is None:  # not from the store: there is nothing to compare with
        return True
    if report.layout == layout:
        return bool(report.roots == {shard: root})
    # A checkpoint that was not read whole has no root that others know.
    if installed.fetched is not None and installed.fetched.wanted is None and run_log.enabled():
        roots = installed.fetched.roots()
        named = {run_log.root_key(source, len(roots)): root for source, root in roots.items()}
        run_log.record("digests", worker=worker, version=version, layout=report.layout, digests=named)
    return True
