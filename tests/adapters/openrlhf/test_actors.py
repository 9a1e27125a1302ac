"""OpenRLHF's actors as we change them, each alone: vLLM and Ray are played, OpenRLHF is the real one."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
torch = pytest.importorskip("torch")

from hub_limits import AT_ONCE  # noqa: E402
from openrlhf_fakes import FakeTokenizer, make_engine  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from tensorhub_plugins.core import CHECKPOINT, Client, TensorHubError, TensorSpec, start_server  # noqa: E402
from tensorhub_plugins.core.client.publisher import Publisher  # noqa: E402
from tensorhub_plugins.openrlhf import answering, parts, policy_ranks, recovery, trainer  # noqa: E402
from tensorhub_plugins.openrlhf.partial_answers import GivenBack  # noqa: E402
from tensorhub_plugins.openrlhf.samples import Samples, whole  # noqa: E402
from tensorhub_plugins.openrlhf.versions import FIRST, LAST  # noqa: E402
from tensorhub_plugins.vllm import checkpoint_names  # noqa: E402
from tensorhub_plugins.vllm.engine.staleness import Staleness  # noqa: E402
from tensorhub_plugins.vllm.engine.status import Status  # noqa: E402
from tensorhub_plugins.vllm.ray import owned  # noqa: E402
from tensorhub_plugins.vllm.ray.health import EngineLost  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine


class TwoTurns:
    """An agent that asks vLLM twice for every sample."""

    async def execute(self, prompt: str, llm_engine: Any, **_: Any) -> dict[str, Any]:
        tokens = [1, 2]
        for _turn in range(2):
            params = SimpleNamespace(max_tokens=6, min_tokens=0)
            tokens += (await llm_engine.generate(tokens, params)).outputs[0].token_ids
        return {"prompt": prompt, "tokens": tokens, "extra_logs": {"mine": 1.0}}


def ask(one: Any, **kwargs: Any) -> Any:
    given = {"prompt": "p", "label": "", "sampling_params": None, "max_length": 8, "hf_tokenizer": FakeTokenizer()}
    return asyncio.create_task(one.generate_responses(**given, num_samples=2, **kwargs))


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_samples_say_which_versions_they_are_of() -> None:
    one = make_engine(TwoTurns(), is_partial=True)
    answer = ask(one)
    await settle()
    assert len(one.llm.output_processor.request_states) == 2
    await one.llm.follower.update(3)  # in the middle
    one.llm.answers.set()
    samples = await answer
    assert [sample["extra_logs"] for sample in samples] == 2 * [{"mine": 1.0, FIRST: 0, LAST: 3}]
    assert one.llm.calls[-5:] == ["pause", "forget", "tensorhub_install", "forget", "resume"]


async def test_without_partial_rollout_a_sample_is_of_one_version() -> None:
    one = make_engine(TwoTurns(), is_partial=False)
    answer = ask(one)
    await settle()
    update = asyncio.create_task(one.llm.follower.update(3))
    await settle()
    later = ask(one, min_version=3)
    await settle()
    assert "pause" not in one.llm.calls and not later.done()
    assert not one.owned.has_version  # the control
    one.llm.answers.set()
    assert [sample["extra_logs"][LAST] for sample in await answer] == [0, 0]
    await update
    assert [sample["extra_logs"][FIRST] for sample in await later] == [3, 3]
    assert one.owned.has_version and one.owned.status.version == 0, "it answers with the adapter; the news is late"


async def test_what_a_leaving_engine_gives_back_is_continued_token_by_token() -> None:
    """Two samples of two turns: one has answered its first turn, the other has not."""
    leaver, other = make_engine(TwoTurns(), is_partial=True), make_engine(TwoTurns(), is_partial=True)
    leaver.llm.switch(3)
    other.llm.switch(5)
    answer = ask(leaver)
    await settle()
    leaver.llm.answers.set()  # both first turns
    leaver.llm.answers = asyncio.Event()
    await settle()
    await leaver.tensorhub_give_back()
    given_back = await answer
    assert isinstance(given_back, GivenBack) and given_back.tokens == 2 * (2 + 1)
    assert isinstance(await ask(leaver), GivenBack), "it takes nothing more"
    moved = pickle.loads(pickle.dumps(given_back)).journals
    other.llm.answers.set()
    samples = await ask(other, journals=moved)
    # [1, 2] -> 7 8, then 5 and what the other engine has come to.
    assert [sample["tokens"] for sample in samples] == 2 * [[1, 2, 7, 8, 5, 7, 8]]
    assert [sample["extra_logs"] for sample in samples] == 2 * [{"mine": 1.0, FIRST: 3, LAST: 5}]
    assert [(asked, params.max_tokens) for asked, params in other.llm.asked] == 2 * [([1, 2, 7, 8, 5], 5)]


async def test_without_partial_rollout_a_prompt_is_asked_again_from_the_beginning() -> None:
    leaver, other = make_engine(TwoTurns(), is_partial=False), make_engine(TwoTurns(), is_partial=False)
    answer = ask(leaver)
    await settle()
    await leaver.tensorhub_give_back()
    given_back = await answer
    assert isinstance(given_back, GivenBack) and given_back.journals is None
    other.llm.answers.set()
    samples = await ask(other, journals=given_back.journals)
    assert [sample["tokens"] for sample in samples] == 2 * [[1, 2, 7, 8, 7, 8]]


class OfItsOwn:
    """An agent that makes something of its own of what goes wrong: a bad sample, or an error."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises

    async def execute(self, prompt: str, llm_engine: Any, **_: Any) -> dict[str, Any]:
        try:
            answer = await self.ask(llm_engine)
        except Exception as error:
            if self.raises:
                raise RuntimeError("the agent has met an error") from error
            return {"prompt": prompt, "tokens": [], "reward": -1.0}
        return {"prompt": prompt, "tokens": answer.outputs[0].token_ids}

    async def ask(self, llm_engine: Any) -> Any:
        return await llm_engine.generate([1, 2], SimpleNamespace(max_tokens=6, min_tokens=0))


class Elsewhere(OfItsOwn):
    """Asks from a task that is of no sample, as OpenRLHF's example of a server in the engine's actor."""

    async def ask(self, llm_engine: Any) -> Any:
        return await asyncio.create_task(super().ask(llm_engine), context=contextvars.Context())


class OfTheFirst(OfItsOwn):
    """Asks from a task that its first prompt has begun, as of a server that is started when it is needed."""

    begun: asyncio.Task[None] | None = None

    async def ask(self, llm_engine: Any) -> Any:
        if self.begun is None:
            self.asked: asyncio.Queue[Any] = asyncio.Queue()
            self.begun = asyncio.create_task(self.serve())
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((super().ask(llm_engine), answer))
        return await answer

    async def serve(self) -> None:
        while True:
            asking, answer = await self.asked.get()
            try:
                answer.set_result(await asking)
            except Exception as error:
                answer.set_exception(error)


AGENTS = [agent(raises=raises) for agent in (OfItsOwn, Elsewhere) for raises in (False, True)]


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("is_partial", [False, True])
async def test_what_an_agent_makes_of_an_engine_that_leaves_is_no_sample(agent: Any, is_partial: bool) -> None:
    leaver, other = make_engine(agent, is_partial=is_partial), make_engine(agent, is_partial=is_partial)
    answer = ask(leaver)
    await settle()
    await leaver.tensorhub_give_back()
    given_back = await answer
    assert isinstance(given_back, GivenBack)
    other.llm.answers.set()
    samples = await ask(other, journals=given_back.journals)  # the control: they are answered well
    assert all(sample["tokens"][-2:] == [7, 8] and "reward" not in sample for sample in samples)


@pytest.mark.parametrize("agent", AGENTS)
async def test_what_an_agent_makes_of_an_engine_that_is_lost_is_no_sample(
    monkeypatch: pytest.MonkeyPatch, agent: Any
) -> None:
    async def spans(*_: Any) -> tuple[()]:
        return ()

    one = make_engine(agent, is_partial=True)
    answer = ask(one)
    await settle()
    monkeypatch.setattr(one.owned, "spans", spans)
    one.llm.answers.set()
    with pytest.raises(EngineLost, match="cannot tell the version"):
        await answer


@pytest.mark.parametrize("agent", [OfTheFirst(raises=raises) for raises in (False, True)])
async def test_a_question_of_a_task_that_an_answered_prompt_has_begun_is_of_all(agent: Any) -> None:
    """It was noted for that prompt, and the agent's own sample or error counted for those that were there."""
    one = make_engine(agent, is_partial=False)
    one.llm.answers.set()
    assert len(await ask(one)) == 2  # the control
    one.llm.answers = asyncio.Event()
    answer = ask(one)
    await settle()
    await one.tensorhub_give_back()
    assert isinstance(await answer, GivenBack)
    agent.begun.cancel()


@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_question_of_a_task_that_an_ended_sample_has_begun_is_of_all(has_ended: bool) -> None:
    """Also while other samples of its prompt are made. The control: it is of that prompt alone while its own one is."""
    samples, asks, goes_on = Samples(), asyncio.Event(), asyncio.Event()
    begun: list[asyncio.Task[None]] = []

    async def helper() -> None:
        await asks.wait()
        samples.note(EngineLost("rollout-0/0"))

    async def beginner() -> dict[str, Any]:
        begun.append(asyncio.create_task(helper()))
        return {} if has_ended else await other()

    async def other() -> dict[str, Any]:
        await goes_on.wait()
        return {}

    async def prompt(*made: Callable[[], Awaitable[dict[str, Any]]]) -> list[dict[str, Any]] | None:
        errors: list[TensorHubError] = []
        return await whole([samples.begin(each, errors) for each in made], errors)

    prompts = asyncio.gather(prompt(beginner, other), prompt(other))
    await settle()
    asks.set()
    await begun[0]
    goes_on.set()
    assert await prompts == [None, None if has_ended else [{}]]


async def test_a_question_to_another_engine_is_of_the_sample_that_asks() -> None:
    """Its versions were counted for all samples of that engine, and not for the one that asks."""
    one, another, goes_on = Samples(), Samples(), asyncio.Event()

    async def asks() -> dict[str, Any]:
        another.came_from(3)
        return {}

    async def waits() -> dict[str, Any]:
        await goes_on.wait()
        return {}

    waiting = another.begin(waits, [])
    await settle()
    assert await one.begin(asks, []) == {"extra_logs": {FIRST: 3, LAST: 3}}
    goes_on.set()
    assert await waiting == {}


async def test_an_error_of_the_agents_own_ends_its_prompt() -> None:
    class Wrong(TwoTurns):
        async def execute(self, prompt: str, llm_engine: Any, **given: Any) -> dict[str, Any]:
            await super().execute(prompt, llm_engine, **given)
            raise ValueError("a mistake")

    one = make_engine(Wrong(), is_partial=True)
    one.llm.answers.set()
    with pytest.raises(ValueError, match="a mistake"):
        await ask(one)


@pytest.mark.parametrize(("waiting", "calls"), [({2}, [1, 0]), ({1, 2}, [0, 0])])
def test_samples_that_are_in_their_environment_when_their_engine_leaves_are_given_back_too(
    waiting: set[int], calls: list[int]
) -> None:
    """Where all of them were, the fleet ended the engine, and all that they had with it."""

    class Slow(TwoTurns):
        """Its samples ask vLLM, or wait for something else."""

        begun = 0

        async def execute(self, prompt: str, llm_engine: Any, **given: Any) -> dict[str, Any]:
            self.begun += 1
            if self.begun in waiting:
                await asyncio.Event().wait()
            return await super().execute(prompt, llm_engine, **given)

    async def story(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answering, "LEAVING_TIMEOUT_S", 0.01)
        leaver = make_engine(TwoTurns(), is_partial=True)
        leaver.executor = Slow()
        answer = ask(leaver)
        await settle()
        await leaver.tensorhub_give_back()
        given_back = await asyncio.wait_for(answer, 2.0)
        assert isinstance(given_back, GivenBack) and given_back.journals is not None
        assert [len(journal.calls) for journal in given_back.journals] == calls

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(story(monkeypatch))


async def test_an_engine_that_leaves_says_goodbye_to_the_store() -> None:
    one = make_engine(TwoTurns(), is_partial=True)
    tasks = one.owned._tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(2)]
    await one.tensorhub_leave()
    assert one.llm.calls == ["tensorhub_leave"]
    assert all(task.cancelled() for task in tasks)


CUT_OFF = {"of_hub": lambda: {"why_not": Staleness(lambda: 6.0, 5.0, worker="rollout-0/0").why_not()}}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (CUT_OFF, "has not heard of the hub for 6 s"),
        ({"is_broken": True}, "has no whole weights"),  # an installation has failed half way
        ({"is_paused": True}, "has no whole weights"),  # it cannot forget what it has computed with others
        ({"version": 9, "of_hub": lambda: {"why_not": "", "attempt": 1}}, "has version 9, and waits for the first of"),
    ],
)
async def test_an_engine_that_should_not_answer_now_says_that_it_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], why: str
) -> None:
    """A prompt would wait there, with others idle."""
    here = SimpleNamespace(get_node_id=lambda: "node-1")
    monkeypatch.setattr(owned, "ray", SimpleNamespace(get_runtime_context=lambda: here))
    one = make_engine(TwoTurns(), is_partial=True)
    one.llm.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    beat = await one.tensorhub_heartbeat()
    assert (beat["ready"], beat["why"], beat["requests_max"]) == (True, "", 8)
    one.llm.follower.__dict__.update(state)
    watching = asyncio.create_task(one.owned.watch())
    while one._why_not() == "":
        await asyncio.sleep(0)
    watching.cancel()
    beat = await one.tensorhub_heartbeat()
    assert not beat["ready"] and why in beat["why"]
    with pytest.raises(EngineLost, match=why):  # asked all the same, a moment before
        await one.generate_responses()
    one.owned.lifeline.is_dying = True  # the control
    with pytest.raises(EngineLost, match="its vLLM is dead"):
        await one.tensorhub_heartbeat()


async def test_a_spare_says_so_and_is_ready_with_its_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_node_id=lambda: "node-1")
    monkeypatch.setattr(owned, "ray", SimpleNamespace(get_runtime_context=lambda: here))
    one, followed = make_engine(TwoTurns(), is_partial=True), asyncio.Event()
    one.llm.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    assert (await one.tensorhub_heartbeat())["spare"] is False  # the control
    one.is_spare = one._was_spare = True

    async def follow() -> None:
        followed.set()

    one._follow, one.owned._tasks = follow, [asyncio.create_task(asyncio.sleep(0))]
    beat = await one.tensorhub_heartbeat()
    assert (beat["spare"], beat["ready"], beat["why"]) == (True, False, "rollout-0/0 has no weights yet")
    with pytest.raises(EngineLost, match="has no weights yet"):
        await one.generate_responses()
    await one.tensorhub_join()
    await one.tensorhub_join()  # again
    await followed.wait()
    assert len(one.owned._tasks) == 2
    beat = await one.tensorhub_heartbeat()
    assert (beat["spare"], beat["ready"]) == (False, False)  # it fetches
    for status, is_ready in ((Status(has_caught_up=True), False), (Status(version=3, has_caught_up=True), True)):
        one.owned.status = status
        assert (await one.tensorhub_heartbeat())["ready"] is is_ready
    for task in one.owned._tasks:
        task.cancel()


def test_what_is_published_are_the_tensors_that_would_be_saved(tmp_path: Any) -> None:
    """Under their names in a checkpoint: vLLM does not know those of a Mixtral model in transformers 5."""
    with start_server(limits=AT_ONCE) as server:
        shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
        model = MixtralForCausalLM(MixtralConfig(**shape, **heads)).to(torch.bfloat16)
        model.save_pretrained(tmp_path)
        truth = load_file(tmp_path / "model.safetensors")
        assert truth.keys() != dict(model.named_parameters()).keys()
        rank = policy_ranks.PolicyModelActor.__new__(policy_ranks.PolicyModelActor)
        rank.actor = SimpleNamespace(model=SimpleNamespace(module=model))
        rank._is_sharded = rank._by_parts = False
        rank._steps = policy_ranks.checkpoint_names.steps(model, policy_ranks.parts.shape_of)
        specs = [spec for step in rank._steps for spec in policy_ranks._specs(step)]
        assert specs[0] == TensorSpec("model.embed_tokens.weight", "bfloat16", (50, 16), 1600)
        client = Client(server.address, run="r", model="actor", replica="trainer")
        rank._publisher = Publisher(client, rank=0, ranks=1, worker="trainer/0", keep=2, timeout_s=10, model=specs)
        metrics = rank.tensorhub_publish(1)
        assert metrics["tensorhub/publish/bytes"] == sum(spec.size_bytes for spec in specs)
        with Client(server.address, run="r", model="actor", replica="reader") as reader:
            tensors = reader.fetch(1, (CHECKPOINT,), timeout_s=10).tensors()
            assert tensors.keys() == truth.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in truth.items())
        rank._publisher.close()
    own, names = dict(model.named_parameters()), set()
    with torch.no_grad():
        for held in recovery.held_whole(model, rank._steps):  # which a run that resumes writes into
            assert not all(tensor.eq(7).all() for tensor in own.values())
            held.tensor.fill_(7)
            names.add(held.whole.name)
    assert names == truth.keys() and all(tensor.eq(7).all() for tensor in own.values())


def test_only_a_model_that_is_saved_as_it_is_can_be_published_in_parts() -> None:
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    dense = Qwen2ForCausalLM(Qwen2Config(**shape, **heads))
    fused = MixtralForCausalLM(MixtralConfig(**shape, **heads, num_local_experts=3))
    for model, why in ((dense, ""), (fused, parts.CONVERTED)):
        assert parts.why_gathered(model, checkpoint_names.steps(model, parts.shape_of), 2) == why


def test_a_parameter_that_is_not_in_two_pieces_is_gathered() -> None:
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    dense = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    steps = checkpoint_names.steps(dense, parts.shape_of)
    parameter: Any = dense.model.norm.weight
    parameter.ds_shape = parameter.shape
    for size, why in ((8, ""), (16, "is not cut into 2 pieces"), (5, "is not cut into 2 pieces")):
        parameter.ds_tensor = torch.zeros(size)
        parameter.ds_tensor.status = SimpleNamespace(name="AVAILABLE")
        assert parts.why_gathered(dense, steps, 2).endswith(why) and bool(why) == bool(
            parts.why_gathered(dense, steps, 2)
        )
    parameter.ds_tensor = torch.zeros(8)
    parameter.ds_tensor.status = SimpleNamespace(name="NOT_AVAILABLE")
    assert "is not in memory" in parts.why_gathered(dense, steps, 2)
    parameter.ds_tensor.ds_quant_scale = torch.zeros(1)
    assert "is quantized" in parts.why_gathered(dense, steps, 2)


class StockTrainer:
    """What `_Publishes` is mixed into."""

    saved = 7

    def init_checkpoint_states(self) -> dict[str, Any]:
        return {"global_step": self.saved}

    def train_step(self, samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        self.broadcast_to_vllm()  # type: ignore[attr-defined]
        return {"reward": 1.0}, global_step + 1


class Trainer(trainer._Publishes, StockTrainer):
    pass


def controller_of(monkeypatch: pytest.MonkeyPatch, *, saved: int, attempt: int) -> tuple[Any, list[tuple[str, int]]]:
    """A controller, and what its two ranks are told."""
    did: list[tuple[str, int]] = []

    def run(method_name: str, step: int, settles: bool = True) -> list[Any]:
        assert settles, "in turns, prompts are handed out next"
        did.append((method_name.removeprefix("tensorhub_"), step))
        if method_name == "tensorhub_begin":
            return [attempt, attempt]
        told = {"tensorhub/publish/bytes": 10.0, "attempt": float(attempt)}
        return [{"tensorhub/publish/seconds": seconds, **told} for seconds in (0.1, 0.2)]

    monkeypatch.setattr(trainer, "ray", SimpleNamespace(get=lambda refs: refs))
    controller = Trainer()
    controller.saved = saved
    controller.args = SimpleNamespace(train=SimpleNamespace(async_enable=False))
    controller.actor_model_group = SimpleNamespace(async_run_method=run)
    return controller, did


@pytest.mark.parametrize(
    ("saved", "attempt", "told"),
    [
        (0, 0, [("begin", 0)]),  # the very first start: engines have the model from their disk
        (0, 2, [("begin", 0), ("publish", 0)]),  # they may have what a former life has published
        (4, 2, [("begin", 3)]),  # OpenRLHF sends the loaded weights itself
    ],
)
def test_an_attempt_begins_before_anything_is_generated(
    monkeypatch: pytest.MonkeyPatch, saved: int, attempt: int, told: list[tuple[str, int]]
) -> None:
    controller, did = controller_of(monkeypatch, saved=saved, attempt=attempt)
    assert controller.init_checkpoint_states() == {"global_step": saved}
    assert did == told and controller.tensorhub_attempt == attempt


def test_the_version_is_the_global_step(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, did = controller_of(monkeypatch, saved=7, attempt=1)
    controller.init_checkpoint_states()
    controller.broadcast_to_vllm()  # as OpenRLHF does when it resumes
    sample = SimpleNamespace(info={FIRST: torch.tensor([6]), LAST: torch.tensor([7])})
    status, step = controller.train_step([sample], 7)
    assert did == [("begin", 6), ("publish", 7), ("publish", 8)] and step == 8
    assert status == {
        "reward": 1.0,
        "tensorhub/version": 8,
        "tensorhub/publish/seconds": 0.2,
        "tensorhub/publish/gather_seconds": 0.0,
        "tensorhub/publish/bytes": 20.0,
        "tensorhub/staleness_mean": 1.0,
        "tensorhub/staleness_max": 1.0,
        "tensorhub/samples_of_several_versions": 1.0,
    }
