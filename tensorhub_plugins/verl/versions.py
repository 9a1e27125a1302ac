"""PURE: verl's steps and the store's versions, and which versions a sample's tokens came from.

verl counts steps from 0 (the weights before training); the store's are positive: one more. In the trainer's first
attempt that is the version, too; a trainer that starts again has others (`core.version_of`).

An engine that keeps its requests while its weights change gives samples whose tokens come from several versions. Its
core says exactly which (../vllm/engine/spans.py). verl's accounting reads `min_global_steps` and `max_global_steps` of
a sample, which two clients fill in: `LLMServerClient` takes what the server gives. `FullyAsyncLLMServerClient`
(separate_async, fully_async) knows one step per answer, and takes the first and last of several answers when a request
was interrupted: what it knows is corrected when it has the whole sample (`routing.watch_client`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorhub_plugins.core import UsageError, step_of
from tensorhub_plugins.verl.config import WHERE, Options
from tensorhub_plugins.vllm.engine.spans import Span


def version_of_step(step: int) -> int:
    return step + 1


def step_of_version(version: int) -> int:
    return step_of(version) - 1


def told(spans: Sequence[Span], *, split: bool) -> dict[str, Any]:
    """Return what an answer says of its versions, in verl's steps, to `routing` on its way to verl's client. split:
    that client goes on with answers that were broken off."""
    steps = [(step_of_version(version), tokens) for version, tokens in spans]
    oldest = min(step for step, _ in steps)  # it may have gone back
    return {"global_steps": oldest, "tensorhub_spans": steps, "tensorhub_split": split}


def reported_as(choice: str, rollout: Any) -> str:
    """Return how samples of several versions are handed to verl's client. "auto": split where the client of this
    trainer understands pieces (verl chooses the client by the trainer)."""
    if choice != "auto":
        return choice
    root = rollout._get_root()
    async_training = root.get("async_training")
    if async_training is not None:
        return "split" if _group(async_training).get("partial_rollout") else "oldest"
    trainer = _group(root.get("trainer"))
    v1 = _group(trainer.get("v1"))
    understands = trainer.get("use_v1", True) and v1.get("trainer_mode") in ("separate_async", "colocate_async")
    return "split" if understands else "oldest"


def check_pieces(options: Options, rollout: Any) -> None:
    """Refuse options by which answers that were broken off go to a client that takes the part for the whole."""
    pieces = {"pause_mode": "abort", "spans": "split"}
    given = [f"{WHERE}.{name}={value}" for name, value in pieces.items() if getattr(options, name) == value]
    if given and reported_as("auto", rollout) != "split":
        raise UsageError(
            f"{given[0]} hands over answers that were broken off, and verl's client in this trainer takes such a part "
            "for the whole answer: leave it out (in fully_async, or set async_training.partial_rollout=True)"
        )


def _group(given: Any) -> Any:
    """Return a group of verl's configuration; an empty one where something else was given."""
    return given if hasattr(given, "keys") else {}
