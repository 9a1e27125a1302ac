"""Puts the store in the place of OpenRLHF's weight update, in the driver's process. Everything else follows from here.

OpenRLHF's driver makes all actors, so it is enough to replace, here, the classes that it makes them from. This happens
before `openrlhf.cli.train_ppo_ray` has imported their names: by our launcher (train_ppo_ray.py), or in the middle of
its imports (autoload.py). Whatever cannot work is refused here, in one sentence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from tensorhub_plugins.core import TensorHubError
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.openrlhf.config import FLAG

if TYPE_CHECKING:
    from tensorhub_plugins.openrlhf.launcher import EngineLauncher, Place

# Of one engine at a time; Ray's own limit is 1,000. Prompts wait in vLLM, and heartbeats must not wait behind prompts.
CALLS_MAX = 100_000

SHORTEST = "--vllm.sync_b"  # argparse takes what begins like one flag alone, and --vllm.sync_with_ray is another


def backend_of(arguments: Sequence[str]) -> str:
    """Return what --vllm.sync_backend says, "" where it is not given. As argparse has it, the last one counts."""
    found = ""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not (FLAG.startswith(name) and name.startswith(SHORTEST)):
            continue
        if equals:
            found = value
        elif position + 1 < len(arguments):
            found = arguments[position + 1]
    return found


def refuse(error: TensorHubError) -> NoReturn:
    sys.exit(f"tensorhub: {error.message}")


def sentence_in(text: str) -> str:
    """Return the last error of ours in a traceback that has come through Ray, as one line; "" where there is none."""
    found = re.findall(r"^(?:\S* )?tensorhub_plugins\.\S+\.(?:\w+): (.+)$", text, flags=re.MULTILINE)
    return found[-1] if found else ""


def options_from_argv(arguments: list[str]) -> config.Options | None:
    """Return the options if this command line is for the store, else None. Colocated engines get OpenRLHF's own path:
    the flag is then rewritten in place."""
    backend = backend_of(arguments)
    config.check_spelling(backend)
    if not config.is_ours(backend):
        return None
    options = config.parse(backend)
    config.check_versions(options, **config.installed_versions())
    is_async = any(one.startswith("--train.async_e") for one in arguments)  # argparse takes its beginnings, too
    if config.is_colocated("--train.colocate_all" in arguments, is_async):
        print(f"tensorhub: {config.COLOCATED}", file=sys.stderr)
        arguments += [FLAG, "nccl"]
        return None
    if options.hub is not None:
        from tensorhub_plugins.vllm.ray import hub

        hub.check(options.hub, config.NO_HUB)  # before anything starts
    return options


class EngineFactory:
    """What create_vllm_engines makes its engines from. What they were made with is how the fleet makes more."""

    def __init__(
        self, remote_engine: Any, options: config.Options, chosen: Any, start_fleet: Callable[[EngineLauncher], None]
    ) -> None:
        """Stand for OpenRLHF's class of engines. chosen: backend, partial, sync, lora and engines, known by the time
        that an engine is made."""
        self._remote_engine, self._options = remote_engine, options
        self._chosen, self._start_fleet = chosen, start_fleet
        self._places: dict[str, Place] = {}

    def options(self, *, scheduling_strategy: Any, **given: Any) -> Any:
        """Do as `options` of an actor's class."""
        how = {**given, "max_restarts": self._options.restarts, "max_task_retries": 0, "max_concurrency": CALLS_MAX}
        made = self._remote_engine.options(**how, scheduling_strategy=scheduling_strategy)

        def remote(**kwargs: Any) -> Any:
            number, chosen = len(self._places), self._chosen
            extra = {name: getattr(chosen, name) for name in ("backend", "partial", "sync", "lora")}
            engine = made.remote(**kwargs, tensorhub={**extra, "engine": number, "joins": False})
            self._places[f"rollout-{number}"] = scheduling_strategy, kwargs["bundle_indices"]
            if len(self._places) == chosen.engines:
                from tensorhub_plugins.openrlhf.launcher import EngineLauncher

                first = {**kwargs, "seed": kwargs["seed"] - number}
                self._start_fleet(EngineLauncher(how, first, extra, self._places))
            return engine

        return SimpleNamespace(remote=remote)


def install(options: config.Options) -> None:
    """Replace the classes. Imports OpenRLHF, vLLM and DeepSpeed."""
    import openrlhf.utils
    import ray
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    from tensorhub_plugins.openrlhf import engine, hub, policy_ranks, trainer
    from tensorhub_plugins.vllm.ray import fleet, owned, policy

    # Known when OpenRLHF has read its command line.
    chosen = SimpleNamespace(backend="", partial=False, sync=False, lora=0, engines=0)
    get_strategy = openrlhf.utils.get_strategy

    def get_strategy_and_check(args: Any) -> Any:
        """OpenRLHF calls it first, with its parsed arguments, when Ray is there."""
        try:
            config.check_arguments(args)
            if options.fleet_policy is not None:
                policy.load(options.fleet_policy)
            chosen.backend = config.to_flag(config.settled(hub.resolve(options), args))
        except TensorHubError as error:
            refuse(error)
        chosen.partial, chosen.engines = bool(args.train.partial_rollout_enable), args.vllm.num_engines
        chosen.sync, chosen.lora = not args.train.async_enable, args.ds.lora.rank
        args.vllm.sync_backend = chosen.backend  # it reaches every actor with the arguments
        print(f"tensorhub: hub {config.parse(chosen.backend).hub}, run {config.parse(chosen.backend).run}", flush=True)
        return get_strategy(args)

    def start_fleet(launcher: EngineLauncher) -> None:
        fleet.start(launcher, options)

    excepthook = sys.excepthook

    def print_root_cause(kind: Any, error: BaseException, traceback: Any) -> None:
        excepthook(kind, error, traceback)
        sentence = sentence_in(str(error))
        if sentence:  # it happened in an actor, and the traceback above is pages long
            print(f"tensorhub: {sentence}", file=sys.stderr)

    sys.excepthook = print_root_cause
    openrlhf.utils.get_strategy = get_strategy_and_check
    vllm_engine.RolloutRayActor = EngineFactory(owned.actor_class(engine.TensorHubEngine), options, chosen, start_fleet)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(policy_ranks.PolicyModelActor)
    ppo_trainer.PPOTrainer = ray.remote(trainer.PPOTrainer)
    # PPOTrainerAsync is sent by value, together with what these names mean here.
    ppo_trainer_async.TrainingActor = ray.remote(trainer.TrainingActor)
    ppo_trainer_async.GenerateSamplesActor = ray.remote(trainer.GenerateSamplesActor)
