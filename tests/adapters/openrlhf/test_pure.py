"""The flag and the driver's decision: no framework is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.openrlhf import autoload, config, install
from tensorhub_plugins.vllm.outlook import Model

ROOT = Path(__file__).resolve().parents[3]

# --- the flag ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "ours"),
    [("tensorhub", True), ("tensorhub://h:1", True), ("tensorhub:?keep=3", True), ("tensorhub?keep=3", True)]
    + [("nccl", False), ("gloo", False), ("", False), ("tensorhubs", False)],
)
def test_whose_flag_it_is(backend: str, ours: bool) -> None:
    assert config.is_ours(backend) is ours


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("tensorhub", config.Options()),
        ("tensorhub://10.0.0.1:7070", config.Options(hub="tcp://10.0.0.1:7070")),
        ("tensorhub://[::1]:7070", config.Options(hub="tcp://[::1]:7070")),
        ("tensorhub:?keep=3&verify=1", config.Options(keep=3, verify=True)),
        ("tensorhub://h:1?install=direct&run=r", config.Options(hub="tcp://h:1", install="direct", run="r")),
        ("tensorhub:?run=reinforce++ a%2Bb", config.Options(run="reinforce++ a+b")),  # no form that a browser sends
    ],
)
def test_options(backend: str, expected: config.Options) -> None:
    assert config.parse(backend) == expected
    assert config.parse(config.to_flag(expected)) == expected


@pytest.mark.parametrize(
    ("backend", "model", "expected"),
    [
        ("tensorhub", None, 120.0),
        ("tensorhub", Model(70_500_000_000), 120.0 + 282.0),
        ("tensorhub:?timeout_s=120", Model(70_500_000_000), 120.0),
    ],
    ids=["unknown", "70B", "given"],
)
def test_a_version_of_a_large_model_may_take_longer(
    backend: str, model: Model | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "model_of", {"hub/model": model}.get)
    args = arguments(**{"actor.model_name_or_path": "hub/model", "vllm.sync_backend": backend})
    found = config.settled(config.parse(backend), args)
    assert config.parse(config.to_flag(found)).timeout_s == expected


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("tensorhub://host", "lacks a host or a port"),
        ("tensorhub://:7070", "lacks a host or a port"),
        ("tensorhub://host:port", "write --vllm.sync_backend tensorhub://10.0.0.1:7070"),
        ("tensorhub:host:7070", "is not understood"),
        ("tensorhub://h:1/path", "is not understood"),
        ("tensorhub://h:1?kep=3", "did you mean 'keep'"),
        ("tensorhub://h:1?hub=x", "has no option 'hub'"),
        ("tensorhub://h:1?keep=none", "option keep"),
        ("tensorhub://h:1?keep=0", "choose a number from 1 to 64"),
        ("tensorhub://h:1?install=stagd", "option install is 'stagd': choose one of staged, direct"),
        ("tensorhub://h:1?serve_from=disk", "option serve_from is 'disk': choose one of host, live"),
        ("tensorhub://h:1?run=", "option run is empty"),
    ],
)
def test_wrong_flags_are_refused_in_one_sentence(backend: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        config.parse(backend)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_untested_versions_are_refused_unless_allowed() -> None:
    tested = {"openrlhf": "0.11.2", "vllm": "0.29.0"}
    config.check_versions(config.Options(), **tested)
    for package, version in (("openrlhf", "0.11.3"), ("openrlhf", "0.11.20"), ("vllm", "0.30.0"), ("vllm", "0.2.9")):
        with pytest.raises(UsageError, match=f"{package} {version} was not tested"):
            config.check_versions(config.Options(), **{**tested, package: version})
        config.check_versions(config.Options(allow_untested=True), **{**tested, package: version})


def arguments(**changes: object) -> SimpleNamespace:
    """As OpenRLHF parses them."""
    flat = {
        **dict.fromkeys(config.NUMBERS, 1),
        "actor.model_name_or_path": "m",
        "vllm.num_engines": 2,
        "vllm.sync_backend": "tensorhub",
        "train.colocate_all": False,
        "train.async_enable": False,
        "ds.lora.rank": 0,
        "ds.load_in_4bit": False,
        "ds.zero_stage": 2,
        "train.dynamic_batch_enable": False,
        "critic.model_name_or_path": None,
        "vllm.gpu_memory_utilization": 0.9,
        "ds.param_dtype": "bf16",
        "ds.tensor_parallel_size": 1,
        "data.max_images_per_prompt": 0,
        **{"rollout.temperature": 1.0, "rollout.top_p": 1.0, "rollout.max_new_tokens": None},
        **{"data.prompt_dataset": "d", "data.prompt_probs": None, "train.async_queue_size": 1},
        **{"reward.remote_url": ["http://r"], "reward.model_name_or_path": None},
        **{"eval.dataset": None, "eval.temperature": 0.6, **dict.fromkeys(config.STEPS, -1)},
        **changes,
    }
    root = SimpleNamespace()
    for name, value in flat.items():
        *groups, last = name.split(".")
        node = root
        for group in groups:
            node.__dict__.setdefault(group, SimpleNamespace())
            node = getattr(node, group)
        setattr(node, last, value)
    return root


def test_combinations_that_work_pass() -> None:
    config.check_arguments(arguments())
    config.check_arguments(arguments(**{"train.colocate_all": True, "train.async_enable": True}))
    lora = arguments(**{"ds.lora.rank": 512, "vllm.sync_backend": "tensorhub:?model=m&timeout_s=9"})
    config.check_arguments(lora)
    assert config.settled(config.parse(lora.vllm.sync_backend), lora).model == "m.lora"


RANKS_OF_4 = {"actor.num_gpus_per_node": 4, "train.micro_batch_size": 8}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train.batch_size": 127}, "--train.batch_size is 127, and the 4 ranks of the actor take .*_size 8 each"),
        ({"train.batch_size": 16}, "--train.batch_size is 16, and the 4 ranks of the actor"),
        (
            {"train.batch_size": 32, "critic.model_name_or_path": "m", "critic.num_gpus_per_node": 8},
            "--train.batch_size is 32, and the 8 ranks of the critic",
        ),
        ({"train.batch_size": 32, "ds.zero_stage": 4}, "--ds.zero_stage is 4: DeepSpeed has 0 to 3"),
        ({"train.batch_size": 32, "vllm.gpu_memory_utilization": 80}, "utilization is 80: vLLM takes a share"),
        ({"train.batch_size": 32, "ds.ring_attn_size": 3}, "ring_attn_size is 3, and the actor has 4 ranks: set a div"),
        ({"train.batch_size": 32, "ds.ring_attn_size": 8}, "ring_attn_size is 8, and the actor has 4 ranks: set a div"),
        ({"train.batch_size": 32, "rollout.temperature": 0}, "temperature is 0, by which OpenRLHF divides logits"),
        ({"train.batch_size": 32, "rollout.top_p": 2.0}, "top_p is 2.0: vLLM takes a share above 0, up to 1"),
        ({"train.batch_size": 32, "rollout.max_new_tokens": -5}, "max_new_tokens is -5: vLLM takes 1 or more"),
        ({"train.batch_size": 32, "eval.dataset": "d", "eval.temperature": -3}, "temperature is -3: vLLM takes 0 or"),
        ({"train.batch_size": 32, "ckpt.save_steps": 0}, "--ckpt.save_steps is 0, by which OpenRLHF divides"),
        ({"train.batch_size": 32, "eval.steps": 0}, "--eval.steps is 0, by which OpenRLHF divides"),
        ({"train.batch_size": 32, "data.max_len": 0}, "--data.max_len is 0: give a whole number, 1 or more"),
        ({"train.batch_size": 32, "data.max_samples": -1}, "--data.max_samples is -1: give a whole number, 1 or more"),
        ({"train.batch_size": 32, "rollout.vllm_generate_batch_size": -5}, "generate_batch_size is -5: give a whole"),
        ({"train.batch_size": 32, "data.prompt_dataset": None}, "--data.prompt_dataset is empty: name data sets"),
        ({"train.batch_size": 32, "data.prompt_probs": "0.5,0.5"}, "is '0.5,0.5': give a number for each of 1 data"),
        ({"train.batch_size": 32, "data.prompt_probs": "all"}, "prompt_probs is 'all': give a number for each of 1"),
        (
            {"train.batch_size": 32, "data.prompt_dataset": "a,b", "data.prompt_probs": "0.5,0.6"},
            "prompt_probs is '0.5,0.6': give a number for each of 2 data sets, 1 in all",
        ),
        ({"train.batch_size": 32, "reward.remote_url": None}, "nothing gives rewards: set --reward.remote_url, --rew"),
        (
            {"train.batch_size": 32, "train.async_enable": True, "train.async_queue_size": 0},
            "--train.async_queue_size is 0: OpenRLHF takes 1 or more",
        ),
    ],
)
def test_numbers_that_are_found_wrong_once_models_are_there_are_refused(
    changes: dict[str, object], sentence: str
) -> None:
    (wrong,) = config.refusals(arguments(**{**RANKS_OF_4, **changes}))
    assert re.search(sentence, wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {"train.batch_size": 64},
        {"train.batch_size": 8, "ds.ring_attn_size": 4},
        {"train.batch_size": 32, "eval.temperature": -3, "rollout.max_new_tokens": 1, "ckpt.save_steps": 1},
        {"train.batch_size": 127, "train.dynamic_batch_enable": True},
        {"train.batch_size": 32, "data.prompt_dataset": "a,b,c", "data.prompt_probs": "0.5,0.2,0.3"},
        {"train.batch_size": 32, "reward.remote_url": None, "reward.model_name_or_path": "m"},
        {"train.batch_size": 32, "train.async_queue_size": 0},  # in turns there is none
        {"train.batch_size": 32, "critic.num_gpus_per_node": 8},  # without a model there is no critic
    ],
)
def test_batches_of_whole_shares_are_fine(changes: dict[str, object]) -> None:
    assert not list(config.refusals(arguments(**{**RANKS_OF_4, **changes})))


RECOVERS = {"ds.zero_stage": 2, "ds.use_universal_ckpt": False, "ckpt.disable_ds": False}


@pytest.mark.parametrize(
    ("given", "changes", "sentence"),
    [
        ("", {"ds.zero_stage": 3}, None),
        ("//h:1?run=r&recover_weights=resumed_step", {}, "takes the weights of its checkpoint from workers.*LOOK"),
        (
            "//h:1?run=r&recover_weights=latest&retain_copies=2",
            {},
            "the NEWEST weights .* OLDER .*no worker holds them$",
        ),
        ("//h:1?run=r&recover_weights=latest", {"ds.zero_stage": 3}, "the NEWEST weights .* OLDER"),
    ],
)
def test_where_a_run_that_resumes_has_its_weights_from(
    given: str, changes: dict[str, object], sentence: str | None
) -> None:
    said = config.check_recovery(config.parse(f"tensorhub:{given}"), arguments(**{**RECOVERS, **changes}))
    assert re.search(sentence, said) if sentence else said == ""


@pytest.mark.parametrize(
    ("given", "mode", "sentence"),
    [
        ("", "resumed_step", "with ZeRO-3 DeepSpeed makes the weights of masters that .*: use 2, or latest"),
        ("parts=false&", "latest", "with ZeRO-3 each rank takes back the part that it holds: leave out parts=false"),
    ],
)
def test_of_zero_3_the_newest_parts_are_taken_back(given: str, mode: str, sentence: str) -> None:
    flag = {"vllm.sync_backend": f"tensorhub://h:1?run=r&{given}recover_weights={mode}", "ds.zero_stage": 3}
    with pytest.raises(UsageError, match=f"recover_weights={mode} would do nothing: {sentence}"):
        config.check_arguments(arguments(**{**RECOVERS, **flag}))


@pytest.mark.parametrize("mode", ["resumed_step", "latest"])
@pytest.mark.parametrize(
    ("given", "changes", "sentence"),
    [
        ("//h:1?run=r&", {"ds.zero_stage": 0}, "with --ds.zero_stage 0 DeepSpeed has one file of .*: use 2"),
        ("//h:1?run=r&", {"ds.lora.rank": 8}, "an adapter is small"),
        ("//h:1?run=r&", {"ds.use_universal_ckpt": True}, "--ds.use_universal_ckpt loads float32 masters"),
        ("//h:1?run=r&", {"ckpt.disable_ds": True}, "--ckpt.disable_ds leaves nothing to resume from"),
        ("//h:1?", {}, "the run's own hub ends with it: write .*//HOST:PORT.run=NAME&recover_weights="),
        ("?run=r&", {}, "the run's own hub ends with it"),
    ],
)
def test_a_checkpoint_that_would_be_loaded_all_the_same_is_refused_at_the_start(
    mode: str, given: str, changes: dict[str, object], sentence: str
) -> None:
    flag = {"vllm.sync_backend": f"tensorhub:{given}recover_weights={mode}"}
    with pytest.raises(UsageError, match=f"recover_weights={mode} would do nothing: {sentence}"):
        config.check_arguments(arguments(**{**RECOVERS, **flag, **changes}))


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("vllm.num_engines", 0, "--vllm.num_engines"),
        ("vllm.num_engines", None, "--vllm.num_engines"),
        ("vllm.num_engines", -1, "--vllm.num_engines"),
        ("vllm.tensor_parallel_size", -2, "--vllm.tensor_parallel_size is -2: give a whole number, 1 or more"),
        ("actor.num_nodes", 0, "--actor.num_nodes is 0"),
        ("ref.num_nodes", -1, "--ref.num_nodes is -1: give a whole number, 0 or more"),
        ("train.batch_size", 0, "--train.batch_size is 0"),
        ("actor.model_name_or_path", "", "--actor.model_name_or_path is empty"),
        ("train.colocate_all", True, "--train.colocate_all in full"),
        ("ds.lora.rank", 600, "--ds.lora.rank is 600"),
        ("ds.lora.rank", -1, "--ds.lora.rank is -1: give a whole number, 0 or more"),
        ("ds.load_in_4bit", True, "--ds.load_in_4bit"),
        ("ds.param_dtype", "fp16", "use bf16"),
        ("ds.tensor_parallel_size", 2, "--ds.tensor_parallel_size 1"),
        ("data.max_images_per_prompt", 1, "--data.max_images_per_prompt"),
    ],
)
def test_combinations_that_cannot_work_are_refused(flag: str, value: object, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        config.check_arguments(arguments(**{flag: value}))
    assert sentence in str(refused.value)


# --- the driver's decision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        (["x", "--vllm.sync_backend", "tensorhub"], "tensorhub"),
        (["x", "--vllm.sync_backend=tensorhub"], "tensorhub"),
        (["x", "--vllm.sync_backend", "tensorhub", "--vllm.sync_backend", "nccl"], "nccl"),
        (["x", "--vllm.sync_b", "tensorhub"], "tensorhub"),  # argparse takes it
        (["x", "--vllm.sync_back=tensorhub"], "tensorhub"),
        (["x", "--vllm.sync_with_ray", "--vllm.sync_", "tensorhub"], ""),  # argparse refuses it
        (["x", "--vllm.sync_backend"], ""),
        (["x"], ""),
    ],
)
def test_the_last_back_end_counts(line: list[str], backend: str) -> None:
    assert install.backend_of(line) == backend


@pytest.fixture
def tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "installed_versions", lambda: {"openrlhf": "0.11.2", "vllm": "0.29.0"})


def test_stock_back_ends_are_left_alone() -> None:
    line = ["x", "--vllm.sync_backend", "gloo", "--train.colocate_all"]
    assert install.options_from_argv(line) is None
    assert line == ["x", "--vllm.sync_backend", "gloo", "--train.colocate_all"]


@pytest.mark.usefixtures("tested_versions")
def test_colocated_engines_keep_their_own_path_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["x", "--vllm.sync_backend", "tensorhub", "--train.colocate_all"]
    assert install.options_from_argv(line) is None
    assert install.backend_of(line) == "nccl"
    assert "the store is not used" in capsys.readouterr().err
    for word in ("--train.async_enable", "--train.async_e"):  # argparse takes both
        line = ["x", "--vllm.sync_backend", "tensorhub", "--train.colocate_all", word]
        assert install.options_from_argv(line) == config.Options()
    line = ["x", "--vllm.sync_backend", "tensorhub", "--train.colocate_all", "--train.async_queue_size", "2"]
    assert install.options_from_argv(line) is None


@pytest.mark.parametrize(
    ("backend", "meant"),
    [
        ("tensorhubb", "tensorhub"),
        ("tensorhub//127.0.0.1:7070", "tensorhub://127.0.0.1:7070"),
        ("tensorhub/127.0.0.1:7070?keep=2", "tensorhub://127.0.0.1:7070?keep=2"),
        ("tensorhubs", "tensorhub"),
        ("tensor-hub", "tensorhub"),
        ("TensorHub", "tensorhub"),
        ("tensorub://10.0.0.1:7070?keep=3", "tensorhub://10.0.0.1:7070?keep=3"),
        (" tensorhub", "tensorhub"),
    ],
)
def test_a_misspelt_back_end_is_not_taken_for_one_of_torch(backend: str, meant: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"did you mean {meant}?")):
        install.options_from_argv(["x", "--vllm.sync_backend", backend])


@pytest.mark.parametrize("backend", ["nccl", "gloo", "mpi", "ucc", "xccl", "hccl", "rccl", "cpu:gloo,cuda:nccl", ""])
def test_back_ends_of_torch_are_not_taken_for_misspelt(backend: str) -> None:
    assert install.options_from_argv(["x", "--vllm.sync_backend", backend]) is None


RAY_SAYS = """ray::PolicyModelActor.init_model_from_pretrained() (pid=7)
  File "client.py", line 3, in __init__
tensorhub_plugins.core.errors.HubUnreachable: no hub answers at tcp://h:1: start one [peer=tcp://h:1]
"""


def test_the_sentence_is_found_in_what_ray_makes_of_an_error() -> None:
    assert install.sentence_in(RAY_SAYS) == "no hub answers at tcp://h:1: start one [peer=tcp://h:1]"
    assert install.sentence_in("ValueError: something else") == ""


# --- the hook in vLLM -------------------------------------------------------------------------------------------------


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", found)
    monkeypatch.delitem(sys.modules, autoload.MODULE, raising=False)  # of a test before, where OpenRLHF is installed
    return found


DRIVER = ["python", "-m", "openrlhf.cli.train_ppo_ray", "--vllm.sync_backend", "tensorhub"]


@pytest.mark.parametrize(
    ("command", "waits"),
    [
        (DRIVER, True),
        ([*DRIVER[:3], "--vllm.sync_back=tensorhub"], True),  # as argparse has it
        (DRIVER[:3], False),  # without the flag
        (["python", "other.py", *DRIVER[3:]], False),  # somebody else's flag
        (["python", "-m", "tensorhub_plugins.openrlhf.train_ppo_ray", *DRIVER[3:]], False),  # does it itself
        (["python", "/site-packages/openrlhf/cli/train_ppo_ray.py", *DRIVER[3:]], True),
    ],
)
def test_the_hook_waits_only_where_it_is_wanted(
    command: list[str], waits: bool, finders: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(finders)
    monkeypatch.setattr(sys, "argv", command[1:])
    monkeypatch.setattr(sys, "orig_argv", command)
    for _ in range(2):  # vLLM asks a platform that it takes twice
        assert autoload.install() is None  # type: ignore[func-returns-value]
    assert len(finders) == before + waits


# Entry points whose failed import its owner logs and forgets, and those of the one framework that is told to load us.
FORGIVING = {"vllm.general_plugins", "vllm.platform_plugins", "verl.plugins"}


def test_no_process_imports_us_for_importing_torch() -> None:
    """A package that is there by half must not break the import of others, as an entry point of torch's does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = set(project["entry-points"])
    assert groups and groups <= FORGIVING


def test_the_hook_loads_nothing_but_itself() -> None:
    program = (
        "import sys; before = set(sys.modules); from tensorhub_plugins.openrlhf import autoload; autoload.install();"
        "print(*sorted(set(sys.modules) - before - {'__future__'}))"
    )
    ended = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    package = "tensorhub_plugins"
    assert ended.stdout.split() == [package, f"{package}.openrlhf", f"{package}.openrlhf.autoload"], ended.stderr
