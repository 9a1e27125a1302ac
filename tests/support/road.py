"""The functions of core that one publish and one replicate enter, counted as they run: `python road.py` prints how many
functions, lines (docstrings and blank ones included) and files.

Hub, trainer and reader are in one process, over TCP; everything is warm: two versions went the same way before. Each
has other bytes, as the reader would not read those that it has. What each of several versions enters counts: on a busy
machine a wait may end by its time, which enters more.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from hub_limits import AT_ONCE

import tensorhub_plugins.core

CORE = str(Path(tensorhub_plugins.core.__file__).parent)
TENSORS = 20
WARM, COUNTED = 2, 20  # versions


class Road:
    """A record of what is entered, by any thread that starts after it was made, while `is_open`."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()
        self.always: set[CodeType] | None = None
        self.is_open = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, given: Any) -> None:
        if self.is_open and event == "call" and frame.f_code.co_filename.startswith(CORE):
            self.entered.add(frame.f_code)

    def close(self) -> None:
        """Keep what was entered since it was opened, and each time before."""
        self.is_open = False
        self.always = self.entered.copy() if self.always is None else self.always & self.entered
        self.entered.clear()


@functools.cache
def lines_of(code: CodeType) -> frozenset[tuple[str, int]]:
    source, first = inspect.getsourcelines(code)
    return frozenset((code.co_filename, first + number) for number in range(len(source)))


def one_version(road: Road) -> None:
    from tensorhub_plugins.core import Client, start_server

    names = [f"layer.{number}" for number in range(TENSORS)]
    common: dict[str, Any] = {"run": "road", "model": "actor", "transports": ("tcp",)}
    with (
        start_server(limits=AT_ONCE) as server,
        Client(server.address, replica="trainer", **common) as trainer,
        Client(server.address, replica="reader", **common) as reader,
    ):
        for version in range(1, WARM + COUNTED + 1):
            road.is_open = version > WARM
            published = trainer.publish(version, {name: torch.randn(64, 64) for name in names})
            reader.wait(newer_than=version - 1)
            read = reader.replicate({name: torch.empty(64, 64) for name in names}, version)
            assert read.transports == {"tcp": published.size_bytes}
            if road.is_open:
                road.close()


if __name__ == "__main__":
    road = Road()
    one_version(road)
    entered = set().union(*map(lines_of, road.always or ()))  # a function within another one is not counted twice
    print(len(road.always or ()), len(entered), len({file for file, _ in entered}))
