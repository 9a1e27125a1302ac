"""A worker extension with faults that a test can switch on, from outside the product."""

from __future__ import annotations

from tensorhub_plugins.vllm import runtime
from tensorhub_plugins.vllm.doctor import Patient
from tensorhub_plugins.vllm.worker import TensorHubWorkerExtension


class FaultyExtension(TensorHubWorkerExtension):
    def tensorhub_test_fail_copy(self, after: int) -> None:
        """The next install fails after this many tensors were written."""
        original = runtime.copy_tensors

        def copy_tensors(live, source):
            runtime.copy_tensors = original
            names = sorted(live)[:after]
            original({name: live[name] for name in names}, {name: source[name] for name in names})
            raise RuntimeError("injected: the copy stopped half way")

        runtime.copy_tensors = copy_tensors

    def tensorhub_test_unguard(self) -> None:
        """execute_model as vLLM has it."""
        type(self).execute_model = type(self).execute_model.__wrapped__

    def tensorhub_test_discard_on(self, rank: int) -> None:
        if self.rank == rank:
            self.tensorhub_discard()

    def tensorhub_test_fail_reload_on(self, rank: int) -> None:
        """The next conversion fails on this worker alone."""
        if self.rank != rank:
            return
        original = runtime.reload_checkpoint

        def reload_checkpoint(model, vllm_config, weights):
            runtime.reload_checkpoint = original
            raise RuntimeError("injected: this worker's reload failed")

        runtime.reload_checkpoint = reload_checkpoint

    def tensorhub_test_forget(self, forgotten: str) -> None:
        """The next install leaves this tensor as it is, and does not know it."""
        original = runtime.copy_tensors

        def copy_tensors(live, source):
            runtime.copy_tensors = original
            names = sorted(live.keys() - {forgotten})
            original({name: live[name] for name in names}, {name: source[name] for name in names})

        runtime.copy_tensors = copy_tensors


class LateExtension(TensorHubWorkerExtension):
    """As if it came only after the model was loaded: nothing was prepared."""

    def __new__(cls, *args, **kwargs):
        worker = super().__new__(cls, *args, **kwargs)
        del worker.load_model
        return worker


class ForgetfulPatient(Patient):
    """The doctor's, whose raw copies leave a tensor as it is."""

    def tensorhub_update(self, version, deadline_s):
        FaultyExtension.tensorhub_test_forget(self, "model.norm.weight")
        return super().tensorhub_update(version, deadline_s)
