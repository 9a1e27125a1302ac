"""An engine as small as one can be that has what makes installs hard: a decode step that is captured as a CUDA graph,
on a stream of its own, with the addresses of its weights baked in; and an eager prefill.

Each weight carries the number of its version in its first element. Every step compares them all on the device, in the
graph: a step that saw two versions is counted, and nothing has to be looked at while it runs.

On the CPU the same step runs without a graph.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tensorhub_plugins.core import gate

STEPS_TO_WARM_UP = 3  # before a capture, as torch asks for


def weights_of(version: int, *, layers: int, width: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, on the host: bfloat16[width, width] and [width] for each layer."""
    generator = torch.Generator().manual_seed(version)
    found = {}
    for layer in range(layers):
        for name, shape in (("weight", (width, width)), ("bias", (width,))):
            tensor = torch.randn(shape, generator=generator) / width**0.5
            tensor.view(-1)[0] = version % 256  # every one of these is exact in bfloat16
            found[f"layers.{layer}.{name}"] = tensor.to(torch.bfloat16)
    return found


class Engine:
    """An engine that holds weights of version 0 until they are replaced in place."""

    def __init__(self, device: torch.device, *, layers: int = 24, width: int = 1024, batch: int = 8) -> None:
        self.layers, self.width, self.device = layers, width, device
        self.weights = {name: tensor.to(device) for name, tensor in weights_of(0, layers=layers, width=width).items()}
        self._input = torch.ones(batch, width, dtype=torch.bfloat16, device=device)
        self._output = torch.zeros_like(self._input)
        self._mixed = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = 0
        self._graph: Any = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def capture(self) -> None:
        """Capture the decode step, with nothing of ours on the device beside, as an engine does when it starts."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(STEPS_TO_WARM_UP):
                self._compute()
        torch.cuda.synchronize()
        gate.close()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="global"):
                self._compute()
        finally:
            gate.open()
        self._graph = graph

    def step(self) -> None:
        """Run one decode step; on a GPU it is only queued."""
        self.steps += 1
        with self._running():
            if self._graph is not None:
                self._graph.replay()
            else:
                self._compute()

    def prefill(self) -> None:
        """Run the same without a graph."""
        with self._running():
            self._compute()

    def finish(self) -> None:
        """Wait for what is queued: a pause."""
        if self._stream is not None:
            self._stream.synchronize()

    @property
    def mixed(self) -> int:
        """Return how many steps saw two versions."""
        self.finish()
        return int(self._mixed)

    @property
    def version(self) -> int:
        """Return the version that the weights carry."""
        self.finish()
        return int(self.weights["layers.0.bias"][0])

    def output(self) -> torch.Tensor:
        """Return the output of the last step, on the host."""
        self.finish()
        return self._output.cpu()

    def _running(self) -> Any:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _compute(self) -> None:
        hidden, tags = self._input, []
        for layer in range(self.layers):
            weight, bias = self.weights[f"layers.{layer}.weight"], self.weights[f"layers.{layer}.bias"]
            hidden = torch.tanh(hidden @ weight + bias)
            tags += [weight.view(-1)[0], bias[0]]
        together = torch.stack(tags)
        self._mixed += (together != together[0]).any()
        self._output.copy_(hidden)
