"""check_transport for one transport with tensors on the device: `python conform.py gpu cuda_ipc`; prints what passed.

On the GPU with CUDA_LAUNCH_BLOCKING=1: the cases write to tensors and go on, as on the CPU.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import gpu_place
import ipc_devices
from transport_suite import TransportSuite, check_transport

from tensorhub_plugins.core.transports import create


def main(place: str, transport: str) -> None:
    adopt = gpu_place.adopt_on_gpu if place == "gpu" else ipc_devices.adopt
    make = ipc_devices.apart if (place, transport) == ("stand-in", "cuda_ipc") else functools.partial(create, transport)
    on_host: dict[str, Any] = {"slabs": "allocated", "adopt": adopt}  # shm serves host memory only, into any
    on_device: dict[str, Any] = {"slabs": "adopted", "adopt": adopt, "adopt_in_peers": adopt}
    with gpu_place.place_named(place) as there:
        options = on_host if transport == "shm" else on_device
        report = check_transport(make, patience_s=60.0, **options)
        there.check()
    assert set(report.passed) | set(report.skipped) == set(TransportSuite.CASES)
    print(json.dumps({"passed": report.passed, "skipped": report.skipped}))


if __name__ == "__main__":
    main(*sys.argv[1:])
