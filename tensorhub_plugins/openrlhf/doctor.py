"""`tensorhub doctor openrlhf ARGUMENTS...`: what a command line of OpenRLHF will do with the store, or what is wrong.

Takes what OpenRLHF takes: arguments alone, or the whole command, with what starts it (`ray job submit ... --`, `python
-m`). Reads it with OpenRLHF's own parser and checks, asks the hub, and says everything that is wrong at once; starts
nothing, and imports neither OpenRLHF nor vLLM. Give it before `python` on the node where the job's driver will run.
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
from collections.abc import Mapping, Sequence
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.core.options import Need
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.openrlhf.config import FLAG, NAME, Options
from tensorhub_plugins.openrlhf.install import backend_of
from tensorhub_plugins.vllm import command_line
from tensorhub_plugins.vllm.lora import history_of
from tensorhub_plugins.vllm.model_size import model_of
from tensorhub_plugins.vllm.outlook import (
    BESIDE,
    Model,
    Outlook,
    adapter_summary,
    check_heads,
    count,
    fleet_summary,
    gpus_summary,
    memory_summary,
)

STOCK, OURS = "openrlhf.cli.train_ppo_ray", "tensorhub_plugins.openrlhf.train_ppo_ray"
UNKNOWN = f"is not as the adapter knows it: install openrlhf {' or '.join(config.TESTED_OPENRLHF)}"
AGENT = "AgentExecutor"  # OpenRLHF's name for it
SHARED = "models that share them"
MODELS = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path")
DATA = ("data.prompt_dataset", "eval.dataset")  # each name may have a folder within it: NAME@FOLDER
PATHS = (*MODELS, *DATA, "train.agent_func_path")
PLUGINS = "VLLM_PLUGINS"  # vLLM's: the names of the plug-ins that it loads; unset: all
HOOKS = "vllm.platform_plugins"  # entry points that vLLM loads when it is imported


def main(arguments: Sequence[str]) -> int:
    return command_line.run(look, __doc__, arguments)


def look(outlook: Outlook, arguments: Sequence[str]) -> None:
    """Ask everything of this command line: our own conditions, as the driver does, and OpenRLHF's."""
    words = command_line.words_of(arguments, (STOCK, OURS), STOCK)
    backend = backend_of(words.arguments)
    config.check_spelling(backend)
    if not config.is_ours(backend):
        raise UsageError(f"this command line does not name the store: add {FLAG} {NAME}")
    options = outlook.ask(config.parse, backend) or Options()
    outlook.ask(_check_versions, options)
    if words.command == STOCK:
        outlook.ask(_check_hook)
    if options.fleet_policy is not None:
        from tensorhub_plugins.vllm.ray import policy

        outlook.ask(policy.load, options.fleet_policy)
    if options.hub is not None:
        from tensorhub_plugins.vllm.ray import hub

        outlook.ask(hub.check, options.hub, config.NO_HUB)
    args = outlook.ask(parse, words.arguments)
    if args is None:
        return
    outlook.ask(_check_apart, args)
    for refusal in config.refusals(args):
        outlook.refuse(refusal)
    outlook.tell(config.check_recovery, options, args)
    read = [name for name in PATHS if name != MODELS[-1] or not args.reward.remote_url]
    paths = [(f"--{name}", one.strip()) for name in read for one in str(attrgetter(name)(args) or "").split(",")]
    paths = [(name, one.partition("@")[0].strip() if name[2:] in DATA else one) for name, one in paths]
    paths += [("--reward.remote_url", one) for one in args.reward.remote_url or () if one.endswith(".py")]
    outlook.ask(lambda: command_line.check_paths(paths, is_submitted=words.is_submitted, unseen=outlook.unseen))
    outlook.ask(_check_agent, args.train.agent_func_path)
    outlook.ask(_check_schedulers, args)
    if any(config.wrong_numbers(args)):
        outlook.unseen.append("GPUs and memory, which follow from these numbers")
        return
    model = model_of(args.actor.model_name_or_path)
    outlook.ask(check_heads, model, args.vllm.tensor_parallel_size, "--vllm.tensor_parallel_size")
    if model is None:
        outlook.unseen.append(
            f"memory (--actor.model_name_or_path {args.actor.model_name_or_path} is no folder here and not in the "
            "Hugging Face cache, or says no size)"
        )
    tell(outlook, options, args, outlook.ask(gpus, args) or {}, model)
    outlook.unseen.append(
        "whether the cluster has these GPUs and this memory; what is in the data, in reward functions and in agents; "
        "what vLLM and DeepSpeed say of the model"
    )


def _check_versions(options: Options) -> None:
    config.check_versions(options, **config.installed_versions())


def _check_apart(args: Any) -> None:
    """Trainer and engines have GPUs of their own. What is advised, OpenRLHF takes: it asserts that async training has
    no engines that sleep."""
    if config.is_colocated(args.train.colocate_all, args.train.async_enable):
        asleep = " (without --vllm.enable_sleep)" if args.vllm.enable_sleep else ""
        raise UsageError(
            f"{config.COLOCATED}; leave out --train.colocate_all, or add --train.async_enable{asleep}, for engines of "
            "their own"
        )


def _check_agent(path: str | None) -> None:
    """Check what OpenRLHF asserts in each engine when it imports the file, which is not imported here."""
    if not path:
        return
    if not path.endswith(".py"):
        raise UsageError(f"--train.agent_func_path {path}: OpenRLHF takes a Python file")
    if Path(path).is_file() and AGENT.encode() not in Path(path).read_bytes():
        raise UsageError(f"--train.agent_func_path {path}: OpenRLHF wants a class {AGENT} there")


def _check_schedulers(args: Any) -> None:
    """Check names that transformers looks up once the models are there."""
    from transformers.trainer_utils import SchedulerType

    known = [each.value for each in SchedulerType]
    for part in ("actor", *(["critic"] if args.critic.model_name_or_path else [])):
        name = getattr(args, part).lr_scheduler
        if name not in known:
            raise UsageError(f"--{part}.lr_scheduler is {name!r}: transformers has {', '.join(known)}")


def _check_hook() -> None:
    """Check that vLLM switches the store on in OpenRLHF's own command."""
    allowed = os.environ.get(PLUGINS)
    if allowed is not None and NAME not in allowed.split(","):
        raise UsageError(f"{PLUGINS}={allowed} keeps vLLM from loading the store: add {NAME} to it, or unset it")
    if not metadata.entry_points(group=HOOKS, name=NAME):
        raise UsageError(
            "OpenRLHF's own command will not find the store: the package is on Python's path but not installed, so "
            f"install it (pip install .), or run python -m {OURS}"
        )


def tell(outlook: Outlook, options: Options, args: Any, needs: Mapping[str, int], model: Model | None) -> None:
    """Say what will happen. needs: GPUs, by what they are for."""
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    engines = args.vllm.num_engines
    how = (
        "take a new version at once and keep their requests (partial rollout)"
        if args.train.partial_rollout_enable
        else "take a new version between prompts: all answers to one come from one version"
    )
    when = "generate beside the training" if args.train.async_enable else "and trainer work in turns, on policy"
    outlook.said += [
        gpus_summary(needs),
        f"hub: {options.hub} answers" if options.hub else "hub: the run starts one, on Ray's head node",
        f"trainer: {count(ranks, 'rank')} will publish version N after step N; each keeps {options.keep} versions of "
        f"its share, and needs host memory for {options.keep + 1}",
        f"engines: {count(engines, 'engine')} of {count(args.vllm.tensor_parallel_size, 'GPU')} {when}; they {how}",
        f"engines: bytes arrive while they generate, and stand in host memory meanwhile (install={options.install})"
        if options.install == "staged"
        else "engines: stand still while bytes arrive in their live weights (install=direct)",
        f"losses: Ray starts an engine again up to {options.restarts} times, its prompts are asked elsewhere",
    ]
    if args.ds.lora.rank:
        outlook.said.append(adapter_summary(history_of(options.model), "--actor.model_name_or_path"))
    elif model is not None:
        size_bytes, tp = config.ELEMENT_SIZE_BYTES * model.elements, args.vllm.tensor_parallel_size
        share, slice_ = Need(size_bytes // ranks, options.keep + 1), Need(size_bytes // tp, options.copies)
        outlook.tell(memory_summary, options, model, "each trainer rank", share, args.actor.num_gpus_per_node)
        outlook.tell(memory_summary, options, model, "each worker of an engine", slice_, tp)
        if engines > 1:
            outlook.said.append(BESIDE)
    if options.fleet_policy is not None:
        target = f"as many as {options.fleet_policy} says"
    else:
        target = count(options.fleet_target or engines, "engine")
    outlook.said.append(fleet_summary(options, target))
    if args.eval.dataset:
        outlook.said.append("evaluation: every engine stays with one version until the end of it")
    if args.vllm.sync_with_ray:
        outlook.said.append("--vllm.sync_with_ray has no effect with the store")
    if options.pull_until is not None:
        outlook.said.append(
            f"pull_until: engines take no version after {options.pull_until}, so that training goes stale then"
        )
    outlook.said.append("nothing is wrong with this command line")


# --- OpenRLHF's own parser --------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what argparse prints below two hundred lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"OpenRLHF does not take this command line: {message}")


def parse(arguments: Sequence[str]) -> Any:
    """Return OpenRLHF's arguments, as its driver has them. Raise UsageError for what OpenRLHF does not take.

    OpenRLHF parses and validates under `if __name__ == "__main__"`, below imports of Ray, vLLM and DeepSpeed. These
    statements are run here without what is around them."""
    folder = command_line.folder_of("openrlhf", "OpenRLHF")
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
    except Exception as error:
        raise _not_taken(error, names.get("args")) from error
    finally:
        sys.argv = before
    return names["args"]


def gpus(args: Any) -> dict[str, int]:
    """Return how many GPUs OpenRLHF reserves, by what for: its own `train` is run without Ray, up to the trainer, and
    its asserts on the way. Raise UsageError for what they refuse."""
    path = command_line.folder_of("openrlhf", "OpenRLHF") / "cli" / "train_ppo_ray.py"
    reserved: dict[str, int] = {}

    def group(nodes: int, gpus_per_node: int, what: str, pg: Any = None, **rest: Any) -> None:
        if not nodes * gpus_per_node:
            raise UsageError(f"{what} has no GPUs: set its num_nodes and num_gpus_per_node to 1 or more")
        reserved[what] = 0 if pg else nodes * gpus_per_node

    def engines(number: int, size: int, *rest: Any, **more: Any) -> None:
        reserved[f"{count(number, 'engine')} of {size}"] = number * size

    def shared(bundles: Sequence[Any], **rest: Any) -> Any:
        reserved[SHARED] = reserved.get(SHARED, 0) + len(bundles)
        return argparse.Namespace(ready=lambda: None)

    def trainer(*arguments: Any, **rest: Any) -> NoReturn:
        raise _Enough

    names: dict[str, Any] = {
        "os": os,
        "ray": argparse.Namespace(is_initialized=lambda: True, get=lambda ref: None),
        "placement_group": shared,
        "create_vllm_engines": engines,
        "RayActorGroup": group,
        "PolicyModelActor": "the trainer",
        "ReferenceModelActor": "the reference model",
        "RewardModelActor": "reward models",
        "CriticModelActor": "the critic",
        "PPOTrainer": argparse.Namespace(remote=trainer),
        "get_strategy": lambda args: argparse.Namespace(print=lambda *words: None),
    }
    (function,) = [one for one in ast.parse(path.read_bytes()).body if getattr(one, "name", "") == "train"]
    module = ast.fix_missing_locations(ast.Module([_WithoutImports().visit(function)], type_ignores=[]))
    exec(compile(module, str(path), "exec"), names)
    try:
        names["train"](args)
    except _Enough:
        return reserved
    except Exception as error:
        raise _not_taken(error) from error
    raise UsageError(f"{path} {UNKNOWN}")


class _Enough(Exception):
    """Everything that has GPUs is made."""


class _WithoutImports(ast.NodeTransformer):
    """Which trainer it would import is not asked."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.Pass()


def _not_taken(error: Exception, args: Any = None) -> UsageError:
    """Return the refusal. error: an assert, or None where a value is needed. args: which numbers of theirs it may have
    stumbled over."""
    words = " ".join(str(error).split()) or type(error).__name__
    if hasattr(args, "actor"):
        words = "; ".join(config.wrong_numbers(args)) or words
    return UsageError(f"OpenRLHF does not take this command line: {words}")


def _main_part(path: Path) -> Any:
    """Return the code from the parser to the last check; not what trains, not what imports."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            kept = [one for one in node.body if not _is_left_out(one)]
            return compile(ast.Module(kept, type_ignores=[]), str(path), "exec")
    raise UsageError(f"{path} {UNKNOWN}")


def _is_left_out(node: ast.stmt) -> bool:
    text = ast.unparse(node)
    return isinstance(node, ast.Import | ast.ImportFrom) or text.startswith(("train(", "if args.use_ms"))
