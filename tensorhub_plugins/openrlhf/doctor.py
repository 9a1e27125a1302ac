"""`tensorhub doctor openrlhf ARGUMENTS...`: what a command line of OpenRLHF will do with the store, or what is wrong.

Takes what OpenRLHF takes: arguments alone, or the whole command, from `python -m` or the module on. Reads it with
OpenRLHF's own parser and asks the hub; starts nothing, and imports neither OpenRLHF nor vLLM.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.core.options import Need, says_need
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.openrlhf.autoload import SWITCH
from tensorhub_plugins.openrlhf.config import FLAG, NAME, Options
from tensorhub_plugins.openrlhf.install import backend_of
from tensorhub_plugins.vllm.model_size import elements_of

ELEMENT_SIZE_BYTES = 2  # OpenRLHF runs vLLM, and trains, in bfloat16
STOCK, OURS = "openrlhf.cli.train_ppo_ray", "tensorhub_plugins.openrlhf.train_ppo_ray"
HOOKS = "torch.backends"  # entry points that torch loads in every process


def main(arguments: Sequence[str]) -> int:
    """Print what will happen, one line each, and return 0; or what is wrong, and return 1."""
    try:
        command, given = split(arguments)
        said = check(command, given)
    except TensorHubError as error:
        print(f"tensorhub: {error.message}", file=sys.stderr)
        return 1
    print("\n".join(said))
    return 0


def split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The module (OpenRLHF's own where none is named), and its arguments."""
    for number, argument in enumerate(arguments):
        if argument.startswith("--"):
            break
        if argument in (STOCK, OURS):
            return argument, list(arguments[number + 1 :])
        if argument.endswith("openrlhf/cli/train_ppo_ray.py"):
            return STOCK, list(arguments[number + 1 :])
        if not (argument == "-m" or Path(argument).name.startswith("python")):
            raise UsageError(f"{argument!r} is no argument of OpenRLHF and none of its commands: {STOCK}, {OURS}")
    return STOCK, list(arguments)


def check(command: str, given: list[str]) -> list[str]:
    """What will happen, or UsageError. The same checks as the driver's, in the same words."""
    backend = backend_of(given)
    config.check_spelling(backend)
    if not config.is_ours(backend):
        raise UsageError(f"this command line does not name the store: add {FLAG} {NAME}")
    options = config.parse(backend)
    config.check_versions(options, **config.installed_versions())
    args = parse(given)
    if config.is_colocated(args.train.colocate_all, args.train.async_enable):
        raise UsageError(
            f"{config.COLOCATED}; leave out --train.colocate_all, or add --train.async_enable, for engines of their own"
        )
    config.check_arguments(args)
    if options.fleet_policy is not None:
        from tensorhub_plugins.vllm.ray import policy

        policy.load(options.fleet_policy)
    if command == STOCK:
        _check_hook()
    if options.hub is not None:
        from tensorhub_plugins.openrlhf import hub

        hub.check(options.hub)
    return outlook(options, args, elements_of(args.actor.model_name_or_path))


def _check_hook() -> None:
    """torch switches the store on in OpenRLHF's own command."""
    for name in (SWITCH, "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        if os.environ.get(name) == "0":
            raise UsageError(f"{name}=0 switches the hook off: unset it, or run python -m {OURS}")
    if not metadata.entry_points(group=HOOKS, name=NAME):
        raise UsageError(
            "OpenRLHF's own command will not find the store: the package is on Python's path but not installed, so "
            f"install it (pip install .), or run python -m {OURS}"
        )


def outlook(options: Options, args: Any, elements: int | None = None) -> list[str]:
    """PURE. What will happen, in words. elements: numbers that the model has."""
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    engines = args.vllm.num_engines
    how = (
        "take a new version at once and keep their requests (partial rollout)"
        if args.train.partial_rollout_enable
        else "take a new version between prompts: all answers to one come from one version"
    )
    when = "generate beside the training" if args.train.async_enable else "and trainer work in turns, on policy"
    said = [
        f"hub: {options.hub} answers" if options.hub else "hub: the run starts one, on Ray's head node",
        f"trainer: {_count(ranks, 'rank')} will publish version N after step N; each keeps {options.keep} versions of "
        f"its share, and needs host memory for {options.keep + 1}",
        f"engines: {_count(engines, 'engine')} of {_count(args.vllm.tensor_parallel_size, 'GPU')} {when}; they {how}",
        f"engines: bytes arrive while they generate, and stand in host memory meanwhile (install={options.install})"
        if options.install == "staged"
        else "engines: stand still while bytes arrive in their live weights (install=direct)",
        f"losses: Ray starts an engine again up to {options.restarts} times, its prompts are asked elsewhere",
    ]
    if elements is not None:
        share = Need(ELEMENT_SIZE_BYTES * elements // ranks, options.keep + 1)
        said.append(f"memory: {says_need(options, 'each trainer rank', share, args.actor.num_gpus_per_node)}")
        tp = args.vllm.tensor_parallel_size
        slice_ = Need(ELEMENT_SIZE_BYTES * elements // tp, options.copies)
        said.append(f"memory: {says_need(options, 'each worker of an engine', slice_, tp)}")
    if options.fleet_policy is not None:
        target = f"as many as {options.fleet_policy} says"
    else:
        target = _count(options.fleet_target or engines, "engine")
    said.append(
        f"fleet: {target}, at least {options.fleet_min}, at most {options.fleet_max}; `tensorhub fleet` adds and drains"
    )
    if args.eval.dataset:
        said.append("evaluation: every engine stays with one version until the end of it")
    if args.vllm.sync_with_ray:
        said.append("--vllm.sync_with_ray has no effect with the store")
    if options.pull_until is not None:
        said.append(f"pull_until: engines take no version after {options.pull_until}, so that training goes stale then")
    return [*said, "nothing is wrong with this command line"]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


# --- OpenRLHF's own parser --------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what argparse prints below two hundred lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"OpenRLHF does not take this command line: {message}")


def parse(arguments: Sequence[str]) -> Any:
    """OpenRLHF's arguments, as its driver has them. UsageError for what OpenRLHF does not take.

    OpenRLHF parses and validates under `if __name__ == "__main__"`, below imports of Ray, vLLM and DeepSpeed. These
    statements are run here without what is around them.
    """
    folder = _openrlhf()
    program = _main_part(folder / "cli" / "train_ppo_ray.py")
    hierarchize = runpy.run_path(str(folder / "utils" / "config.py"))["hierarchize"]
    names = {
        "argparse": argparse.Namespace(ArgumentParser=lambda: _Parser(prog="openrlhf")),
        "datetime": datetime.datetime,
        "hierarchize": hierarchize,
        "os": os,
    }
    before = sys.argv
    sys.argv = [STOCK, *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # recommendations that are none of ours
            exec(program, names)
    except TensorHubError:
        raise
    except Exception as error:  # an assert, or None where a value is needed
        words = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"OpenRLHF does not take this command line: {words}") from error
    finally:
        sys.argv = before
    return names["args"]


def _main_part(path: Path) -> Any:
    """From the parser to the last check; not what trains, not what imports."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            kept = [one for one in node.body if not _is_left_out(one)]
            return compile(ast.Module(kept, type_ignores=[]), str(path), "exec")
    raise UsageError(f"{path} is not as the adapter knows it: install openrlhf {' or '.join(config.TESTED_OPENRLHF)}")


def _is_left_out(node: ast.stmt) -> bool:
    text = ast.unparse(node)
    return isinstance(node, ast.Import | ast.ImportFrom) or text.startswith(("train(", "if args.use_ms"))


def _openrlhf() -> Path:
    found = find_spec("openrlhf")
    if found is None or not found.submodule_search_locations:
        raise UsageError("OpenRLHF is not installed: pip install 'tensorhub-plugins[openrlhf]'")
    return Path(next(iter(found.submodule_search_locations)))
