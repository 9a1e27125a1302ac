"""`tensorhub doctor verl ARGUMENTS...`: what a command line of verl will do with the store, or what is wrong with it.

Takes what verl takes: overrides alone (for verl.trainer.main_ppo), or the whole command, from `python -m` or the module
on. Reads it with verl's own configuration and asks the hub; starts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.verl import checks, config, driver

# A command of verl: the folder of its configuration, below verl's own, and the name.
COMMANDS = {
    "verl.trainer.main_ppo": ("trainer", "ppo_trainer"),
    "verl.experimental.one_step_off_policy.main_ppo": ("experimental/one_step_off_policy", "one_step_off_ppo_trainer"),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "experimental/fully_async_policy",
        "fully_async_ppo_trainer",
    ),
}
MODULES = "VERL_USE_EXTERNAL_MODULES"  # environment of verl
PACKAGE = "tensorhub_plugins.verl"


def main(arguments: Sequence[str]) -> int:
    """Print what will happen, one line each, and return 0; or what is wrong, and return 1."""
    try:
        root = compose(arguments)
        if not checks.concerns_store(root):
            backend = "actor_rollout_ref.rollout.checkpoint_engine.backend"
            raise UsageError(
                f"this command line does not name the store: add {backend}={config.BACKEND}, and for pull mode "
                f"actor_rollout_ref.rollout.name={config.ROLLOUT}"
            )
        said = driver.check(root)
        if not is_found(root):
            raise UsageError(
                "verl will not find the store: the package is on Python's path but not installed, so install it "
                f"(pip install .), or set {MODULES}={PACKAGE} on all nodes"
            )
    except TensorHubError as error:
        print(f"tensorhub: {error.message}", file=sys.stderr)
        return 1
    print("\n".join(said))
    return 0


def is_found(root: Any) -> bool:
    """Whether verl's processes will know our names."""
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


def compose(arguments: Sequence[str]) -> Any:
    """verl's configuration for these arguments. UsageError for one that verl does not take."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder, name, overrides = read(arguments)
    own = verl_folder() / "trainer" / "config"
    if folder != own and not any(one.startswith("hydra.searchpath=") for one in overrides):
        overrides = [f"hydra.searchpath=[file://{own}]", *overrides]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose(name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"verl does not take this command line: {_one_line(error)}") from error


def read(arguments: Sequence[str]) -> tuple[Path, str, list[str]]:
    """The folder and the name of the configuration, and the overrides."""
    command, given = "verl.trainer.main_ppo", list(arguments)
    folder: Path | None = None
    name = None
    overrides = []
    while given:
        argument = given.pop(0)
        key, _, value = argument.partition("=")
        if key in ("--config-name", "--config-path", "-cn", "-cp"):
            value = value or (given.pop(0) if given else "")
            name, folder = (value, folder) if "n" in key.rpartition("-")[2] else (name, Path(value).absolute())
        elif argument in COMMANDS:
            command = argument
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        elif not (argument == "-m" or Path(argument).name.startswith("python")):
            raise UsageError(
                f"{argument!r} is no override of verl (name=value) and none of its commands: {', '.join(COMMANDS)}"
            )
    place, default = COMMANDS[command]
    return folder or verl_folder() / place / "config", name or default, overrides


def verl_folder() -> Path:
    found = find_spec("verl")
    if found is None or not found.submodule_search_locations:
        raise UsageError("verl is not installed: pip install 'tensorhub-plugins[verl]'")
    return Path(found.submodule_search_locations[0])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
