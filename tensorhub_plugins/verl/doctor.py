"""`tensorhub doctor verl ARGUMENTS...`: what a command line of verl will do with the store, or what is wrong with it.

Takes what verl takes: overrides alone (for verl.trainer.main_ppo), or the whole command, with what starts it (`ray job
submit ... --`, `python -m`). Puts the configuration together as verl does, asks verl's own checks and the hub, and says
everything that is wrong at once; starts nothing. Give it before `python` on the node where the job's driver will run.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra import version
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl import checks, config, driver, stock
from tensorhub_plugins.vllm import command_line
from tensorhub_plugins.vllm.command_line import Words
from tensorhub_plugins.vllm.outlook import Outlook

# A command of verl, and the name of its configuration, which lies in the folder `config` beside it.
COMMANDS = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
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
OWN_CONFIGURATIONS = "hydra.searchpath=[pkg://verl.trainer.config]"
MODULES = "VERL_USE_EXTERNAL_MODULES"  # environment of verl
PACKAGE = "tensorhub_plugins.verl"


def main(arguments: Sequence[str]) -> int:
    return command_line.run(look, __doc__, arguments)


def look(outlook: Outlook, arguments: Sequence[str]) -> None:
    """Ask everything of this command line."""
    words = command_line.words_of(arguments, COMMANDS, "verl.trainer.main_ppo")
    root = compose(words, outlook)
    outlook.ask(check_kinds, words, root)
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


def check_kinds(words: Words, root: Any) -> None:
    """Check that no number, and no yes or no, of verl's own configuration was given as another word: verl stops where
    it first counts with it, and takes every word for a yes, `no` and `off` as well."""
    options = _given(words.arguments)
    places = [one for one in options.overrides if one.startswith("hydra.searchpath=")] or [OWN_CONFIGURATIONS]
    try:
        plain = _compose(words.command, options, _name_of(words, options), places)
    except HydraException:  # a configuration of a user's own, that is none without an override
        return
    given, own = (OmegaConf.to_container(config, resolve=False) for config in (root, plain))
    wrong = [
        f"{name} is {value!r}: give {'true or false' if isinstance(was, bool) else 'a number'}, as verl's own {was!r}"
        for name, value, was in _words_for_numbers(given, own, "")
        if name not in checks.NUMBERS  # which are looked at closer
    ]
    if wrong:
        raise UsageError("; ".join(wrong))


def _words_for_numbers(given: Any, own: Any, above: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each word in the place of a number, the word, and that number."""
    for name, was in own.items():
        value = given.get(name)
        if isinstance(was, dict) and isinstance(value, dict):
            yield from _words_for_numbers(value, was, f"{above}{name}.")
        elif isinstance(was, int | float) and isinstance(value, str) and not value.startswith("${"):
            yield f"{above}{name}", value, was


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


def compose(words: Words, outlook: Outlook) -> Any:
    """Return verl's configuration for these words, put together as Hydra does it for verl's command. Overrides that
    verl does not take are kept in `outlook`, all of them, and left out. Raise UsageError where there is no
    configuration at all."""
    version.setbase(None)  # as verl's commands are decorated
    given = _given(words.arguments)
    name = _name_of(words, given)
    overrides = list(given.overrides)
    while True:
        try:
            return _compose(words.command, given, name, overrides)
        except MissingConfigException as error:
            if OWN_CONFIGURATIONS in overrides or "Could not load 'ppo_" not in str(error):
                raise _not_taken(error) from error
            overrides.append(OWN_CONFIGURATIONS)
            if not words.is_submitted:
                outlook.refuse(
                    f"verl's {name}.yaml includes what lies in verl/trainer/config of the folder that verl is started "
                    f"in: start it there, or add {OWN_CONFIGURATIONS} ({_one_line(error)})"
                )
        except ConfigCompositionException as error:
            refusal = _not_taken(error)
            key = re.search(r"'([^']+)'", str(error))
            meant = {one: one.lstrip("+~").partition("=")[0] for one in overrides}
            if key is None or key[1] not in meant.values():
                raise refusal from error
            outlook.refuse(refusal.message)
            exists = "already at" in str(error)  # and is set all the same, for what else there is to see
            others = [one for one in overrides if meant[one] != key[1]]
            overrides = others + [f"++{one.lstrip('+')}" for one in overrides if exists and meant[one] == key[1]]
        except (HydraException, OmegaConfBaseException) as error:
            raise _not_taken(error) from error


def _name_of(words: Words, given: Any) -> str:
    return str(given.config_name or COMMANDS[words.command]).removesuffix(".yaml")


def _not_taken(error: Exception) -> UsageError:
    return UsageError(f"verl does not take this command line: {_one_line(error)}")


def _given(arguments: Sequence[str]) -> Any:
    """Return Hydra's options and the overrides, as its own parser has them."""
    from hydra._internal.utils import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given, unknown = get_args_parser().parse_known_args(list(arguments))
    except SystemExit as error:
        raise UsageError(f"verl does not take this command line: {said.getvalue().splitlines()[-1:]}") from error
    strange = [one for one in given.overrides if "=" not in one and not one.startswith("~")]
    if strange or unknown:
        raise UsageError(
            f"{(unknown + strange)[0]!r} is no override of verl (name=value) and none of its commands: "
            f"{', '.join(COMMANDS)}"
        )
    return given


def _compose(command: str, given: Any, name: str, overrides: list[str]) -> Any:
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_automatic_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    file = command_line.folder_of("verl", "verl").parent / f"{command.replace('.', '/')}.py"
    search_path = create_automatic_config_search_path(str(file), None, given.config_path or "config")
    if given.config_dir is not None:
        folder = Path(given.config_dir).absolute()
        if not folder.is_dir():
            raise UsageError(f"--config-dir={given.config_dir}: there is no such folder on this machine")
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of folders of the search path that are not there
            hydra = Hydra.create_main_hydra2("doctor", search_path)
            root = hydra.compose_config(name, overrides, RunMode.RUN, with_log_configuration=False)
    finally:
        GlobalHydra.instance().clear()
    with open_dict(root):
        del root["hydra"]
    return root


def _one_line(error: Exception) -> str:
    return " ".join(str(error).partition("Config search path")[0].split())
