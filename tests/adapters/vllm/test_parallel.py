"""Pipeline, expert and data parallel engines: what each worker takes of a version, and that all of them do or none."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import Engine, checkpoint, wait_until
from vllm_ranks import alone, bytes_of_ranks, plans_of_ranks

from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.vllm.config import WorkerConfig, of_rank, parse
from tensorhub_plugins.vllm.engine.core_follower import check_weights
from tensorhub_plugins.vllm.worker.votes import first_name

HEAVY, LONG = pytest.mark.heavy, pytest.mark.long
TIMEOUT_S = 60.0
TWO = {"workers": 2, "extension": "vllm_faults.FaultyExtension", "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
EP_2 = {**TWO, "enable_expert_parallel": True}
PP_2 = {**TWO, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}


# --- dense data parallel ranks: engines of their own behind one address ---


def test_dense_data_parallel_ranks_join_under_names_of_their_own() -> None:
    config = WorkerConfig(hub="tcp://h:1", run="r", model="m", replica="server")

    def named(**parallel: int) -> str:
        return of_rank(config, SimpleNamespace(parallel_config=SimpleNamespace(**parallel))).replica

    assert [named(data_parallel_index=index) for index in range(3)] == ["server", "server-dp1", "server-dp2"]
    assert named() == "server"


def test_all_workers_of_an_engine_are_called_what_the_first_is() -> None:
    """On another host it has another name of its own, where none is given."""

    def named(*names: str) -> list[str]:
        everyone = threading.Barrier(len(names))
        said: list[bytes] = [b""] * len(names)

        def name_of(shard: int) -> str:
            def gather(message: bytes) -> list[bytes]:
                said[shard] = message
                everyone.wait(10)
                heard = list(said)
                everyone.wait(10)
                return heard

            return first_name(gather, names[shard])

        with ThreadPoolExecutor(len(names)) as workers:
            return list(workers.map(name_of, range(len(names))))

    for name in ("short", "x" * 32, "a-long-host-name.of.a.cluster-" * 4, "größer", ""):
        assert named(name, "other", "and-another-host-with-a-much-longer-name-than-it") == [name] * 3


class Cores:
    """vLLM's client of several engine cores, whose call of all of them gives the answers of the first."""

    def __init__(self, broken: list[str | None]) -> None:
        self.broken, self.core_engines = broken, list(range(len(broken)))

    async def call_utility_async(self, name: str, method: str) -> list[str | None]:
        return await self._call_utility_async(name, method, engine=0)

    async def _call_utility_async(self, name: str, method: str, *, engine: int) -> list[str | None]:
        assert (name, method) == ("collective_rpc", "tensorhub_health")
        return [self.broken[engine]]


@pytest.mark.parametrize("broken", [[None, "mixed"], ["mixed", None], [None, None], ["mixed"]])
def test_one_broken_engine_of_several_is_not_healthy(broken: list[str | None]) -> None:
    engine = SimpleNamespace(engine_core=Cores(broken))
    if "mixed" not in broken:
        asyncio.run(check_weights(engine))
        return
    with pytest.raises(Exception, match="whole weights: mixed"):
        asyncio.run(check_weights(engine))


# --- from configurations alone ---

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 512}
DENSE = {**TINY, "num_key_value_heads": 2, "num_hidden_layers": 3}
QWEN3 = {**DENSE, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN3_MOE = {**QWEN3, "decoder_sparse_step": 1, "head_dim": 32}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK = {**QWEN3, **LATENT, **ROUTED, "num_key_value_heads": 4, "topk_method": "noaux_tc"}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
CASES: dict[str, Any] = {  # family, settings, (TP, PP, DP), experts by ranks
    "PP 2, tied": ("Qwen2", {**DENSE, "tie_word_embeddings": True}, (1, 2, 1), False),
    "PP 3": ("Llama", DENSE, (1, 3, 1), False),
    "TP 2 PP 2": ("Llama", DENSE, (2, 2, 1), False),
    "70B at TP 8 PP 2": ("Llama", {**LLAMA_70B, "num_key_value_heads": 8, "vocab_size": 128256}, (8, 2, 1), False),
    "EP of TP 4": ("Qwen3Moe", QWEN3_MOE, (4, 1, 1), True),
    "EP of TP 2, PP 2": ("Qwen3Moe", QWEN3_MOE, (2, 2, 1), True),
    "EP of TP 2 and latent attention": ("DeepseekV3", DEEPSEEK, (2, 1, 1), True),
    "DP 2 with shares of experts": ("Qwen3Moe", QWEN3_MOE, (1, 1, 2), False),
    "TP 2 DP 2 with shares of experts": ("Qwen3Moe", QWEN3_MOE, (2, 1, 2), False),
    "EP of DP 4": ("Qwen3Moe", QWEN3_MOE, (1, 1, 4), True),
    "EP of TP 2, DP 2 and latent attention": ("DeepseekV3", DEEPSEEK, (2, 1, 2), True),
}


def overlaps(one: Any, other: Any) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def size(box: Any) -> int:
    product = 1
    for first, last in box:
        product *= last - first
    return product


def union(boxes: list[Any]) -> int:
    """Elements in boxes that are equal or have nothing in common, as slices of one tensor by rank are."""
    different = list({tuple(box) for box in boxes})
    assert not any(overlaps(a, b) for k, a in enumerate(different) for b in different[:k])
    return sum(map(size, different))


@HEAVY
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.smoke if n == "PP 2, tied" else ()) for n in CASES])
def test_the_ranks_of_an_engine_need_all_of_a_checkpoint(name: str) -> None:
    """And each fills its parameters to the last element, once, from what it needs."""
    family, settings, sizes, by_experts = CASES[name]
    shapes, ranks = alone(plans_of_ranks, family, settings, sizes, {"enable_expert_parallel": by_experts})
    for rank in ranks:
        assert rank["uncovered"] == [] and rank["needed"]
    tied_head = "lm_head.weight" if settings.get("tie_word_embeddings") else None
    for tensor, shape in shapes.items():
        boxes = [box for rank in ranks for box in rank["needed"].get(tensor, [])]
        if tensor == tied_head and not boxes:
            continue
        assert union(boxes) == size([(0, n) for n in shape]), tensor
        takers = [k for k, rank in enumerate(ranks) if tensor in rank["needed"]]
        stages = {k // sizes[0] % sizes[1] for k in takers}
        if ".layers." in tensor:
            assert len(stages) == 1, tensor
        if by_experts and ".experts." in tensor and "shared" not in tensor:
            assert len(takers) == 1, tensor
    lonely = [[t for t in rank["needed"] if ".experts." in t] for rank in ranks] if by_experts else []
    assert all(len(one) == len(lonely[0]) > 0 for one in lonely)


# --- engines ---


def fetch_all(engine: Engine, version: int) -> None:
    engine.ask("rpc", "tensorhub_start_fetch", (version, TIMEOUT_S))

    def states() -> set[str]:
        return {polled["state"] for polled in engine.ask("rpc", "tensorhub_poll", ())}

    wait_until(lambda: states() == {"ready"}, "ready on all workers", TIMEOUT_S)


def install(engine: Engine, version: int) -> list[bool]:
    return [result["installed"] for result in engine.ask("rpc", "tensorhub_install", (version, TIMEOUT_S))]


def digests(engine: Engine) -> list[dict[str, str]]:
    return [worker["runtime"] for worker in engine.ask("rpc", "tensorhub_digests", ())]


def connect(engine: Engine, hub: Server, name: str = "rollout") -> None:
    config = {"hub": hub.address, "run": "test", "model": "actor", "replica": name}
    places = engine.ask("rpc", "tensorhub_connect", (config,))
    assert [place["shard"] for place in places] == list(range(places[0]["shard_count"]))


@HEAVY
@LONG
@pytest.mark.timeout(240)  # vLLM starts processes that import it anew
@pytest.mark.parametrize("kind", ["mixtral", "deepseek-mla"])
def test_the_ranks_of_expert_parallel_engines_update_both_or_none(kind: str, models: Any, hub: Server) -> None:
    """vLLM's CPU build makes and loads them, and crashes as they compute: their bytes, against vLLM's own load."""
    truths = {
        seed: alone(bytes_of_ranks, models(kind, seed), (2, 1, 1), {"enable_expert_parallel": True}) for seed in (1, 2)
    }
    with (
        Engine(models(kind, 1), **EP_2) as engine,
        Client(hub.address, run="test", model="actor", replica="trainer") as trainer,
    ):
        connect(engine, hub)
        assert digests(engine) == truths[1] != truths[2]
        trainer.publish(1, checkpoint(models(kind, 2)))
        fetch_all(engine, 1)
        engine.ask("rpc", "tensorhub_test_discard_on", (1,))
        assert install(engine, 1) == [False, False] and digests(engine) == truths[1]
        for version, seed in enumerate([2, 1, 2], 2):
            trainer.publish(version, checkpoint(models(kind, seed)))
            fetch_all(engine, version)
            assert install(engine, version) == [True, True] and digests(engine) == truths[seed]


ROTARY = "rotary_emb.cos_sin_cache"  # one for all layers of a worker, under the name of the first one


def by_weight(named: dict[str, str]) -> dict[str, str]:
    return {ROTARY if name.endswith(ROTARY) else name: digest for name, digest in named.items()}


@HEAVY
@LONG
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["qwen2-tied", "llama"])
def test_the_stages_of_a_pipeline_update_both_or_none(kind: str, models: Any, hub: Server) -> None:
    """Their tensors together, and their tokens, are those of a fresh engine of one worker."""
    truths = {}
    for seed in (1, 2):
        with Engine(models(kind, seed)) as fresh:
            connect(fresh, hub, f"fresh-{seed}")
            truths[seed] = by_weight(*digests(fresh)), fresh.generate()
    assert truths[1][1] != truths[2][1]

    def is_version_of(engine: Engine, seed: int) -> bool:
        first, second = map(by_weight, digests(engine))
        whole, tokens = truths[seed]
        # At both ends is an embedding that is the head, too; what the layers of a stage share is at each.
        both = {"model.embed_tokens.weight"} if kind.endswith("tied") else set()
        assert first.keys() & second.keys() == both | {ROTARY} and first.keys() | second.keys() == whole.keys()
        parts = [{name: whole[name] for name in part} for part in (first, second)]
        return [first, second] == parts and engine.generate() == tokens

    with (
        Engine(models(kind, 1), **PP_2) as engine,
        Client(hub.address, run="test", model="actor", replica="trainer") as trainer,
    ):
        engine.ask("rpc", "tensorhub_test_warm_up", ())
        connect(engine, hub)
        assert is_version_of(engine, 1)
        trainer.publish(1, checkpoint(models(kind, 2)))
        fetch_all(engine, 1)
        engine.ask("rpc", "tensorhub_test_discard_on", (1,))
        assert install(engine, 1) == [False, False] and is_version_of(engine, 1)
        for version, seed in enumerate([2, 1, 2], 2):
            trainer.publish(version, checkpoint(models(kind, seed)))
            fetch_all(engine, version)
            assert is_version_of(engine, 3 - seed) and not is_version_of(engine, seed)
            assert install(engine, version) == [True, True] and is_version_of(engine, seed)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [("start_timeout_s", 0, 0.5), ("start_timeout_s", -1, None), ("disk_version", -1, 0)],
)
def test_numbers_that_cannot_be_meant_are_refused_by_name(option: str, value: float, allowed: float | None) -> None:
    with pytest.raises(UsageError, match=f"option {option} is {value}.*: choose a number from 0"):
        parse({"disk": "only", option: value}, None)
    assert getattr(parse({"disk": "only", option: allowed}, None)[0], option) == allowed


def test_a_hub_is_given_time_to_answer() -> None:
    given = {"hub": "tcp://127.0.0.1:9", "run": "r", "model": "m", "replica": "engine"}
    with pytest.raises(UsageError, match="option connect_timeout_s is 0"):
        WorkerConfig.parse({**given, "connect_timeout_s": 0})
    assert WorkerConfig.parse({**given, "connect_timeout_s": 0.1}).connect_timeout_s == 0.1
