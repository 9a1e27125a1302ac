"""A server that no framework has started, as a small real HTTP server: what joins, and what comes of its answers.

The store is real, too. A real `vllm serve` is in test_external_serve.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

pytest.importorskip("ray")
pytest.importorskip("aiohttp")

import aiohttp
import msgspec
from vllm_http import FACTS, Fake, answering, status

from tensorhub_plugins.core import Client, Server, UsageError, version_of
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm.ray import external
from tensorhub_plugins.vllm.ray.external import Answer, Expected, External, ServerLost

EXPECTED = Expected("", "", FACTS, 100, "processed_logprobs")
OPTIONS = TrainingOptions(run="r", model="m", staleness_s=5.0)
TIMEOUT_S = 60.0


Story = Callable[[Fake, External], Coroutine[Any, Any, None]]


@pytest.fixture
def play(hub: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a story with a server of version 3, and the job's side of it."""
    monkeypatch.setattr(external, "PROBE_INTERVAL_S", 0.02)
    monkeypatch.setattr(external, "JOIN_TIMEOUT_S", 0.1)

    async def run(story: Story, path: str, holder: str, timeout_s: float) -> None:
        fake = Fake()
        options = msgspec.structs.replace(OPTIONS, hub=hub.address)
        async with answering(fake) as url:
            other = External("external-1", f"{url}{path}", options, EXPECTED, timeout_s=timeout_s)
            try:
                with Client(hub.address, run="r", model="m", replica=holder) as server:
                    server.publish(3, {"weight": torch.zeros(8)}, "runtime:x")
                    await asyncio.wait_for(story(fake, other), TIMEOUT_S)
            finally:
                await other.tensorhub_leave()

    return lambda story, path="", holder="server", timeout_s=5.0: asyncio.run(run(story, path, holder, timeout_s))


async def answer(other: External, **params: Any) -> Answer:
    return await other.ask([1, 2, 3], {"max_tokens": 4, "logprobs": 0, **params})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (status(following=None), "does not follow the store"),
        (status(run="another"), "follows run another, model m, and this job is run r, model m"),
        (status(facts={**FACTS, "vocab_size": 256}), "another model .vocab_size 256 instead of 128."),
        (status(facts={"architectures": ["Other"]}), "another model .architectures"),
        (status(max_model_len=99), "--max-model-len 100"),
        (status(logprobs_mode="raw_logprobs"), "--logprobs-mode processed_logprobs"),
        (status(engines=2), "2 engines behind one address"),
        (status(by_hand=True), "updated by hand"),
    ],
    ids=["following", "run", "vocabulary", "architecture", "length", "logprobs", "engines", "by hand"],
)
def test_what_cannot_join_is_refused_in_one_sentence(play: Any, said: dict[str, Any], sentence: str) -> None:
    async def story(fake: Fake, other: External) -> None:
        fake.status = said
        with pytest.raises(UsageError, match=sentence) as refused:
            await other.join()
        assert "\n" not in str(refused.value) and other.url in str(refused.value)
        fake.status = status()
        await other.join()  # the control

    play(story)


def test_a_server_of_another_hub_is_refused(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        with pytest.raises(UsageError, match="the hub of this job knows nothing of"):
            await other.join()

    play(story, holder="somebody-else")


def test_a_server_that_is_none_of_ours_and_one_that_is_not_there_are_refused(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        with pytest.raises(UsageError, match="is no `vllm serve --load-format tensorhub`"):
            await other.join()
        other.url = "http://127.0.0.1:9"
        with pytest.raises(UsageError, match=r"no server answers at http://127.0.0.1:9"):
            await other.join()

    play(story, path="/elsewhere")
    with pytest.raises(UsageError, match="no address of a server"):
        asyncio.run(External("external-1", "10.0.0.1:8000", OPTIONS, EXPECTED, timeout_s=1.0).join())


def test_a_server_with_weights_of_a_former_attempt_gets_no_requests(play: Any) -> None:
    """A job that was started again got answers from the weights of its former incarnation."""

    async def story(fake: Fake, other: External) -> None:
        await other.join()
        assert other.why_not == ""
        with Client(other._options.hub or "", run="r", model="m", replica="trainer") as trainer:
            await asyncio.to_thread(trainer.begin, 2)
            while not other.why_not:
                await asyncio.sleep(0.005)
            assert "waits for the first of" in other.why_not
            with pytest.raises(ServerLost, match="former attempt"):
                await answer(other)
            fake.status = status(version=version_of(trainer.attempt, 3))
            while other.why_not:
                await asyncio.sleep(0.005)

    play(story)


def test_an_answer_has_its_tokens_log_probabilities_and_versions(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        await other.join()
        assert other.why_not == "" and other.status.version == 3
        assert await answer(other) == Answer([0, 1, 2, 3], [-0.0, -1.0, -2.0, -3.0], "length", ((3, 4),))
        fake.starts = [[3, 0], [5, 1]]
        assert (await answer(other, logprobs=None)) == Answer([0, 1, 2, 3], None, "length", ((3, 1), (5, 3)))
        assert fake.asked[0]["token_ids"] == [1, 2, 3] and fake.asked[0]["stream"] is True
        assert fake.asked[0]["request_id"] != fake.asked[1]["request_id"] and not other.running()
        with pytest.raises(UsageError, match="refuses a request.*too long"):
            await other.ask([1] * 101, {"max_tokens": 4, "logprobs": 0})

    play(story)


def test_no_request_goes_out_on_a_connection_that_its_server_may_just_close(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        await other.join()
        for _ in range(3):
            assert (await answer(other)).token_ids == [0, 1, 2, 3]
        async with aiohttp.ClientSession() as keeping:  # the control
            await keeping.get(f"{other.url}/tensorhub")
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await keeping.post(f"{other.url}/inference/v1/generate", json={})

    play(story)


@pytest.mark.parametrize("starts", [None, [[0, 0]], [[3, 0], [0, 2]]])
def test_an_answer_whose_versions_cannot_be_told_is_not_used(starts: Any, play: Any) -> None:
    """Or are none of the store's."""

    async def story(fake: Fake, other: External) -> None:
        await other.join()
        fake.starts = starts
        with pytest.raises(ServerLost, match="cannot tell the version"):
            await answer(other)

    play(story)


def test_what_is_given_back_keeps_its_tokens_and_their_versions(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        await other.join()
        fake.stop_after, fake.starts = 2, [[3, 0], [4, 1], [5, 9]]
        asked = asyncio.create_task(answer(other))
        await fake.reached.wait()
        await _until(lambda: list(other.running().values()) == [2])
        assert await other.tensorhub_give_back() == 1
        assert await asked == Answer([0, 1], [-0.0, -1.0], "abort", ((3, 1), (4, 1)))
        await fake.disconnected.wait()  # vLLM ends the request then

    play(story)


def test_a_server_that_breaks_off_is_lost_and_so_is_one_that_falls_silent(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(fake: Fake, other: External) -> None:
        await other.join()
        fake.break_after = 2
        with pytest.raises(ServerLost):
            await answer(other)
        fake.break_after, fake.stop_after = None, 2
        asked = asyncio.create_task(answer(other))
        await fake.reached.wait()
        monkeypatch.setattr(external, "PROBE_TIMEOUT_S", 0.2)
        fake.silent = True
        with pytest.raises(ServerLost, match="has not answered for"):
            await asked
        assert other.silent_s > other.timeout_s
        fake.silent, fake.stop_after = False, None
        fake.go.set()
        await _until(lambda: other.silent_s < other.timeout_s)
        assert (await answer(other)).token_ids == [0, 1, 2, 3]

    play(story, timeout_s=0.5)


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_an_address_that_sends_elsewhere_is_refused(play: Any, code: int) -> None:
    """A status is had through it, and a request is not: its POST arrives as a GET."""

    async def story(fake: Fake, other: External) -> None:
        there, other.url = other.url, f"{other.url}/old"
        fake.redirect = code
        with pytest.raises(UsageError, match=rf"/old sends elsewhere \({there}/tensorhub\): give the address of"):
            await other.join()
        other.url = there
        await other.join()  # the control

    play(story)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, UsageError), (422, UsageError)] + [(code, ServerLost) for code in (302, 401, 403, 404, 429, 502)],
)
def test_only_a_request_that_is_wrong_everywhere_fails(
    play: Any, code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server or a proxy of it has against anybody's requests is no reason to end a run."""

    monkeypatch.setattr(external, "REFUSED_S", 0.2)

    async def story(fake: Fake, other: External) -> None:
        await other.join()
        fake.refuses = code
        with pytest.raises(kind, match=other.url):
            await answer(other)
        assert (other.why_not == "") == (kind is UsageError)
        fake.refuses = None
        await _until(lambda: other.why_not == "")
        assert (await answer(other)).token_ids == [0, 1, 2, 3]

    play(story)


def test_one_that_answers_as_something_else_is_watched_all_the_same(play: Any) -> None:
    """The watch ended with a KeyError, and the server stayed out for good."""

    async def story(fake: Fake, other: External) -> None:
        fake.status = {"hello": "world"}
        with pytest.raises(UsageError, match="is no `vllm serve --load-format tensorhub`"):
            await other.join()
        fake.status = status()
        await other.join()
        fake.status = {"hello": "world"}
        await _until(lambda: other.silent_s > 0.2)
        fake.status = status(version=5)
        await _until(lambda: other.status.version == 5)
        fake.starts = {"no": "list"}
        with pytest.raises(ServerLost):
            await answer(other)

    play(story)


def test_what_a_server_refuses_is_heard_with_why(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        del fake.status["following"]["refusal"]  # one with an earlier version of this package
        await other.join()
        assert other.status.refusal == (0, "")
        fake.status = status(refusal=[4, "no tensor 'a'"])
        await _until(lambda: other.status.refusal == (4, "no tensor 'a'"))
        assert other.why_not == "" and other.status.version == 3  # it goes on with the one before
        fake.status = status(version=5)
        await _until(lambda: other.status.refusal == (0, ""))

    play(story)


def test_one_that_is_held_for_an_evaluation_answers_from_one_version(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "HOLD_AGAIN_S", 0.05)

    async def story(fake: Fake, other: External) -> None:
        await other.join()
        fake.holds = None  # the control: a server that may not be held
        with pytest.raises(ServerLost, match="cannot be held: .*set may_be_held to true"):
            await other.tensorhub_hold(3)
        fake.starts = [[3, 0], [4, 2]]
        assert (await answer(other)).spans == ((3, 2), (4, 2))
        fake.holds = []
        assert await other.tensorhub_hold(0) == 3 and await other.tensorhub_hold(4) == 4
        with pytest.raises(ServerLost, match="has left version 4"):  # it was started again meanwhile, or held by others
            await answer(other)
        fake.starts = [[4, 0]]
        assert (await answer(other)).spans == ((4, 4),)
        await _until(lambda: fake.holds is not None and fake.holds[2:4] == [("hold", 4), ("hold", 4)])
        await other.tensorhub_release()
        assert fake.holds[-1] == ("release", 0)
        told = len(fake.holds)
        fake.starts = [[4, 0], [5, 2]]
        assert (await answer(other)).spans == ((4, 2), (5, 2))
        await other.tensorhub_release()
        assert len(fake.holds) == told, "it is told once, and not held any more"
        await other.tensorhub_hold(5)
        await other.tensorhub_leave()
        assert fake.holds[told:] == [("hold", 5), ("release", 0)]

    play(story)


ODD = ['{"version": 4}', "{}", "[]", "null", '{"version": null}', '{"version": 0}', "Infinity", "[" * 20_000, "x"]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_an_odd_answer_to_a_hold_is_a_lost_server_and_it_is_watched_on(
    odd: str, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the evaluation with an error that nobody expects, or, at a renewal, the watch of the server."""
    monkeypatch.setattr(external, "HOLD_AGAIN_S", 0.02)

    async def story(fake: Fake, other: External) -> None:
        await other.join()
        assert await other.tensorhub_hold(3) == 3
        fake.odd_hold, told = odd, len(fake.holds or ())
        await _until(lambda: len(fake.holds or ()) > told + 1)  # it has gone on after one
        fake.status = status(version=5)
        await _until(lambda: other.status.version == 5)
        with pytest.raises(ServerLost):
            await other.tensorhub_hold(3)
        await other.tensorhub_release()
        assert fake.holds is not None and fake.holds[-1] == ("release", 0), "what came of it there is not known"
        await other.tensorhub_leave()
        with pytest.raises(ServerLost):
            await other.tensorhub_hold(3)

    play(story)


def test_a_server_that_refuses_its_first_version_joins_with_its_reason(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        fake.status = status(version=0, refusal=[4, "no tensor 'a'"])
        with pytest.raises(UsageError, match="cannot install version 4: no tensor 'a'"):
            await other.join()

    play(story)


def test_one_that_is_started_again_as_something_else_gets_no_requests(play: Any) -> None:
    async def story(fake: Fake, other: External) -> None:
        await other.join()
        fake.status = status(run="another")
        await _until(lambda: "follows run another" in other.why_not)
        fake.status = status(version=4)
        await _until(lambda: other.why_not == "" and other.status.version == 4)
        fake.status = status(broken=True)
        await _until(lambda: "waits for whole weights" in other.why_not)
        fake.status = status(why_not="server/0 has no whole weights")
        await _until(lambda: "server/0 has no whole weights" in other.why_not)
        fake.status = status(hub_silent_s=6.0)
        await _until(lambda: "has not heard of the hub for longer than staleness_s, 5 s" in other.why_not)
        fake.status = status(hub_silent_s=4.0)
        await _until(lambda: other.why_not == "")

    play(story)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)
