"""Ranks of parallel engines, each made, loaded and updated alone in its own process (recipes/bench/sizes/ranks.py)."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm_engines import _context, checkpoint

TIMEOUT_S = 300


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return the function's result from a process of its own, forked from one that has imported vLLM."""
    context = _context()
    pipe, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"no answer within {TIMEOUT_S} s")
        succeeded, value = pipe.recv()
    finally:
        process.kill()
        process.join()
    if not succeeded:
        raise RuntimeError(value)
    return value


def _answer(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


@contextmanager
def loaded(folder: Path, rank: Any, weights: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """Yield (model, vllm_config) as load_format makes it: with zeros, or (weights) by vLLM's own loaders."""
    import torch
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from recipes.bench.sizes.ranks import made
    from tensorhub_plugins.vllm.worker import cpu

    with made(folder, rank, device="cpu", **options) as (model, config), cpu.live_layers(), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        if weights is not None:
            model.load_weights(iter(weights.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        yield model, config


@contextmanager
def with_heads(folder: Path, rank: Any, weights: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """Yield the same with the MTP heads that draft for the model, made and shared as vLLM does."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from tensorhub_plugins.vllm.worker import draft

    with loaded(folder, rank, weights, **options) as (model, config), torch.no_grad():
        of_heads = config.speculative_config.draft_model_config
        with set_default_torch_dtype(of_heads.dtype):
            heads = initialize_model(vllm_config=config, model_config=of_heads)
        for parameter in heads.parameters():
            parameter.zero_()
        if weights is not None:
            heads.load_weights(iter(weights.items()))
        process_weights_after_loading(heads, of_heads, torch.device("cpu"))
        heads.model.embed_tokens, heads.lm_head = model.model.embed_tokens, model.lm_head
        yield draft.together(model, heads), config


def heads_of_ranks(first: Path, second: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what both ranks of TP 2 make of a model with its MTP heads."""
    load = partial(with_heads, speculative_config=options)
    return [update_by_slices(first, second, 2, tp, load=load) for tp in (0, 1)]


def bytes_of_ranks(folder: Path, sizes: tuple[int, int, int], options: dict[str, Any]) -> list[dict[str, str]]:
    """Return the digests of each rank of an engine (TP, PP, DP) after vLLM's own load of this folder's checkpoint."""
    from recipes.bench.sizes.ranks import Rank

    found = []
    for rank in Rank.all_of(*sizes):
        with loaded(folder, rank, checkpoint(folder), **options) as (model, _):
            found.append(bytes_of(model))
    return found


def plans_of_ranks(
    family: str, settings: dict[str, Any], sizes: tuple[int, int, int], options: dict[str, Any]
) -> tuple[dict[str, tuple[int, ...]], list[dict[str, Any]]]:
    """Return from a configuration alone the checkpoint's shapes, and for each rank of an engine (TP, PP, DP) what it
    needs, the layers that are reloaded, and the parameters of others not made of pieces, each element once."""
    import tempfile

    import torch
    import transformers

    from recipes.bench.sizes.ranks import Rank, made
    from recipes.bench.sizes.slices import planned, shapes_of_config
    from tensorhub_plugins.vllm.worker.plan import filled, layer_of

    config = getattr(transformers, f"{family}Config")(
        **{"tie_word_embeddings": False, **settings}, architectures=[f"{family}ForCausalLM"], dtype="bfloat16"
    )
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        shapes = shapes_of_config(config)
        for rank in Rank.all_of(*sizes):
            with made(Path(folder), rank, **options) as (model, vllm_config):
                plan = planned(model, vllm_config, shapes)
                numbers = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
                boxes: dict[int, list[Any]] = {}
                for piece in plan.pieces:
                    boxes.setdefault(numbers[piece.target], []).append(piece.written)
                uncovered = []
                for name, parameter in model.named_parameters():  # a padding of the vocabulary is no piece
                    written = boxes.get(id(parameter), [])
                    count = sum(torch.Size(shape).numel() for _, shape, _ in written)
                    rows = parameter.numel() if "embed" not in name and "lm_head" not in name else count
                    if layer_of(name) not in plan.process and not count == filled(parameter.numel(), written) == rows:
                        uncovered.append(name)
                needed = {name: [region.box for region in regions] for name, regions in plan.needed.items()}
            ranks.append({"needed": needed, "process": sorted(plan.process), "uncovered": uncovered})
    return {name: tuple(shape) for name, (_, shape) in shapes.items()}, ranks


def bytes_of(model: Any) -> dict[str, str]:
    from tensorhub_plugins.vllm.worker import weights

    return {name: weights.digest(tensor) for name, tensor in weights.tensors(model).items()}


def of_all_ranks(first: Path, second: Path) -> list[dict[str, Any]]:
    """Return the results at TP 1, and of both ranks of TP 2."""
    return [update_by_slices(first, second, tp_size, tp) for tp_size, tp in ((1, 0), (2, 0), (2, 1))]


def read_at_tp_2(folder: Path) -> list[int]:
    """Return the bytes in the segments that each rank reads, from the configuration alone."""
    from recipes.bench.sizes.ranks import Rank
    from recipes.bench.sizes.slices import shares

    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint(folder).items()}
    return [share.read for share in shares(folder, shapes, [Rank(2, 0), Rank(2, 1)])]


def without_a_row(first: Path, second: Path, tensor: str) -> dict[str, Any]:
    """Return the same with a plan that lacks a needed row of the tensor of this name."""
    return update_by_slices(first, second, 1, 0, lambda plan: lacking(plan, tensor))


def with_a_wrong_element(first: Path, second: Path, target: str) -> list[dict[str, Any]]:
    """Return the results of both ranks of TP 2, with a plan that has one element of this parameter from beside it."""
    return [update_by_slices(first, second, 2, tp, lambda plan: moved(plan, target)) for tp in (0, 1)]


def moved(plan: Any, target: str) -> Any:
    def part(box: Any, row: int, column: int, rows: int, columns: int) -> Any:
        offset, _, (down, right) = box
        return offset + row * down + column * right, (rows, columns), (down, right)

    *others, piece = (each for each in plan.pieces if each.target == target)
    rows, columns = piece.taken[1]
    parts = [
        piece._replace(taken=part(piece.taken, *taken), written=part(piece.written, *written))
        for taken, written in (
            ((0, 1, 1, 1), (0, 0, 1, 1)),
            ((0, 1, 1, columns - 1),) * 2,
            ((1, 0, rows - 1, columns),) * 2,
        )
    ]
    rest = [each for each in plan.pieces if each.target != target]
    return dataclasses.replace(plan, pieces=(*rest, *others, *parts))


def lacking(plan: Any, tensor: str) -> Any:
    name = next(name for name in plan.needed if tensor in name)
    *others, last = plan.needed[name]
    last = last._replace(shape=(last.shape[0] - 1, *last.shape[1:]))
    return dataclasses.replace(plan, needed={**plan.needed, name: (*others, last)})


def update_by_slices(
    first: Path,
    second: Path,
    tp_size: int,
    tp: int,
    spoil: Callable[[Any], Any] = lambda plan: plan,
    load: Any = loaded,
) -> dict[str, Any]:
    """Convert the first checkpoint whole, the second one from what the plan needs of it alone."""
    from recipes.bench.sizes.ranks import Rank
    from tensorhub_plugins.vllm.worker import checkpoint_contract
    from tensorhub_plugins.vllm.worker.conversion import Conversion
    from tensorhub_plugins.vllm.worker.plan import Given

    rank = Rank(tp_size, tp)
    with load(first, rank) as (model, config):
        old, new = checkpoint(first), checkpoint(second)
        true_plan = checkpoint_contract.rehearse(model, config, old).plan
        assert true_plan is not None
        plan = spoil(true_plan)
        conversion = Conversion(model, config)
        by = conversion.install(Given.of(old, plan))
        after_first = bytes_of(model)
        proved = conversion._plan is plan
        conversion.install(Given.of(new).cut(true_plan.needed))
        after_second = bytes_of(model)
        process = sorted(conversion._process)
    truths = []
    for weights in (old, new):
        with load(first, rank, weights) as (model, _):
            truths.append(bytes_of(model))
    return {
        "by": by,
        "proved": proved,
        "process": process,
        "guessed": sorted(plan.process),
        "wrong": [
            [name for name in truth if got.get(name) != truth[name]]
            for got, truth in zip((after_first, after_second), truths, strict=True)
        ],
        "tensors": len(truths[1]),
        "differ": sum(truths[0][name] != truths[1][name] for name in truths[0]),
        "needed": plan.needed_bytes,
        "checkpoint": plan.checkpoint_bytes,
    }


def derived_beside(first: Path, second: Path) -> dict[str, Any]:
    """Return what becomes of a tensor that loaders derive at their end and keep beside the parameters, as DeepSeek-V4's
    do: whether a rehearsal of the second checkpoint left it alone, and whether it follows versions."""
    import torch

    from recipes.bench.sizes.ranks import Rank
    from tensorhub_plugins.vllm.worker import checkpoint_contract
    from tensorhub_plugins.vllm.worker.conversion import Conversion
    from tensorhub_plugins.vllm.worker.plan import Given

    old, new = checkpoint(first), checkpoint(second)
    name = "model.norm.weight"
    with loaded(first, Rank(1, 0), old) as (model, config):
        load, derived = model.load_weights, torch.empty_like(old[name])

        def load_weights(weights: Any) -> Any:
            result = load(weights)
            model.sums[0].copy_(model.model.norm.weight.data * 2)
            return result

        vars(model).update(load_weights=load_weights, sums=[derived])
        derived.copy_(old[name] * 2)
        plan = checkpoint_contract.rehearse(model, config, new).plan
        untouched, conversion, follows = torch.equal(derived, old[name] * 2), Conversion(model, config), []
        for weights in (old, new, old):
            conversion.install(Given.of(weights, plan))
            follows.append(torch.equal(derived, weights[name] * 2))
    return {"untouched": untouched, "follows": follows, "hidden": conversion.hidden}


def follow(paths: list[Path], tp: int, lacks: str = "") -> dict[str, Any]:
    """Run one rank of TP 2 with the real store: two good versions, one of another shape, one with a tensor more.

    lacks: it has not noticed that it needs the last row of the tensor of this name."""
    from recipes.bench.sizes.ranks import Rank
    from tensorhub_plugins.core import Client, Deadline, Publisher, start_server
    from tensorhub_plugins.vllm.config import WorkerConfig
    from tensorhub_plugins.vllm.worker import checkpoint_contract
    from tensorhub_plugins.vllm.worker.updater import Updater
    from tensorhub_plugins.vllm.worker.votes import ShardPosition

    first, second = (checkpoint(path) for path in paths)
    if lacks:
        whole = checkpoint_contract.rehearse

        def rehearse(*given: Any) -> Any:
            found = whole(*given)
            return dataclasses.replace(found, plan=lacking(found.plan, lacks))

        checkpoint_contract.rehearse = rehearse
    name = "model.norm.weight"
    bad = [{**second, name: second[name][:-1].clone()}, {**second, "extra.weight": second[name]}]
    results, refused = [], []
    with start_server() as hub, loaded(paths[0], Rank(2, tp)) as (model, config):
        said = {"hub": hub.address, "run": "r", "model": "m"}
        position = ShardPosition(tp, 2, "runtime:of this test")
        updater = Updater(
            WorkerConfig.parse({**said, "replica": "e"}), model, config, position, lambda vote: [vote, vote]
        )
        with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
            publisher = Publisher(trainer, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=30.0, slices=2)
            for version, weights in enumerate((first, second), 1):
                publisher.publish(version, weights.items())
                results.append(updater.update(version, 30.0))
                updater._wait_until_served(Deadline.after(30.0), 30.0)
            got = bytes_of(model)
            for version, weights in enumerate(bad, 3):
                trainer.publish(version, weights)
                refused.append(updater.update(version, 30.0)["error"])
            after = bytes_of(model)
        updater.close()
    with loaded(paths[1], Rank(2, tp), second) as (model, _):
        truth = bytes_of(model)
    return {
        "errors": [result["error"] for result in results],
        "read": [sum(result["report"]["sources"].values()) for result in results],
        "refused": refused,
        "wrong": [key for key in truth if not got.get(key) == after.get(key) == truth[key]],
    }
