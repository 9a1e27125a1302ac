"""A server that verl has not started, in verl's words: what it is asked, and what verl gets."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("verl")

import ray
from vllm_http import FACTS, Fake, answering, status

from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.verl.config import Options
from tensorhub_plugins.verl.external import ExternalServer, Rollout, request_of, rollout_of
from tensorhub_plugins.verl.routing import ReplicaLost
from tensorhub_plugins.vllm.ray import external as neutral
from tensorhub_plugins.vllm.ray.external import Expected

ROLLOUT = Rollout(100, 40, 60, 1.0, False, (126, 127))
EXPECTED = Expected("", "", FACTS, 100, "processed_logprobs")
RUN = {"run": "r", "model": "m", "replica_timeout_s": 5.0, "spans": "split"}


def test_a_request_is_what_verls_own_server_makes_of_it() -> None:
    made = request_of({"temperature": 0.7, "logprobs": True}, 30, ROLLOUT)
    bias = {126: -100.0, 127: -100.0}
    assert made == {
        "temperature": 0.7,
        "max_tokens": 60,
        "logprobs": 0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "logit_bias": bias,
    }
    assert request_of({}, 50, ROLLOUT)["max_tokens"] == 50  # what is left of prompt and response together
    assert request_of({"max_new_tokens": 7}, 30, ROLLOUT)["max_tokens"] == 7
    assert request_of({"max_tokens": 90}, 30, ROLLOUT)["max_tokens"] == 70  # what the model takes
    assert request_of({}, 30, ROLLOUT)["logprobs"] is None
    with pytest.raises(ValueError, match="leaves no room"):
        request_of({}, 100, ROLLOUT)


def test_what_only_verls_own_replicas_can_do_is_refused() -> None:
    model = SimpleNamespace(processor=None, tokenizer=range(126), hf_config=SimpleNamespace(**FACTS))
    config = {"prompt_length": 40, "response_length": 60, "max_model_len": None, "logprobs_mode": "raw_logprobs"}

    def of(config: dict[str, Any], **changes: Any) -> Any:
        return rollout_of(_Config(config), SimpleNamespace(**{**vars(model), **changes}))

    assert of(config) == (ROLLOUT, msgspec.structs.replace(EXPECTED, logprobs_mode="raw_logprobs"))
    for changed in ({"enable_rollout_routing_replay": True}, {"full_determinism": True}):
        with pytest.raises(UsageError, match="need verl's own replicas"):
            of({**config, **changed})
    with pytest.raises(UsageError, match="takes images"):
        of(config, processor=object())
    with pytest.raises(UsageError, match="a server would"):
        of(config, hf_config=SimpleNamespace(architectures=["A"], vocab_size=20_000))


class _Config(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_an_answer_is_verls_with_exact_steps(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neutral, "PROBE_INTERVAL_S", 0.02)

    async def story() -> None:
        fake = Fake()
        options = Options(hub=hub.address, **RUN)
        async with answering(fake) as url:
            server = ExternalServer("external-1", url, options, ROLLOUT, EXPECTED)
            asked: dict[str, Any] = {"prompt_ids": [1, 2], "sampling_params": {"logprobs": True}, "request_id": "q"}
            with pytest.raises(ReplicaLost, match="has not joined"):
                await server.generate(**asked)
            assert (await server.tensorhub_heartbeat())["ready"] is False
            await server.join()
            beat = await server.tensorhub_heartbeat()
            assert (beat["worker"], beat["ready"], beat["version"]) == ("external-1/0", True, 3)
            assert (beat["refusal"], beat["stays"]) == ((0, ""), False)
            fake.status = status(refusal=[4, "no tensor 'a'"])
            while not beat["stays"]:
                await asyncio.sleep(0.005)
                beat = await server.tensorhub_heartbeat()
            assert (beat["refusal"], beat["ready"]) == ((4, "no tensor 'a'"), True)
            fake.starts = [[3, 0], [5, 1]]
            output = await server.generate(**asked, priority=0, image_data=None)
            assert (output.token_ids, output.log_probs) == ([0, 1, 2, 3], [-0.0, -1.0, -2.0, -3.0])
            assert (output.stop_reason, output.extra_fields["global_steps"]) == ("completed", 2)
            assert output.extra_fields["tensorhub_spans"] == [(2, 1), (4, 3)]
            assert output.extra_fields["tensorhub_split"] is True
            with pytest.raises(UsageError, match="cannot be given images"):
                await server.generate(**asked, image_data=[object()])
            fake.stop_after = 2
            waiting = asyncio.create_task(server.generate(**asked))
            await fake.reached.wait()
            while list(server.running().values()) != [2]:
                await asyncio.sleep(0.005)
            assert await server.tensorhub_give_back() == 1
            output = await waiting
            assert (output.token_ids, output.stop_reason) == ([0, 1], "aborted")
            await server.tensorhub_leave()

            # A client that cannot go on with a part is not given one.
            fake.reached.clear()
            whole = ExternalServer(
                "external-2", url, msgspec.structs.replace(options, spans="oldest"), ROLLOUT, EXPECTED
            )
            await whole.join()
            waiting = asyncio.create_task(whole.generate(**asked))
            await fake.reached.wait()
            await whole.tensorhub_give_back()
            with pytest.raises(ReplicaLost, match="told to give its requests back"):
                await waiting
            server = whole
            fake.stop_after, fake.break_after = None, 1
            with pytest.raises(ReplicaLost):
                await server.generate(**asked)
            await server.tensorhub_leave()

    with Client(hub.address, run="r", model="m", replica="server") as holder:
        holder.publish(3, {"weight": torch.zeros(8)}, "runtime:x")
        asyncio.run(asyncio.wait_for(story(), 30))


@pytest.mark.smoke
@pytest.mark.heavy  # Ray
def test_as_an_actor_it_joins_or_says_in_one_sentence_why_not(hub: Server) -> None:
    fake, began, end = Fake(), threading.Event(), threading.Event()
    urls = []

    async def serve() -> None:
        async with answering(fake) as url:
            urls.append(url)
            began.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    began.wait()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with Client(hub.address, run="r", model="m", replica="server") as holder:
            holder.publish(3, {"weight": torch.zeros(8)}, "runtime:x")
            given = (urls[0], Options(hub=hub.address, **RUN), ROLLOUT, EXPECTED)
            fake.status = status(run="another")
            with pytest.raises(UsageError, match="follows run another") as refused:
                asyncio.run(ExternalServer.start("external-1", *given))
            assert "\n" not in str(refused.value)
            fake.status = status()
            handle = asyncio.run(ExternalServer.start("external-1", *given))
            asked: dict[str, Any] = {"prompt_ids": [1, 2], "sampling_params": {}, "request_id": "q"}
            output = ray.get(handle.generate.remote(**asked))
            assert output.token_ids == [0, 1, 2, 3] and output.extra_fields["global_steps"] == 2
            fake.break_after = 0
            with pytest.raises(ReplicaLost):
                ray.get(handle.generate.remote(**asked))
            ray.get(handle.tensorhub_leave.remote())
    finally:
        ray.shutdown()
        end.set()
        thread.join()
