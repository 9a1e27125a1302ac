"""Nobody waits for graphs that nobody captures any more. (What waits while they are captured: test_device.py.)"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tensorhub_plugins.core.device.graph_capture import Gate

PATIENCE_S = 60.0
ENDS_BEFORE_ITS_WARM_UP = """
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from tensorhub_plugins.core import gate

def serve():
    with gate.passing():
        print("served")

gate.close()
serving = ThreadPoolExecutor(1).submit(serve)
while not gate.waiting:
    Event().wait(0.01)
raise ValueError("no memory for the KV cache")
"""


def test_an_engine_that_ends_before_its_warm_up_ends() -> None:
    """The interpreter joins the threads that were about to serve its weights. Without a word they wait for half an
    hour."""
    command = [sys.executable, "-c", ENDS_BEFORE_ITS_WARM_UP]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (1, "served\n")
    assert "no memory for the KV cache" in ended.stderr


def test_a_close_that_is_broken_off_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gate._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gate.close()
    assert not gate.closed
    gate._owner = -1  # of another thread
    with pytest.raises(KeyboardInterrupt), gate.passing():
        pass
    assert gate.waiting == 0


def test_a_call_that_fails_is_out() -> None:
    """Of a thread that calls within another call, too."""
    gate = Gate(closed_s_max=PATIENCE_S)
    with pytest.raises(OSError), gate.passing(), gate.passing():
        raise OSError
    closes = threading.Thread(target=gate.close)
    closes.start()
    closes.join(PATIENCE_S / 2)
    assert not closes.is_alive() and gate.closed
    gate.open()
