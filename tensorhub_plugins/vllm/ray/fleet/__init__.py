"""A run's fleet: replicas join and leave while it runs. `find` returns a handle of it (handle.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorhub_plugins.vllm.ray.fleet.handle import Fleet, find, find_all, of_this_job, start

__all__ = ["Fleet", "find", "find_all", "of_this_job", "start"]


def __getattr__(name: str) -> object:
    if name in __all__:  # with Ray, which the pure modules beside it do without
        from tensorhub_plugins.vllm.ray.fleet import handle

        return getattr(handle, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
