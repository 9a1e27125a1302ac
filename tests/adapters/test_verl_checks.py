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

from tensorhub_plugins.core import UsageError, start_server  # noqa: E402
from tensorhub_plugins.core.cli import main as command  # noqa: E402
from tensorhub_plugins.verl import checks, config, doctor, driver  # noqa: E402
from tensorhub_plugins.vllm.model_size import elements_of  # noqa: E402

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
ONE_STEP_OFF = ["verl.experimental.one_step_off_policy.main_ppo"]
FULLY_ASYNC = ["verl.experimental.fully_async_policy.fully_async_main"]
OPTIONS = f"+{config.WHERE}"
GATHER = f"{OPTIONS}.parts=false"
MERGED = "actor_rollout_ref.model.lora.merge=true"


@functools.cache
def default(*command):
    return doctor.compose(command)


def unlocked(root):
    root = copy.deepcopy(root)
    OmegaConf.set_struct(root, False)
    return root


def composed(arguments):
    """What doctor.compose gives, without reading all of verl's files once more."""
    command = [argument for argument in arguments if "=" not in argument]
    given = [argument.removeprefix("+") for argument in arguments if "=" in argument]
    return OmegaConf.unsafe_merge(unlocked(default(*command)), OmegaConf.from_dotlist(given))


def test_what_will_happen_is_told():
    told = "\n".join(checks.check(composed([*SEPARATE, *PULL]))[1])
    assert "trainer: separate_async\n" in told
    assert "each of 2 engines fetches every version by itself" in told
    assert "hub: started on Ray's head node" in told
    assert "fleet: as many replicas as verl starts, at least 1" in told
    told = "\n".join(checks.check(composed([*SEPARATE, *STORE, f"{OPTIONS}.run=r1"]))[1])
    assert "drop-in: verl stops all engines" in told and "run: r1" in told
    assert "fleet" not in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "each trainer rank publishes the part that fsdp gave it, and nothing is gathered"),
        (["actor_rollout_ref.actor.strategy=fsdp2"], "the part that fsdp2 gave it"),
        ([GATHER], f"gathered to every trainer rank ({config.WHERE}.parts=false)"),
        (["actor_rollout_ref.actor.strategy=megatron"], "verl's megatron engine hands over whole tensors only"),
        (["actor_rollout_ref.model.lora_rank=8", MERGED], "verl merges the adapter into whole tensors"),
        (
            ["actor_rollout_ref.actor.fsdp_config.qat.enable=true"],
            "quantization-aware training quantizes whole tensors",
        ),
    ],
)
def test_which_way_the_weights_take_is_told(arguments, says):
    told = checks.check(composed([*SEPARATE, *PULL, *arguments]))[1]
    assert [line for line in told if line.startswith("weights: ") and says in line]


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
    told = [line for line in driver.check(root) if line.startswith("dtype: ")]
    trainers = config.parse(root.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.get(config.BACKEND))
    assert trainers.dtype == dtype
    assert told == [f"dtype: {checks.says_dtype(trainers)}"] and (dtype or "as the trainer has them") in told[0]


def test_the_memory_of_a_run_is_told_before_it(tmp_path):
    save_file({"w": torch.zeros(1000, 1000), "b": torch.zeros(1000)}, tmp_path / "model.safetensors")
    elements = elements_of(tmp_path)
    assert elements == 1_001_000 and elements_of(tmp_path / "none") is None
    size = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{OPTIONS}.dtype=bfloat16", f"{OPTIONS}.keep=1"]
    root = composed([*SEPARATE, *PULL, *size])
    options, _ = checks.check(root)
    trainer, rollout = checks.says_memory(root, options, 1000 * elements)
    assert trainer == (
        "memory: each trainer rank takes up to 500.5 MB of host memory (2 copies of the 250.2 MB that it has of a "
        "version), and the 4 of its host 2.0 GB"
    )
    assert "each rollout worker takes up to 2.0 GB of host memory (2 copies of the 1.0 GB" in rollout
    _, drop_in = checks.says_memory(composed([*SEPARATE, *STORE, *size]), options, 1000 * elements)
    assert "4.0 GB of host memory (2 copies of the 2.0 GB" in drop_in  # each has all of it
    budget = [f"{OPTIONS}.memory_budget_bytes=600000000", f"{OPTIONS}.over_budget=refuse"]
    kept = composed([*SEPARATE, *PULL, *size, *budget])
    with pytest.raises(UsageError, match="each rollout worker.*above memory_budget_bytes=600000000: raise it"):
        checks.says_memory(kept, checks.check(kept)[0], 1000 * elements)
    assert "says at its start" in checks.says_memory(root, options, None)[0]


@pytest.mark.parametrize(("command", "name"), [(ONE_STEP_OFF, "one_step_off"), (FULLY_ASYNC, "fully_async")])
def test_the_other_trainers_are_told_apart(command, name):
    told = checks.check(composed([*command, *PULL]))[1]
    assert f"trainer: {name}" in told


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
        ([*SEPARATE, *STORE, "actor_rollout_ref.model.lora_rank=8"], "model.lora.merge=true"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.model.lora_rank=8"], "model.lora.merge=true"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.rollout.pipeline_model_parallel_size=2"], "GPUs that nobody uses"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.rollout.data_parallel_size=2"], "set it to 1"),
        ([*SEPARATE, *PULL, f"{OPTIONS}.keeep=3"], "did you mean 'keep'"),
        ([*SEPARATE, *PULL, SEPARATE[1].replace("=1", "=4")], "set trainer.v1.separate_async.parameter_sync_step=1"),
        ([*SEPARATE, *PULL, "actor_rollout_ref.rollout.nnodes=0"], "needs GPUs of its own for the engines"),
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
    with pytest.raises(UsageError) as refusal:
        checks.check(root)
    assert says in str(refusal.value)


def test_adapters_that_are_merged_are_fine():
    checks.check(composed([*SEPARATE, *PULL, "actor_rollout_ref.model.lora_rank=8", MERGED]))


def test_a_run_without_the_store_is_none_of_ours():
    root = composed([])
    assert not checks.concerns_store(root)
    driver.refuse_or_tell(root)  # and not even a sentence


# --- the doctor -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setenv(doctor.MODULES, doctor.PACKAGE)


def test_the_doctor_says_what_will_happen_and_asks_the_hub(installed, capsys):
    with start_server() as hub:
        arguments = ["doctor", "verl", "python", "-m", "verl.trainer.main_ppo", *SEPARATE, *PULL]
        assert command([*arguments, f"{OPTIONS}.hub={hub.address}"]) == 0
    assert f"hub: at {hub.address}" in capsys.readouterr().out


def test_the_doctor_names_a_hub_that_does_not_answer(installed, capsys, monkeypatch):
    monkeypatch.setattr(driver, "CONNECT_TIMEOUT_S", 0.3)
    assert command(["doctor", "verl", *SEPARATE, *PULL, f"{OPTIONS}.hub=tcp://127.0.0.1:9"]) == 1
    assert "no hub answers at tcp://127.0.0.1:9: start one with `tensorhub server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "does not name the store: add"),
        (["nonsense"], "'nonsense' is no override of verl"),
        (["actor_rollout_ref.rollout.nam=vllm"], "verl does not take this command line"),
        (PULL, "trainer 'sync' shares"),
    ],
)
def test_the_doctor_says_what_is_wrong_in_one_line(installed, arguments, says, capsys):
    assert command(["doctor", "verl", *arguments]) == 1
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1


def test_the_doctor_knows_whether_verl_finds_the_store(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_: [])
    monkeypatch.delenv(doctor.MODULES, raising=False)
    module = f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={doctor.PACKAGE}"
    external = f"actor_rollout_ref.model.external_lib={doctor.PACKAGE}"
    assert not doctor.is_found(composed([*SEPARATE, *STORE]))
    assert doctor.is_found(composed([*SEPARATE, *STORE, module]))
    assert not doctor.is_found(composed([*SEPARATE, *PULL, module]))
    assert doctor.is_found(composed([*SEPARATE, *PULL, module, external]))
    assert not doctor.is_found(composed([*FULLY_ASYNC, *PULL, module, external]))
    monkeypatch.setenv(doctor.MODULES, doctor.PACKAGE)
    assert doctor.is_found(composed([*FULLY_ASYNC, *PULL]))


# --- the driver -------------------------------------------------------------------------------------------------------


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
    groups = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    return "[verl.plugins]\n" + "".join(f"{name} = {value}\n" for name, value in groups["verl.plugins"].items())
