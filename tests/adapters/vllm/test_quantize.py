"""FP8 by blocks from a checkpoint of floats: verl's numbers, vLLM's loaders and layers, the real store; no engine runs.

What a CPU has no kernel for is left out: a stand-in keeps the scale it was given, as the real ones do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from client_stage import FIRST_HUB
from packaging.version import Version
from vllm_layers import only_rank

from recipes.bench.big.worker import Kernel, Layers
from tensorhub_plugins.core import Client, Deadline, start_server
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.worker import checkpoint_contract, quantize
from tensorhub_plugins.vllm.worker.fingerprint import parallel_ranks
from tensorhub_plugins.vllm.worker.updater import Updater
from tensorhub_plugins.vllm.worker.votes import ShardPosition

pytestmark = pytest.mark.heavy
BLOCK = (128, 128)
TIMEOUT_S = 30.0


VERLS = """
import sys, torch
from verl.utils.kernel import fp8_kernel
fp8_kernel.FP8_DTYPE = torch.float32  # Triton's interpreter rounds up to powers of two wrongly
tensors = torch.load(sys.argv[1])
torch.save([fp8_kernel.scaled_fp8_blockwise_triton(tensor, [128, 128]) for tensor in tensors], sys.argv[2])
"""  # in a process of its own, which has Triton interpret kernels


def test_the_numbers_are_those_of_verls_kernel(tmp_path: Path) -> None:
    pytest.importorskip("verl.utils.kernel.fp8_kernel")
    pytest.importorskip("triton")
    random = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(shape, generator=random).bfloat16() for shape in [(256, 384), (130, 100), (1, 1), (300, 128)]
    ]
    for tensor in tensors:
        tensor[0] = 0
    tensors.append(torch.zeros(128, 256).bfloat16().index_fill_(0, torch.tensor([3]), 1e-37))  # nearly nothing
    torch.save(tensors, tmp_path / "in")
    command = [sys.executable, "-c", VERLS, str(tmp_path / "in"), str(tmp_path / "out")]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300)
    for tensor, (theirs, their_scales) in zip(tensors, torch.load(tmp_path / "out"), strict=True):
        values, scales = quantize.quantize(tensor, BLOCK)
        assert torch.equal(values.view(torch.uint8), theirs.to(values.dtype).view(torch.uint8))
        assert torch.equal(scales, their_scales)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
        assert torch.allclose(values.float() * spread, tensor.float(), atol=0.2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    with only_rank(tmp_path_factory.mktemp("group")) as made:
        made.quant_config = Fp8Config(True, "dynamic", weight_block_size=list(BLOCK))
        yield made


def make(config: Any, monkeypatch: pytest.MonkeyPatch, size: int = 384) -> Layers:
    """A quantized layer between two that are not."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **settings: Kernel(), raising=False)
    model = Layers()
    with torch.device("cpu"):
        model.gate = ReplicatedLinear(256, 8, bias=False, prefix="gate")
        model.linear = ColumnParallelLinear(256, size, bias=False, quant_config=config.quant_config, prefix="linear")
        model.norm = RMSNorm(256)
    for parameter in model.parameters():
        parameter.data.zero_()
        if not hasattr(parameter, "weight_loader"):
            parameter.weight_loader = default_weight_loader
    record_metadata_for_reloading(model)
    model.linear.quant_method.process_weights_after_loading(model.linear)
    return model


def kernel(model: Any) -> Kernel:
    method = vars(model.linear.quant_method).values()
    return next(each for each in method if isinstance(each, Kernel))


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"gate.weight": (8, 256), "linear.weight": (384, 256), "norm.weight": (256,)}
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


class Engine:
    def __init__(self, name: str, hub: Any, config: Any, monkeypatch: pytest.MonkeyPatch, size: int = 384) -> None:
        self.model = make(config, monkeypatch, size)
        said = {"hub": hub.address, "run": "r", "model": "m", "replica": name, "serve_from": "live"}
        self.updater = Updater(
            WorkerConfig.parse(said), self.model, config, ShardPosition(0, 1, "runtime:x"), lambda vote: [vote]
        )

    def update(self, version: int) -> Any:
        result = self.updater.update(version, TIMEOUT_S)
        assert result["installed"], result["error"]
        self.updater._wait_until_served(Deadline.after(TIMEOUT_S), TIMEOUT_S)
        return result["layout"]

    def is_version_of(self, seed: int) -> list[bool]:
        """Whether the weight, the scale, what the kernel reads, and the rest are of this checkpoint."""
        given, layer = checkpoint(seed), self.model.linear
        values, scales = quantize.quantize(given["linear.weight"], BLOCK)
        remembered = kernel(self.model).scale
        assert remembered is not None
        return [
            torch.equal(layer.weight.view(torch.uint8), values.view(torch.uint8)),
            torch.equal(layer.weight_scale_inv, scales),
            torch.equal(remembered, scales),
            torch.equal(self.model.gate.weight, given["gate.weight"])
            and torch.equal(self.model.norm.weight, given["norm.weight"]),
        ]


@pytest.fixture
def verls_patches() -> Iterator[None]:
    """What verl changes of vLLM's FP8 layers in the workers of such a rollout, for its own way of reloading."""
    verl = pytest.importorskip("verl")
    file = Path(verl.__file__).parent / "utils/vllm/vllm_fp8_utils.py"  # alone: its package wants a vLLM called so
    spec = importlib.util.spec_from_file_location("vllm_fp8_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with ExitStack() as stack:
        for patcher in module.build_fp8_method_patchers(Version("0.29.0")):
            stack.enter_context(patcher)
        yield


@pytest.mark.parametrize("within", [pytest.param("vLLM", marks=pytest.mark.smoke), "verl"])
def test_floats_become_fp8_on_the_way_in_and_peers_copy_the_result(
    within: str, config: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if within == "verl":
        request.getfixturevalue("verls_patches")
    made: list[int] = []
    original = quantize.quantize

    def counted(*given: Any) -> Any:
        made.append(given[0].numel())
        return original(*given)

    with start_server(limits=FIRST_HUB) as hub, Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        engines = [Engine(name, hub, config, monkeypatch) for name in ("e0", "e1")]
        for version in (1, 2, 3):  # each converts by a reload, and then copies what the other has converted
            trainer.publish(version, checkpoint(version))
            with monkeypatch.context() as patch:
                patch.setattr(quantize, "quantize", counted)
                layouts = [engine.update(version) for engine in engines]
            assert layouts == ["checkpoint", "runtime:x"]
            assert version < 3 or len(made) == 1, "its values and its scales at once"
            made.clear()
            assert [engine.is_version_of(version) for engine in engines] == [[True] * 4] * 2
            engines.reverse()
        # One that is not like the others is refused by name, whatever it is made of.
        bad = checkpoint(4)
        trainer.publish(4, {**bad, "linear.weight": bad["linear.weight"][:-1].clone()})
        for engine in engines:
            refused = engine.updater.update(4, TIMEOUT_S)
            assert not refused["installed"] and "linear.weight" in refused["error"] and refused["broken"] is None
            assert engine.is_version_of(3) == [True] * 4
            engine.updater.close()


@pytest.mark.smoke
def test_the_control_a_kernel_that_keeps_a_copy_of_its_own_is_noticed(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeps(kernel: Kernel, layer: Any) -> None:
        kernel.scale = layer.weight_scale_inv.detach().clone()

    monkeypatch.setattr(Kernel, "process_weights_after_loading", keeps)
    with start_server(limits=FIRST_HUB) as hub, Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        engines = [Engine(name, hub, config, monkeypatch) for name in ("e0", "e1")]
        for version in (1, 2):
            trainer.publish(version, checkpoint(version))
            for engine in engines:
                assert engine.update(version) == "checkpoint"  # no raw copies
                assert engine.is_version_of(version) == [True] * 4
        copied = {name: p.detach().clone() for name, p in engines[0].model.linear.named_parameters()}
        trainer.publish(3, checkpoint(3))
        engines[0].update(3)
        for name, parameter in engines[0].model.linear.named_parameters():
            parameter.data.copy_(copied[name])
        assert engines[0].is_version_of(2) == [True, True, False, False]  # what raw copies would have made
        for engine in engines:
            engine.updater.close()


def test_what_quantizing_takes_is_said_before_the_first_version(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with start_server(limits=FIRST_HUB) as hub, caplog.at_level("INFO"):
        engine = Engine("e0", hub, config, monkeypatch)
        quantized = engine.model.linear.weight.numel()
        assert quantize.memory_bytes(engine.model) == quantized > 0  # two bytes an element, of which one is made
        assert "while it quantizes a checkpoint of floats" in caplog.text
        engine.updater.close()


def test_floats_beside_a_scale_are_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be of the weights that these floats were made of."""
    with start_server(limits=FIRST_HUB) as hub, Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        engine = Engine("e0", hub, config, monkeypatch)
        trainer.publish(1, {**checkpoint(1), "linear.weight_scale_inv": torch.full((3, 2), 7.0)})
        refused = engine.updater.update(1, TIMEOUT_S)
        assert not refused["installed"] and "linear.weight_scale_inv" in refused["error"] and refused["broken"] is None
        trainer.publish(2, checkpoint(2))
        engine.update(2)
        assert engine.is_version_of(2) == [True] * 4
        engine.updater.close()


def test_who_cannot_quantize_beside_the_engine_keeps_nobody_waiting(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    with start_server(limits=FIRST_HUB) as hub, Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        engines = [Engine(name, hub, config, monkeypatch) for name in ("e0", "e1")]
        trainer.publish(1, checkpoint(1))
        assert [engine.update(1) for engine in engines] == ["checkpoint", "runtime:x"]
        trainer.publish(2, checkpoint(2))
        with monkeypatch.context() as patch:
            patch.setattr(quantize, "quantize", fails)
            assert "allocate" in engines[0].updater.update(2, TIMEOUT_S)["error"]
        assert engines[1].update(2) == "checkpoint"  # it was not left to the first one
        for engine in engines:
            engine.updater.close()


def test_a_checkpoint_that_is_quantized_already_is_taken_as_it_is(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = checkpoint(1)
    given["linear.weight"], given["linear.weight_scale_inv"] = quantize.quantize(given["linear.weight"], BLOCK)
    with start_server(limits=FIRST_HUB) as hub, Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        engine = Engine("e0", hub, config, monkeypatch)
        trainer.publish(1, given)
        engine.update(1)
        assert engine.is_version_of(1) == [True] * 4
        assert engine.updater._quantizer is not None and not engine.updater._quantizer._names
        engine.updater.close()


def test_a_worker_reads_and_quantizes_its_own_slice(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """N5: each worker of an engine read the whole checkpoint, and made all of it, and its copy, on the host."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 4)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 2)
    ranks = {"tp": 2, "tp_size": 4}
    monkeypatch.setattr(checkpoint_contract, "parallel_ranks", lambda config: {**parallel_ranks(config), **ranks})
    wanted: list[Any] = []
    fetch = Client.fetch

    def fetches(*given: Any, **how: Any) -> Any:
        wanted.append(how["wanted"])
        return fetch(*given, **how)

    monkeypatch.setattr(Client, "fetch", fetches)
    most: list[int] = []
    original = quantize.quantize

    def counted(*given: Any) -> Any:
        most.append(given[0].numel())
        return original(*given)

    whole = {
        name: torch.randn(shape).bfloat16() for name, shape in {"gate.weight": (8, 256), "norm.weight": (256,)}.items()
    }
    whole["linear.weight"] = torch.randn(4 * 384 + 256, 256).bfloat16()[: 4 * 384]
    with start_server(limits=FIRST_HUB) as hub, Client(hub.address, run="r", model="m", replica="trainer") as trainer:
        engine = Engine("e0", hub, config, monkeypatch, size=4 * 384)
        engine.updater._plans_ahead = True  # as if there were others
        assert engine.model.linear.weight.shape == (384, 256)
        monkeypatch.setattr(quantize, "quantize", counted)
        for version in (1, 2):
            now = {name: tensor + version for name, tensor in whole.items()}
            trainer.publish(version, now)
            assert engine.update(version) == "checkpoint"
            values, scales = original(now["linear.weight"], BLOCK)
            layer = engine.model.linear
            assert torch.equal(layer.weight.view(torch.uint8), values[2 * 384 : 3 * 384].view(torch.uint8))
            assert torch.equal(layer.weight_scale_inv, scales[6:9])
            assert torch.equal(engine.model.gate.weight, now["gate.weight"])
            assert wanted.pop().size_bytes == 2 * (384 * 256 + 8 * 256 + 256)
        assert set(most) == {384 * 256}
        engine.updater.close()


def test_blocks_are_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(700, 300).bfloat16()
    values, scales = quantize.quantize(tensor, BLOCK)
    monkeypatch.setattr(quantize, "ELEMENTS_AT_ONCE", 300 * 300)
    some, of = quantize.quantize(tensor, BLOCK)
    assert torch.equal(some.view(torch.uint8), values.view(torch.uint8)) and torch.equal(of, scales)
