"""Checkpoints that are not this model's: refused by name before anything stops, and what broke can always be mended.

Every refusal here was an engine with a wrong model, or one broken for good, before there was a contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from vllm_engines import Engine, EngineError, checkpoint, engines, wait_until

from tensorhub_plugins.core import Client, Server

pytestmark = pytest.mark.heavy
LONG = pytest.mark.long

TIMEOUT_S = 60.0
Weights = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: tensor for key, tensor in weights.items() if key != name}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: change(weights[name]).contiguous()}


def two_rows_more(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:2]])


def two_rows_less(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-2]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 100).to(torch.int32)


def surplus(weights: Weights) -> Weights:
    return {**weights, "model.layers.7.self_attn.q_proj.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}


Q, DOWN, NORM = (
    f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj", "post_attention_layernorm")
)
EXPERT = "model.layers.0.block_sparse_moe.experts.2"
GATE_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
BAD: dict[str, list[tuple[str, Callable[[Weights], Weights], str]]] = {
    "qwen2-untied": [
        ("a linear is missing", without(Q), "model.layers.1.self_attn.q"),
        ("a bias is missing", without(Q.replace("weight", "bias")), "model.layers.1.self_attn.q"),
        ("a norm is missing", without(NORM), NORM),
        ("the head is missing", without("lm_head.weight"), "lm_head.weight"),
        ("a surplus tensor", surplus, "model.layers.7"),
        ("rows are missing", changed(DOWN, two_rows_less), DOWN),
        ("surplus rows", changed(DOWN, two_rows_more), DOWN),
        ("surplus rows that vLLM cuts off", changed(Q, two_rows_more), Q),
        ("the same with a bias", changed(Q.replace("weight", "bias"), two_rows_more), Q.replace("weight", "bias")),
        ("transposed", changed(DOWN, torch.t), DOWN),
        ("integers", changed(DOWN, as_integers), DOWN),
        ("float8", changed(DOWN, lambda t: t.to(torch.float8_e4m3fn)), DOWN),
        ("empty", changed(NORM, lambda t: t[:0]), NORM),
        ("nothing at all", lambda weights: {"a": torch.zeros(3)}, "a float32[3]"),
    ],
    "qwen2-tied": [
        (
            "another head than the embedding",
            lambda weights: {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 2},
            "lm_head.weight",
        ),
    ],
    "llama": [
        (
            "a bias that the model has not",
            lambda weights: {**weights, Q.replace("weight", "bias"): torch.ones(128, dtype=torch.bfloat16)},
            Q.replace("weight", "bias"),
        ),
    ],
    "mixtral": [
        ("an expert's tensor is missing", without(f"{EXPERT}.w1.weight"), "model.layers.0.block_sparse_moe.experts"),
        ("an expert's rows are missing", changed(f"{EXPERT}.w2.weight", two_rows_less), "experts"),
        ("an expert's surplus rows", changed(f"{EXPERT}.w2.weight", two_rows_more), "experts"),
        ("the router is missing", without("model.layers.0.block_sparse_moe.gate.weight"), "block_sparse_moe.gate"),
        ("an expert of integers", changed(f"{EXPERT}.w3.weight", as_integers), f"{EXPERT}.w3.weight"),
    ],
    "deepseek-mla": [
        ("the router's bias is missing", without(GATE_BIAS), GATE_BIAS),
        ("an expert's tensor is missing", without("model.layers.1.mlp.experts.3.down_proj.weight"), "experts"),
        ("a derived weight's source is missing", without("model.layers.1.self_attn.kv_b_proj.weight"), "kv_b_proj"),
    ],
}


def connect(engine: Engine, hub: Server) -> None:
    engine.call(
        "tensorhub_connect", {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout", "verify": True}
    )


def try_to_take(engine: Engine, version: int) -> str:
    """As a follower does up to the pause; what was said against it, or nothing."""
    engine.call("tensorhub_start_fetch", version, TIMEOUT_S)
    wait_until(lambda: engine.call("tensorhub_poll")["state"] != "fetching", "fetched", TIMEOUT_S)
    polled = engine.call("tensorhub_poll")
    if polled["state"] == "ready":
        try:
            engine.call("tensorhub_prepare_install", TIMEOUT_S)
            return ""
        except EngineError:
            polled = engine.call("tensorhub_poll")
    assert (polled["state"], polled["error_kind"], polled["broken"]) == ("failed", "VersionRefused", None)
    return str(polled["error"])


def install(engine: Engine, version: int) -> dict[str, Any]:
    engine.ask("pause")
    result: dict[str, Any] = engine.call("tensorhub_install", version, TIMEOUT_S)
    if result["broken"] is None:
        engine.ask("resume")
    return result


def take(engine: Engine, version: int) -> None:
    assert try_to_take(engine, version) == ""
    result = install(engine, version)
    assert result["installed"], result["error"]
    wait_until(lambda: not engine.call("tensorhub_poll")["serving"], "served", TIMEOUT_S)
    engine.call("tensorhub_guard")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("qwen2-untied", marks=pytest.mark.smoke),
        "qwen2-tied",
        "llama",
        "mixtral",
        pytest.param("deepseek-mla", marks=LONG),
    ],
)
def test_another_models_tensors_are_refused_by_name(kind: str, models: Any, hub: Server) -> None:
    """As the first checkpoint of an engine that reads its weights from disk, and later as one of many."""
    new = checkpoint(models(kind, 2))
    with (
        engines(models(kind, 1), models(kind, 2)) as (engine, fresh),
        Client(hub.address, run="test", model="actor", replica="trainer") as trainer,
    ):
        expected = fresh.generate()
        fresh.close()
        connect(engine, hub)
        untouched, answers = engine.call("tensorhub_digests"), engine.generate()
        version = 0
        for good_one_came in (False, True):
            for what, spoil, named in BAD[kind]:
                version += 1
                trainer.publish(version, spoil(new))
                said = try_to_take(engine, version)
                assert named in said, (what, said)
                result = engine.call("tensorhub_install", version, TIMEOUT_S)  # whoever insists
                assert not result["installed"] and result["broken"] is None
                assert engine.call("tensorhub_digests")["runtime"] == untouched["runtime"], what
                trainer.unpublish(version)
            assert engine.generate() == answers
            version += 1
            trainer.publish(version, new)
            take(engine, version)
            untouched, answers = engine.call("tensorhub_digests"), engine.generate()
            assert answers == expected, good_one_came
        # What a loader's copy converts is fine.
        version += 1
        trainer.publish(version, {name: tensor.float() for name, tensor in new.items()})
        take(engine, version)
        assert engine.generate() == expected


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("deepseek-mla", marks=LONG)])
def test_whatever_fails_half_way_is_mended_by_the_next_version(kind: str, models: Any, hub: Server) -> None:
    old, new = checkpoint(models(kind, 1)), checkpoint(models(kind, 2))
    with (
        engines(models(kind, 1), models(kind, 2), extension="vllm_faults.FaultyExtension") as (engine, fresh),
        Client(hub.address, run="test", model="actor", replica="trainer") as trainer,
    ):
        expected = fresh.generate()
        connect(engine, hub)
        names = set(engine.call("tensorhub_digests")["runtime"])
        for version, step in enumerate(("load", "process", "finalize"), start=1):
            trainer.publish(2 * version, old)
            assert try_to_take(engine, 2 * version) == ""
            engine.call("tensorhub_test_fail_reload", step)
            failed = install(engine, 2 * version)
            assert "injected" in failed["error"] and failed["broken"] is not None
            assert set(engine.call("tensorhub_digests")["runtime"]) == names  # nothing was left without memory
            with pytest.raises(EngineError, match="BrokenWeights"):
                engine.call("tensorhub_guard")
            trainer.publish(2 * version + 1, new)
            assert try_to_take(engine, 2 * version + 1) == ""
            assert install(engine, 2 * version + 1)["installed"]
            assert engine.generate() == expected, step


def test_an_engine_starts_from_the_newest_version_that_fits(models: Any, bare: Any, hub: Server) -> None:
    good = checkpoint(models("qwen2-untied", 1))
    joining = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout", "serve_from": "live"}
    start = {"load_format": "tensorhub", "model_loader_extra_config": joining, "extension": None}
    with Client(hub.address, run="test", model="actor", replica="trainer") as trainer:
        trainer.publish(1, without(Q)(good))
        with pytest.raises(EngineError, match="cannot start from the store: VersionRefused: .*qkv_proj.weight"):
            Engine(bare("qwen2-untied"), **start)
        trainer.publish(2, good)
        trainer.publish(3, surplus(good))
        with Engine(bare("qwen2-untied"), **start) as engine, engines(models("qwen2-untied", 1)) as (fresh,):
            assert engine.call("tensorhub_poll")["version"] == 2
            assert engine.generate() == fresh.generate()


@pytest.mark.timeout(240)  # vLLM starts processes that import it anew
def test_workers_that_refuse_do_not_mix_up_their_answers(models: Any, hub: Server) -> None:
    """All workers refuse the first version, one alone the second; the third is good, whatever was refused before."""
    new = checkpoint(models("llama", 2))
    with (
        Engine(models("llama", 1), workers=2, env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}) as engine,
        Client(hub.address, run="test", model="actor", replica="trainer") as trainer,
    ):
        config = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout"}
        engine.ask("rpc", "tensorhub_connect", (config,))
        answers = engine.generate()
        trainer.publish(1, without(Q)(new))
        trainer.publish(2, changed(Q, two_rows_less)(new))  # the first worker finds all the rows that it needs
        trainer.publish(3, new)
        for version, refusing in ((1, [True, True]), (2, [False, True])):
            assert fetch_all(engine, version) == ["ready", "ready"]
            with pytest.raises(EngineError, match="VersionRefused|Worker failed"):
                engine.ask("rpc", "tensorhub_prepare_install", (TIMEOUT_S,))
            states = [worker["error_kind"] == "VersionRefused" for worker in engine.ask("rpc", "tensorhub_poll", ())]
            assert states == refusing
            with pytest.raises(EngineError):  # every worker says that this is what it has
                engine.ask("rpc", "tensorhub_start_fetch", (0, TIMEOUT_S))
            assert engine.ask("rpc", "tensorhub_health", ()) == [None, None]
            assert engine.generate() == answers
        assert fetch_all(engine, 3) == ["ready", "ready"]
        engine.ask("rpc", "tensorhub_prepare_install", (TIMEOUT_S,))
        results = engine.ask("rpc", "tensorhub_install", (3, TIMEOUT_S))
        assert [result["installed"] for result in results] == [True, True]
        assert engine.generate() != answers


def fetch_all(engine: Engine, version: int) -> list[str]:
    engine.ask("rpc", "tensorhub_start_fetch", (version, TIMEOUT_S))

    def states() -> list[str]:
        return [worker["state"] for worker in engine.ask("rpc", "tensorhub_poll", ())]

    wait_until(lambda: "fetching" not in states(), "fetched by all workers", TIMEOUT_S)
    return states()


def test_a_broken_engine_waits_for_clients_that_leave(models: Any, hub: Server) -> None:
    """vLLM takes one more step, without tokens, to clear a request whose client has gone."""
    with (
        engines(models("qwen2-tied", 1), extension="vllm_faults.FaultyExtension") as (engine,),
        Client(hub.address, run="test", model="actor", replica="trainer") as trainer,
    ):
        connect(engine, hub)
        trainer.publish(1, checkpoint(models("qwen2-tied", 2)))
        assert engine.call("tensorhub_health") is None
        assert try_to_take(engine, 1) == ""
        engine.call("tensorhub_test_fail_conversion_on", 0)
        assert install(engine, 1)["broken"] is not None
        assert "version 1" in engine.call("tensorhub_health")
        assert engine.ask("step_without_tokens") is True
        with pytest.raises(EngineError, match="BrokenWeights"):  # the control: with tokens it refuses
            engine.ask("resume")
            engine.generate()


def test_models_that_compute_with_views_of_weights_follow(models: Any, bare: Any, hub: Server) -> None:
    """Mamba2 on the CPU: a view of the convolution's weight stayed what it was when the model was made."""
    kind = "mamba2"
    with Client(hub.address, run="test", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models(kind, 1)))
        joining = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout", "serve_from": "live"}
        start = {"load_format": "tensorhub", "model_loader_extra_config": joining}
        with engines(models(kind, 2)) as (fresh,), Engine(bare(kind), extension=None, **start) as engine:
            expected = fresh.generate()
            assert engine.generate() != expected
            trainer.publish(2, checkpoint(models(kind, 2)))
            take(engine, 2)
            assert engine.generate() == expected
        # The control: what does not follow is refused by name. Convolutions are packed only with AVX512-BF16.
        if torch.cpu._is_avx512_bf16_supported():
            with pytest.raises(EngineError, match="do not follow an update: backbone.layers.0.mixer.conv_weights"):
                Engine(bare(kind), extension="vllm_faults.StaleViewsExtension", **start)
