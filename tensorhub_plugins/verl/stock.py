"""verl's own checks of its configuration, called as verl's commands call them, without Ray, models and data.

Each question has a copy of the configuration to itself, and what verl raises is what will be raised a minute after the
start of the job. What cannot be asked on this machine (a package that is not installed) is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import logging
import pkgutil
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf, open_dict

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.verl import checks
from tensorhub_plugins.vllm.model_size import folder_of
from tensorhub_plugins.vllm.names import NAME as OURS
from tensorhub_plugins.vllm.outlook import Outlook
from tensorhub_plugins.vllm.plugin import replaced

RUN = "verl.trainer.main_ppo"  # whose `run_ppo` starts Ray, for all of verl's commands
PARALLEL = {  # sizes of an engine: vLLM's option, and verl's of its rollout; None: it has none
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "prefill_context_parallel_size": None,
}


def ask(outlook: Outlook, command: str, root: Any) -> None:
    """Have verl look at a configuration: every check that it makes before the first model is loaded. root: the whole
    configuration; what our own checks have found in it already is set right for verl, which stops at the first."""
    root = copy.deepcopy(root)
    with _quiet():
        _set_right(root)
        found = _ask(outlook, "its command", command_of, command, root)
        root = root if found is None else found
        if not checks.is_served(root):
            return
        if command == RUN:
            _ask(outlook, "its trainer", separate_async, root)
        else:
            for question in (_roles, _critic, _fully_async if "fully_async" in command else _one_step_off):
                _ask(outlook, "its trainer", question, root)
        _ask(outlook, "its engines", engines, root)
        _ask(outlook, "algorithm.adv_estimator", _estimator, root)
        _ask(outlook, "the trainer's strategy", _strategies, root)
        for name, look_up in NAMES.items():
            _ask(outlook, name, _name, name, look_up, root)
        _ask(outlook, "its samplers", _samplers, root.actor_rollout_ref.rollout)


def _ask(outlook: Outlook, what: str, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer; None where verl raises, which is wrong, or where it cannot be asked here."""
    try:
        return question(*copy.deepcopy(arguments))
    except TensorHubError as error:  # our own replica's
        outlook.refuse(error.message)
    except Exception as error:
        words = " ".join(str(error).split()) or _line_of(error)
        if isinstance(error, ImportError) or "HFModelConfig" in words:  # which reads a model that is not here
            outlook.unseen.append(f"verl's checks of {what} ({words})")
        else:
            outlook.refuse(f"verl: {words}")
    return None


def _line_of(error: Exception) -> str:
    """Return the statement that raised it, and where: some of verl's asserts have no words."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.line or type(error).__name__} (in {place.name})"


def command_of(command: str, root: Any) -> Any:
    """Return what verl's command makes of the configuration before it starts Ray."""
    module, run, given = import_module(command), import_module(RUN), []
    with (
        replaced(module, auto_set_device=lambda config: None),
        replaced(run, run_ppo=lambda config, task_runner_class: given.append(config)),
    ):
        module.main.__wrapped__(root)
    return given[0]


def separate_async(root: Any) -> Any:
    """Return verl's trainer, which has reserved nothing yet but knows what it will."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    trainer = get_trainer_cls(root.trainer.v1.trainer_mode)(root)
    trainer._init_resource_pool_mgr()
    return trainer


def _roles(root: Any) -> None:
    from verl.experimental.separation import utils
    from verl.trainer.ppo.core_algos import get_kl_controller
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    roles, _ = utils.create_role_worker_mapping(root)
    utils.create_resource_pool_manager(root, list(roles))
    if root.get("async_training") is None:
        validate_config(root, need_reference_policy(root), need_critic(root))
        return
    omega_conf_to_dataclass(root.actor_rollout_ref.actor)  # as its workers and its trainer do, later
    if root.algorithm.use_kl_in_reward:
        get_kl_controller(root.algorithm.kl_ctrl)


def _critic(root: Any) -> None:
    """Check that verl's separate trainers know this critic; the critic's model is not read."""
    from verl.experimental.separation import ray_trainer
    from verl.trainer.ppo.utils import need_critic
    from verl.workers.config import HFModelConfig

    class Model(_Anything):
        """Has what verl's configuration of a model has, and no more."""

        def __getattr__(self, name: str) -> Any:
            if name in HFModelConfig.__dataclass_fields__:
                return self
            raise UsageError(
                f"verl makes no critic in this trainer (it reads critic.model.{name}, which its configuration does not "
                "have): set algorithm.adv_estimator to one without a critic, or use trainer.v1.trainer_mode="
                "separate_async"
            )

    class Trainer(ray_trainer.SeparateRayPPOTrainer):
        def __init__(self) -> None:
            self.config, self.use_critic = root, need_critic(root)
            self.resource_pool_manager, self.resource_pool_to_cls = _Anything(), _Anything()
            self.role_worker_mapping = _Anything()

    critic = _Anything()
    critic.strategy, critic.model = root.critic.strategy, Model()
    with replaced(ray_trainer, omega_conf_to_dataclass=lambda config: critic):
        Trainer()._create_critic_class()


def _one_step_off(root: Any) -> None:
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    class Trainer(OneStepOffRayTrainer):
        def _create_dataloader(self, *arguments: Any) -> None:
            pass

    Trainer(root, None, {}, None, device_name=root.trainer.device)


def _fully_async(root: Any) -> None:
    from verl.experimental.fully_async_policy import fully_async_rollouter as module

    def create_dataloader(self: Any, *arguments: Any) -> None:
        raise _Enough

    stock_class = module.FullyAsyncRollouter.__ray_metadata__.modified_class
    rollouter = type("Rollouter", (stock_class,), {"_create_dataloader": create_dataloader})
    with (
        contextlib.suppress(_Enough),
        replaced(module, create_rl_dataset=lambda *arguments, **options: None),
        replaced(module, create_rl_sampler=lambda *arguments, **options: None),
    ):
        rollouter(root, None)  # which validates the configuration between data sets and loaders


def engines(root: Any) -> list[Any]:
    """Return the replicas that verl's manager makes, none of them started."""
    from verl.workers.rollout.llm_server import LLMServerManager

    root.actor_rollout_ref.rollout.prometheus.enable = False  # which writes to a server that is there
    manager = LLMServerManager(root)

    async def init_standalone(self: Any) -> None:
        pass

    stands_for = {"init_standalone": init_standalone, "_server_handle": None, "_server_address": None}
    manager.rollout_replica_class = type("Replica", (manager.rollout_replica_class,), stands_for)
    asyncio.run(manager._initialize_llm_servers())
    for replica in manager.rollout_replicas[:1]:
        _check_server(replica.config, replica.model_config, replica.gpus_per_replica_node)
    return list(manager.rollout_replicas)


def _check_server(rollout: Any, model: Any, gpus: int) -> None:
    """Have verl tell vLLM's server what to do, and vLLM's own parser read it. Refuse other GPUs than verl gives it, and
    weights that come in no way that vLLM knows."""
    if not rollout.name.startswith("vllm"):
        return
    from verl.workers.rollout.vllm_rollout import vllm_async_server
    from vllm.model_executor import model_loader

    class Parser(vllm_async_server.FlexibleArgumentParser):
        def error(self, message: str) -> None:
            raise UsageError(f"vLLM does not take what actor_rollout_ref.rollout says: {' '.join(message.split())}")

    async def run_server(args: Any) -> None:
        vars(server)["told"] = args

    server: Any = object.__new__(vllm_async_server.vLLMHttpServer)
    length = _length_of(model.path)
    with open_dict(model):  # of which no more is read here
        model.local_path, model.hf_config = "model", {"max_position_embeddings": length}
    vars(server).update(config=rollout, model_config=model, node_rank=0, replica_rank=0, nnodes=1, gpus_per_node=gpus)
    vars(server).update(workers=[None] * gpus, _master_address=None, _dp_rpc_port=None, _disaggregation_role="null")
    vars(server).update(_should_profile=lambda: False, run_server=run_server)
    if rollout.quantization in (None, "fp8"):  # which changes vLLM
        vars(server).update(_apply_quantization=lambda: (rollout.quantization, {}))
    if length is not None:
        server._validate_configs()
    with replaced(vllm_async_server, FlexibleArgumentParser=Parser):
        asyncio.run(server.launch_server())
    _check_scheduler(server.told)
    for name, option in PARALLEL.items():
        size = getattr(server.told, name, 1)
        if size != (getattr(rollout, option) if option else 1):
            mend = f"set actor_rollout_ref.rollout.{option} instead" if option else "leave it out"
            raise UsageError(
                f"engine_kwargs.vllm.{name} is {size}, which takes other GPUs than verl gives an engine: {mend}"
            )
    loader = server.told.load_format
    if loader not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.keys() - {OURS}:
        raise UsageError(
            f"actor_rollout_ref.rollout.load_format is {loader!r}, by which no engine of verl gets its weights: set "
            "dummy, or auto for what is on disk"
        )


def _length_of(path: Any) -> int | None:
    """Return how many tokens this model takes, as verl reads it; None: it is not here, or does not say."""
    import transformers
    from verl.workers.rollout.utils import get_max_position_embeddings

    with contextlib.suppress(Exception):
        return int(get_max_position_embeddings(transformers.AutoConfig.from_pretrained(folder_of(path))))
    return None


def _check_scheduler(told: Any) -> None:
    """Have vLLM look at the sizes of its batches and its share of a GPU, of which its parser takes any number. What it
    says of the model is not asked: this may be a node without a GPU."""
    from vllm.config import CacheConfig, SchedulerConfig

    sizes = {name: getattr(told, name) for name in ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill")}
    length = told.max_model_len or told.max_num_batched_tokens
    try:
        CacheConfig(gpu_memory_utilization=told.gpu_memory_utilization)
        SchedulerConfig.default_factory(max_model_len=length, **sizes)
    except ValueError as error:
        found: list[Any] = getattr(error, "errors", list)()  # pydantic's
        words = "; ".join(" ".join([*map(str, one["loc"]), one["msg"].removeprefix("Value error, ")]) for one in found)
        raise UsageError(f"vLLM does not take what actor_rollout_ref.rollout says: {words or error}") from error


def _estimator(root: Any) -> None:
    """Check that verl knows this estimator, and that its trainer has what one of its own takes, which it finds out in
    its first step: it is given a batch of two samples."""
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.import_utils import import_external_libs

    import_external_libs(root.actor_rollout_ref.model.get("external_lib"))  # which may have registered more
    algorithm, name, actor = root.algorithm, root.algorithm.adv_estimator, root.actor_rollout_ref.actor
    get_adv_estimator_fn(name)
    if name not in list(AdvantageEstimator):
        return
    given = dict.fromkeys(("response_mask", "token_level_rewards", "old_log_probs"), torch.ones(2, 2))
    given |= {"values": torch.ones(2, 2)} if need_critic(root) else {}
    others = {"uid": np.zeros(2, dtype=object)}
    if not checks.is_separate_async(root):  # which reads no more than these
        given |= dict.fromkeys(("prompts", "attention_mask"), torch.ones(2, 2, dtype=torch.int64))
        given |= {"sum_pi_squared": torch.ones(2, 2)} if actor.get("calculate_sum_pi_squared") else {}
        others |= {key: np.ones(2) for key in algorithm.get("gdpo_reward_keys") or ()}
    batch = DataProto.from_dict(given, non_tensors=others)
    try:
        compute_advantage(batch, adv_estimator=name, config=algorithm)
    except Exception as error:
        raise UsageError(
            f"algorithm.adv_estimator is {name!r}, and this trainer of verl does not give it what it takes: choose "
            f"another one ({' '.join(str(error).split())})"
        ) from error


def _strategies(root: Any) -> None:
    """Check whether verl's workers will find the engines of these names. Which of them run here is not asked: this may
    be a node without a GPU."""
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.import_utils import import_external_libs
    from verl.workers import engine

    import_external_libs(root.actor_rollout_ref.model.get("external_lib"))
    asked = [("actor_rollout_ref.actor.strategy", "language_model", root.actor_rollout_ref.actor.strategy)]
    if need_critic(root):
        asked.append(("critic.strategy", "value_model", root.critic.strategy))
    not_here = {module.name for module in pkgutil.iter_modules(engine.__path__)}
    for option, kind, name in asked:
        known = engine.EngineRegistry._engines[kind]
        if name not in known and name in not_here:
            raise ImportError(f"what verl's {name} engine needs is not installed")
        if name not in known:
            names = ", ".join(sorted({*known, *not_here} - {"base", "utils"}))
            raise UsageError(f"{option} is {name!r}, which verl does not know: choose one of {names}")


def _name(option: str, look_up: Callable[[Any, Any], Any], root: Any) -> None:
    """Have verl look up what this option names, which it does minutes after its start. Refuse what it does not know."""
    value = OmegaConf.select(root, option)
    try:
        if value is not None:
            look_up(value, root)
    except ImportError:
        raise
    except Exception as error:
        raise UsageError(
            f"{option} is {value!r}, which verl does not know: {' '.join(str(error).split()) or 'correct it'}"
        ) from error


def _policy_loss(name: Any, root: Any) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    get_policy_loss_fn(name)


def _divergence(name: Any, root: Any) -> None:
    import torch
    from verl.trainer.ppo.core_algos import kl_penalty

    if root.actor_rollout_ref.actor.use_kl_loss or root.algorithm.use_kl_in_reward:
        kl_penalty(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), name)


def _truncation(name: Any, root: Any) -> None:
    import torch
    from verl.utils.torch_functional import postprocess_data

    one = torch.ones(1, 1, dtype=torch.int64)
    postprocess_data(one, one, max_length=1, pad_token_id=0, truncation=name)


def _dtype(name: Any, root: Any) -> None:
    from verl.utils.torch_dtypes import PrecisionType

    PrecisionType.to_dtype(name)


def _reward_manager(name: Any, root: Any) -> None:
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    if root.reward.reward_manager.source == "register":  # else it is in a file of the job's
        resolve_reward_manager_cls(root)


def _loggers(given: Any, root: Any) -> None:
    from verl.utils.tracking import Tracking

    known = {*Tracking.supported_backend, "tracking"}
    if strange := [name for name in ([given] if isinstance(given, str) else given) if name not in known]:
        raise ValueError(f"{strange[0]} is none of {', '.join(sorted(known))}")


def _agent_loop(name: Any, root: Any) -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as known

    if root.actor_rollout_ref.rollout.agent.agent_loop_config_path is None and name not in known:  # which adds others
        raise ValueError(f"it is none of {', '.join(known)}")


def _tool_format(name: Any, root: Any) -> None:
    from verl.experimental.agent_loop.tool_parser import ToolParser

    if root.actor_rollout_ref.rollout.agent.default_agent_loop == "tool_agent":
        ToolParser.get_tool_parser(name, None)


def _optimizer(name: Any, root: Any) -> None:
    actor = root.actor_rollout_ref.actor
    if actor.strategy in ("fsdp", "fsdp2"):
        getattr(import_module(actor.optim.optimizer_impl), name)  # as its `build_optimizer` does


def _correction(root: Any, **kind: Any) -> None:
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    if root.actor_rollout_ref.rollout.calculate_log_probs:  # or there is nothing to correct
        limits = {f"{name}_threshold": root.algorithm.rollout_correction.get(f"{name}_threshold") for name in kind}
        of_tokens = torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)
        compute_rollout_correction_and_rejection_mask(*of_tokens, **kind, **limits)


NAMES: dict[str, Callable[[Any, Any], None]] = {
    "actor_rollout_ref.actor.policy_loss.loss_mode": _policy_loss,
    "actor_rollout_ref.actor.kl_loss_type": _divergence,
    "algorithm.kl_penalty": _divergence,
    "actor_rollout_ref.actor.fsdp_config.model_dtype": _dtype,
    "actor_rollout_ref.actor.optim.optimizer": _optimizer,
    "algorithm.rollout_correction.rollout_is": lambda name, root: _correction(root, rollout_is=name),
    "algorithm.rollout_correction.rollout_rs": lambda name, root: _correction(root, rollout_rs=name),
    "reward.reward_manager.name": _reward_manager,
    "data.truncation": _truncation,
    "trainer.logger": _loggers,
    "actor_rollout_ref.rollout.agent.default_agent_loop": _agent_loop,
    "actor_rollout_ref.rollout.multi_turn.format": _tool_format,
}


def _samplers(rollout: Any) -> None:
    """Have vLLM look at what every request will be sampled with."""
    from vllm import SamplingParams

    for place, given in (("", rollout), ("val_kwargs.", rollout.val_kwargs)):
        try:
            SamplingParams(temperature=given.temperature, top_p=given.top_p, top_k=given.top_k, max_tokens=1)
        except Exception as error:
            raise UsageError(f"vLLM does not take actor_rollout_ref.rollout.{place}*: {error}") from error


def _set_right(root: Any) -> None:
    """Set right what checks.py has said in its own words, for verl to go on to the next check."""
    if not checks.is_separate_async(root):
        if checks.is_served(root):
            root.actor_rollout_ref.hybrid_engine = False
        return
    rollout, v1 = root.actor_rollout_ref.rollout, root.trainer.v1.separate_async
    v1.parameter_sync_step = checks.steps_of(root) or v1.parameter_sync_step
    if root.actor_rollout_ref.actor.ppo_mini_batch_size:
        root.data.train_batch_size = v1.parameter_sync_step * root.actor_rollout_ref.actor.ppo_mini_batch_size
    rollout.nnodes, rollout.n_gpus_per_node = rollout.nnodes or 1, rollout.n_gpus_per_node or 8


class _Enough(Exception):
    """All that is to be asked was asked."""


class _Anything:
    """Stands for what verl's constructors keep and only later use."""

    strategy: Any
    model: Any

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what verl warns and prints of what its commands would do, and keep it from looking on the Hugging Face
    hub for what is not here."""
    from huggingface_hub import constants

    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            replaced(constants, HF_HUB_OFFLINE=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
