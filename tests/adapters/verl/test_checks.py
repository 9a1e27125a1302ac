"""What a command line of verl means for the store: told, or refused, before anything starts."""

import ast
import copy
import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

pytest.importorskip("verl", reason="its configuration is read")

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from tensorhub_plugins.verl import checks, composing, config, doctor, driver  # noqa: E402
from tensorhub_plugins.vllm.command_line import words_of  # noqa: E402
from tensorhub_plugins.vllm.model_size import elements_of  # noqa: E402
from tensorhub_plugins.vllm.outlook import Model, Outlook  # noqa: E402

BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend=tensorhub"
STORE = [BACKEND, "actor_rollout_ref.rollout.name=vllm"]
PULL = [BACKEND, "actor_rollout_ref.rollout.name=vllm_tensorhub"]
SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
]
APART = "actor_rollout_ref.hybrid_engine=False"
ONE_STEP_OFF = ["verl.experimental.one_step_off_policy.main_ppo", APART]
FULLY_ASYNC = ["verl.experimental.fully_async_policy.fully_async_main", APART]
OPTIONS = f"+{config.WHERE}"
GATHER = f"{OPTIONS}.parts=false"
LORA = "actor_rollout_ref.model.lora_rank=8"
MERGED = "actor_rollout_ref.model.lora.merge=true"


@functools.cache
def default(*command):
    return composing.compose(words_of(command, composing.COMMANDS, "verl.trainer.main_ppo"), Outlook())


def unlocked(root):
    root = copy.deepcopy(root)
    OmegaConf.set_struct(root, False)
    return root


def composed(arguments):
    """What composing.compose gives, without reading all of verl's files once more."""
    command = [argument for argument in arguments if "=" not in argument]
    given = [argument.removeprefix("+") for argument in arguments if "=" in argument]
    return OmegaConf.unsafe_merge(unlocked(default(*command)), OmegaConf.from_dotlist(given))


def told_of(arguments):
    outlook = checks.check(composed(arguments))[1]
    assert not outlook.wrong
    return outlook.said


def refusals(arguments):
    return checks.check(composed(arguments))[1].wrong


def test_what_will_happen_is_told():
    told = "\n".join(told_of([*SEPARATE, *PULL]))
    assert "trainer: separate_async\n" in told
    assert "each of 2 engines fetches every version by itself" in told
    assert "hub: started on Ray's head node" in told
    assert "fleet: as many replicas as verl starts, at least 1" in told
    told = "\n".join(told_of([*SEPARATE, *STORE, f"{OPTIONS}.run=r1"]))
    assert "drop-in: verl stops all engines" in told and "run: r1" in told
    assert "fleet" not in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "each trainer rank publishes the part that fsdp gave it, and nothing is gathered"),
        (["actor_rollout_ref.actor.strategy=fsdp2"], "the part that fsdp2 gave it"),
        ([GATHER], f"gathered to every trainer rank ({config.WHERE}.parts=false)"),
        (["actor_rollout_ref.actor.strategy=veomni"], "verl's veomni engine hands over whole tensors only"),
        (["actor_rollout_ref.actor.strategy=megatron"], "the parts that megatron gave it, and nothing is gathered, if"),
        (
            ["actor_rollout_ref.actor.strategy=megatron", "+actor_rollout_ref.actor.megatron.use_megatron_fsdp=true"],
            "gathered to every trainer rank (Megatron-FSDP",
        ),
        (
            ["actor_rollout_ref.actor.strategy=megatron", "+actor_rollout_ref.actor.megatron.qat.enable=true"],
            "quantization-aware training quantizes whole tensors",
        ),
        ([LORA], "each trainer rank publishes its part of the adapter"),
        ([LORA, MERGED], "verl merges the adapter into whole tensors"),
        (
            ["actor_rollout_ref.actor.fsdp_config.qat.enable=true"],
            "quantization-aware training quantizes whole tensors",
        ),
    ],
)
def test_which_way_the_weights_take_is_told(arguments, says):
    told = told_of([*SEPARATE, *PULL, *arguments])
    assert [line for line in told if line.startswith("weights: ") and says in line]


HUB = (f"{OPTIONS}.hub=tcp://h:1", f"{OPTIONS}.run=r", "trainer.resume_mode=auto")
TAKES, NEWEST = (f"{OPTIONS}.recover_weights={mode}" for mode in ("resumed_step", "latest"))
TRAINED = "actor_rollout_ref.actor.fsdp_config.model_dtype"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([TAKES, *HUB, f"{OPTIONS}.dtype=float32"], "takes the weights of its checkpoint from workers that hold them"),
        ([TAKES, *HUB, f"{OPTIONS}.dtype=bfloat16", f"{TRAINED}=bf16"], "takes the weights of its checkpoint"),
        ([NEWEST, *HUB, f"{OPTIONS}.dtype=bfloat16"], "with the OLDER optimizer, data and step"),
    ],
)
def test_where_a_run_that_resumes_has_its_weights_from_is_told(arguments, says):
    assert [line for line in told_of([*SEPARATE, *PULL, *arguments]) if says in line and "LOOK" in line]
    more = [*arguments, f"{OPTIONS}.retain_copies=2"]
    assert [line for line in told_of([*SEPARATE, *PULL, *more]) if says in line and "LOOK" not in line]
    assert not [line for line in told_of([*SEPARATE, *PULL, *HUB]) if "resumes" in line]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([TAKES, *HUB, f"{OPTIONS}.dtype=bfloat16"], "the trainer's float32 weights are published in bfloat16"),
        ([NEWEST, HUB[0], HUB[2]], "the run's own hub ends with it"),
        ([NEWEST, *HUB[1:]], "the run's own hub ends with it"),
        ([NEWEST, *HUB, GATHER], "it takes parts of whole weights"),
        ([NEWEST, *HUB, LORA], "it takes parts of whole weights"),
        ([NEWEST, *HUB, "actor_rollout_ref.actor.strategy=megatron"], "it takes parts of whole weights"),
        ([NEWEST, *HUB[:2], "trainer.resume_mode=disable"], "resumes from nothing"),
        ([NEWEST, *HUB, "actor_rollout_ref.actor.checkpoint.load_contents=[optimizer,extra]"], "has no model"),
    ],
)
def test_weights_that_would_never_be_taken_are_refused(arguments, why):
    (refusal,) = refusals([*SEPARATE, *PULL, *arguments])
    assert f".recover_weights={arguments[0].rpartition('=')[2]} would do nothing: " in refusal and why in refusal


def test_the_history_of_an_adapter_is_called_after_it():
    root = composed([*SEPARATE, *PULL, LORA, f"{OPTIONS}.dtype=float16"])
    OmegaConf.set_struct(root, True)  # as Hydra makes it
    for _ in range(2):  # it may be looked at twice
        told = driver.check(root).said
        given = config.parse(root.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.get(config.BACKEND))
        assert (given.model, given.slices) == ("actor.lora", 1)  # every worker reads all of it
    assert len([line for line in told if line.startswith("LoRA: ") and "as model actor.lora," in line]) == 1
    assert not [line for line in told if line.startswith("memory: ")]  # of the whole model


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ([], "bfloat16"),
        (["actor_rollout_ref.rollout.dtype=float16"], "float16"),
        ([f"{OPTIONS}.dtype=float32"], "float32"),
        (["actor_rollout_ref.rollout.dtype=auto"], None),
    ],
)
def test_weights_are_published_in_the_dtype_of_the_rollouts(arguments, dtype):
    root = composed([*SEPARATE, *PULL, *arguments])
    OmegaConf.set_struct(root, True)  # as Hydra makes it
    told = [line for line in driver.check(root).said if line.startswith("dtype: ")]
    trainers = config.parse(root.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.get(config.BACKEND))
    assert trainers.dtype == dtype
    assert told == [f"dtype: {checks.dtype_summary(trainers)}"] and (dtype or "as the trainer has them") in told[0]


def test_the_memory_of_a_run_is_told_before_it(tmp_path):
    save_file({"w": torch.zeros(1000, 1000), "b": torch.zeros(1000)}, tmp_path / "model.safetensors")
    elements = elements_of(tmp_path)
    assert elements == 1_001_000 and elements_of(tmp_path / "none") is None
    size = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{OPTIONS}.dtype=bfloat16", f"{OPTIONS}.keep=1"]
    model = Model(1000 * elements)
    trainer, rollout, shared = memory([*SEPARATE, *PULL, *size], model).said
    assert trainer == (
        "memory: each trainer rank takes up to 500.5 MB of host memory (2 copies of the 250.2 MB that it has of a "
        "version), and the 4 of its host 2.0 GB"
    )
    assert "each worker of an engine takes up to 2.0 GB of host memory (2 copies of the 1.0 GB" in rollout
    assert "and the 2 of its host 4.0 GB" in rollout  # of one engine, although the host has room for two
    assert "engines beside it on its host use the same copies" in shared
    budget = [f"{OPTIONS}.memory_budget_bytes=600000000", f"{OPTIONS}.over_budget=refuse"]
    (refusal,) = memory([*SEPARATE, *PULL, *size, *budget], model).wrong
    assert "each worker of an engine" in refusal and "above memory_budget_bytes=600000000: raise it" in refusal
    assert "is no folder here and not in the Hugging Face cache" in memory([*SEPARATE, *PULL], None).unseen[0]


def memory(arguments, model):
    outlook, root = Outlook(), composed(arguments)
    checks.tell_memory(outlook, root, checks.check(root)[0], model)
    return outlook


@pytest.mark.parametrize("engines", [1, 2, 8])
def test_engines_of_a_host_take_two_copies_however_many_they_are(engines):
    """As docs/serving.md and StoreOptions.copies say."""
    sizes = [f"actor_rollout_ref.rollout.tensor_model_parallel_size={8 // engines}"]
    sizes += ["actor_rollout_ref.rollout.n_gpus_per_node=8", f"{OPTIONS}.dtype=bfloat16"]
    said = memory([*SEPARATE, *PULL, *sizes], Model(7_600_000_000)).said[1]
    assert "30.4 GB" in said.rpartition("its host ")[2] or engines == 8 and "takes up to 30.4 GB" in said


def test_what_drop_in_takes_of_a_host_is_not_overlooked():
    size = ["actor_rollout_ref.rollout.n_gpus_per_node=8", f"{OPTIONS}.dtype=bfloat16"]
    said = memory([*SEPARATE, *STORE, *size], Model(70_600_000_000)).said
    assert "each worker of an engine takes up to 282.4 GB" in said[1]
    assert said[-1].startswith("LOOK: drop-in takes 2259.2 GB of host memory on every host of engines")
    assert said[-1].endswith("rollout.name=vllm_tensorhub takes 282.4 GB")
    assert not any("LOOK" in one for one in memory([*SEPARATE, *PULL, *size], Model(70_600_000_000)).said)


def test_a_size_that_is_from_the_configuration_is_said_to_be():
    (*_, said, _) = memory([*SEPARATE, *PULL], Model(10**9, is_exact=False)).said
    assert said.endswith("the number of weights is from the model's configuration")


@pytest.mark.parametrize(("command", "name"), [(ONE_STEP_OFF, "one_step_off"), (FULLY_ASYNC, "fully_async")])
def test_the_other_trainers_are_told_apart(command, name):
    assert f"trainer: {name}" in told_of([*command, *PULL])
    assert refusals([*command[:1], *PULL]) == [f"trainer {name!r} starts with {APART} only: add that"]


def standalone_or_hybrid(trainer):
    """What a trainer of verl has its engines made with: the trainer's workers, or none, for engines apart from them."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(trainer))) if isinstance(node, ast.Call)]
    makes = [call for call in calls if ast.unparse(call.func) == "LLMServerManager.create"]
    return {"hybrid" if "worker_group" in {word.arg for word in call.keywords} else "standalone" for call in makes}


def test_verls_trainers_that_are_refused_have_no_engines_on_gpus_of_their_own():
    """Else the store could serve those: what the refusal says holds of the verl that is installed."""
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import trainer_base, trainer_colocate_async, trainer_separate_async, trainer_sync

    assert standalone_or_hybrid(trainer_base) == standalone_or_hybrid(ray_trainer) == {"hybrid"}
    assert standalone_or_hybrid(trainer_sync) == standalone_or_hybrid(trainer_colocate_async) == set()
    assert standalone_or_hybrid(trainer_separate_async) == {"standalone"}  # the control, which the store serves


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (PULL, "trainer 'sync' shares its GPUs"),
        (PULL, "verl gives it no engines anywhere else, so the store would do nothing"),
        (STORE, "add trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False"),
        ([*PULL, "trainer.v1.trainer_mode=colocate_async"], "trainer 'colocate_async' shares its GPUs"),
        ([*SEPARATE, *PULL, "trainer.use_v1=False"], "the legacy trainer (trainer.use_v1=False) shares"),
        ([BACKEND], "rollout.name is not set"),
        ([*SEPARATE, *PULL[1:]], "follows the store, but"),
        ([*SEPARATE, BACKEND + "b", STORE[1]], "backend is 'tensorhubb': for the store set it to 'tensorhub'"),
        ([*SEPARATE, *STORE, LORA], "rollout.name=vllm_tensorhub (pull mode), or set actor_rollout_ref.model.lora.mer"),
        ([*SEPARATE, *PULL, LORA, "actor_rollout_ref.hybrid_engine=True"], "set actor_rollout_ref.hybrid_engine=False"),
        ([*SEPARATE, *PULL, LORA, "actor_rollout_ref.actor.strategy=megatron"], "actor.strategy=fsdp2, or set actor"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.model.lora.rank=8"], "set actor_rollout_ref.model.lora_rank, or set"),
        ([*SEPARATE, *PULL, LORA, GATHER], "parts=false out, or set actor"),
        ([*SEPARATE, *PULL, LORA, "actor_rollout_ref.model.target_parameters=[w]"], "target_parameters out"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"], "GPUs that stay unused"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.rollout.data_parallel_size=2"], "set it to 1"),
        ([*SEPARATE, *PULL, f"{OPTIONS}.keeep=3"], "did you mean 'keep'"),
        ([*SEPARATE, *PULL, SEPARATE[1].replace("=1", "=4")], "set trainer.v1.separate_async.parameter_sync_step=1"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.rollout.nnodes=0"], "the engines need GPUs of their own: set"),
        ([*ONE_STEP_OFF, *PULL, f"{OPTIONS}.pause_mode=abort"], "takes such a part for the whole answer"),
        ([*SEPARATE, *STORE, f"{OPTIONS}.fleet_target=4"], "drop-in mode has a fixed number of engines: set"),
        (
            [*SEPARATE, *PULL, f"{OPTIONS}.fleet_max=4", "actor_rollout_ref.rollout.router_config_path=r"],
            "knows no fleet",
        ),
        (
            [*SEPARATE, *PULL, f"{OPTIONS}.fleet_max=4", "actor_rollout_ref.rollout.full_determinism=True"],
            "switch it off",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_change(arguments, says):
    root = composed(arguments)
    assert checks.concerns_store(root)
    assert says in checks.check(root)[1].wrong[0]


def test_adapters_that_are_merged_are_fine():
    assert not refusals([*SEPARATE, *PULL, LORA, MERGED]) and not refusals([*SEPARATE, *STORE, LORA, MERGED])


@pytest.mark.parametrize(
    ("beside", "is_refused"),
    [
        ([], True),
        (["use_distributed_optimizer=false"], False),
        (["use_megatron_fsdp=true"], False),
        (["override_ddp_config.overlap_param_gather=false"], False),
    ],
)
def test_a_gather_that_is_left_to_the_next_forward_pass_is_refused(beside, is_refused):
    """megatron-core: DistributedOptimizer.step_with_ready_grads gathers only without overlap_param_gather."""
    engine = "actor_rollout_ref.actor.megatron"
    given = [f"{engine}.{option}" for option in ("override_ddp_config.overlap_param_gather=true", *beside)]
    wrong = refusals([*SEPARATE, *PULL, "actor_rollout_ref.actor.strategy=megatron", *given])
    assert bool(wrong) is is_refused and all("overlap_param_gather leaves gathering" in each for each in wrong)
    assert not refusals([*SEPARATE, *PULL, *given])  # of another engine


def test_a_run_without_the_store_is_none_of_ours():
    root = composed([])
    assert not checks.concerns_store(root)
    driver.refuse_or_tell(root)  # and not even a sentence


@pytest.mark.parametrize("given", [None, "x", []])
@pytest.mark.parametrize(
    ("mode", "group"),
    [
        (SEPARATE, "actor_rollout_ref.model"),
        (SEPARATE, "actor_rollout_ref.actor"),
        (SEPARATE, "actor_rollout_ref.actor.fsdp_config.qat"),
        (SEPARATE, "actor_rollout_ref.rollout.val_kwargs"),
        (SEPARATE, "trainer"),
        (SEPARATE, "trainer.v1"),
        (SEPARATE, "data"),
        (FULLY_ASYNC, "async_training"),
        (FULLY_ASYNC, "rollout"),
    ],
)
def test_what_is_given_in_the_place_of_a_whole_group_ends_in_no_traceback(mode, group, given):
    """What is wrong with it is said, or is verl's to say."""
    root = composed([*mode, *PULL])
    OmegaConf.update(root, group, given, merge=False, force_add=True)
    outlook = driver.check(root)
    if group == "actor_rollout_ref.model":
        assert any(one.startswith("actor_rollout_ref.model.path is empty") for one in outlook.wrong)


# --- the driver -------------------------------------------------------------------------------------------------------


@pytest.mark.heavy  # imports all of verl
def test_verls_own_command_is_refused_before_ray_starts(tmp_path):
    """By the entry point that pyproject.toml declares: no flag and no variable names our module."""
    declared = tmp_path / "tensorhub_plugins-0.dist-info"
    declared.mkdir()
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorhub-plugins\nVersion: 0\n")
    (declared / "entry_points.txt").write_text(entry_points())
    run = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *PULL, f"hydra.run.dir={tmp_path}"],
        env={**environment(), "PYTHONPATH": f"{tmp_path}:{environment().get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("tensorhub: trainer 'sync' shares its GPUs")
    assert "Traceback" not in run.stderr and "ray init" not in run.stdout


def environment():
    return {name: value for name, value in os.environ.items() if name != doctor.MODULES}


def entry_points():
    groups = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["entry-points"]
    return "[verl.plugins]\n" + "".join(f"{name} = {value}\n" for name, value in groups["verl.plugins"].items())
