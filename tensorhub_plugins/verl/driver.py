"""In the process of verl's command: what cannot work is refused in one sentence, before Ray starts.

verl loads this package when it is imported (entry point group `verl.plugins`), and every command of verl calls
`auto_set_device` with its whole configuration first. There the configuration is looked at, if it names the store. Where
the package is not installed but only on the path, the same is refused a minute later, by replica.py.
"""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import OmegaConf

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
    settle_dtype(root)
    settle_slices(root)
    settle_adapter(root)
    model = model_of(root.actor_rollout_ref.model.get("path"))
    settle_timeout(root, model)
    options, outlook = checks.check(root)
    outlook.wrong[:0] = wrong
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


def settle_dtype(root: Any) -> None:
    """Publish in the dtype of the rollouts where none is asked for: verl's trainers have fp32 masters, which would be
    twice the bytes for all readers. It is written into the configuration, as no other process knows both sides."""
    rollout = root.actor_rollout_ref.rollout
    given = rollout.checkpoint_engine.get("engine_kwargs") or {}
    if (given.get(config.BACKEND) or {}).get("dtype") is None and rollout.get("dtype") in config.DTYPES:
        OmegaConf.update(root, f"{config.WHERE}.dtype", rollout.dtype, force_add=True)


def settle_slices(root: Any) -> None:
    """Publish for workers that each take a slice where it is not said otherwise: those of tensor parallel replicas that
    pull. In drop-in mode every worker reads everything."""
    rollout = root.actor_rollout_ref.rollout
    given = (rollout.checkpoint_engine.get("engine_kwargs") or {}).get(config.BACKEND) or {}
    if rollout.get("name") == config.ROLLOUT:
        size, experts = (int(rollout.get(f"{kind}_parallel_size") or 1) for kind in ("tensor_model", "expert"))
        if checks.has_adapter(root.actor_rollout_ref.get("model")):  # every worker reads all of it
            size = experts = 1
        for option, value in (("slices", size), ("slices_experts", experts == 1)):
            if given.get(option) is None:
                OmegaConf.update(root, f"{config.WHERE}.{option}", value, force_add=True)


def settle_adapter(root: Any) -> None:
    """Name the history of a LoRA run after the adapter: nothing else is in it."""
    if checks.has_adapter(root.actor_rollout_ref.get("model")):
        given = root.actor_rollout_ref.rollout.checkpoint_engine.get("engine_kwargs") or {}
        model = str((given.get(config.BACKEND) or {}).get("model") or config.Options().model)
        OmegaConf.update(root, f"{config.WHERE}.model", history_of(model), force_add=True)


def settle_timeout(root: Any, model: Model | None) -> None:
    """Give a version of a large model the time that its bytes take, or more while it works, unless the timeout was
    given."""
    given = root.actor_rollout_ref.rollout.checkpoint_engine.get("engine_kwargs") or {}
    ours = given.get(config.BACKEND) or {}
    if ours.get("timeout_s") is not None:
        return
    OmegaConf.update(root, f"{config.WHERE}.timeout_grows", True, force_add=True)
    if model is not None:
        size_bytes = model.elements * checks.SIZES.get(str(ours.get("dtype")), checks.SIZES["float32"])
        OmegaConf.update(root, f"{config.WHERE}.timeout_s", config.Options.timeout_for(size_bytes), force_add=True)
