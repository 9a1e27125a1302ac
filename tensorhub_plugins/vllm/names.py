"""What the store is called in vLLM's configurations, and the versions of vLLM that the adapter is written for."""

from __future__ import annotations

NAME = "tensorhub"
LEAVING_S = 8.0  # for an engine that ends: HAND_OVER_TIMEOUT_S (updater.py), and its processes

VERSIONS_SUPPORTED = ((0, 26), (0, 33))  # first and last minor version with these interfaces


def check_version(version: str) -> None:
    """Raise UsageError unless the adapter is written for that vLLM version."""
    try:
        minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        minor = ()
    first, last = VERSIONS_SUPPORTED
    if not (first <= minor <= last):
        from tensorhub_plugins.core import UsageError  # plugin.py imports this module in every vLLM process

        raise UsageError(
            f"vLLM {version} is outside the supported range {_dotted(first)} to {_dotted(last)}: "
            "install a version in that range, or use the engine's own weight update instead of tensorhub"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
