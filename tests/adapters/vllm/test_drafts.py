"""Speculative decoding with MTP heads whose weights come with the versions.

The models for real engines are made so that a head that is the model's own drafts every token as the model would, and
another one none: how many drafts are accepted says which weights the head has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import msgspec
import torch
from vllm_engines import Engine, EngineError, checkpoint, make_model
from vllm_ranks import alone, heads_of_ranks

from tensorhub_plugins.core import CHECKPOINT, Client, Server, UsageError
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.worker import draft, extension

heavy = pytest.mark.heavy

TIMEOUT_S = 30.0
MTP = {"method": "mtp", "num_speculative_tokens": 1}
HEAD = "model.mtp_layers.0"


class Part(torch.nn.Module):
    """A model of vLLM's whose loaders take the names that they know, and count what they were given."""

    def __init__(self, prefix: str, shared: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.prefix, self.seen = prefix, 0
        self.embed = torch.nn.Linear(2, 2, bias=False) if shared is None else shared
        self.own = torch.nn.Linear(2, 2, bias=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.seen += 1
            for wanted, parameter in (("embed", self.embed.weight), ("own", self.own.weight)):
                if name == f"{self.prefix}{wanted}":
                    load: Any = getattr(parameter, "weight_loader", lambda kept, given: kept.data.copy_(given))
                    load(parameter, tensor)


TENSORS = {
    **{"embed": torch.full((2, 2), 1.0), "own": torch.full((2, 2), 2.0)},
    **{"mtp.embed": torch.full((2, 2), 3.0), "mtp.own": torch.full((2, 2), 4.0)},
}


def test_one_checkpoint_fills_a_model_and_what_drafts_for_it() -> None:
    target = Part("")
    drafting = Part("mtp.", target.embed)
    made: list[str] = []

    def again() -> Iterator[tuple[str, torch.Tensor]]:
        made.append("once")
        yield from TENSORS.items()

    both = draft.together(target, drafting)
    draft.load(both, draft.Again(again))
    assert (target.seen, drafting.seen, len(made)) == (4, 4, 2)  # nothing was held for the second
    assert torch.equal(target.own.weight, TENSORS["own"]) and torch.equal(drafting.own.weight, TENSORS["mtp.own"])
    assert torch.equal(target.embed.weight, TENSORS["embed"])  # the target's, though the draft's copy came later
    assert not hasattr(target.embed.weight, "weight_loader")

    draft.load(drafting, TENSORS.items())  # the control: its loaders alone write into what is shared
    assert torch.equal(target.embed.weight, TENSORS["mtp.embed"])


def test_the_model_of_both_has_the_targets_names_and_tensors() -> None:
    target = Part("")
    drafting = Part("mtp.", target.embed)
    both = draft.together(target, drafting)
    assert [name for name, _ in both.named_parameters()] == ["embed.weight", "own.weight", f"{draft.NAME}.own.weight"]
    assert both.own is target.own and type(both) is Part and draft.NAME not in dict(target.named_modules())
    assert draft.together(target, None) is target


def test_a_failed_load_leaves_the_shared_loaders_as_they_were() -> None:
    target = Part("")
    drafting = Part("mtp.", target.embed)
    loader = target.embed.weight.weight_loader = lambda parameter, tensor: None  # type: ignore[assignment]
    drafting.load_weights = None  # type: ignore[assignment]
    try:
        draft.load(draft.together(target, drafting), TENSORS.items())
    except TypeError:
        pass
    else:
        raise AssertionError("nothing failed")
    assert target.embed.weight.weight_loader is loader


@pytest.mark.parametrize(("load_format", "wanted"), [("dummy", None), ("auto", "store")])
def test_weight_transfer_alone_says_how_heads_follow(
    load_format: str, wanted: str | None, weight_transfer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives it the model only. The control: heads that were read stay, and the store is joined."""
    from tensorhub_plugins.vllm import weight_transfer as door

    load_config, speculative = SimpleNamespace(load_format=load_format), SimpleNamespace(method="mtp")
    engine = object.__new__(door.TensorHubWeightTransferEngine)
    engine.model = torch.nn.Linear(2, 2)
    engine.vllm_config = SimpleNamespace(load_config=load_config, speculative_config=speculative)
    monkeypatch.setattr(extension.fingerprint, "group_of", lambda _: SimpleNamespace(is_last_rank=True))
    config = WorkerConfig(hub="tcp://none:1", run="r", model="m", replica="x", draft=wanted)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"\(mtp\) here, as its weight transfer .*: start with --load-format"):
        engine.init_transfer_engine(config)

    class JoinedError(Exception):
        pass

    def joined(*_: Any, **__: Any) -> None:
        raise JoinedError

    load_config.load_format = "auto"
    monkeypatch.setattr(extension, "_check_supported", joined)
    with pytest.raises(JoinedError):
        engine.init_transfer_engine(msgspec.structs.replace(config, draft="disk"))


def make_drafting_model(folder: Path, seed: int, *, agrees: bool) -> Path:
    """Save a MiMo in which layers add nothing, so that a token alone decides on the next one. agrees: its head does the
    same with the token that it is given; else the opposite."""
    from safetensors.torch import save_file

    make_model("qwen2-untied", folder, seed)
    weights = checkpoint(folder)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name].zero_()
    norm = weights["model.norm.weight"]
    same = torch.eye(len(norm), dtype=norm.dtype) * (1 if agrees else -1)
    block = {name: t.clone() for name, t in weights.items() if name.startswith("model.layers.0.")}
    head = {name.replace("model.layers.0", HEAD): tensor for name, tensor in block.items()}
    head |= {f"{HEAD}.{name}.weight": torch.ones_like(norm) for name in ("token_layernorm", "hidden_layernorm")}
    head[f"{HEAD}.final_layernorm.weight"] = norm.clone()
    head[f"{HEAD}.input_proj.weight"] = torch.cat([torch.zeros_like(same), same], 1)
    save_file({**weights, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Path]:
    made: dict[tuple[int, bool], Path] = {}

    def model(seed: int, agrees: bool) -> Path:
        if (seed, agrees) not in made:
            made[seed, agrees] = make_drafting_model(
                tmp_path_factory.mktemp("mimo") / f"{seed}-{agrees}", seed, agrees=agrees
            )
        return made[seed, agrees]

    return model


def trainer(hub: Server) -> Client:
    return Client(hub.address, run="r", model="m", replica="trainer")


def start(model: Path, **options: Any) -> Engine:
    return Engine(model, speculative_config=MTP, disable_log_stats=False, **options)


def accepted(engine: Engine) -> tuple[list[list[int]], float]:
    """Return continuations, and the share of the drafted tokens that were accepted in them."""

    def counted() -> list[int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in engine.ask("own", "get_metrics", ())}
        return [values[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")]

    before = counted()
    tokens = engine.generate()
    drafted, taken = (after - earlier for after, earlier in zip(counted(), before, strict=True))
    assert drafted
    return tokens, taken / drafted


def update(engine: Engine, version: int) -> dict[str, Any]:
    engine.call("tensorhub_start_fetch", version, TIMEOUT_S)
    while polled(engine)["state"] == "fetching":
        pass
    assert polled(engine)["state"] == "ready", polled(engine)["error"]
    engine.ask("pause")
    result = engine.call("tensorhub_install", version, TIMEOUT_S)
    engine.ask("resume")
    assert result["installed"], result["error"]
    return result


def polled(engine: Engine) -> dict[str, Any]:
    return engine.ask("rpc", "tensorhub_poll", ())[0]


def runtime(engine: Engine) -> list[dict[str, str]]:
    return [each["runtime"] for each in engine.ask("rpc", "tensorhub_digests", ())]


def connect(engine: Engine, hub: Server, replica: str, **options: Any) -> None:
    config = {"hub": hub.address, "run": "r", "model": "m", "replica": replica, **options}
    engine.call("tensorhub_connect", config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads_are_cut_as_the_model_and_take_its_dtype(dtype: torch.dtype, drafting: Any, tmp_path: Path) -> None:
    """By vLLM's own classes, which make them with the model's TP and dtype, whatever option and checkpoint say."""
    from safetensors.torch import save_file

    folders = []
    for seed in (1, 2):
        folders.append(shutil.copytree(drafting(seed, True), tmp_path / str(seed)))
        weights = {n: t.to(dtype) if n.startswith(HEAD) else t for n, t in checkpoint(folders[-1]).items()}
        save_file(weights, folders[-1] / "model.safetensors", metadata={"format": "pt"})
    for rank in alone(heads_of_ranks, *folders, {**MTP, "draft_tensor_parallel_size": 1}):
        assert rank["wrong"] == [[], []] and rank["proved"] and 0 < rank["differ"] < rank["tensors"]
        assert rank["needed"] < 0.6 * rank["checkpoint"]


@heavy
@pytest.mark.parametrize("source", ["store", "disk"])
def test_heads_change_with_the_model(source: str, drafting: Any, hub: Server) -> None:
    """As many drafts are accepted as in a fresh engine; heads that keep their weights are the control."""
    with start(drafting(2, True), extension=None) as fresh:
        expected, share = accepted(fresh)
        assert share == 1.0
    with start(drafting(1, False)) as engine, trainer(hub) as publisher:
        connect(engine, hub, "engine", draft=source)
        assert accepted(engine)[1] == 0.0
        publisher.publish(1, checkpoint(drafting(2, True)))
        update(engine, 1)
        assert accepted(engine) == (expected, 1.0 if source == "store" else 0.0)
        for version, agrees in ((2, False), (3, True)):  # by plain copies, after the trial
            publisher.publish(version, checkpoint(drafting(2, agrees)))
            update(engine, version)
            assert accepted(engine) == (expected, float(agrees) if source == "store" else 0.0)


@heavy
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_engines_start_from_the_store_with_their_heads(workers: int, drafting: Any, hub: Server) -> None:
    """The first converts the trainer's checkpoint, the second takes both from the first; neither reads a disk."""
    folder = without_weights(drafting(2, True))
    extra = {"hub": hub.address, "run": "r", "model": "m", "draft": "store"}
    options = {"extension": None, "load_format": "tensorhub", "model_loader_extra_config": extra, "workers": workers}
    options["env"] = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if workers > 1 else {}
    with start(drafting(2, True), extension=None) as fresh:
        expected = accepted(fresh)
    with trainer(hub) as publisher:
        publisher.publish(1, checkpoint(drafting(2, True)))
        with start(folder, **options) as first:
            assert accepted(first) == expected
            assert polled(first)["report"]["layout"] == CHECKPOINT
            publisher.close()
            with start(folder, **options) as second:
                assert accepted(second) == expected
                assert polled(second)["report"]["layout"] == polled(second)["layout"]
                assert runtime(second) == runtime(first)


def without_weights(folder: Path) -> Path:
    bare = folder.with_name(f"{folder.name}-bare")
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    return bare


@heavy
@pytest.mark.parametrize("disk", ["only", "fallback"])
def test_heads_that_were_read_from_disk_follow_from_then_on(disk: str, drafting: Any, hub: Server) -> None:
    """vLLM's CPU build packs layers that are loaded without us: no update would reach those."""
    extra = {"hub": hub.address, "run": "r", "model": "m", "draft": "store", "disk": disk, "disk_version": 1}
    with start(drafting(1, False), extension=None, load_format="tensorhub", model_loader_extra_config=extra) as engine:
        assert accepted(engine)[1] == 0.0 and polled(engine)["version"] == 1
        with trainer(hub) as publisher:
            publisher.publish(2, checkpoint(drafting(2, True)))
            update(engine, 2)
        assert accepted(engine)[1] == 1.0


@heavy
def test_a_version_without_the_heads_is_refused_by_name(drafting: Any, hub: Server) -> None:
    with start(drafting(1, True), load_format="dummy") as engine, trainer(hub) as publisher:
        connect(engine, hub, "engine")  # nobody has read them: they come from the store
        whole = checkpoint(drafting(2, True))
        publisher.publish(1, {name: tensor for name, tensor in whole.items() if HEAD not in name})
        engine.call("tensorhub_start_fetch", 1, TIMEOUT_S)
        while polled(engine)["state"] == "fetching":
            pass
        with pytest.raises(EngineError, match="would not be filled: tensorhub_draft.*publish them with the model"):
            engine.call("tensorhub_prepare_install", TIMEOUT_S)
        publisher.publish(2, whole)
        update(engine, 2)
        with start(drafting(2, True), extension=None) as fresh:
            assert accepted(engine) == accepted(fresh)


@heavy
def test_a_draft_model_is_read_from_disk_and_is_no_worker_of_the_store(models: Any, bare: Any, hub: Server) -> None:
    """vLLM loads it by a configuration in which it stands for the model: it was given versions of that, or refused."""
    speculative = {"method": "draft_model", "model": str(models("llama", 2)), "num_speculative_tokens": 1}
    options: dict[str, Any] = {"extension": None, "disable_log_stats": False, "speculative_config": speculative}
    options["model_loader_extra_config"] = {"hub": hub.address, "run": "r", "model": "m", "replica": "engine"}
    with Engine(models("llama", 2), extension=None) as fresh, trainer(hub) as publisher:
        publisher.publish(1, checkpoint(models("llama", 1)))
        with Engine(bare("llama"), load_format="tensorhub", **options) as engine:
            assert accepted(engine)[1] < 1.0
            publisher.publish(2, checkpoint(models("llama", 2)))
            update(engine, 2)
            assert accepted(engine) == (fresh.generate(), 1.0)  # it drafts with what was on disk
