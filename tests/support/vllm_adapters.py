"""LoRA adapters for tests: PEFT's own over a tiny model, and the log-probabilities of transformers with them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8
LONE = "0.mlp.up_proj.lora_A.weight"
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens.lora_embedding"


class Trained:
    """A PEFT model, as a trainer has it: its adapter is another one after each `step`."""

    def __init__(
        self, model: Path, *, rank: int = RANK, layers: list[str] = LAYERS, seed: int = 0, **more: Any
    ) -> None:
        import peft
        import torch
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, **more)
        self.seed, self.peft = seed, peft.get_peft_model(base, config).eval()

    def step(self, number: int) -> dict[str, Any]:
        """Make the adapter of this step, and return what is published of it, in bfloat16."""
        import torch

        from tensorhub_plugins.vllm.lora import adapter_tensors

        torch.manual_seed(1000 * self.seed + number)
        for name, parameter in self.peft.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape).mul(0.1).bfloat16().float()
        tensors = adapter_tensors(self.peft)
        return {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}

    def logprobs(self, prompt: list[int], tokens: list[int], *, adapter: bool = True) -> list[float]:
        """Return the log-probability of each of these tokens after the prompt."""
        import contextlib

        import torch

        with torch.no_grad(), contextlib.nullcontext() if adapter else self.peft.disable_adapter():
            logits = self.peft(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None])
        return [float(each) for each in chosen[:, 0]]


# --- vLLM's LoRA manager over its own layers, without an engine: see `vllm_ranks.alone` ---


class Layers:
    """A worker's adapter `name`, and what its layers compute with."""

    def __init__(self, updater: Any, trainer: Any) -> None:
        self.updater, self.trainer = updater, trainer
        self.manager = updater._manager._adapter_manager

    def update(self, version: int, tensors: dict[str, Any]) -> dict[str, Any]:
        """Publish, fetch and install this; return the last answer, of a fetch that was refused too."""
        self.trainer.publish(version, tensors)
        self.updater.start_fetch(version, 30.0)
        while (said := self.updater.poll())["state"] == "fetching":
            time.sleep(0.01)
        return self.updater.install(version, 30.0) if said["state"] == "ready" else said

    def has(self, tensors: dict[str, Any], scaling: float = 2.0) -> bool:
        """Return whether the layers hold these matrices, fused as they are."""
        import torch

        if self.updater.request.lora_int_id not in self.manager.lora_index_to_id:
            return False
        slot, same = self.manager.lora_index_to_id.index(self.updater.request.lora_int_id), []
        for module, wrapped in self.manager.modules.items():
            parts = self.manager.packed_modules.get(module, [module])
            for place, part in enumerate(parts):
                one = tensors.get(f"base_model.model.{part}.lora_A.weight")
                if one is not None:
                    other = tensors[f"base_model.model.{part}.lora_B.weight"] * scaling
                    same.append(torch.equal(wrapped.lora_a_stacked[place][slot, 0], one))
                    same.append(torch.equal(wrapped.lora_b_stacked[place][slot, 0], other))
        return bool(same) and all(same)


@contextmanager
def layers(folder: Path, name: str) -> Iterator[Layers]:
    import torch
    from client_stage import FIRST_HUB
    from vllm.config.lora import LoRAConfig
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm_engines import checkpoint
    from vllm_ranks import loaded

    from recipes.bench.sizes.ranks import Rank
    from tensorhub_plugins.core import Client, start_server
    from tensorhub_plugins.vllm.config import WorkerConfig
    from tensorhub_plugins.vllm.worker.adapters import AdapterUpdater

    with ExitStack() as stack:
        hub = stack.enter_context(start_server(limits=FIRST_HUB))
        trainer = stack.enter_context(Client(hub.address, run="r", model=name, replica="trainer"))
        model, config = stack.enter_context(loaded(folder, Rank(), checkpoint(folder)))
        config.lora_config = LoRAConfig(max_lora_rank=RANK, max_loras=1, max_cpu_loras=1)
        config.lora_config.lora_dtype = torch.bfloat16
        manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        manager.create_lora_manager(model, config)
        given = {"hub": hub.address, "run": "r", "model": "actor", "replica": "engine", "lora": [name]}
        updater = AdapterUpdater(WorkerConfig.parse(given), name, manager, config, lambda vote: [vote], 0)
        stack.callback(updater.close)
        yield Layers(updater, trainer)


def swapped(folder: Path, name: str) -> dict[str, Any]:
    """Return what comes of updates, of one that fails half way, and of adapters that vLLM pushes out."""
    from tensorhub_plugins.core import run_log

    trained, found, told = Trained(folder), {}, set[str]()
    run_log.record = lambda event, worker, **_: told.add(worker)
    with layers(folder, name) as worker:
        found["waits for the next try"] = waits_for_the_next_try(worker, trained.step(0))
        for version in (2, 3, 4):
            tensors = trained.step(version)
            result = worker.update(version, tensors)
            found[f"update {version}"] = bool(result["installed"] and worker.has(tensors))
        found["control"] = not worker.has(trained.step(9))
        found["its name in the journal"] = f"engine.{name}/0" in told and "engine/0" not in told
        while worker.updater.poll()["serving"]:  # in the background, after the install
            time.sleep(0.01)
        found["serves it, and the one before no longer"] = [
            key.version for key in worker.updater._client.serving()
        ] == [4]
        found["bytes"] = result["report"]["size_bytes"]
        worker.updater._manager.remove_adapter(worker.updater.request.lora_int_id)
        found["gone"] = not worker.has(tensors)
        for _ in range(2):  # each request asks for it
            worker.updater._manager.add_adapter(worker.updater.request)
        found["asked for again"] = worker.has(tensors)

        def activate_adapter(number: int) -> bool:
            del worker.manager.activate_adapter
            raise RuntimeError("out of memory")

        worker.manager.activate_adapter = activate_adapter
        later = trained.step(5)
        result = worker.update(5, later)
        found["half way"] = (result["installed"], result["error"], result["broken"], result["version"])
        found["the old one is back"] = worker.has(tensors)
        worker.updater.start_fetch(5, 30.0)
        while worker.updater.poll()["state"] == "fetching":
            time.sleep(0.01)
        found["again"] = bool(worker.updater.install(5, 30.0)["installed"] and worker.has(later))
        # Users' adapters have all places of the layers and are pinned there: it fails, and so would a second try.
        worker.updater.evict()
        worker.manager._active_adapters[1] = None
        worker.manager._active_adapters.pin(1)
        result = worker.update(6, trained.step(6))
        found["no place"] = (result["installed"], result["error"], result["broken"], result["version"])
        worker.manager._active_adapters.pop(1)
        worker.updater._manager.add_adapter(worker.updater.request)
        found["the old one has a place"] = worker.has(later)
        try:
            worker.updater._manager.add_adapter(_renamed(worker.updater.request))
        except ValueError as error:
            found["another's path"] = str(error)
    return found


def waits_for_the_next_try(worker: Layers, tensors: dict[str, Any]) -> bool:
    """Return whether a first one that cannot be swapped in is not tried again as fast as that fails."""
    from tensorhub_plugins.vllm.worker import adapters

    tries: list[int] = []

    def activate_adapter(number: int) -> bool:
        tries.append(number)
        raise RuntimeError("out of memory")

    def sleep(seconds: float) -> None:
        raise InterruptedError

    worker.manager.activate_adapter, adapters.time = activate_adapter, SimpleNamespace(sleep=sleep)
    worker.trainer.publish(1, tensors)
    try:
        worker.updater.install_first(5.0)
    except InterruptedError:
        return len(tries) == 1
    finally:
        del worker.manager.activate_adapter
    return False


def _renamed(request: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(request, lora_path="/elsewhere", load_inplace=True)


def refused(folder: Path, larger: Path, name: str) -> dict[str, tuple[str | None, str, int, bool]]:
    """Return of adapters that do not fit: the kind of error, its text, the version that stays, and whether it does."""
    import torch

    from tensorhub_plugins.vllm.lora import CONFIG, COUNT, adapter_of

    trained = Trained(folder)
    first, given = trained.step(1), Trained(folder, seed=1).step(2)

    first_a = next(name for name in given if "lora_A" in name)

    def changed(tensors: dict[str, Any], **changes: Any) -> dict[str, Any]:
        said = {**adapter_of(given)[1], COUNT: len(tensors.keys() - {CONFIG}), **changes}
        return {**tensors, CONFIG: torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)}

    wrong = {
        "rank": Trained(folder, rank=2 * RANK).step(0),
        "base": Trained(larger).step(0),
        "part": {name: each for name, each in given.items() if "layers.1" not in name},
        "layer": {name.replace("layers.1.", "layers.7."): each for name, each in given.items()},
        "shape": {name: each[:64] if name.endswith("o_proj.lora_B.weight") else each for name, each in given.items()},
        "lone": changed({name: each for name, each in given.items() if not name.endswith(LONE)}),
        "said rank": changed(given, r=RANK // 2),
        "alpha": Trained(folder, alpha_pattern={"q_proj": 99}).step(0),
        "whole module": Trained(folder, modules_to_save=["lm_head"]).step(0),
        "dora": Trained(folder, use_dora=True).step(0),
        "bias": Trained(folder, bias="all").step(0),
        "weights": {"a": torch.ones(3)},
        "none": changed({}),
        "no matrix": {**given, first_a: given[first_a].flatten()},
        "no floats": {**given, first_a: given[first_a].int()},
        "nan": {**given, first_a: given[first_a].clone().index_fill(1, torch.tensor([5]), float("nan"))},
        "inf": {**given, first_a: given[first_a].clone().index_fill(0, torch.tensor([0]), -float("inf"))},
        "twice": changed({**given, first_a.removeprefix("base_model.model."): given[first_a] * 2}),
        "head": changed(
            {f"{HEAD}.lora_A.weight": torch.ones(RANK, 128), f"{HEAD}.lora_B.weight": torch.ones(499, RANK)}
        ),
        "embedding": changed({f"{EMBEDDING}_A": torch.ones(RANK, 500), f"{EMBEDDING}_B": torch.ones(127, RANK)}),
    }
    found: dict[str, tuple[str | None, str, int, bool]] = {}
    with layers(folder, name) as worker:
        assert worker.update(1, first)["installed"]
        for number, (what, tensors) in enumerate(wrong.items(), 20):
            said = worker.update(number, tensors)
            found[what] = (said.get("error_kind"), said["error"] or "", said["version"], worker.has(first))
        assert worker.update(99, given)["installed"] and worker.has(given)
    return found
