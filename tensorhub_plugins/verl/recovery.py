"""A trainer of verl that resumes takes its weights from the store (../core/client/recovery.py).

verl's worker loads a checkpoint by `FSDPEngine.load_checkpoint`, before the first update begins an attempt: what was
published is all there still. That method is wrapped, as in parts.py. Where the weights were taken from the store,
verl is told to load all but the model: optimizer, scheduler and random numbers.
"""

from __future__ import annotations

from typing import Any

from tensorhub_plugins.core import AllHeld, Publisher, Recovery, of_all_ranks
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl import parts
from tensorhub_plugins.verl.config import Options
from tensorhub_plugins.vllm.plugin import wrap

log = get_logger(__name__)


def watch(publisher: Publisher, options: Options) -> None:
    """Have the checkpoints of this process's policy noted, and resumed, with the help of this publisher."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    FSDPEngine.tensorhub = publisher, options
    wrap(FSDPEngine, "load_checkpoint", _load)
    wrap(FSDPEngine, "save_checkpoint", _save)


def _load(original: Any, engine: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
    manager, recovery = engine.checkpoint_manager, _recovery(engine)
    contents = manager.checkpoint_load_contents
    _, options = engine.tensorhub
    how = {"timeout_s": options.timeout_s, "grows": options.timeout_grows}
    if local_path is not None and recovery is not None and recovery.resume(local_path, **how):
        manager.checkpoint_load_contents = [each for each in contents if each != "model"]
    try:
        original(engine, local_path, *args, **kwargs)
    finally:
        manager.checkpoint_load_contents = contents


def _save(original: Any, engine: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
    original(engine, local_path, *args, **kwargs)
    recovery = _recovery(engine)
    if local_path is not None and recovery is not None:
        recovery.note(local_path)


def _recovery(engine: Any) -> Recovery | None:
    """Return the way back of this engine's rank; None where there is none: of a critic, and of what is gathered."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

    publisher, options = engine.tensorhub
    if isinstance(engine, FSDPEngineWithValueHead) or not engine.checkpoint_manager.should_load_model:
        return None
    if why := parts.why_gathered(engine):
        log.warning("the weights are loaded from the checkpoint: %s", why)
        return None
    return Recovery(
        publisher,
        options.recover_weights,
        weights=lambda: parts.held_by_rank(engine),
        held=lambda: parts.held_by_rank(engine, AllHeld),
        by_parts=True,
        gather=of_all_ranks,
    )
