"""Workers read of a checkpoint only what they need: planned from vLLM's own loaders, compared with vLLM's own load."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import checkpoint
from vllm_ranks import alone, derived_beside, follow, of_all_ranks, read_at_tp_2, with_a_wrong_element, without_a_row

pytestmark = pytest.mark.heavy
LONG, SMOKE = pytest.mark.long, pytest.mark.smoke

EXPERTS = "experts.routed_experts"
RELOADED = {  # what must go through vLLM's reload, whatever this CPU packs; None: nothing needs it
    "llama": None,
    "phi3": None,
    "qwen2-tied": None,
    "gemma": None,
    "mixtral": (EXPERTS,),
    "mixtral-deep": (EXPERTS,),  # of whose layers between the first and the last none is put to the test
    "qwen3-moe": (EXPERTS,),
    "deepseek-mla": (EXPERTS, "mla_attn"),
    "mamba2": ("mixer",),
}
MARKS = {"llama": SMOKE, "phi3": (), "mixtral": ()}
FAMILIES = [pytest.param(kind, marks=MARKS.get(kind, LONG)) for kind in RELOADED]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_rank_updated_from_its_regions_alone_equals_vllms_own_load(kind: str, models: Any) -> None:
    """At TP 1 and both ranks of TP 2, without anything that the plan does not name."""
    found = alone(of_all_ranks, models(kind, 1), models(kind, 2))
    for rank in found:
        assert rank["proved"] and rank["wrong"] == [[], []], rank
        assert rank["differ"] >= 10  # tensors that are not the same in the two checkpoints
        reloaded = RELOADED[kind]
        assert (
            rank["by"] == "copy"
            if reloaded is None
            else all(any(each in layer for each in reloaded) for layer in rank["process"])
        ), rank
    one, *two = found
    assert one["needed"] == one["checkpoint"]
    # What every rank keeps whole is much of a tiny model: latent attention's first half, Mamba2's groups.
    at_most = {"deepseek-mla": 0.60, "mamba2": 0.72}.get(kind, 0.51)
    for rank in two:
        assert rank["needed"] < at_most * rank["checkpoint"]
    assert sum(rank["needed"] for rank in two) >= two[0]["checkpoint"]  # together they have all of it


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        pytest.param("llama", "down_proj", id="copied", marks=SMOKE),
        pytest.param("mixtral", "w2", id="reloaded"),
        pytest.param("mixtral-deep", "layers.2.block_sparse_moe.experts.1.w2", id="not put to the test"),
    ],
)
def test_the_control_a_plan_that_lacks_a_row_is_found_out(kind: str, tensor: str, models: Any) -> None:
    rank = alone(without_a_row, models(kind, 1), models(kind, 2), tensor)
    assert not rank["proved"] and rank["by"] == "reload"
    assert rank["wrong"] == [[], []]  # and nothing is wrong for it


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layer", ["model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.down_proj"])
def test_the_control_one_wrong_element_is_found_and_that_layer_alone_is_reloaded(layer: str, models: Any) -> None:
    for rank in alone(with_a_wrong_element, models("llama", 1), models("llama", 2), f"{layer}.weight"):
        assert rank["proved"] and rank["process"] == [layer] and rank["wrong"] == [[], []]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["qwen2-wide", "mixtral"])
def test_a_worker_reads_from_the_first_version_on_what_it_needs(kind: str, models: Any) -> None:
    paths = [models(kind, seed) for seed in (1, 2)]
    size_bytes = sum(tensor.nbytes for tensor in checkpoint(paths[0]).values())
    expected = alone(read_at_tp_2, paths[0])
    # They need half of it. Its segments are small: most hold rows for both workers, or columns.
    assert kind == "mixtral" or max(expected) < 0.7 * size_bytes
    for tp in (0, 1):
        found = alone(follow, paths, tp)
        assert found["errors"] == [None, None] and found["wrong"] == []
        assert found["read"] == [expected[tp]] * 2  # the first one, which is put to the test, too
        # One that is not like those before is read whole, and refused by name, whether or not a plan would notice.
        assert "model.norm.weight is bfloat16" in found["refused"][0]
        assert "unknown: extra.weight" in found["refused"][1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "tensor"), [("qwen2-wide", "down_proj"), ("mixtral", "w2")])
def test_the_control_a_first_version_that_lacks_a_row_is_read_whole(kind: str, tensor: str, models: Any) -> None:
    paths = [models(kind, seed) for seed in (1, 2)]
    size_bytes = sum(tensor.nbytes for tensor in checkpoint(paths[0]).values())
    found = alone(follow, paths, 1, tensor)
    assert found["errors"] == [None, None] and found["wrong"] == [] and found["read"] == [size_bytes] * 2


@pytest.mark.timeout(300)
def test_what_loaders_derive_beside_the_parameters_is_rehearsed_without_it_and_follows(models: Any) -> None:
    """Every version of such a model was refused, as nothing can be copied out of a parameter without memory."""
    found = alone(derived_beside, models("llama", 1), models("llama", 2))
    assert found == {"untouched": True, "follows": [True] * 3, "hidden": ("sums.0",)}
