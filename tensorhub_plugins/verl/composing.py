"""A configuration of verl from a command line: put together as verl's own command does it, with all that it refuses."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import version
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl import checks
from tensorhub_plugins.vllm import command_line
from tensorhub_plugins.vllm.command_line import Words
from tensorhub_plugins.vllm.outlook import Outlook

# A command of verl, and the name of its configuration, which lies in the folder `config` beside it.
COMMANDS = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
OWN_CONFIGURATIONS = "hydra.searchpath=[pkg://verl.trainer.config]"


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
