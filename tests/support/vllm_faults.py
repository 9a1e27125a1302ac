"""A worker extension with faults that a test can switch on, from outside the product."""

from __future__ import annotations

import itertools
import os
import signal
import threading

import torch

from tensorhub_plugins.core.transfer import sharing
from tensorhub_plugins.core.transports import tcp
from tensorhub_plugins.vllm.doctor.check_sync import Patient
from tensorhub_plugins.vllm.worker import conversion, cpu, not_finite, progress, weights
from tensorhub_plugins.vllm.worker.conversion import Conversion
from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension


class FaultyExtension(TensorHubWorkerExtension):
    def tensorhub_test_fail_copy(self, after: int) -> None:
        """Make the next install fail after this many tensors were written."""
        original = weights.copy_tensors

        def copy_tensors(live, source):
            weights.copy_tensors = original
            names = sorted(live)[:after]
            original({name: live[name] for name in names}, {name: source[name] for name in names})
            raise RuntimeError("injected: the copy stopped half way")

        weights.copy_tensors = copy_tensors

    def tensorhub_test_die_in_copy(self, after: int) -> None:
        """Kill this process (SIGKILL) in the next conversion, when so many pieces of the weights have been written."""
        original = conversion.copy_all

        def copy_all(pairs):
            for number, pair in enumerate(pairs):
                if number == after:
                    os.kill(os.getpid(), signal.SIGKILL)
                original([pair])

        conversion.copy_all = copy_all

    def tensorhub_test_fail_reload(self, step: str) -> None:
        """Make the next reload fail: while a loader runs, while a layer is packed, or while the last layers are."""
        from vllm.model_executor.model_loader.reload import layerwise

        calls, failed = itertools.count(), []
        name = {"load": "get_numel_loaded", "process": "_layerwise_process", "finalize": "_place_kernel_tensors"}[step]
        original = getattr(layerwise, name)

        def fail(*args, **kwargs):
            # Of the others there may be one: most layers may be copied instead.
            if failed or (step == "load" and next(calls) < 3):
                return original(*args, **kwargs)
            failed.append(step)  # this stays where it is: a reload has wrapped it, and puts it back
            raise RuntimeError(f"injected: {step}")

        setattr(layerwise, name, fail)

    def tensorhub_test_stop_after(self, segments: int) -> None:
        """Stop this whole process (SIGSTOP) when it is about to send one more segment by TCP."""
        sent = itertools.count()

        def payload(backend, channel, offer, start, stop, deadline):
            if next(sent) >= segments:
                os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait()  # other threads may stop a moment earlier than this one
            return original(backend, channel, offer, start, stop, deadline)

        original, tcp.TcpSource.segment_payload = tcp.TcpSource.segment_payload, payload

    def tensorhub_test_warm_up(self) -> None:
        """Warm up as other builds do at start. The CPU's does not where nothing is compiled, and then lacks the buffers
        in which a stage of a pipeline receives the output of the one before it."""
        self.model_runner.profile_run()

    def tensorhub_test_offload(self, number: int) -> None:
        """Have one layer compute with buffers that are refilled from host memory before each forward from now on."""
        layer = self.get_model().model.layers[number]
        stored = {parameter: parameter.data for parameter in layer.parameters()}
        for parameter in stored:
            parameter.data = torch.empty_like(parameter.data)
        original = layer.forward

        def forward(*args, **kwargs):
            for parameter, host in stored.items():
                parameter.data.copy_(host)
            return original(*args, **kwargs)

        layer.forward = forward

    def tensorhub_test_keep_progress(self) -> None:
        """Restore the old behaviour: what was gathered of requests outlives their preemption."""
        progress.begin_again = lambda *_: None

    def tensorhub_test_pid(self) -> int:
        return os.getpid()

    def tensorhub_test_unhook(self, method: str) -> None:
        """Restore a method as vLLM has it."""
        setattr(type(self), method, getattr(type(self), method).__wrapped__)

    def tensorhub_test_discard_on(self, rank: int) -> None:
        if self.rank == rank:
            self.tensorhub_discard()

    def tensorhub_test_fail_conversion_on(self, rank: int) -> None:
        """Make the next conversion fail on this worker alone."""
        if self.rank != rank:
            return
        original = Conversion.install

        def install(*_):
            Conversion.install = original
            raise RuntimeError("injected: this worker's conversion failed")

        Conversion.install = install

    def tensorhub_test_fail_layer_on(self, rank: int, name: str) -> None:
        """Make the next reload fail on this worker alone, as it packs this layer."""
        from vllm.model_executor.model_loader.reload import layerwise

        if self.rank != rank:
            return
        layer, original, faults = self.get_model().get_submodule(name), layerwise._layerwise_process, [1]

        def process(processed, info):
            if processed is layer and faults:
                faults.clear()
                raise RuntimeError("injected: this worker's layer failed")
            original(processed, info)

        layerwise._layerwise_process = process

    def tensorhub_test_forget(self, forgotten: str) -> None:
        """Make the next install leave this tensor unchanged, without noticing."""
        original = weights.copy_tensors

        def copy_tensors(live, source):
            weights.copy_tensors = original
            names = sorted(live.keys() - {forgotten})
            original({name: live[name] for name in names}, {name: source[name] for name in names})

        weights.copy_tensors = copy_tensors


class HidingPatient(Patient):
    """A patient with something that no raw copy would carry, so that raw copies are not exchanged."""

    def __new__(cls, *args, **kwargs):
        original = Conversion._prove

        def prove(conversion, given, plan):
            original(conversion, given, plan)
            conversion.hidden = ("kernel.scale",)

        Conversion._prove = prove
        return super().__new__(cls, *args, **kwargs)


class OffloadingExtension(FaultyExtension):
    """An extension that offloads a layer after the model has been loaded, as vLLM's offloaders do."""

    def __new__(cls, *args, **kwargs):
        def warm_up():
            worker.tensorhub_test_offload(1)
            return type(worker).compile_or_warm_up_model(worker)

        worker = super().__new__(cls, *args, **kwargs)
        worker.compile_or_warm_up_model = warm_up
        return worker


class StaleViewsExtension(TensorHubWorkerExtension):
    """An extension that leaves the views that Mamba2 has of its weights unchanged."""

    def __new__(cls, *args, **kwargs):
        cpu.refresh_convolutions = lambda model: None
        return super().__new__(cls, *args, **kwargs)


class UnlookedExtension(TensorHubWorkerExtension):
    """An extension that looks for no NaN in the KV that an update leaves."""

    def __new__(cls, *args, **kwargs):
        not_finite.clear_after = lambda worker, changed: None
        return super().__new__(cls, *args, **kwargs)


class BlindExtension(TensorHubWorkerExtension):
    """An extension that does not notice a lost source: it takes what has arrived for everything."""

    def __new__(cls, *args, **kwargs):
        def remove(shard, session, *, lost):
            source = original(shard, session, lost=lost)
            if lost:
                shard.missing = {}
                shard.queue.clear()
            return source

        original, sharing.Shard.remove = sharing.Shard.remove, remove
        return super().__new__(cls, *args, **kwargs)


class LateExtension(TensorHubWorkerExtension):
    """An extension that behaves as if added after the model was loaded: nothing was prepared."""

    def __new__(cls, *args, **kwargs):
        worker = super().__new__(cls, *args, **kwargs)
        del worker.load_model
        return worker


class ForgetfulPatient(Patient):
    """The doctor's patient, but its raw copies leave a tensor unchanged."""

    def tensorhub_install(self, version, timeout_s):
        FaultyExtension.tensorhub_test_forget(self, "model.norm.weight")
        return super().tensorhub_install(version, timeout_s)


class CrashingPatient(Patient):
    """The doctor's patient, but its process ends in the middle of an install."""

    def tensorhub_install(self, version, timeout_s):
        os._exit(3)
