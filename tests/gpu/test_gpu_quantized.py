"""Weights of FP8, and what is cut from a checkpoint by a plan: rows 7, 22 and 23 of the suite, without vLLM; where vLLM
is as well, its engines that quantize as they load.

test_quantized.py, test_slices.py and test_online.py of tests/adapters/vllm have the same with vLLM's own layers,
on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gpu_place import NO_GPU
from quantized import Fp8Layer, Remembering, fp8_experts, quantized

from tensorhub_plugins.core import VersionRefused, copy_all, same_bytes
from tensorhub_plugins.vllm.worker.checkpoint_contract import Place, rehearse_in
from tensorhub_plugins.vllm.worker.kernel_references import rebind
from tensorhub_plugins.vllm.worker.plan import given_by, view, view_in

# --- row 7: a kernel that remembers the scale of its layer (A2) ---


@pytest.mark.parametrize("rebinds", [True, False])
def test_a_raw_copy_after_a_reload_is_what_eager_and_captured_steps_compute_with(place, clients, rebinds):
    """The control: eager steps take the weights of version 3 and the scales of version 2."""
    size = place.size(1 << 20, 100)
    layer = Remembering(place.torch_device, size)
    layer.capture()
    trainer, rollout = clients("trainer"), clients("rollout")
    moved = layer.reload(torch.full_like(layer.weight, 2.0), torch.full_like(layer.scale, 5.0))
    if rebinds:
        assert rebind(layer.kernel, moved, skip=set()) == 1
    for eager in (True, False):
        assert set(layer.step(eager=eager)) == {10.0}
    new = {"weight": torch.full((size,), 3.0), "scale": torch.full((size,), 7.0)}
    trainer.publish(3, new)
    rollout.replicate({"weight": layer.weight, "scale": layer.scale}, 3, serve=False)
    assert set(layer.step(eager=True)) == ({21.0} if rebinds else {15.0})
    assert set(layer.step(eager=False)) == ({21.0} if rebinds or place.is_gpu else {15.0})


# --- row 22: slices by a plan, quantized on the device ---


class Attention(torch.nn.Module):
    """One worker's part of a layer, as engines have it: q, k and v in one matrix, cut by rows; o, cut by columns."""

    def __init__(self, width, rank, ranks, device):
        super().__init__()
        self.rank, self.size = rank, width // ranks
        self.qkv = torch.nn.Parameter(torch.zeros(3 * self.size, width, dtype=torch.bfloat16, device=device), False)
        self.o = torch.nn.Parameter(torch.zeros(width, self.size, dtype=torch.bfloat16, device=device), False)

    def load_weights(self, weights, *, into):
        """into: parameters by name, these or such without memory."""
        cut = slice(self.rank * self.size, (self.rank + 1) * self.size)
        for name, loaded in weights:
            if name == "o":
                into["o"].data.copy_(loaded[:, cut])
            else:
                at = "qkv".index(name) * self.size
                into["qkv"].data[at : at + self.size].copy_(loaded[cut])


def plan_of(model, tensors, rank, ranks):
    """Baked from what the loaders do, with nothing in memory."""
    places, into = {}, {}
    for name, live in model.named_parameters():
        into[name] = torch.empty(live.shape, dtype=live.dtype, device="meta")
        storage = into[name].untyped_storage()._cdata
        places[storage] = Place(f"attention.{name}", model, live.shape, live.dtype, live.numel(), live)
    nothing = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    load = partial(model.load_weights, into=into)
    return rehearse_in(places, load, nothing, ends=lambda _: (rank == 0, rank == ranks - 1)).plan


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_what_a_plan_cuts_is_what_a_reload_makes_and_quantizes(place, clients, ranks, lacks):
    """bfloat16 is published; each rank reads its slices and makes FP8 of them where they lie, bit for bit as if it had
    loaded all. The control: a plan that lacks a piece."""
    block = place.size(128, 4)
    width = 8 * block * place.size(4, 1)
    generator = torch.Generator().manual_seed(ranks)
    tensors = {name: torch.randn(width, width, generator=generator).bfloat16() for name in ("q", "k", "v", "o")}
    clients("trainer").publish(1, tensors)
    for rank in sorted({0, ranks - 1}):
        reloaded, planned = (Attention(width, rank, ranks, place.torch_device) for _ in range(2))
        reloaded.load_weights(tensors.items(), into=dict(reloaded.named_parameters()))
        plan = plan_of(planned, tensors, rank, ranks)
        assert plan is not None and not plan.process
        assert plan.needed_bytes == 4 * width * width * 2 // ranks
        rollout = clients(f"rollout-{rank}")
        fetched = rollout.fetch(1, wanted=plan.wanted)
        given, live = given_by(fetched), dict(planned.named_parameters())
        pieces = plan.pieces[1:] if lacks else plan.pieces
        copy_all(
            (
                view(live[piece.target.rpartition(".")[2]].data, piece.written),
                view_in(given.held[piece.source], plan.shapes[piece.source][1], piece.taken),
            )
            for piece in pieces
        )
        if place.is_gpu:
            torch.cuda.synchronize()
        equal = []
        for name, tensor in reloaded.named_parameters():
            pairs = zip(quantized(live[name].data, block), quantized(tensor.data, block), strict=True)
            same = [same_bytes(one.contiguous().cpu(), other.contiguous().cpu()) for one, other in pairs]
            equal.append(all(same))
        assert all(equal) != lacks


# --- row 23: what is not quantized alike ---


def rehearsed(layer, tensors):
    places, into = {}, {}
    for name, live in layer.named_parameters():
        into[name] = torch.empty(live.shape, dtype=live.dtype, device="meta")
        places[into[name].untyped_storage()._cdata] = Place(name, layer, live.shape, live.dtype, live.numel(), live)

    def load(weights):
        for name, loaded in weights:
            layer._load(into[name], loaded)

    return rehearse_in(places, load, tensors, ends=lambda _: (True, True))


@pytest.mark.parametrize("lacks", ["scale", "fp8"])
def test_bfloat16_is_refused_by_a_model_of_fp8_and_leaves_it_as_it_was(place, clients, lacks):
    """A1. What was fetched is compared with what the loaders would do to it; the control is one that is quantized."""
    size = place.size(4096, 256)
    layer = Fp8Layer(size, place.torch_device)
    before = {name: tensor.data.clone() for name, tensor in layer.named_parameters()}
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(1))
    fp8, scale = quantized(weight.bfloat16())
    trainer, rollout = clients("trainer"), clients("rollout")
    trainer.publish(1, {"weight": fp8} if lacks == "scale" else {"weight": weight.bfloat16(), "weight_scale": scale})
    trainer.publish(2, {"weight": fp8, "weight_scale": scale})
    refusal = "weight_scale .* gets 0 of" if lacks == "scale" else "weight is bfloat16, weight is float8_e4m3fn"
    with pytest.raises(VersionRefused, match=refusal):
        rehearsed(layer, rollout.fetch(1).tensors())
    for name, tensor in layer.named_parameters():
        assert same_bytes(tensor.data.cpu(), before[name].cpu())
    good = rollout.fetch(2).tensors()
    rehearsed(layer, good)
    layer.load_weights(good.items())
    for name, tensor in layer.named_parameters():
        assert same_bytes(tensor.data.cpu(), good[name].cpu())


def test_without_the_refusal_weights_are_cut_off(place):
    """What A1 was: a cast without a scale, of which nothing is said."""
    layer = Fp8Layer(256, place.torch_device)
    layer.load_weights([("weight", torch.full((256, 256), 1000.0, dtype=torch.bfloat16))])
    found = set(layer.weight.data.float().cpu().flatten().tolist())
    assert 1000.0 not in {abs(value) for value in found}


# --- vLLM's engines, where it is ---


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("kind", ["qwen2-untied", "mixtral", "deepseek-mla"])
@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_channel", "fp8_per_block"])
def test_floats_that_vllm_quantizes_are_synced_as_they_are_loaded(quantization, kind, captures, tmp_path):
    """vLLM's kernels, eager and in captured graphs: two engines, noise and weights in turn, by reloads and copies."""
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    pytest.importorskip("vllm")
    pytest.importorskip("transformers")
    from vllm_engines import make_model

    from tensorhub_plugins.vllm.doctor import check_sync

    settings: dict[str, Any] = {
        "quantization": quantization,
        "gpu_memory_utilization": 0.2,
        "enforce_eager": not captures,
    }
    model = make_model(kind, tmp_path, 1)
    if theirs := check_sync.runs_without_us(model, settings):
        pytest.skip(f"vLLM by itself does not run this here: {theirs.strip().splitlines()[-1]}")
    findings = list(check_sync.check_sync(model, check_sync.starter(settings)))
    assert len(findings) == 6 and not any(finding.wrong for finding in findings), findings
    assert "copied from a peer" in findings[4].what


@pytest.mark.timeout(900)
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize(
    "where", [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.heavy)]
)
def test_experts_of_an_fp8_checkpoint_are_synced_as_they_are_loaded(where, captures, tmp_path):
    """A2: vLLM's kernel of FP8 experts remembers scales. Two layers of Qwen3-30B-A3B: reloads, then a raw copy into an
    engine that has reloaded before, and reloads again; every answer with its log-probabilities."""
    if (where == "gpu") != torch.cuda.is_available():
        pytest.skip(NO_GPU if where == "gpu" else "vLLM's CPU build is where there is no GPU")
    pytest.importorskip("vllm")
    pytest.importorskip("transformers")
    from tensorhub_plugins.vllm.doctor import check_sync

    sizes = {"experts": 128, "width": 2048} if where == "gpu" else {"experts": 32, "width": 256}
    settings: dict[str, Any] = {"enforce_eager": not captures}
    if where == "gpu":
        settings["gpu_memory_utilization"] = 0.2
    model = fp8_experts(tmp_path, **sizes)
    if theirs := check_sync.runs_without_us(model, settings):
        pytest.skip(f"vLLM by itself does not run this here: {theirs.strip().splitlines()[-1]}")
    findings = list(check_sync.check_sync(model, check_sync.starter(settings)))
    assert len(findings) >= 6 and not any(finding.wrong for finding in findings), findings
