"""What an engine that follows tells of itself: to the actor that owns it as soon as that changes, and over HTTP
(routes.py), with what changes with the clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from typing_extensions import NotRequired, TypedDict

from tensorhub_plugins.core import steps_behind
from tensorhub_plugins.vllm.config import WorkerConfig


@dataclass
class LastUpdate:
    """What the last version cost."""

    pull_s: float = 0.0  # beside generation
    pause_s: float = 0.0  # no request was served
    sources: dict[str, int] = field(default_factory=dict)  # "replica/shard" -> bytes, of all workers
    ways: dict[str, int] = field(default_factory=dict)  # "same_host shm" -> bytes; WIRE: those that were sent for them


class Status(msgspec.Struct, frozen=True):
    """How far an engine is, and whether it takes work."""

    revision: int = 0  # grows with every change
    version: int = 0  # installed; 0: what the engine was started with
    is_broken: bool = msgspec.field(default=False, name="broken")  # an installation has failed half way
    has_caught_up: bool = False
    busy_since: float = 0.0  # monotonic seconds: since then an installation keeps the engine from answering; 0.0: none
    refusal: tuple[int, str] = (0, "")  # a newer version that it cannot install, and why
    stays: bool = False  # it will not go on to the trainer's newest version
    pinned: int | None = None
    attempt: int = 0  # the trainer's newest one
    why_not: str = ""  # it takes no new work
    last: LastUpdate = msgspec.field(default_factory=LastUpdate)

    def may_answer(self, version: int) -> bool:
        """Return whether a prompt may begin now that asks for this version or a later one."""
        return self.version >= version and not (self.is_broken or self.busy_since)


class Following(TypedDict):
    """The same as a dict, with which run the engine follows, and what changes with the clock."""

    run: str
    model: str
    replica: str
    version: int
    broken: bool
    hub_silent_s: float
    follow: NotRequired[str | None]  # "now" or "idle"; servers with earlier versions of this package lack these
    why_not: NotRequired[str]
    refusal: NotRequired[tuple[int, str]]
    wanted: NotRequired[int]  # the version to run, as the hub last said
    behind_s: NotRequired[float]  # for which that has been another than the installed one
    installed_s: NotRequired[float]  # since that was installed
    failure: NotRequired[str]  # of the last try; "": it went well
    last: NotRequired[dict[str, Any]]  # see LastUpdate
    updating: NotRequired[bool]  # a version is fetched, installed, or waited for by a hold
    paused: NotRequired[bool]  # by another client, or put to sleep: it answers nothing, and installs nothing
    adapters: NotRequired[dict[str, Following]]  # of an engine that follows adapters, all; the rest is of the last one


def following(joining: WorkerConfig, when: str | None, status: Status, hub_silent_s: float) -> Following:
    """Return what an engine reports of itself over HTTP."""
    said = msgspec.to_builtins(status)
    how = {"run": joining.run, "model": joining.model, "replica": joining.replica, "follow": when}
    return {**said, **how, "hub_silent_s": hub_silent_s}  # type: ignore[typeddict-item]


def lag_of(said: Following) -> int:
    """Return by how many steps an engine is behind the version that it is to run."""
    wanted = said.get("wanted", 0)
    return max(0, steps_behind(said["version"], wanted)) if wanted > said["version"] else 0


def why_refused(said: Following) -> str | None:
    """Return why it cannot install the version that it is to run; None: it can, or has."""
    refused, why = said.get("refusal", (0, ""))
    return why if refused >= said.get("wanted", 0) > said["version"] else None
