"""Changes of a worker's weights from outside the store: vLLM's own routes, for any back end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorhub_plugins.core import Slab
from tensorhub_plugins.vllm.config import shares_experts
from tensorhub_plugins.vllm.worker import weights
from tensorhub_plugins.vllm.worker.preserved import preserved
from tensorhub_plugins.vllm.worker.updater import Updater
from tensorhub_plugins.vllm.worker.votes import anyone


@contextmanager
def external_change(updater: Updater, what: str, vllm_config: Any, *, is_certain: bool = True) -> Iterator[None]:
    """Wrap such a change, in all workers of the engine at once: no peer reads the weights meanwhile, and afterwards
    they are no version of the store. If it fails they are unchanged and served as before, or broken.

    is_certain: it changes them, now or later on; else only if their bytes differ afterwards. While the engine sleeps
    there are none, and to read them would end the process."""
    updater.before_external_change(what)
    before = None if updater.is_asleep else Slab.adopt(weights.tensors(updater.model)).manifest()
    reason = ""
    try:
        with preserved(updater.model):
            yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        if before is None or updater.is_asleep:
            differs = updater.is_asleep == (before is not None)
            updater.before_external_change(what)  # again: to wake it up serves them
        else:
            differs = bool(Slab.adopt(weights.tensors(updater.model)).damaged(before))
        changed = differs or (is_certain and not reason)
        if not shares_experts(vllm_config):  # whose ranks are not asked at once
            failed, changed = anyone(updater.gather, bool(reason)), anyone(updater.gather, changed)
            reason = reason or "another worker of this engine failed" * failed
        if not changed:
            updater.mark_unchanged()
        elif reason:
            updater.mark_broken(f"{what} failed half way: {reason}")
        else:
            updater.mark_unversioned()
