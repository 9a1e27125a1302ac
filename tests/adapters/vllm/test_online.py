"""`--quantization` of floats as they are loaded: real engines of vLLM's CPU build, and vLLM's own load beside them.

`fp8_per_channel` runs there as it is, slowly; what the others lack is said in tests/support/vllm_online.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
import vllm
from torch_ranks import started
from vllm_engines import TOKENS, Engine, EngineError, checkpoint, make_model, wait_until

from tensorhub_plugins.core import CHECKPOINT, Client, Server, UsageError
from tensorhub_plugins.vllm.doctor import check_sync
from tensorhub_plugins.vllm.worker import online_quantization

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not vllm.__version__.startswith("0.29."),
        reason="the stand-ins are for what the CPU build of vLLM 0.29 lacks; that of 0.32 has kernels that refuse them",
    ),
]
LONG = pytest.mark.long
TIMEOUT_S = 60.0
TWO = {"workers": 2, "extension": "vllm_online.FaultyOnline", "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
PATIENT = "vllm_online.OnlinePatient"


def long(*values: str) -> Any:
    return pytest.param(*values, marks=LONG)


# --- the doctor ---


def examine(model: Path, quantization: str, patient: str = PATIENT) -> list[check_sync.Finding]:
    settings = {
        "kv_cache_memory_bytes": 64 << 20,
        "quantization": quantization,
        "worker_extension_cls": patient,
    }
    return list(check_sync.check_sync(model, check_sync.starter(settings)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("quantization", "kind", "patient"),
    [
        ("fp8_per_channel", "qwen2-untied", PATIENT),
        long("fp8_per_channel", "qwen2-untied", "tensorhub_plugins.vllm.doctor.check_sync.Patient"),  # no stand-in
        ("fp8", "mixtral", PATIENT),
        long("fp8", "qwen2-tied", PATIENT),
        long("fp8", "deepseek-mla", PATIENT),  # matrices are derived from a layer that is quantized
        long("fp8_per_tensor", "llama", PATIENT),
        long("fp8_per_channel", "qwen3-moe", PATIENT),
        long("fp8_per_block", "qwen2-untied", PATIENT),
        long("fp8_per_block", "mixtral", PATIENT),
        long("mxfp8", "qwen2-untied", PATIENT),
        long("mxfp8", "mixtral", PATIENT),
        long("int8_per_channel_weight_only", "mixtral", PATIENT),
    ],
)
def test_a_synced_engine_equals_a_fresh_one(quantization: str, kind: str, patient: str, tmp_path: Path) -> None:
    findings = examine(make_model(kind, tmp_path, 1), quantization, patient)
    assert [finding.wrong for finding in findings] == [""] * 6, findings
    assert "copied from a peer" in findings[4].what


@LONG
def test_the_control_a_kernel_that_keeps_the_scales_of_a_reload_is_noticed(tmp_path: Path) -> None:
    *_, last = examine(make_model("mixtral", tmp_path, 1), "fp8", "vllm_online.UnboundPatient")
    assert "moe_quant_config._w1.scale" in last.wrong


# --- starts and updates, and vLLM's own load ---


def client(hub: Server, name: str) -> Client:
    return Client(hub.address, run="default", model="actor", replica=name)


def start(model: Path, hub: Server, *, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
    settings = {"hub": hub.address, "model": "actor", **(extra or {})}
    return Engine(model, load_format="tensorhub", model_loader_extra_config=settings, **options)


def runtime_digests(engine: Engine) -> list[dict[str, str]]:
    return [digests["runtime"] for digests in engine.ask("rpc", "tensorhub_digests", ())]


def everything(engine: Engine) -> dict[str, str]:
    found: dict[str, str] = engine.call("tensorhub_everything")
    return found


def update(engine: Engine, version: int) -> dict[str, Any]:
    engine.call("tensorhub_start_fetch", version, TIMEOUT_S)
    wait_until(lambda: engine.call("tensorhub_poll")["state"] != "fetching", "fetched", TIMEOUT_S)
    engine.ask("pause")
    result: dict[str, Any] = engine.call("tensorhub_install", version, TIMEOUT_S)
    engine.ask("resume")
    wait_until(lambda: not engine.call("tensorhub_poll")["serving"], "served", TIMEOUT_S)
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("quantization", "kind"),
    [("fp8", "qwen2-untied"), long("fp8_per_channel", "qwen2-tied"), long("fp8", "mixtral")],
)
def test_every_version_is_what_vllm_makes_of_it(
    quantization: str, kind: str, models: Any, bare: Any, hub: Server
) -> None:
    """Weights, scales and all else that hangs on the model, bit for bit; tokens; by peers in turn."""
    how = {"extension": PATIENT, "quantization": quantization}
    truths = {}
    for seed in (1, 2):
        with Engine(models(kind, seed), **how) as stock:
            truths[seed] = stock.generate(), everything(stock)
    assert truths[1][0] != truths[2][0]

    def is_version_of(engine: Engine, seed: int) -> bool:
        tokens, tensors = truths[seed]
        return engine.generate() == tokens and everything(engine) == tensors

    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models(kind, 1)))
        with start(bare(kind), hub, **how) as first, start(bare(kind), hub, **how) as second:
            reports = [engine.call("tensorhub_poll")["report"]["layout"] for engine in (first, second)]
            assert reports[0] == CHECKPOINT and reports[1].startswith("runtime:")
            engines = [first, second]
            for version, seed in enumerate([2, 1, 2], 2):
                trainer.publish(version, checkpoint(models(kind, seed)))
                layouts = [update(engine, version)["layout"] for engine in engines]
                assert layouts == [CHECKPOINT, reports[1]]
                assert all(is_version_of(engine, seed) and not is_version_of(engine, 3 - seed) for engine in engines)
                engines.reverse()
            lacks(trainer, models(kind, 1), engines)
            is_quantized(trainer, models(kind, 1), engines)
            assert all(is_version_of(engine, 2) for engine in engines)


def lacks(trainer: Any, model: Path, engines: list[Engine]) -> None:
    tensors = checkpoint(model)
    missing = next(name for name in reversed(tensors) if "o_proj" in name)
    trainer.publish(5, {name: tensor for name, tensor in tensors.items() if name != missing})
    for engine in engines:
        refused = update(engine, 5)
        assert missing in refused["error"] and refused["broken"] is None


def is_quantized(trainer: Any, model: Path, engines: list[Engine]) -> None:
    given = quantized(checkpoint(model))
    name = next(name for name in given if name.endswith("weight_scale"))
    trainer.publish(6, given)
    for engine in engines:
        refused = update(engine, 6)
        assert name in refused["error"] and refused["broken"] is None


def quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.to(torch.float8_e4m3fn) if "o_proj" in name else tensor
        if "o_proj" in name:
            found[f"{name}_scale"] = torch.ones(1)
    return found


@pytest.mark.timeout(240)
def test_a_quantized_checkpoint_is_refused_by_who_quantizes_itself(models: Any, bare: Any, hub: Server) -> None:
    """As the first one. A start waits for another one that it can take."""
    how = {"extension": PATIENT, "quantization": "fp8_per_channel"}
    given = checkpoint(models("qwen2-untied", 1))
    with client(hub, "trainer") as trainer:
        trainer.publish(1, quantized(given))
        with pytest.raises(EngineError) as refused:
            start(bare("qwen2-untied"), hub, **how, extra={"start_timeout_s": 5.0})
        said = str(refused.value)
        assert "o_proj.weight is quantized already, and this engine quantizes floats itself" in said
        assert "start it without --quantization and with the checkpoint's quantization_config" in said


@pytest.mark.timeout(240)
def test_weights_from_disk_are_quantized_and_served(models: Any, bare: Any, hub: Server) -> None:
    """And an engine that vLLM started with dummies takes them from a peer, and the next version from a trainer."""
    kind, how = "qwen2-untied", {"extension": PATIENT, "quantization": "fp8_per_channel"}
    with start(models(kind, 1), hub, **how, extra={"disk": "fallback", "disk_version": 1}) as first:
        assert first.call("tensorhub_poll")["report"] is None
        with Engine(bare(kind), **how, load_format="dummy") as second, client(hub, "trainer") as trainer:
            assert second.generate() != first.generate()
            config = {"hub": hub.address, "run": "default", "model": "actor", "replica": "second"}
            layout = second.call("tensorhub_connect", config)["layout"]
            assert update(second, 1)["layout"] == layout
            assert second.generate() == first.generate()
            assert runtime_digests(second) == runtime_digests(first)
            trainer.publish(2, checkpoint(models(kind, 2)))
            for engine in (second, first):
                assert update(engine, 2)["installed"]
            assert second.generate() == first.generate() and everything(second) == everything(first)


@LONG
@pytest.mark.timeout(600)
def test_a_server_that_quantizes_follows(hub: Server, tmp_path: Path) -> None:
    """`vllm serve --quantization fp8_per_channel`, as a person starts it; its tokens are those of vLLM's own load."""
    from vllm_servers import make_two_models, serving

    folders, prompt = make_two_models(tmp_path), [10, 11, 12, 13, 14, 15]
    options = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    expected = []
    for folder in folders:
        with Engine(folder, extension=None, **options) as stock:
            expected += stock.generate([prompt])
    assert expected[0] != expected[1]
    shell = [word for key, value in options.items() for word in (f"--{key}", value)]

    def answered(server: Any) -> list[int]:
        tokens: list[int] = server.complete(prompt, TOKENS).json()["choices"][0]["token_ids"]
        return tokens

    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(folders[0]))
        extra = {"hub": hub.address, "model": "actor", "follow": "now"}
        with serving(folders[0], tmp_path, extra, *shell) as server:
            assert answered(server) == expected[0]
            trainer.publish(2, checkpoint(folders[1]))
            wait_until(lambda: answered(server) == expected[1], "the second version's answer", TIMEOUT_S)


def made_by(method: str) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.quant_method = type(method, (), {"uses_meta_device": True})()
    return torch.nn.ModuleList([layer])


@pytest.mark.parametrize(
    ("quantization", "method"),
    [(name, "UnquantizedLinearMethod") for name in online_quantization.OPAQUE]
    + [("nvfp4_per_token", "Nvfp4OnlineMoEMethod")],
)
def test_what_is_not_known_to_follow_is_refused_with_what_to_do(quantization: str, method: str) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))
    model = made_by(method) if method.startswith("Nv") else torch.nn.Module()
    with pytest.raises(UsageError, match=f"what {quantization} makes of weights .* --quantization fp8"):
        online_quantization.check(model, config)
    config.model_config.quantization = "fp8"
    online_quantization.check(made_by("Fp8PerTensorOnlineLinearMethod"), config)


def test_what_floats_take_is_said_before_the_first_version() -> None:
    model = made_by("Fp8PerTensorOnlineLinearMethod")
    weight = torch.zeros(8, 4, dtype=torch.float8_e4m3fn)
    model[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    model[0].weight_scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    assert online_quantization.more_bytes(model) == 8 * 4
    model[0].quant_method.uses_meta_device = False
    assert online_quantization.more_bytes(model) == 0


# --- ranks that make a scale together ---


def test_all_workers_of_an_engine_know_alike_whether_they_make_scales_together() -> None:
    """A stage of a pipeline may have no such layer, and votes like the others."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.quantization.experts_int8 import ExpertsInt8Config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    def together(quant_config: Any, ranks: int = 2) -> bool:
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        return online_quantization.shares_scales(SimpleNamespace(parallel_config=parallel, quant_config=quant_config))

    by_name = OnlineQuantizationConfig(resolve_quantization_config("fp8_per_channel", None))
    assert [together(config) for config in (by_name, ExpertsInt8Config(), Fp8Config())] == [True] * 3
    assert not together(by_name, ranks=1)
    assert not together(None) and not together(Fp8Config(is_checkpoint_fp8_serialized=True))


def install_all(engine: Engine, version: int) -> list[dict[str, Any]]:
    engine.ask("rpc", "tensorhub_start_fetch", (version, TIMEOUT_S))

    def states() -> set[str]:
        return {polled["state"] for polled in engine.ask("rpc", "tensorhub_poll", ())}

    wait_until(lambda: states() == {"ready"}, "ready on all workers", TIMEOUT_S)
    results: list[dict[str, Any]] = engine.ask("rpc", "tensorhub_install", (version, TIMEOUT_S))
    return results


@LONG
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("quantization", "kind", "layer"),
    [
        ("fp8_per_channel", "qwen2-untied", "model.layers.1.self_attn.o_proj"),
        ("fp8", "mixtral", "model.layers.1.block_sparse_moe.experts.routed_experts"),
    ],
)
def test_ranks_that_share_scales_update_all_or_none(
    quantization: str, kind: str, layer: str, models: Any, hub: Server
) -> None:
    """One that fails before or within a reload has the others wait for nothing; the next version mends both."""
    how = {**TWO, "quantization": quantization}
    truths = {}
    for seed in (1, 2):
        with Engine(models(kind, seed), **how) as stock:
            config = {"hub": hub.address, "run": "truths", "model": "actor", "replica": f"stock-{seed}"}
            stock.ask("rpc", "tensorhub_connect", (config,))
            truths[seed] = runtime_digests(stock), stock.generate()
    with Engine(models(kind, 1), **how) as engine, client(hub, "trainer") as trainer:
        config = {"hub": hub.address, "run": "default", "model": "actor", "replica": "rollout"}
        engine.ask("rpc", "tensorhub_connect", (config,))
        fault: tuple[str, tuple[Any, ...]]
        for version, fault in enumerate(
            [
                ("tensorhub_test_fail_conversion_on", (1,)),  # the others are at their first scale
                ("tensorhub_test_fail_layer_on", (0, layer)),
                ("tensorhub_test_fail_conversion_on", (0,)),
            ],
            start=1,
        ):
            seed = 1 + version % 2
            trainer.publish(2 * version, checkpoint(models(kind, 3 - seed)))
            engine.ask("rpc", *fault)
            failed = install_all(engine, 2 * version)
            assert [result["installed"] for result in failed] == [False, False]
            errors = sorted(result["error"] for result in failed)
            assert "another worker of this engine has failed" in errors[0] and "injected" in errors[1]
            trainer.publish(2 * version + 1, checkpoint(models(kind, seed)))
            assert all(result["installed"] for result in install_all(engine, 2 * version + 1))
            assert (runtime_digests(engine), engine.generate()) == truths[seed]


@LONG
@pytest.mark.timeout(400)
def test_an_engine_starts_although_a_rank_failed_once(models: Any, bare: Any, hub: Server) -> None:
    """The control: one that goes on failing ends the start, and nobody waits for it."""
    kind, how = "qwen2-untied", {**TWO, "quantization": "fp8_per_channel"}
    with Engine(models(kind, 1), **how) as stock, client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models(kind, 1)))
        with start(bare(kind), hub, **{**how, "extension": "vllm_online.FailsOnce"}) as engine:
            assert engine.generate() == stock.generate()
        with pytest.raises(EngineError):
            start(bare(kind), hub, **{**how, "extension": "vllm_online.FailsTwice"})


@pytest.mark.timeout(300)  # each rank imports vLLM
@pytest.mark.parametrize(("in_step", "stages"), [(True, 1), pytest.param(True, 2, marks=LONG), (False, 1)])
def test_who_fails_ends_the_steps_of_the_others(in_step: bool, stages: int, tmp_path: Path) -> None:
    """The ranks of another stage go on to the vote. The control: without steps it is waited for, as long as the group's
    timeout."""
    file, count = Path(__file__).parents[2] / "support" / "ranks_in_step.py", 2 * stages
    with started(str(file), count, tmp_path, in_step, stages) as ranks:
        assert [rank.wait(timeout=250) for rank in ranks] == [0] * count
    saw = [(tmp_path / str(rank)).read_text() for rank in range(count)]
    others = ["all, refused"] * (count - 2)
    assert saw == ["out-of-step, refused" if in_step else "waited, refused", "failed, refused", *others]
