"""Agents that ask in ways of their own: from a thread, several times at once, for what else vLLM says."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")

from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch  # noqa: E402
from openrlhf_fakes import FakeEngine, FakeHub, FakeLLM, FakeTokenizer, make, make_engine, play_ray  # noqa: E402

from tensorhub_plugins.openrlhf.partial_answers import GivenBack  # noqa: E402
from tensorhub_plugins.openrlhf.versions import FIRST, LAST  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine

PARAMS = SimpleNamespace(max_tokens=6, min_tokens=0)


class LLM(FakeLLM):
    """Notes in which loop it is asked, and answers as vLLM does, each time with other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: set[Any] = set()
        self.more = 0

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.loops.add(asyncio.get_running_loop())
        async for answer in super().generate(prompt, params, request_id):
            answer.prompt_token_ids, answer.finished = prompt["prompt_token_ids"], True
            (output,) = answer.outputs
            self.more += 10
            output.token_ids = [token + self.more for token in output.token_ids]
            yield answer

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.loops.add(asyncio.get_running_loop())
        return await super().call_utility_async(method, *args)


class Agent:
    """Asks vLLM as often as it is to, at once."""

    def __init__(self, images: Any = lambda: None, times: int = 1) -> None:
        self.images, self.times = images, times

    async def execute(self, llm_engine: Any, **_: Any) -> dict[str, Any]:
        answers = await asyncio.gather(*(self.ask(llm_engine) for _ in range(self.times)))
        return {"answers": answers, "tokens": [answer.outputs[0].token_ids for answer in answers]}

    async def ask(self, llm_engine: Any) -> Any:
        return await llm_engine.generate([1, 2], PARAMS, multi_modal_data=self.images())


class FromAThread(Agent):
    """Asks as OpenRLHF's example of a server in the engine's actor: in a thread and a loop of its own."""

    loop: asyncio.AbstractEventLoop

    async def ask(self, llm_engine: Any) -> Any:
        asking = super().ask(llm_engine)

        async def request() -> Any:
            return await asyncio.create_task(asking, context=contextvars.Context())

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request(), self.loop))

    @contextmanager
    def serving(self) -> Iterator[None]:
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join()
            self.loop.close()


class OfTheFirst(Agent):
    """Asks from a task that its first sample has begun, as of a server that is started when it is needed."""

    async def ask(self, llm_engine: Any) -> Any:
        self.context = getattr(self, "context", contextvars.copy_context())
        return await asyncio.create_task(super().ask(llm_engine), context=self.context.copy())


def ask(one: Any, count: int = 1, **given: Any) -> Any:
    asked = {"prompt": "p", "label": "", "sampling_params": None, "max_length": 8, "hf_tokenizer": FakeTokenizer()}
    return asyncio.create_task(one.generate_responses(**asked, num_samples=count, **given))


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def until_asked(one: Any, count: int) -> None:
    while len(one.llm.output_processor.request_states) < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_partial", [False, True])
async def test_an_agent_may_ask_from_a_thread_of_its_own(is_partial: bool) -> None:
    """vLLM's client was asked there, in the middle of what the actor asked it: its sockets are of one thread."""
    agent, llm = FromAThread(), LLM()
    with agent.serving():
        one = make_engine(agent, is_partial=is_partial, llm=llm)
        llm.switch(3)
        llm.answers.set()
        (sample,) = await ask(one)
        assert (sample["extra_logs"][FIRST], sample["extra_logs"][LAST]) == (3, 3)
        assert llm.loops == {asyncio.get_running_loop()} != {agent.loop}
        llm.answers = asyncio.Event()
        answer = ask(one)
        await until_asked(one, 1)
        await one.tensorhub_give_back()
        assert isinstance(await answer, GivenBack)


async def test_of_whom_a_question_is_not_known_its_versions_are_of_all() -> None:
    """The control: those of the others are their own."""
    agent = FromAThread()
    with agent.serving():
        one = make_engine(agent, is_partial=True, llm=LLM())
        other, one.llm.follower.version = ask(one), 0
        await until_asked(one, 1)
        one.llm.switch(4)
        late = ask(one)
        await until_asked(one, 2)
        one.llm.answers.set()
        told = [(await each)[0]["extra_logs"] for each in (other, late)]
        assert all(logs[FIRST] == 0 and logs[LAST] == 4 for logs in told)
        assert (await ask(one))[0]["extra_logs"][FIRST] == 4


async def test_an_agent_gets_what_else_vllm_says_also_from_an_engine_that_left() -> None:
    leaver, other = (make_engine(Agent(times=2), is_partial=True, llm=LLM()) for _ in range(2))
    leaver.llm.answers.set()
    ((first, _),) = [sample["answers"] for sample in await ask(leaver)]
    assert (first.prompt_token_ids, first.finished) == ([1, 2], True)
    leaver.llm.answers = asyncio.Event()
    answer = ask(leaver)
    await until_asked(leaver, 2)
    await leaver.tensorhub_give_back()
    other.llm.answers.set()
    (sample,) = await ask(other, journals=pickle.loads(pickle.dumps((await answer).journals)))
    assert [answer.prompt_token_ids for answer in sample["answers"]] == 2 * [[1, 2]]
    assert sorted(tokens[0] for tokens in sample["tokens"]) == [35, 45], "each goes on with its own tokens"


class Waits(LLM):
    """Has nothing of what it was asked when it has to leave, as of prompts that wait in vLLM."""

    async def abort(self, requests: list[str], internal: bool) -> None:
        await super().abort(requests, internal)
        self.aborted = {request: [] for request in requests}


@pytest.mark.parametrize(("llm", "first"), [(Waits, 5), (LLM, 3)])
async def test_an_answer_that_had_not_begun_is_of_the_next_engine_alone(llm: type[LLM], first: int) -> None:
    """It counted as one of an older version. The control: one that had begun."""
    leaver, other = (make_engine(Agent(), is_partial=True, llm=made()) for made in (llm, LLM))
    leaver.llm.switch(3)
    other.llm.switch(5)
    answer = ask(leaver)
    await until_asked(leaver, 1)
    await leaver.tensorhub_give_back()
    other.llm.answers.set()
    (sample,) = await ask(other, journals=pickle.loads(pickle.dumps((await answer).journals)))
    assert (sample["extra_logs"][FIRST], sample["extra_logs"][LAST]) == (first, 5)


@pytest.mark.parametrize("is_another", [True, False])
async def test_what_another_image_was_answered_is_no_answer(is_another: bool) -> None:
    """A screenshot of the environment is the same tokens as the one that the engine that left was shown."""
    shown = [{"image": [b"before"]}]
    leaver, other = (make_engine(Agent(lambda: shown[0]), is_partial=True, llm=LLM()) for _ in range(2))
    answer = ask(leaver)
    await until_asked(leaver, 1)
    await leaver.tensorhub_give_back()
    journals = pickle.loads(pickle.dumps((await answer).journals))
    if is_another:
        shown[0] = {"image": [b"after"]}
    other.llm.answers.set()
    (sample,) = await ask(other, journals=journals)
    assert sample["tokens"] == ([[17, 18]] if is_another else [[15, 17, 18]])


async def test_an_ended_sample_remembers_no_more_questions() -> None:
    """All that a server was asked was kept as of the sample that had begun it, as long as the actor lived."""
    one = make_engine(agent := OfTheFirst(), is_partial=True, llm=LLM())
    one.llm.answers.set()
    for _ in range(5):
        await ask(one)
    kept = [value.journal for value in agent.context.values() if hasattr(value, "journal")]
    assert [len(journal.calls) for journal in kept] == [1]


class WithAStop(Agent):
    async def ask(self, llm_engine: Any) -> Any:
        params = SimpleNamespace(max_tokens=6, min_tokens=0, stop=["</s>"])
        answer = await llm_engine.generate([1, 2], params)
        answer.outputs[0].token_ids.append(99)  # what its environment says
        return answer


@pytest.mark.parametrize(("text", "expected"), [("a", [15, 17, 18, 99]), ("a</", [17, 18, 99])])
async def test_an_answer_that_ended_in_a_stop_string_is_asked_anew(text: str, expected: list[int]) -> None:
    """Of what was asked anew the next engine that leaves has one answer, as ever."""

    class Speaks(LLM):
        async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
            async for answer in super().generate(prompt, params, request_id):
                answer.outputs[0].text = text
                yield answer

    leaver = make_engine(WithAStop(), is_partial=True, llm=Speaks())
    answer = ask(leaver)
    await until_asked(leaver, 1)
    await leaver.tensorhub_give_back()
    journals = pickle.loads(pickle.dumps((await answer).journals))
    for _ in range(2):  # the second one finds it whole
        other = make_engine(WithAStop(), is_partial=True, llm=LLM())
        other.llm.answers.set()
        (sample,) = await ask(other, journals=journals)
        assert sample["tokens"] == [expected]
        assert [len(journal.calls) for journal in journals] == [1]
        journals = pickle.loads(pickle.dumps(journals))


def test_a_sample_without_tokens_says_what_the_others_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an agent whose environment has failed: OpenRLHF ended with KeyError, or in the size of a batch."""
    play_ray(monkeypatch)
    monkeypatch.setattr(FakeHub, "visible", 4)
    engine = FakeEngine(version=3)
    answer = engine.do_generate_responses
    told = {FIRST: 3, LAST: 3}
    engine.do_generate_responses = lambda **asked: [  # type: ignore[method-assign]
        {**sample, "extra_logs": logs} for sample, logs in zip(answer(**asked), ({}, told), strict=True)
    ]
    samples, *_ = make([engine]).generate_samples()
    assert [(int(one.info[FIRST]), int(one.info[LAST])) for one in samples[:2]] == [(4, 4), (3, 3)]
    items = split_experience_batch(Experience.concat_experiences(samples, 0))
    assert [int(each) for each in make_experience_batch(items).info[FIRST]] == 6 * [4, 3]


@pytest.mark.timeout(30)
def test_an_engine_that_has_given_a_prompt_back_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the fleet's roster had come it was, over and over. The control: the other one is asked for all of them."""
    play_ray(monkeypatch)
    leaver, other = FakeEngine(), FakeEngine()
    leaver.do_generate_responses = lambda **_: GivenBack()  # type: ignore[method-assign]
    samples, *_ = make([leaver, other], per_engine=1).generate_samples()
    assert (len(samples), len(leaver.asked), len(other.asked)) == (12, 1, 6)
