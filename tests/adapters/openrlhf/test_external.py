"""A server that OpenRLHF has not started, in OpenRLHF's words: what it is asked, and what OpenRLHF gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

pytest.importorskip("openrlhf")

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm import RequestOutput, SamplingParams
from vllm_http import FACTS, Fake, answering, status

from tensorhub_plugins.core import Client, Server, UsageError, VersionRefused
from tensorhub_plugins.openrlhf.config import Options
from tensorhub_plugins.openrlhf.external import ExternalEngine, as_json, ending_of, is_of_one_version
from tensorhub_plugins.openrlhf.versions import FIRST, LAST
from tensorhub_plugins.vllm.ray import external as neutral
from tensorhub_plugins.vllm.ray.external import Answer, Expected, ServerLost

EXPECTED = Expected("", "", FACTS, 100)


def tokenizer(*, words: bool = False) -> PreTrainedTokenizerFast:
    """Token n is the letter n, or a word of it: spaces are before words, and are left out before a text."""
    made = Tokenizer(models.BPE({f"{'▁' if words else ''}{chr(97 + each)}": each for each in range(26)}, []))
    made.decoder = decoders.Metaspace() if words else decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_parameters_and_text_are_as_vllm_has_them() -> None:
    params = SamplingParams(temperature=0.5, max_tokens=9, min_tokens=1, logprobs=1, skip_special_tokens=False)
    given = as_json(params)
    assert (given["temperature"], given["max_tokens"], given["logprobs"]) == (0.5, 9, 1)
    assert not any(name.startswith("_") for name in given) and "output_kind" not in given

    def ending(finish: str, **options: Any) -> Any:
        return ending_of(Answer([0, 1, 2, 3], None, finish, ((1, 4),)), [4], SamplingParams(**options), tokenizer())

    assert ending("length") == ("abcd", None) and ending("stop") == ("abc", None)  # the token that ends it is no text
    assert ending("stop", stop_token_ids=[3]) == ("abc", 3)
    assert ending("stop", include_stop_str_in_output=True) == ("abcd", None)
    assert ending("stop", stop=["x", "cd"]) == ("ab", "cd") and ending("length", detokenize=False) == ("", None)
    assert ending("stop", stop="cd", include_stop_str_in_output=True) == ("abcd", "cd")
    assert ending("stop", stop=["bc", "cd"], min_tokens=3) == ("ab", "cd")  # it was none when "bc" came
    assert ending("stop", stop=["bc"], min_tokens=3, stop_token_ids=[3]) == ("abc", 3)


@pytest.mark.parametrize(("prompt", "expected"), [([4], " a b"), ([], "a b")])
def test_a_text_goes_on_after_its_prompt(prompt: list[int], expected: str) -> None:
    """An agent that put it behind the prompt had no space between them, as no engine of the run's gives it."""
    answer = Answer([0, 1], None, "length", ((1, 2),))
    assert ending_of(answer, prompt, SamplingParams(), tokenizer(words=True)) == (expected, None)


def test_samples_of_one_version() -> None:
    one, other = {"extra_logs": {FIRST: 3, LAST: 3}}, {"extra_logs": {FIRST: 4, LAST: 4}}
    assert is_of_one_version([one, one]) and is_of_one_version([{}])
    assert not is_of_one_version([one, other]) and not is_of_one_version([{"extra_logs": {FIRST: 3, LAST: 4}}])


@pytest.fixture
def asked() -> dict[str, Any]:
    params = SamplingParams(max_tokens=4, logprobs=1)
    return {
        "prompt": "ab",
        "label": "",
        "sampling_params": params,
        "max_length": 50,
        "hf_tokenizer": tokenizer(),
        "num_samples": 2,
    }


def play(hub: Server, story: Any, *, partial: bool, **options: Any) -> None:
    async def run() -> None:
        fake = Fake()
        async with answering(fake) as url:
            given = Options(hub=hub.address, run="r", model="m", **options)
            engine = ExternalEngine("external-1", url, given, EXPECTED, partial=partial)
            await engine.join()
            await story(fake, engine)
            await engine.tensorhub_leave()

    with Client(hub.address, run="r", model="m", replica="server") as holder:
        holder.publish(3, {"weight": torch.zeros(8)}, "runtime:x")
        asyncio.run(asyncio.wait_for(run(), 60))


def test_partial_rollout_tells_the_versions_of_every_sample(hub: Server, asked: dict[str, Any]) -> None:
    async def story(fake: Fake, engine: ExternalEngine) -> None:
        beat = await engine.tensorhub_heartbeat()
        assert (beat["version"], beat["ready"], beat["why"]) == (3, True, "")
        fake.starts = [[3, 0], [4, 2]]
        responses = await engine.generate_responses(**asked)
        assert len(responses) == 2
        for response in responses:
            assert response["observation_tokens"] == [0, 1, 0, 1, 2, 3] and response["action_ranges"] == [(2, 6)]
            assert response["rollout_log_probs"][-4:] == [0.0, -1.0, -2.0, -3.0] and response["truncated"]
            assert (response["extra_logs"][FIRST], response["extra_logs"][LAST]) == (3, 4)
        assert await engine.tensorhub_hold(3) == 3 and fake.holds == [("hold", 3)]
        with pytest.raises(ServerLost, match="has left version 3"):
            await engine.generate_responses(**asked)
        await engine.tensorhub_release()
        with pytest.raises(UsageError, match="cannot be given images"):
            await engine.generate_responses(**asked, images=[object()])
        fake.asked = []
        with pytest.raises(ServerLost, match="cannot be given images"):  # of an agent: they were left out
            await engine.generate([1], asked["sampling_params"], {"image": [object()]})
        assert not fake.asked

    play(hub, story, partial=True)


def test_a_server_that_may_not_be_asked_says_why_and_is_not_lost(hub: Server) -> None:
    async def story(_: Fake, engine: ExternalEngine) -> None:
        engine.why_not = "it has not heard of the hub for longer than staleness_s, 5 s"
        beat = await engine.tensorhub_heartbeat()
        assert not beat["ready"] and "staleness_s" in beat["why"]
        with pytest.raises(ServerLost, match="staleness_s"):
            await engine.generate_responses("p", "", None, 5, None)
        await engine.tensorhub_leave()
        assert not (await engine.tensorhub_heartbeat())["ready"]

    play(hub, story, partial=True)


def test_without_partial_rollout_a_prompt_is_asked_again_until_it_is_of_one_version(
    hub: Server, asked: dict[str, Any]
) -> None:
    async def story(fake: Fake, engine: ExternalEngine) -> None:
        fake.starts = [[3, 0], [4, 2]]
        with pytest.raises(ServerLost, match="changes its version while it answers"):
            await engine.generate_responses(**asked)
        assert len(fake.asked) == 8
        fake.asked = []

        def switch_later() -> None:
            if len(fake.asked) == 3:
                fake.starts = [[4, 0]]

        fake.on_request = switch_later
        responses = await engine.generate_responses(**asked)
        assert [r["extra_logs"][FIRST] for r in responses] == [4, 4] and len(fake.asked) == 4

    play(hub, story, partial=False)


@pytest.mark.parametrize("starts", [[[3, 0]], [[3, 0], [4, 2]]])
def test_an_agent_may_ask_from_a_thread_of_its_own(hub: Server, asked: dict[str, Any], starts: Any) -> None:
    """As OpenRLHF's example of a server in the engine's actor: the run ended with LookupError. Without partial rollout
    its samples are of one version, too."""

    class Agent:
        async def execute(self, llm_engine: Any, sampling_params: Any, **_: Any) -> dict[str, Any]:
            def serve() -> Any:
                return asyncio.run(llm_engine.generate([1], sampling_params))

            answer = await asyncio.get_running_loop().run_in_executor(None, serve)
            assert isinstance(answer, RequestOutput)  # with all that an engine's answer says
            assert answer.outputs[0].cumulative_logprob == -6.0 and answer.outputs[0].stop_reason is None
            return {"tokens": answer.outputs[0].token_ids, "text": answer.outputs[0].text}

    async def story(fake: Fake, engine: ExternalEngine) -> None:
        engine.executor, fake.starts = Agent(), starts
        if len(starts) > 1:
            with pytest.raises(ServerLost, match="changes its version while it answers"):
                await engine.generate_responses(**asked)
        else:
            samples = await engine.generate_responses(**asked)
            assert [(sample["tokens"], sample["text"]) for sample in samples] == 2 * [([0, 1, 2, 3], "abcd")]

    play(hub, story, partial=False)


@pytest.mark.parametrize("raises", [None, RuntimeError, asyncio.CancelledError])
def test_what_an_agent_makes_of_a_lost_answer_is_no_sample(
    hub: Server, asked: dict[str, Any], raises: type[BaseException] | None
) -> None:
    """The last one: an agent that awaits what else it had asked, which it has cancelled."""

    class Agent:
        async def execute(self, llm_engine: Any, sampling_params: Any, **_: Any) -> dict[str, Any]:
            try:
                answer = await llm_engine.generate([1], sampling_params)
            except Exception as error:
                if raises is not None:
                    raise raises("the agent has met an error") from error
                return {"reward": -1.0}
            return {"tokens": answer.outputs[0].token_ids}

    async def story(fake: Fake, engine: ExternalEngine) -> None:
        engine.executor = Agent()
        assert len(await engine.generate_responses(**asked)) == 2  # the control
        fake.starts = None
        with pytest.raises(ServerLost, match="cannot tell the version"):
            await engine.generate_responses(**asked)

    play(hub, story, partial=True)


def test_what_a_sample_of_a_lost_prompt_loses_later_is_no_loss_of_others(hub: Server, asked: dict[str, Any]) -> None:
    """It was noted for every prompt that was there, whose samples then went on likewise: a server that breaks off some
    of its answers lost nearly all of them."""

    class Agent:
        """Each sample asks when it may."""

        def __init__(self) -> None:
            self.may_ask = [asyncio.Event() for _ in range(3)]
            self.ended = [asyncio.Event() for _ in range(3)]
            self.begun = 0

        async def execute(self, llm_engine: Any, sampling_params: Any, **_: Any) -> dict[str, Any]:
            number, self.begun = self.begun, self.begun + 1
            await self.may_ask[number].wait()
            try:
                # From a task of its own, as with a timeout.
                answer = await asyncio.create_task(llm_engine.generate([1], sampling_params))
            finally:
                self.ended[number].set()
            return {"tokens": answer.outputs[0].token_ids}

    async def story(fake: Fake, engine: ExternalEngine) -> None:
        agent = Agent()
        engine.executor, fake.starts = agent, None
        agent.may_ask[0].set()
        with pytest.raises(ServerLost, match="cannot tell the version"):
            await engine.generate_responses(**asked)
        other = asyncio.create_task(engine.generate_responses(**{**asked, "num_samples": 1}))
        while agent.begun < 3:
            await asyncio.sleep(0)
        agent.may_ask[1].set()
        await agent.ended[1].wait()
        fake.starts = [[3, 0]]
        agent.may_ask[2].set()
        assert [sample["tokens"] for sample in await other] == [[0, 1, 2, 3]]

    play(hub, story, partial=True)


def test_a_version_that_it_refuses_is_said_with_why(
    hub: Server, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neutral, "PROBE_INTERVAL_S", 0.02)

    async def story(fake: Fake, engine: ExternalEngine) -> None:
        fake.status = status(refusal=[4, "no tensor 'a'"])
        with pytest.raises(VersionRefused, match="no tensor 'a'"):
            await engine.generate_responses(**asked, min_version=4)
        heartbeat = await engine.tensorhub_heartbeat()
        assert (heartbeat["refusal"], heartbeat["version"]) == ((4, "no tensor 'a'"), 3)
        assert len(await engine.generate_responses(**asked, min_version=3)) == 2

    play(hub, story, partial=True, timeout_s=30.0)


def test_it_answers_from_the_version_that_is_asked_for_or_not_at_all(
    hub: Server, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neutral, "PROBE_INTERVAL_S", 0.02)

    async def story(fake: Fake, engine: ExternalEngine) -> None:
        with pytest.raises(ServerLost, match="was asked to answer from a later one"):
            await engine.generate_responses(**asked, min_version=4)
        waiting = asyncio.create_task(engine.generate_responses(**asked, min_version=4))
        await asyncio.sleep(0)
        fake.status, fake.starts = status(version=4), [[4, 0]]
        assert len(await waiting) == 2

    play(hub, story, partial=True, timeout_s=0.5)


def test_what_is_given_back_is_asked_elsewhere_as_a_whole(hub: Server, asked: dict[str, Any]) -> None:
    async def story(fake: Fake, engine: ExternalEngine) -> None:
        fake.stop_after = 1
        waiting = asyncio.create_task(engine.generate_responses(**{**asked, "num_samples": 1}))
        await fake.reached.wait()
        assert engine.get_num_unfinished_requests() == 1 and await engine.tensorhub_give_back() == 1
        with pytest.raises(ServerLost, match="give its requests back"):
            await waiting

    play(hub, story, partial=True)
