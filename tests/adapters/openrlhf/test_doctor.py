"""`tensorhub doctor openrlhf`: OpenRLHF's command line read by OpenRLHF's own parser, without OpenRLHF's imports."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_limits import AT_ONCE

from tensorhub_plugins.core import UsageError, start_server
from tensorhub_plugins.openrlhf import config, doctor
from tensorhub_plugins.vllm.command_line import words_of
from tensorhub_plugins.vllm.outlook import Outlook

ROOT = Path(__file__).resolve().parents[3]
needs_openrlhf = pytest.mark.skipif(
    find_spec("openrlhf") is None, reason="needs OpenRLHF's environment (make test-openrlhf)"
)
JOB = ["--vllm.num_engines", "2", "--actor.model_name_or_path", "m", "--reward.remote_url", "http://r"]
JOB += ["--data.prompt_dataset", "prompts"]
FLAG = ["--vllm.sync_backend", "tensorhub"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "metadata", SimpleNamespace(entry_points=lambda **_: ["tensorhub"]))
    monkeypatch.setattr(config, "installed_versions", lambda: {"openrlhf": "0.11.2", "vllm": "0.29.0"})
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.mark.parametrize(
    ("line", "module", "is_submitted"),
    [
        (["--a", "1"], doctor.STOCK, False),
        (["-m", doctor.OURS, "--a", "1"], doctor.OURS, False),
        (["/usr/bin/python3", "-u", "-m", doctor.STOCK, "--a", "1"], doctor.STOCK, False),
        (["python", "/site-packages/openrlhf/cli/train_ppo_ray.py", "--a", "1"], doctor.STOCK, False),
        (["ray", "job", "submit", "--address=a", "--", "python3", "-m", doctor.STOCK, "--a", "1"], doctor.STOCK, True),
    ],
)
def test_a_whole_command_is_understood(line: list[str], module: str, is_submitted: bool) -> None:
    assert words_of(line, (doctor.STOCK, doctor.OURS), doctor.STOCK) == (module, ["--a", "1"], is_submitted)


def test_another_program_is_refused() -> None:
    own = ["my_openrlhf/cli/train_ppo_ray.py", "--a", "1"]
    assert words_of(own, (doctor.STOCK, doctor.OURS), doctor.STOCK).arguments == own
    with pytest.raises(UsageError, match=r"this command line starts none of openrlhf.cli.train_ppo_ray"):
        words_of(["-m", "verl.trainer.main_ppo", "x=1"], (doctor.STOCK, doctor.OURS), doctor.STOCK)


@needs_openrlhf
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "does not name the store: add --vllm.sync_backend tensorhub"),
        (["--vllm.sync_backend", "tensorhubb"], "did you mean tensorhub?"),
        (["--vllm.sync_backend", "tensorhub:?install=stagd"], "choose one of staged, direct"),
        (["--vllm.sync_backend", "tensorhub://127.0.0.1:9"], "no hub answers at tcp://127.0.0.1:9"),
        ([*FLAG, "--train.colocate_all", "--actor.num_gpus_per_node", "2"], "the store is not used"),
        (["--vllm.sync_backend", "tensorhub:?fleet_policy=nowhere.at_all"], "nowhere"),
        (["--vllm.sync_backend", "tensorhub:?fleet_min=3&fleet_max=2"], "option fleet_max is 2"),
        (["--vllm.sync_backend", "tensorhub:?run=r&recover_weights=latest"], "the run's own hub ends with it"),
        ([*FLAG, "--ds.lora.rank", "513"], "vLLM takes adapters of rank 512 at most"),
        ([*FLAG, "--ds.load_in_4bit"], "leave out --ds.load_in_4bit"),
        ([*FLAG, "--ds.param_dtype", "fp16"], "use bf16"),
        ([*FLAG, "--train.agent_func_path", "/not/here.py"], "not on this machine: --train.agent_func_path=/not/here"),
        ([*FLAG, "--critic.model_name_or_path", "/not/here"], "not on this machine: --critic.model_name_or_path=/not"),
        (
            [*FLAG, "--reward.remote_url", "", "--reward.model_name_or_path", "m,/not/rm"],
            "--reward.model_name_or_path=/",
        ),
        ([*FLAG, "--data.prompt_dataset", "/not/here@main"], "not on this machine: --data.prompt_dataset=/not/here;"),
        ([*FLAG, "--train.agent_func_path", "agent"], "OpenRLHF takes a Python file"),
        (
            [*FLAG, "--train.agent_func_path", str(pytest.__file__)],
            "OpenRLHF wants a class AgentExecutor there",
        ),
        ([*FLAG, "--reward.remote_url", "/not/reward.py"], "not on this machine: --reward.remote_url=/not/reward.py"),
        ([*FLAG, "--train.colocate_actor_ref", "--ref.num_gpus_per_node", "4"], "must be the same when colocate actor"),
        ([*FLAG, "--vllm.num_engines", "0"], "set --vllm.num_engines to 1 or more"),
        ([*FLAG, "--actor.num_gpus_per_node", "0"], "--actor.num_gpus_per_node is 0: give a whole number, 1 or more"),
        ([*FLAG, "--actor.num_nodes", "-1"], "--actor.num_nodes is -1"),
        ([*FLAG, "--vllm.tensor_parallel_size", "0"], "--vllm.tensor_parallel_size is 0"),
        ([*FLAG, "--vllm.tensor_parallel_size", "-2"], "--vllm.tensor_parallel_size is -2"),
        ([*FLAG, "--vllm.num_engines", "-1"], "set --vllm.num_engines to 1 or more"),
        ([*FLAG, "--rollout.micro_batch_size", "0"], "--rollout.micro_batch_size is 0"),
        ([*FLAG, "--train.batch_size", "0"], "--train.batch_size is 0"),
        ([*FLAG, "--actor.model_name_or_path", ""], "--actor.model_name_or_path is empty"),
        (
            [*FLAG, "--ref.num_gpus_per_node", "0"],
            "the reference model has no GPUs: set its num_nodes and num_gpus_per",
        ),
        ([*FLAG, "--actor.lr_scheduler", "linearr"], "--actor.lr_scheduler is 'linearr': transformers has linear, cos"),
        ([*FLAG, "--bogus", "3"], "OpenRLHF does not take this command line: unrecognized arguments: --bogus 3"),
        ([*FLAG, "--train.partial_rollout_enable"], "requires --train.async_enable"),
        ([*FLAG, "--algo.advantage.estimator", "rloo"], "rloo requires n_samples_per_prompt > 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    more: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorhub_plugins.vllm.ray.hub.CONNECT_TIMEOUT_S", 0.2)
    assert doctor.main([*JOB, *more]) == 1
    said = capsys.readouterr()
    line, *_, last = said.err.splitlines()
    assert line.startswith("tensorhub: ") and sentence in line
    assert last.startswith("I did not look at ")
    assert not said.out


@needs_openrlhf
def test_data_sets_may_name_a_folder_within_them(tmp_path: Path) -> None:
    data = ["--data.prompt_dataset", f"openai/gsm8k@main, {tmp_path}@train", "--reward.model_name_or_path", "/not/read"]
    assert doctor.main([*JOB, *FLAG, *data]) == 0


def test_what_nobody_had_thought_of_is_a_sentence_too() -> None:
    def check_shares(number: int) -> int:
        return 1 // number

    outlook = Outlook()
    assert outlook.ask(check_shares, 0) is None and outlook.ask(check_shares, 1) == 1
    (wrong,) = outlook.wrong
    assert "check_shares could not be asked: ZeroDivisionError: " in wrong and f"({Path(__file__).name}, line " in wrong


@needs_openrlhf
def test_what_will_happen_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server(limits=AT_ONCE) as server:
        backend = f"tensorhub{server.address.removeprefix('tcp')}?keep=3&pull_until=9&run=r&recover_weights=latest"
        partial = ["--train.async_enable", "--train.partial_rollout_enable", "--vllm.sync_with_ray"]
        line = [*JOB, *partial, "--eval.dataset", "d", "--actor.num_gpus_per_node", "4"]
        assert doctor.main(["-m", doctor.OURS, *line, "--vllm.sync_backend", backend]) == 0
    said = capsys.readouterr().out
    for words in (
        f"hub: {server.address} answers",
        "trainer: 4 ranks",
        "keeps 3 versions",
        "2 engines of 1 GPU generate beside the training; they take a new version at once",
        "every engine stays with one version",
        "--vllm.sync_with_ray has no effect",
        "no version after 9",
        "a run that resumes takes the NEWEST weights that workers hold",
        "fleet: 2 engines, at least 1",
        "nothing is wrong",
    ):
        assert words in said
    assert doctor.main([*JOB, *FLAG]) == 0
    said = capsys.readouterr().out
    assert "hub: the run starts one" in said and "in turns, on policy; they take a new version between prompts" in said


@needs_openrlhf
def test_a_hook_that_is_off_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora,other")
    assert doctor.main([*JOB, *FLAG]) == 1
    assert "VLLM_PLUGINS=lora,other keeps vLLM from loading the store" in capsys.readouterr().err
    assert doctor.main(["-m", doctor.OURS, *JOB, *FLAG]) == 0  # our launcher needs none
    monkeypatch.setenv("VLLM_PLUGINS", "other,tensorhub")
    assert doctor.main([*JOB, *FLAG]) == 0
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(doctor, "metadata", SimpleNamespace(entry_points=lambda **_: []))
    assert doctor.main([*JOB, *FLAG]) == 1
    assert "not installed" in capsys.readouterr().err


@needs_openrlhf
def test_the_parser_is_openrlhfs_own_and_needs_none_of_its_imports() -> None:
    program = (
        "import sys; from tensorhub_plugins.openrlhf import doctor;"
        f"args = doctor.parse({[*JOB, *FLAG]});"
        "print(args.vllm.num_engines, args.rollout.vllm_generate_batch_size, args.reward.remote_url);"
        "print(*sorted({'openrlhf', 'ray', 'vllm', 'torch', 'deepspeed'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.stdout.splitlines() == ["2 1024 ['http://r']", ""], ended.stderr


def test_another_openrlhf_is_not_guessed_at(tmp_path: Path) -> None:
    file = tmp_path / "train_ppo_ray.py"
    file.write_text("def main():\n    pass\n")
    with pytest.raises(UsageError, match="not as the adapter knows it: install openrlhf 0.11.2"):
        doctor._main_part(file)


@needs_openrlhf
def test_everything_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        "--ds.lora.rank",
        "600",
        "--ds.param_dtype",
        "fp16",
        "--reward.remote_url",
        "/r.py",
        "--train.colocate_all",
    ]
    assert doctor.main([*JOB, "--vllm.sync_backend", "tensorhub:?kep=1", *wrong]) == 1
    said = capsys.readouterr().err.splitlines()
    for words in ("did you mean 'keep'", "--ds.lora.rank is 600", "use bf16", "--reward.remote_url=/r.py", "CUDA IPC"):
        assert sum(words in line for line in said) == 1, words


@needs_openrlhf
@pytest.mark.parametrize("asleep", [[], ["--vllm.enable_sleep"]])
def test_advice_is_taken_by_openrlhf(asleep: list[str]) -> None:
    outlook = Outlook()
    outlook.ask(doctor.look, outlook, [*JOB, *FLAG, "--train.colocate_all", *asleep])
    apart = next(one for one in outlook.wrong if "CUDA IPC" in one)
    assert ("(without --vllm.enable_sleep)" in apart) == bool(asleep)
    for line in (["--train.colocate_all", "--train.async_enable"], asleep):  # what was advised, both ways
        then = Outlook()
        then.ask(doctor.look, then, [*JOB, *FLAG, *line])
        assert not then.wrong


@needs_openrlhf
@pytest.mark.parametrize(
    ("more", "gpus"),
    [
        ([], {"the trainer": 8, "2 engines of 1": 2, "the reference model": 8}),
        (["--algo.kl.init_coef", "0", "--vllm.tensor_parallel_size", "4"], {"the trainer": 8, "2 engines of 4": 8}),
        (["--train.colocate_actor_ref"], {"models that share them": 8, "2 engines of 1": 2}),
        (
            ["--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "3", "--algo.kl.init_coef", "0"],
            {"the trainer": 8, "2 engines of 1": 2, "the critic": 3},
        ),
    ],
)
def test_gpus_are_counted_by_openrlhf(more: list[str], gpus: dict[str, int]) -> None:
    critic = [] if "--algo.advantage.estimator" in more else ["--algo.advantage.estimator", "reinforce"]
    args = doctor.parse([*JOB, *FLAG, *critic, *more])
    assert {what: number for what, number in doctor.gpus(args).items() if number} == gpus
