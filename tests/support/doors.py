"""Doors of trainers to the store, called as their frameworks call them, and a rollout that reads what comes of it."""

from __future__ import annotations

import os
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from processes import answering

from tensorhub_plugins.core import CHECKPOINT, Client, Publisher, folders

TIMEOUT_S = 30.0
ACTOR, ADAPTER = "actor", "actor.lora"


class Door:
    """One life of a trainer that publishes by this door. It has trained so many steps."""

    model = ACTOR

    def __init__(self, hub: str, folder: Path, trained: int) -> None:
        self.trained = trained
        self.join(hub, folder)

    def join(self, hub: str, folder: Path) -> None:
        raise NotImplementedError

    def update(self) -> None:
        """Do what the framework does after a step: at once again, it is the same update."""
        raise NotImplementedError

    def leave(self) -> None:
        raise NotImplementedError

    def train(self, steps: int = 1) -> None:
        self.trained += steps


class OwnLoop(Door):
    """A loop that somebody wrote, in the versions that it counts."""

    def join(self, hub: str, folder: Path) -> None:
        self.client = Client(hub, run="default", model=self.model, replica="trainer")
        self.publisher = Publisher(
            self.client, rank=0, ranks=1, worker="trainer", keep=1, timeout_s=TIMEOUT_S, begins=True
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {"layer": torch.full((64, 32), float(self.trained))}

    def update(self) -> None:
        self.publisher.publish(self.trained, self.weights().items())

    def leave(self) -> None:
        self.publisher.close()
        self.client.close()


@cache
def peft_model(folder: Path) -> Any:
    from vllm_adapters import Trained
    from vllm_engines import make_model

    return Trained(make_model("qwen2-tied", folder, 1)).peft


class Adapter(OwnLoop):
    """The same, of a LoRA adapter."""

    model = ADAPTER

    def join(self, hub: str, folder: Path) -> None:
        super().join(hub, folder)
        self.peft = peft_model(folder.parent / "base")

    def weights(self) -> dict[str, torch.Tensor]:
        from tensorhub_plugins.vllm.lora import adapter_tensors

        for name, parameter in self.peft.named_parameters():
            if ".lora_" in name:
                parameter.data.fill_(float(self.trained))
        return dict(adapter_tensors(self.peft))


class Transfer(Door):
    """vLLM's own weight transfer, which counts its updates itself, too."""

    def join(self, hub: str, folder: Path) -> None:
        from vllm.distributed.weight_transfer import ModuleSource

        from tensorhub_plugins.vllm.weight_transfer import (
            FollowingEngines,
            TensorHubTrainerEngine,
            TensorHubTrainerInitInfo,
        )

        self.module = torch.nn.Linear(8, 8, bias=False)
        info = TensorHubTrainerInitInfo(hub=hub, model=self.model, rank=0, linger_s=0.0)
        self.engine = TensorHubTrainerEngine.trainer_init(
            info, client=FollowingEngines(), source=ModuleSource(self.module)
        )

    def update(self) -> None:
        self.module.weight.data.fill_(float(self.trained))
        self.engine.send_weights()

    def leave(self) -> None:
        self.engine.shutdown()


class Trl(Door):
    """TRL counts its updates itself: each is a version."""

    def join(self, hub: str, folder: Path) -> None:
        import transformers
        from vllm_engines import make_model

        from tensorhub_plugins.vllm.trl import StoreTransfer

        made = make_model("qwen2-tied", folder.parent / "base", 1)
        self.trl = transformers.AutoModelForCausalLM.from_pretrained(made)
        self.transfer = StoreTransfer(hub, str(made))
        self.transfer.init_weight_transfer()

    def update(self) -> None:
        self.transfer.pause()
        weights = self.trl.named_parameters()
        self.transfer.send_weights((name, torch.full_like(each, float(self.trained))) for name, each in weights)
        self.transfer.resume()

    def leave(self) -> None:
        self.transfer._publisher.close()  # `destroy` first waits until somebody else has the last version
        self.transfer._client.close()


class Folders(Door):
    """slime and miles: a version is a folder of files, written before it is published."""

    def join(self, hub: str, folder: Path) -> None:
        self.folder = folder
        folders._joined.clear()
        folders._run.clear()

    def update(self) -> None:
        made = self.folder / f"weight_v{self.trained:06d}"
        made.mkdir(parents=True, exist_ok=True)
        (made / "model.safetensors").write_bytes(bytes([self.trained]) * 10_000)
        (made / folders.INDEX).write_text('{"metadata": {}}')
        folders.publish(SimpleNamespace(), str(made), [])

    def leave(self) -> None:
        for _, client in folders._joined.values():
            client.close()
        folders._joined.clear()


DOORS = {"own loop": OwnLoop, "adapter": Adapter, "vLLM's transfer": Transfer, "TRL": Trl, "slime": Folders}


def rollout(pipe: Connection, hub: str, name: str, door: str, folder: Path, timeout_s: float) -> None:
    """Have the weights of the newest version, and offer them to others."""
    if door == "slime":
        os.environ["TENSORHUB_HUB"] = hub
        answering(pipe, lambda number: of_folder(folder, number))
        return
    with Client(hub, run="default", model=DOORS[door].model, replica=name) as client:
        have = 0

        def newest(_: int) -> set[float]:
            nonlocal have
            have = client.wait(newer_than=have, timeout_s=timeout_s)
            fetched = client.fetch(have, (CHECKPOINT,), timeout_s=timeout_s, serve=True)
            for key in client.serving():
                if key.version != have:
                    client.unpublish(key.version)
            floats = [tensor for tensor in fetched.tensors().values() if tensor.is_floating_point()]
            return {float(value) for tensor in floats for value in tensor.unique()}

        answering(pipe, newest)


def of_folder(folder: Path, number: int) -> set[float]:
    folders.fetch(str(folder), number)
    return set(map(float, (folder / f"weight_v{number:06d}" / "model.safetensors").read_bytes()))
