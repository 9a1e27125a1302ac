"""What verl's client and its loop of several turns make of answers, and what they leave behind."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="these are verl's")

from ray.exceptions import ActorUnavailableError  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl_router import Router, Server, client_of, until  # noqa: E402

from tensorhub_plugins.verl import routing  # noqa: E402


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(routing, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(routing, "JOIN_INTERVAL_S", 0.02)


@pytest.mark.parametrize("spans", [[(4, 2), (5, 1), (7, 3)], [(7, 3), (4, 2), (5, 1)]], ids=["on", "back"])
async def test_verls_own_client_reports_the_first_and_last_step_of_a_sample_at_once(monkeypatch, spans):
    """FullyAsyncLLMServerClient sleeps a second before it comes back for the rest of an answer: there is none."""
    from verl.workers.rollout import llm_server

    slept = []
    monkeypatch.setattr(llm_server, "asyncio", SimpleNamespace(gather=asyncio.gather, sleep=slept.append))
    server = Server("a", spans=spans)
    router = Router({"a": server})

    client = client_of(router)
    output = await client.generate("r", prompt_ids=[7, 8], sampling_params={}, priority=-3)
    assert server.given["priority"] == -3  # verl's client itself drops it where rollout.name is not vllm
    assert output.token_ids == [0, 1, 2, 3, 4, 5]
    assert output.log_probs == [-0.5 * t for t in range(6)]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (4, 7)
    assert output.stop_reason == "completed"
    assert server.asked == 1 and not slept
    await until(lambda: router.real._inflight_requests == {"a": 0})  # releases are fire and forget


class Hybrid(Server):
    """verl's own on the trainer's GPUs: it knows the step of an answer, and breaks the first one off."""

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        self.asked += 1
        return TokenOutput(token_ids=[9], log_probs=[0.0], stop_reason="aborted", extra_fields={"global_steps": 2})


async def test_what_an_engine_of_verls_has_begun_counts_as_well(monkeypatch):
    """The rest comes from a replica that follows, with the last of its versions first."""
    from verl.workers.rollout import llm_server

    hybrid, follows = Hybrid("hybrid"), Server("follows", spans=[(5, 1), (4, 1)])
    router = Router({"hybrid": hybrid})

    async def leave(_):
        await router.real.remove_servers(["hybrid"])
        await router.real.add_servers({"follows": follows})

    monkeypatch.setattr(llm_server, "asyncio", SimpleNamespace(gather=asyncio.gather, sleep=leave))
    output = await client_of(router).generate("r", prompt_ids=[7, 8], sampling_params={})
    assert output.token_ids == [9, 0, 1] and (hybrid.asked, follows.asked) == (1, 1)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (2, 5)


@pytest.mark.parametrize("steps", [(5, 4, 6, 4), (3, 4, 4, 6)], ids=["back", "on"])
async def test_a_conversation_says_the_first_and_last_step_of_all_its_turns(steps):
    """verl's loop takes the first turn's first and the last turn's last, as its steps only grow. A turn goes to another
    replica where the one before is lost or leaves."""
    from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop

    server, loop = Server("a"), object.__new__(ToolAgentLoop)

    async def merged(prompt_ids, response_ids, mask, log_probs, assistant_logprobs):
        return SimpleNamespace(token_ids=[*prompt_ids, *response_ids]), [*mask, *(1 for _ in response_ids)], None

    async def calls(*_):
        return "", ["one"]

    parser = SimpleNamespace(stop_token_ids=[], extract_tool_calls=calls)
    vars(loop).update(server_manager=client_of(Router({"a": server})), tool_parser=parser, tools={}, response_length=99)
    vars(loop).update(max_assistant_turns=0, max_user_turns=0, ct_merge_assistant_token=merged)
    loop._build_assistant_message = lambda *_: {}
    given = dict.fromkeys(("image_data", "video_data", "audio_data", "mm_processor_kwargs", "mm_processor_output"))
    data = SimpleNamespace(request_id="r", prompt_ids=[7], response_mask=[], response_logprobs=[], **given)
    vars(data).update(metrics={}, extra_fields={}, assistant_turns=0, user_turns=0, messages=[], tool_calls=[])
    for step in steps:
        server.spans = [(step, 2)]
        assert await loop._handle_generating_state(data, {}) == AgentState.PROCESSING_TOOLS
    assert len(data.response_mask) == 2 * len(steps)
    told = data.extra_fields
    assert (told["min_global_steps"], told["max_global_steps"]) == (min(steps), max(steps))


async def test_who_waits_for_a_replica_no_more_is_not_counted_there():
    """A sample that its agent gives up, before it is given a replica, and while it waits for another one."""
    a = Server("a", version=0)
    router = Router({"a": a})
    client = client_of(router)
    for waits in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.generate(f"{waits}", prompt_ids=[7], sampling_params={}), 0.05)
    a.version = 1
    output = await client.generate("r", prompt_ids=[7], sampling_params={})
    assert output.token_ids == [0, 1]
    await until(lambda: not router.real._waiting)
    await asyncio.sleep(0.05)
    assert (router.real._load.count("a"), router.real._inflight_requests) == (0, {"a": 0})
    a.dead = ActorUnavailableError("restarts", None)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.generate("s", prompt_ids=[7], sampling_params={}), 0.2)
    a.dead = None
    await until(lambda: router.real._inflight_requests)
    await asyncio.sleep(0.05)
    assert (router.real._load.count("a"), router.real._inflight_requests) == (0, {"a": 0})
