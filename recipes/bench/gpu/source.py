"""A trainer in a process of its own, whose tensors lie on the device."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import torch

from recipes.bench.gpu.machine import Machine
from tensorhub_plugins.core import Client

if TYPE_CHECKING:
    from recipes.bench.gpu.store import Setting


class Source:
    """A trainer process. publish() has it publish new content; this process computes the same content, to compare."""

    def __init__(self, address: str, setting: Setting, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._setting = setting
        self._version = 0
        self._pipe, child = context.Pipe()
        kind = "cuda" if setting.machine.is_gpu else "cpu"
        arguments = (child, address, kind, setting.shapes, transport)
        self._process = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        child.close()

    def publish(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Publish the next version, and return it, the only one, with its contents."""
        self._version += 1
        self._pipe.send(self._version)
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return self._version, self._setting.tensors(answer)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()


def _run(pipe: Any, address: str, kind: str, shapes: list[tuple[int, ...]], transport: str) -> None:
    machine = Machine(kind)
    tensors = machine.tensors(shapes, 0)
    with Client(address, run="bench", model="actor", replica="trainer", transports=(transport,)) as trainer:
        trainer.retain(0)
        while True:
            try:
                version = pipe.recv()
            except EOFError:
                return
            try:
                if version > 1:
                    trainer.unpublish(version - 1)
                seed = 100 + version % 2
                for name, tensor in machine.tensors(shapes, seed).items():
                    tensors[name].copy_(tensor)
                trainer.publish(version, tensors, copy=False)
                pipe.send(seed)
            except Exception as error:
                pipe.send(error)
