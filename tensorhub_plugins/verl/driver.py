"""In the process of verl's command: what cannot work is refused in one sentence, before Ray starts.

verl loads this package when it is imported (entry point group `verl.plugins`), and every command of verl calls
`auto_set_device` with its whole configuration first. There the configuration is looked at, if it names the store. Where
the package is not installed but only on the path, the same is refused a minute later, by replica.py.
"""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import OmegaConf

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl import checks, config
from tensorhub_plugins.vllm.lora import history_of
from tensorhub_plugins.vllm.model_size import model_of
from tensorhub_plugins.vllm.outlook import Model, Outlook, check_heads
from tensorhub_plugins.vllm.plugin import wrap
from tensorhub_plugins.vllm.ray import hub, policy


def look_at_configuration() -> None:
    """Have verl's first step look at the configuration, too. Twice is fine."""
    from verl.utils import device

    def auto_set_device(original: Any, config: Any) -> None:
        original(config)
        refuse_or_tell(config)

    wrap(device, "auto_set_device", auto_set_device)


def refuse_or_tell(root: Any) -> None:
    """Print what will happen, or end this process with the sentences that say why it cannot."""
    if not checks.concerns_store(root):
        return
    outlook = check(root)
    if outlook.wrong:
        sys.exit("\n".join(f"tensorhub: {sentence}" for sentence in outlook.wrong))
    for sentence in outlook.said:
        print(f"tensorhub: {sentence}", file=sys.stderr, flush=True)


def check(root: Any) -> Outlook:
    """Check all that can be known here: configuration, versions, whether the hub answers."""
    wrong = checks.settle(root)
    model = model_of(checks.get(root, "actor_rollout_ref", "model", "path"))
    settle(root, model)
    options, outlook = checks.check(root)
    outlook.wrong[:0] = wrong
    outlook.ask(check_samples, root)
    checks.tell_memory(outlook, root, options, model)
    tensor_parallel = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    outlook.ask(check_heads, model, int(OmegaConf.select(root, tensor_parallel) or 1), tensor_parallel)
    outlook.ask(config.check_verl, options)
    outlook.ask(config.check_vllm, options)
    if options.fleet_policy is not None:
        outlook.ask(policy.load, options.fleet_policy)
    if options.hub is not None:
        outlook.ask(hub.check, options.hub, config.NO_HUB)
    return outlook


def settle(root: Any, model: Model | None) -> None:
    """Write into the configuration what it leaves open: no other process knows both sides."""
    reference = root.actor_rollout_ref
    rollout, has_adapter = reference.rollout, checks.has_adapter(reference.get("model"))
    given = checks.get(rollout, "checkpoint_engine", "engine_kwargs", config.BACKEND) or {}
    settled: dict[str, Any] = {}
    if rollout.get("dtype") in config.DTYPES:  # verl's trainers have fp32 masters: twice the bytes for all readers
        settled["dtype"] = rollout.dtype
    if rollout.get("name") == config.ROLLOUT:  # in drop-in mode, and of an adapter, every worker reads everything
        size, experts = (int(rollout.get(f"{kind}_parallel_size") or 1) for kind in ("tensor_model", "expert"))
        settled |= {"slices": 1 if has_adapter else size, "slices_experts": has_adapter or experts == 1}
    if model is not None:
        dtype = str(given.get("dtype") or settled.get("dtype"))
        size_bytes = model.elements * checks.SIZES.get(dtype, checks.SIZES["float32"])
        settled["timeout_s"] = config.Options.timeout_for(size_bytes)
    settled = {option: value for option, value in settled.items() if given.get(option) is None}
    if given.get("timeout_s") is None:
        settled["timeout_grows"] = True  # while it works
    if has_adapter:  # nothing else is in its history
        settled["model"] = history_of(str(given.get("model") or config.Options().model))
    for option, value in settled.items():
        OmegaConf.update(root, f"{config.WHERE}.{option}", value, force_add=True)


def check_samples(root: Any) -> None:
    """Check what fully_async ends by: without a last checkpoint, or with success and nothing trained."""
    given, reference = checks.get(root, "async_training"), checks.get(root, "actor_rollout_ref")
    if given is None:
        return
    if checks.get(root, "trainer", "test_freq") == 0:
        raise UsageError("trainer.test_freq is 0, and fully_async divides by it before its last checkpoint: set -1")
    total = checks.get(root, "rollout", "total_rollout_steps")
    together = (checks.get(reference, "actor", "ppo_mini_batch_size") or 0) * (
        checks.get(given, "require_batches") or 1
    )
    if total is not None and total < together:
        raise UsageError(
            f"rollout.total_rollout_steps is {total}, and fully_async trains on {together} samples together (actor_"
            "rollout_ref.actor.ppo_mini_batch_size times async_training.require_batches): raise it, or set null"
        )
