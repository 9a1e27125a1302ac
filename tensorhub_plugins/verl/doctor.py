"""`tensorhub doctor verl ARGUMENTS...`: what a command line of verl will do with the store, or what is wrong with it.

Takes what verl takes: overrides alone (for verl.trainer.main_ppo), or the whole command, with what starts it (`ray job
submit ... --`, `python -m`). Puts the configuration together as verl does, asks verl's own checks and the hub, and says
everything that is wrong at once; starts nothing. Give it before `python` on the node where the job's driver will run.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from omegaconf import ListConfig, OmegaConf

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl import checks, composing, config, driver, stock
from tensorhub_plugins.vllm import command_line
from tensorhub_plugins.vllm.outlook import Outlook

PATHS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.model.hf_config_path",
    "actor_rollout_ref.model.lora_adapter_path",
    "critic.model.path",
    "reward.reward_model.model_path",
    "data.custom_cls.path",
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
)
MODULES = "VERL_USE_EXTERNAL_MODULES"  # environment of verl
PACKAGE = "tensorhub_plugins.verl"


def main(arguments: Sequence[str]) -> int:
    return command_line.run(look, __doc__, arguments)


def look(outlook: Outlook, arguments: Sequence[str]) -> None:
    """Ask everything of this command line."""
    words = command_line.words_of(arguments, composing.COMMANDS, "verl.trainer.main_ppo")
    root = composing.compose(words, outlook)
    outlook.ask(composing.check_kinds, words, root)
    if not checks.concerns_store(root):
        backend = f"{checks.ENGINE}.backend"
        raise UsageError(
            f"this command line does not name the store: add {backend}={config.BACKEND}, and for pull mode "
            f"actor_rollout_ref.rollout.name={config.ROLLOUT}"
        )
    outlook.add(driver.check(copy.deepcopy(root)))
    outlook.ask(check_paths, root, words.is_submitted, outlook.unseen)
    outlook.ask(check_found, root)
    if checks.settle(copy.deepcopy(root)):
        outlook.unseen.append("verl's own checks, which count with what is no number")
    else:
        stock.ask(outlook, words.command, root)
    outlook.unseen.append(
        "whether the cluster has these GPUs and this memory; what is in the data, in reward functions and in agent "
        "loops; what vLLM says of the model"
    )


def check_found(root: Any) -> None:
    """UsageError where verl's processes would not know our names."""
    if not is_found(root):
        raise UsageError(
            "verl will not find the store: the package is on Python's path but not installed, so install it "
            f"(pip install .), or set {MODULES}={PACKAGE} on all nodes"
        )


def check_paths(root: Any, is_submitted: bool, unseen: list[str]) -> None:
    """Check the files and folders that verl reads on the node of its driver."""
    critic, has_reward_model = (
        OmegaConf.select(root, name) for name in ("critic.enable", "reward.reward_model.enable")
    )
    read = {
        **dict.fromkeys(PATHS, True),
        "critic.model.path": root.algorithm.adv_estimator == "gae" if critic is None else critic,
        "reward.reward_model.model_path": has_reward_model,
        "trainer.resume_from_path": OmegaConf.select(root, "trainer.resume_mode") == "resume_path",
    }
    given = [(name, OmegaConf.select(root, name)) for name, is_read in read.items() if is_read]
    paths = [(name, one) for name, value in given for one in (value if isinstance(value, ListConfig) else [value])]
    command_line.check_paths(paths, is_submitted=is_submitted, unseen=unseen)


def is_found(root: Any) -> bool:
    if PACKAGE in os.environ.get(MODULES, "").split(","):
        return True
    installed = any(entry.name == "tensorhub" for entry in metadata.entry_points(group="verl.plugins"))
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if installed and (policy == "auto" or "tensorhub" in policy.split(",")):
        return True
    model, rollout = root.actor_rollout_ref.model, root.actor_rollout_ref.rollout
    pulls = rollout.get("name") == config.ROLLOUT
    is_v1 = root.get("rollout") is None  # the other trainers make their engines before they read external_lib
    return rollout.checkpoint_engine.custom_backend_module == PACKAGE and (
        not pulls or (is_v1 and model.external_lib == PACKAGE)
    )
