"""Weights with NaN leave nothing to the ones after them, in any block of KV."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from vllm_adapters import RANK, Trained
from vllm_engines import PROMPTS, Engine, checkpoint, wait_until

from tensorhub_plugins.core import Client, Server
from tensorhub_plugins.vllm.worker import not_finite

NAN, INF = float("nan"), float("inf")
TIMEOUT_S = 30.0
TOKENS = 24


def layer(cache: Any, **more: Any) -> Any:
    return SimpleNamespace(kv_cache=cache, **more)


# --- what is found, and what is changed ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_becomes_zero_and_nothing_else_changes(dtype: Any, value: float) -> None:
    caches = [torch.full((8, 2, 16, 32), torch.finfo(dtype).max, dtype=dtype) for _ in range(3)]
    layers = {
        "0": layer([caches[0]]),
        "1": layer((caches[1], caches[2])),
        "none": layer(torch.tensor([])),
        "x": object(),
    }
    assert not not_finite.clear(layers, ["0", "1", "none", "x"]), (
        "the control: numbers whose sum is no number of this format"
    )
    wanted = [cache.clone() for cache in caches]
    for cache, clean in zip(caches, wanted, strict=True):
        cache[5, 1, 3, 7], clean[5, 1, 3, 7] = value, 0
    assert not_finite.clear(layers, ["1"])
    assert all(torch.equal(cache, clean) for cache, clean in zip(caches, wanted, strict=True))
    assert not not_finite.clear(layers, ["0", "1"])


@pytest.mark.parametrize(
    ("kind", "dtype", "values"),
    [
        ("fp8", torch.uint8, (0x7F, 0xFF)),
        ("fp8_e4m3", torch.float8_e4m3fn, (0x7F, 0xFF)),
        ("fp8_e5m2", torch.uint8, (0x7C, 0x7F, 0xFC, 0xFF)),
        ("fp8", torch.float8_e4m3fnuz, (0x80,)),
    ],
)
def test_bytes_of_fp8_are_read_as_what_they_are(kind: str, dtype: Any, values: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(not_finite, "PIECE_BYTES", 96)
    given = torch.arange(256).remainder(0x7C).to(torch.uint8).reshape(8, 32)  # no NaN among them
    for value in values:
        cache = given.clone()
        layers = {"0": layer(cache.view(dtype), kv_cache_dtype=kind)}
        assert not not_finite.clear(layers, ["0"])
        cache[7, 3] = value
        assert not_finite.clear(layers, ["0"])
        assert cache[7, 3] == 0 and torch.equal(cache.flatten()[:227], given.flatten()[:227])
    packed = {"0": layer(torch.full((2, 2), 0x7F, dtype=torch.uint8), kv_cache_dtype="nvfp4")}
    assert not not_finite.clear(packed, ["0"]) and packed["0"].kv_cache.min() == 0x7F, "of a format with scales in it"


class Drafting(torch.nn.Module):
    kv_cache = torch.zeros(1)


def worker_with(layers: dict[str, Any], groups: list[list[str]], **more: Any) -> Any:
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups],
        needs_kv_cache_zeroing=more.get("zeroes", False),
    )
    drafter = SimpleNamespace(model=more["drafter"]) if "drafter" in more else None
    return SimpleNamespace(
        model_runner=SimpleNamespace(kv_cache_config=config, drafter=drafter),
        vllm_config=SimpleNamespace(
            quant_config=more.get("quantized"), compilation_config=SimpleNamespace(static_forward_context=layers)
        ),
    )


def test_the_last_layer_of_each_kind_is_looked_at() -> None:
    """Of each group of KV, of the model and of what drafts for it; every one where a layer does not tell of the ones
    before."""
    cache, drafter = torch.zeros(1), Drafting()
    layers = {f"{number}": layer(cache) for number in range(6)}
    layers |= {"encoder": layer(torch.tensor([])), "draft": drafter}
    cross = {name: layer(cache, attn_type="encoder_decoder") for name in ("7", "8")}
    groups = [["0", "2", "4", "draft"], ["1", "3", "5"], ["7", "8"]]
    asked = worker_with(layers | cross, groups, drafter=drafter)
    assert not_finite._looked_at(asked, layers | cross) == ["4", "5", "draft", "7", "8"]
    assert not_finite._looked_at(worker_with(layers, groups, quantized="fp8"), layers) == [*layers]
    assert not_finite._looked_at(worker_with(layers, groups, zeroes=True), layers) == []


def test_each_change_of_the_weights_is_followed_by_one_look() -> None:
    kept = layer(torch.tensor([NAN]))
    worker = worker_with({"0": kept}, [["0"]])
    not_finite.clear_after(worker, 0)
    assert kept.kv_cache.isnan(), "nothing was changed"
    not_finite.clear_after(worker, 3)
    assert kept.kv_cache == 0
    kept.kv_cache.fill_(NAN)
    not_finite.clear_after(worker, 3)
    assert kept.kv_cache.isnan(), "the weights that are here made it"
    not_finite.clear_after(worker, 4)
    assert kept.kv_cache == 0


# --- real engines ---


def broken(weights: dict[str, Any], value: float = NAN) -> dict[str, Any]:
    """Return these weights with one number of the first layer replaced."""
    name = next(name for name in weights if name.endswith(("v_proj.weight", "kv_a_proj_with_mqa.weight", "A_log")))
    spoilt = weights[name].clone()
    spoilt.view(-1)[0] = value
    return {**weights, name: spoilt}


def answers(engine: Engine) -> list[Any]:
    """Return tokens and log-probabilities."""
    return [engine.ask("with_adapter", prompt, TOKENS, None) for prompt in PROMPTS]


def update(engine: Engine, version: int, target: str = "") -> None:
    engine.call("tensorhub_start_fetch", version, TIMEOUT_S, False, target)
    wait_until(lambda: engine.call("tensorhub_poll", target)["state"] != "fetching", "fetched")
    engine.ask("pause")
    result = engine.call("tensorhub_install", version, TIMEOUT_S, target)
    engine.ask("resume")
    assert result["installed"], result["error"]


FEW = {"num_gpu_blocks_override": 12, "max_model_len": 128}  # so that each is used again at once
FP8 = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="on CPUs without AVX-512 and AMX vLLM has no FP8 KV cache",
)


@contextmanager
def taking(first: dict[str, Any], spoilt: dict[str, Any], last: dict[str, Any], hub: Server, engine: Engine) -> Any:
    """Yield with these as versions 1 to 3, which the engine may take."""
    with Client(hub.address, run="r", model="actor", replica="trainer") as trainer:
        trainer.retain(newest=3)
        for version, weights in enumerate((first, spoilt, last), 1):
            trainer.publish(version, weights)
        engine.call("tensorhub_connect", {"hub": hub.address, "run": "r", "model": "actor", "replica": "engine"})
        yield


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "value", "options"),
    [
        ("qwen2-untied", NAN, {}),
        pytest.param("qwen2-untied", INF, {"kv_cache_dtype": "fp8"}, marks=FP8),
        ("gemma", NAN, {}),
        pytest.param("deepseek-mla", NAN, {}, marks=pytest.mark.long),
        pytest.param("mamba2", NAN, {}, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(400)
def test_the_version_after_one_with_nan_answers_as_if_that_had_not_been(
    kind: str, value: float, options: dict[str, Any], models: Any, hub: Server
) -> None:
    with Engine(models(kind, 2), **FEW, **options) as fresh:
        wanted = answers(fresh)
    first, last = checkpoint(models(kind, 1)), checkpoint(models(kind, 2))
    with Engine(models(kind, 1), **FEW, **options) as engine, taking(first, broken(first, value), last, hub, engine):
        before = answers(engine)
        for version, expected in ((3, wanted), (1, before)):
            update(engine, 2)
            assert str(answers(engine)) not in (str(before), str(wanted))
            update(engine, version)
            assert answers(engine) == expected, version


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_without_the_look_nan_stays(models: Any, hub: Server) -> None:
    """The control of the test above, which needs kernels that load more than a request's tokens."""
    first = checkpoint(models("qwen2-untied", 1))
    with (
        Engine(models("qwen2-untied", 1), extension="vllm_faults.UnlookedExtension", **FEW) as engine,
        taking(first, broken(first), first, hub, engine),
    ):
        before = answers(engine)
        update(engine, 2)
        answers(engine)
        update(engine, 3)
        assert "nan" in str(answers(engine)) and "nan" not in str(before)


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_engine_that_follows_forgets_a_withdrawn_version_with_nan(models: Any, bare: Any, hub: Server) -> None:
    first = checkpoint(models("qwen2-untied", 1))
    extra = {"hub": hub.address, "model": "actor", "replica": "engine", "follow": "now"}
    options = {"own_core": True, "extension": None, "load_format": "tensorhub", "model_loader_extra_config": extra}
    with Client(hub.address, run="default", model="actor", replica="trainer") as trainer:
        trainer.retain(newest=2)
        trainer.publish(1, first)
        with Engine(bare("qwen2-untied"), **options, **FEW) as engine:
            before = answers(engine)
            trainer.publish(2, broken(first))
            wait_until(lambda: engine.call("tensorhub_poll")["version"] == 2, "it follows")
            assert "nan" in str(answers(engine))
            trainer.withdraw(2)
            wait_until(lambda: engine.call("tensorhub_poll")["version"] == 1, "it returns")
            assert answers(engine) == before


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_an_adapter_whose_numbers_are_too_large_leaves_nothing_to_the_next_one(models: Any, hub: Server) -> None:
    """Nor to requests without it, once it has gone."""
    model, name = models("qwen3", 1), "actor.lora"
    trained = Trained(model)
    first, huge, last = (trained.step(number) for number in (1, 1, 3))
    next(huge[each] for each in sorted(huge) if "v_proj.lora_B" in each).fill_(3e38)
    config = {"hub": hub.address, "run": "r", "model": "actor", "replica": "engine", "lora": [name]}
    options = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1, **FEW}

    def asked(engine: Engine) -> list[Any]:
        return [engine.ask("with_adapter", prompt, TOKENS, adapter) for prompt in PROMPTS for adapter in (name, None)]

    found = []
    with Client(hub.address, run="r", model=name, replica="trainer") as trainer:
        trainer.retain(newest=8)
        for version, adapter in enumerate((first, huge, last), 1):
            trainer.publish(version, adapter)
        for versions in ([1, 3], [1, 2, 3]):
            with Engine(model, **options) as engine:
                engine.call("tensorhub_connect_adapters", {**config, "replica": f"engine-{len(versions)}"})
                for version in versions:
                    update(engine, version, name)
                    found.append(asked(engine))
    assert "nan" in str(found[3]), "the second adapter has had its effect"
    assert (found[0], found[1]) == (found[2], found[4])
