"""Under `python -O`, which leaves asserts out, what protects data is still there."""

from __future__ import annotations

import subprocess
import sys

import pytest

READ_ANEW = """
import torch
from tensorhub_plugins.core import Client
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.hub.hub import Hub
from tensorhub_plugins.core.hub.report import validate
from tensorhub_plugins.core.hub.server import start_server
from tensorhub_plugins.core.manifest import TensorSpec, TensorTable
import msgspec

def raises(kind, work):
    try:
        work()
    except kind:
        return True
    return False

assert False, "asserts are left out here"
specs = [TensorSpec(name, "float32", (2,), 8) for name in ("b", "a")]  # not sorted: no peer may say so
right = TensorTable.of(specs)
print("table", raises(ProtocolError, lambda: TensorTable.decode(msgspec.msgpack.encode(specs))))
print("right", not raises(ProtocolError, lambda: TensorTable.decode(right.encoded)))
hub = Hub(bytes(16), 0.0)
validate(hub.registry)
hub.registry.readers_records += 1
print("records", raises(AssertionError, lambda: validate(hub.registry)))
with start_server() as server:
    names = dict(run="r", model="m")
    with Client(server.address, replica="a", **names) as one, Client(server.address, replica="b", **names) as other:
        want = {f"w{k}": torch.full((1 << 20,), float(k)) for k in range(5)}  # several segments
        one.publish(1, want)
        got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
        other.replicate(got, 1)
        print("bytes", all(torch.equal(want[name], got[name]) for name in want))
"""


@pytest.mark.smoke
@pytest.mark.heavy
def test_what_is_checked_is_checked_without_asserts() -> None:
    ran = subprocess.run([sys.executable, "-O", "-c", READ_ANEW], capture_output=True, text=True, timeout=100)
    assert ran.stdout.splitlines() == [f"{what} True" for what in ("table", "right", "records", "bytes")], ran.stderr
