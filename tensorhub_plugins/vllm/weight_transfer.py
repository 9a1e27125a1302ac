"""vLLM's weight transfer, through the store: `--weight-transfer-config '{"backend": "tensorhub"}'`.

An update is vLLM's own round, over HTTP (VLLM_SERVER_DEV_MODE=1) or as methods of LLM and AsyncLLM:
    init_weight_transfer_engine({"hub": "tcp://hub:7070", "model": "actor"})     keys of config.WorkerConfig; once.
                                            Not needed after --load-format tensorhub, which has joined already
    pause                                   in any mode, or not at all
    start_weight_update()
    update_weights({"version": 7})          or {} for the newest; the weights are pulled and swapped
    finish_weight_update("7")               vLLM's weight_version is any text; fails while the weights are broken
    resume

update_weights that fails raises (HTTP 500) and ends the round. Unless bytes had been changed, the old version is whole
and goes on; else the engine stays alive, answers nothing, and does not resume before an update has succeeded. Caches
are forgotten with every update, see engine/core_follower.py.

The trainer's side publishes what its source gives, and drives the round:
    engine = WeightTransferTrainerFactory.trainer_init(
        TensorHubTrainerInitInfo(hub="tcp://hub:7070", model="actor", rank=0),
        client=HTTPVLLMWeightSyncClient("http://server:8000"), source=CheckpointSource(model))
    engine.send_weights()
vLLM's own ModuleSource gives a model's parameters as transformers names and fuses them, which vLLM does not load for
every family (Mixtral, for one).
For servers that follow by themselves (engine/core_follower.py), client=FollowingEngines(): they are not called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferUpdateInfo,
    materialize_full_tensor,
)

from tensorhub_plugins.core import LATEST, Client, Publisher, TensorHubError, UsageError, settle_host
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm import checkpoint_names
from tensorhub_plugins.vllm.config import WorkerConfig, configure, is_further_rank
from tensorhub_plugins.vllm.plugin import register
from tensorhub_plugins.vllm.worker import cpu
from tensorhub_plugins.vllm.worker.extension import extend, join
from tensorhub_plugins.vllm.worker.updater import Updater, time_of_update


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int | str = LATEST
    timeout_s: float | None = None  # of all of it; None: as long as it advances


class TensorHubWeightTransferEngine(WeightTransferEngine[WorkerConfig, UpdateInfo]):
    """Runs in every worker. The updater it drives belongs to the model, see extension.join."""

    init_info_cls = WorkerConfig
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    tensorhub = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        cpu.check_layers(model, vllm_config)  # now, rather than at the first update
        extend(vllm_config)

    def parse_init_info(self, init_dict: dict[str, Any]) -> WorkerConfig:
        return configure({"serve_from": "live", **init_dict}, self.vllm_config)

    def init_transfer_engine(self, init_info: WorkerConfig) -> None:
        joined = vars(self.model).get("tensorhub_updater")
        if joined is None or any(getattr(joined.config, k) != getattr(init_info, k) for k in ("hub", "run", "model")):
            join(init_info, self.model, self.vllm_config)

    def start_weight_update(self) -> None:
        self._updater()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        updater, timeout_s = self._updater(), update_info.timeout_s
        latest = update_info.version == LATEST
        if latest and is_further_rank(self.vllm_config):
            raise UsageError("name the version: each data parallel engine would take what is the latest for it")
        most_s, _ = time_of_update(timeout_s, grows=False)
        version = updater.resolve(most_s) if latest else number_of(update_info.version)
        polled = updater.poll()
        if polled["version"] == version and not polled["broken"]:
            return
        result = updater.update(version, timeout_s)
        if not result["installed"]:
            raise TensorHubError(str(result["error"]), version=version)

    def finish_weight_update(self) -> None:
        self._updater().guard()

    def shutdown(self) -> None:
        """Do nothing: since vLLM 0.32 a trainer's goodbye calls this too, and the engine stays in the store until its
        worker ends."""

    def _updater(self) -> Updater:
        updater: Updater | None = vars(self.model).get("tensorhub_updater")
        if updater is None:
            raise UsageError("not connected: call init_weight_transfer_engine first, with hub and model")
        return updater


def number_of(version: object) -> int:
    """Return the version that a request names, as a number or its digits."""
    if isinstance(version, bool) or not re.fullmatch("[0-9]+", str(version)):
        raise UsageError(f"version is {version!r}: name a whole number, or {LATEST!r}")
    return int(str(version))


# --- the trainer's side ---


@dataclass
class TensorHubTrainerInitInfo(TrainerInitInfo):
    """engine: more keys of config.WorkerConfig for the engines, such as install. client: more arguments of `Client` for
    the trainer, such as interface. linger_s: how long `shutdown` waits for another worker to hold the last version,
    which would be lost with the trainer."""

    backend: ClassVar[str] = "tensorhub"
    hub: str
    model: str
    run: str = "default"
    replica: str = "trainer"
    engine: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    linger_s: float = 60.0

    def __post_init__(self) -> None:
        register()  # vLLM loads no plug-ins in a process that only trains, and its factory is asked next


class TensorHubTrainerEngine(TrainerWeightTransferEngine[TensorHubTrainerInitInfo]):
    """Every rank iterates the source; rank 0 publishes."""

    init_info_cls = TensorHubTrainerInitInfo

    def __init__(self, *, publisher: Publisher | None, linger_s: float, **others: Any) -> None:
        super().__init__(**others)
        self._publisher, self._linger_s = publisher, linger_s
        self._step = 0  # the last one published
        self._left_open = True  # perhaps: vLLM's round, by the trainer before this one

    @classmethod
    def trainer_init(
        cls, init_info: TensorHubTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TensorHubTrainerEngine:
        if source is None:
            raise UsageError("give the trainer's weights: source=CheckpointSource(model)")
        publisher = None
        if init_info.is_sender:
            names: dict[str, Any] = {"run": init_info.run, "model": init_info.model}
            size_bytes = sum(prod(meta.shape) * meta.dtype.itemsize for meta in _declared(source))
            worker, timeout_s = init_info.replica, TrainingOptions.timeout_for(size_bytes)
            store = Client(init_info.hub, replica=worker, **{**names, **init_info.client})
            try:
                publisher = Publisher(store, rank=0, ranks=1, worker=worker, keep=1, timeout_s=timeout_s, begins=True)
                client.init_weight_transfer_engine({"hub": init_info.hub, **names, **init_info.engine})
            except BaseException:  # the next one is no second trainer
                store.close()
                raise
        linger_s, is_sender = init_info.linger_s, init_info.is_sender
        return cls(publisher=publisher, linger_s=linger_s, client=client, source=source, is_sender=is_sender)

    def begin(self, step: int = 0) -> None:
        """Continue from this step: a run that resumes, or is rolled back. What was published above it is superseded."""
        if self._publisher is not None:
            self._publisher.begin(step)
        self._step = step

    def send_weights(self, version: int | None = None) -> None:
        """Publish the source's weights as this step (None: one more than the last), and have the engines take them.

        One that is refused does not count; one that the engines did not take does, and they may yet. A round that was
        left open, as its trainer was interrupted or killed, or its answer was too late, is ended first. The first one
        begins an attempt: what the trainer published from that step on, before it was started again, is superseded."""
        before, step = self._step, self._step + 1 if version is None else number_of(version)
        if self._publisher is None:
            for _ in _items(self.source):  # the ranks that hold parts of a tensor gather it together
                pass
            self._step = step
            return
        newest = self._publisher.newest
        try:
            self._publisher.publish(step, self._whole(step))
        except UsageError:  # nothing was offered; after any other error it may have been seen, and never changes
            if self._publisher.newest == newest:  # else another thread has published meanwhile
                self._step = before
            raise
        number = self._publisher.version(step)
        self._start()
        self.client.update_weights({"version": number})
        self.client.finish_weight_update(str(number))
        self._left_open = False

    def _start(self) -> None:
        """Start vLLM's round. One that was left open is ended before: it would refuse the next one for ever."""
        try:
            self.client.start_weight_update()
        except Exception:
            if not self._left_open:
                raise
            with suppress(Exception):
                self.client.finish_weight_update()
            self.client.start_weight_update()
        finally:
            self._left_open = True

    def _whole(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the source's tensors; raise UsageError if it lacks one that it declares. The step counts then."""
        lacking = {meta.name for meta in _declared(self.source)}
        for name, tensor in _items(self.source):
            yield name, tensor
            lacking.discard(name)
        if lacking:
            raise UsageError(
                f"the source declares {min(lacking)}, and {len(lacking) - 1} more, that rank 0 got nothing of: rank 0 "
                "publishes, so give it a source that it owns all parameters of, such as CheckpointSource(model)"
            )
        self._step = step

    def shutdown(self) -> None:
        """Leave the store, once another worker holds the last version (or `linger_s` is over)."""
        if self._publisher is None:
            return
        with suppress(TensorHubError):
            self._publisher.client.versions()  # without a hub nothing finds another worker
            self._publisher.client.hand_over(self._linger_s)
        self._publisher.close()


class CheckpointSource(WeightSource):
    """A transformers model, under the names that its `save_pretrained` writes. Every rank iterates it.

    Tensors that FSDP2 shards are gathered one by one. What else is not whole in this process is a UsageError."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = checkpoint_names.pretrained(model)
        checkpoint_names.check_whole(model)
        self._steps = checkpoint_names.steps(self._model)

    @cached_property
    def metadata(self) -> Declared:
        return Declared(
            ParamMeta(name, dtype, tuple(shape))
            for step in self._steps
            for name, (dtype, shape) in step.targets.items()
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = self._model.state_dict()
        settle_host(own.values())
        for step in self._steps:
            whole = {name: materialize_full_tensor(own[name]) for name in step.sources}
            converted = checkpoint_names.convert(self._model, whole)
            for name in step.targets:
                yield name, converted[name]

    iter_full = __iter__  # its name since vLLM 0.33


class Declared(list[ParamMeta]):
    """A source's metadata: a property since vLLM 0.33, which refuses a method, and a method before."""

    def __call__(self) -> Declared:
        return self


def _declared(source: Any) -> Iterable[ParamMeta]:
    found = source.metadata
    return found() if callable(found) else found


def _items(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


class FollowingEngines:
    """vLLM's client of an engine, for engines that follow by themselves: there is nothing to tell them."""

    def _nothing(self, *given: Any, **named: Any) -> None:
        pass

    init_weight_transfer_engine = start_weight_update = update_weights = finish_weight_update = _nothing
