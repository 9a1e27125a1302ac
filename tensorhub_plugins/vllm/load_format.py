"""`--load-format tensorhub`: an engine starts from the store, and others start from it.

    vllm serve MODEL --load-format tensorhub --model-loader-extra-config '{"hub": "tcp://hub:7070", "model": "actor"}'

The model is made as vLLM makes it, with zeros in it, and then gets its first version as it will get every later one
(worker/updater.py): read in place from a peer of the same runtime layout, else converted from the checkpoint layout. So
MODEL needs a configuration and a tokenizer; its weights are read only where `disk` allows it. Afterwards the engine
serves what it has to others, in place, while it generates.

The worker gets the methods of `TensorHubWorkerExtension`, as if it had been started with `worker_extension_cls`.
A draft model comes from disk, and so do MTP heads, unless option "draft" says "store": then they are in the versions.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from tensorhub_plugins.core import (
    CHECKPOINT,
    LATEST,
    Deadline,
    NotPublished,
    TensorHubError,
    VersionInfo,
    VersionRefused,
    cores,
    gate,
    work,
)
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm import drafts
from tensorhub_plugins.vllm.config import StartConfig, WorkerConfig, parse
from tensorhub_plugins.vllm.interrupts import leave_garbage
from tensorhub_plugins.vllm.worker import addresses, cpu, online_quantization, reload
from tensorhub_plugins.vllm.worker.extension import BEGIN, extend, join, leave
from tensorhub_plugins.vllm.worker.updater import Updater
from tensorhub_plugins.vllm.worker.votes import OutOfStep, anyone, engine_gather, first_says

logger = get_logger(__name__)

FILL_THREADS_MAX = 8  # more wait for each other in the kernel


class _Verdict(enum.IntEnum):
    """What all workers of the engine do after a failed read."""

    FAIL = 0
    AGAIN = 1
    DISK = 2


class TensorHubModelLoader(BaseModelLoader):
    """Making one has no effects: vLLM 0.32 makes it early, and may never use it."""

    def download_model(self, model_config: Any) -> None:
        """Download nothing."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load from disk what vLLM itself loads again."""
        self._from_disk().load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Any:
        """Yield the checkpoint on disk, for vLLM's reload_weights()."""
        return self._from_disk().get_all_weights(model_config, model)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Return the model with its weights; in all workers of an engine at once."""
        start, joining = parse(self.load_config.model_loader_extra_config, vllm_config)
        has_draft = joining is not None and drafts.source_in(vllm_config, joining.draft) == "store"
        if _is_draft(model_config, vllm_config):
            if has_draft:
                return self._made(vllm_config, model_config, prefix, on_disk=start.disk != "never").eval()
            draft = self._from_disk()
            return draft.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        began = time.monotonic()
        if joining is not None:
            addresses.check_config(vllm_config)  # before vLLM's offloaders take hold of the layers
        extend(vllm_config)
        if joining is not None and joining.lora and start.disk == "only" and not start.disk_version:
            joining = None  # only its adapters come from the store (engine/core_follower.py)
        on_disk = joining is None or _start_from_disk(start, joining, vllm_config)
        model = self._made(vllm_config, model_config, prefix, on_disk=on_disk)
        made = time.monotonic()

        def begin(drafting: torch.nn.Module | None = None) -> None:
            came_from_disk = on_disk
            if joining is not None:
                came_from_disk = self._begin(start, joining, model, vllm_config, drafting, on_disk=on_disk)
            logger.info(
                "weights from %s: model made in %.2f s, then %.2f s",
                "disk" if came_from_disk else "the store",
                made - began,
                time.monotonic() - made,
            )

        if has_draft:  # vLLM makes it now, and has it share the target's embeddings
            vars(model)[BEGIN] = begin
        else:
            begin()
        return model.eval()

    def _made(self, vllm_config: Any, model_config: Any, prefix: str, *, on_disk: bool) -> torch.nn.Module:
        """Make a model as vLLM does, with the weights on disk, or with zeros."""
        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        with set_default_torch_dtype(model_config.dtype), cpu.live_layers():
            with device:
                model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            with reload.defined_paddings():
                if on_disk:
                    self.load_weights(model, model_config)
                else:
                    _fill_with_zeros(model)
                online_quantization.finish_first_load(model, model_config)
            process_weights_after_loading(model, model_config, device)
        return model

    def _begin(
        self,
        start: StartConfig,
        joining: WorkerConfig,
        model: torch.nn.Module,
        vllm_config: Any,
        drafting: torch.nn.Module | None,
        *,
        on_disk: bool,
    ) -> bool:
        """Join the store and get the first version; return whether the weights are those on disk."""
        try:
            updater = join(joining, model, vllm_config, drafting, on_disk=on_disk and not joining.lora)
            if not on_disk and not _read(start, joining, updater):
                reload.reload_checkpoint(model, vllm_config, self.get_all_weights(vllm_config.model_config, model))
                updater.mark_unversioned(mended=True)
                on_disk = True
            if on_disk:
                _serve_what_was_on_disk(start, joining, updater)
        except BaseException as error:  # also a signal: no thread of its keeps the process, and the hub knows at once
            leave(model)
            if isinstance(error, SystemExit):
                leave_garbage()
            raise
        # vLLM captures graphs from now on, to measure their memory and then for good: until the end of its warm-up
        # (extension.py) nothing is served from the device.
        gate.close()
        return on_disk

    def _from_disk(self) -> DefaultModelLoader:
        plain = dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})
        return DefaultModelLoader(plain)


def _is_draft(model_config: Any, vllm_config: Any) -> bool:
    """Return whether this model drafts for the engine's own. vLLM loads a draft model by a configuration in which it
    stands in the place of that."""
    if model_config is not vllm_config.model_config:
        return True
    speculative = getattr(vllm_config, "speculative_config", None)
    of_draft, own = (getattr(speculative, f"{which}_model_config", None) for which in ("draft", "target"))
    return model_config is of_draft and model_config is not own  # one and the same where nothing drafts by weights


def _fill_with_zeros(model: torch.nn.Module) -> None:
    """Fill the weights with zeros, so that what kernels make of them before they arrive is defined, and the same
    everywhere.

    The host's by several threads: what takes its time is that the memory is touched for the first time. A device's by
    this thread, on whose stream the next kernels follow. Layers that vLLM quantizes as it loads have no memory yet."""

    def fill(parameter: torch.nn.Parameter) -> None:
        with torch.no_grad():
            parameter.zero_()

    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    on_device: list[torch.Tensor] = [parameter for parameter in parameters if parameter.device.type != "cpu"]
    if on_device:
        with torch.no_grad():
            torch._foreach_zero_(on_device)
    with ThreadPoolExecutor(min(FILL_THREADS_MAX, cores())) as threads:
        list(threads.map(fill, (parameter for parameter in parameters if parameter.device.type == "cpu")))


def _read(start: StartConfig, joining: WorkerConfig, updater: Updater) -> bool:
    """Get the first version; False: the store has lost all it had, and the weights are to come from disk.

    A version that is lost or superseded while it is read, or not this model's, is no reason not to start: there may be
    another."""
    lost, began, grows = "", time.monotonic(), start.start_timeout_s is None
    refused: dict[int, str] = {}  # not this model's, and why
    out_of_step: list[int] = []  # these workers lost each other: once more is enough, unless one of them cannot go on

    def until() -> Deadline:
        return Deadline(work.until(began, work.last_at() if grows else began, start.wait_s))

    while True:
        try:
            version = updater.resolve(until().remaining(), refused) if start.version == LATEST else int(start.version)
        except NotPublished as error:
            raise NotPublished(f"{error.message}{lost}", timeout_s=start.wait_s) from error
        left_s = start.wait_s if grows else until().remaining()
        result = updater.update(version, left_s, in_place=True, grows=grows)
        if result["installed"]:
            break
        if anyone(updater.gather, updater.poll()["error_kind"] == VersionRefused.__name__):
            refused[version] = str(result["error"])
        lost_step = anyone(updater.gather, str(result["error"]).startswith(OutOfStep.__name__))
        verdict = _Verdict.FAIL
        if updater.position.shard == 0:
            held = {info.version for info in _versions(joining) if info.visible}
            other = bool(held - set(refused)) if version in refused else version not in held
            if not held and start.disk == "fallback":
                verdict = _Verdict.DISK
            elif other and start.version == LATEST and not until().expired:
                verdict = _Verdict.AGAIN
            elif lost_step and version not in out_of_step and not until().expired:
                verdict = _Verdict.AGAIN
                out_of_step.append(version)
        verdict = _Verdict(first_says(updater.gather, verdict))
        if verdict == _Verdict.FAIL:
            raise TensorHubError(f"the engine cannot start from the store: {result['error']}", version=version)
        lost = f"; version {version} was {'refused' if version in refused else 'lost on the way'}: {result['error']}"
        logger.warning("going on from %s%s", "disk" if verdict == _Verdict.DISK else "the store", lost)
        if verdict == _Verdict.DISK:
            return False
    _log_first(version, result)
    return True


def _log_first(version: int, result: dict[str, Any]) -> None:
    report = result["report"]
    logger.info(
        "version %d as %s from %s: %.1f MB by %s in %.3f s",
        version,
        result["layout"],
        ", ".join(report["sources"]),
        report["size_bytes"] / 1e6,
        ", ".join(report["transports"]),
        result["seconds"],
    )


def _start_from_disk(start: StartConfig, joining: WorkerConfig, vllm_config: Any) -> bool:
    """Return what the first worker of the engine finds, for all of them."""
    if start.disk != "fallback":
        return start.disk == "only"
    gather, place = engine_gather(vllm_config)
    return not first_says(gather, place == 0 and any(info.layouts for info in _versions(joining)))


def _serve_what_was_on_disk(start: StartConfig, joining: WorkerConfig, updater: Updater) -> None:
    """Serve them under the number that the configuration gives it, unless the store has used that number."""
    if not start.disk_version:
        return
    held = {info.version: info.layouts for info in _versions(joining, f"start-{updater.position.shard}")}
    taken = max(held, default=0) > start.disk_version or CHECKPOINT in held.get(start.disk_version, ())
    if first_says(updater.gather, taken):
        logger.warning("the weights from disk are not served: the store has versions of its own by now")
    else:
        updater.serve_current_as(start.disk_version)


def _versions(joining: WorkerConfig, visitor: str = "start") -> list[VersionInfo]:
    """Return what the store has; asked by a visitor, which leaves again."""
    with joining.connect(replica=f"{joining.replica}-{visitor}", transports=("tcp",)) as client:
        return client.versions()
