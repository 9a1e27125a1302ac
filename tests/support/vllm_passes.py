"""What the workers of vLLM's engines are asked by tests/adapters/vllm/test_from_disk.py, in their own processes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from recipes.bench.big.worker import Passes
from tensorhub_plugins.vllm.worker import intake, weights
from tensorhub_plugins.vllm.worker.conversion import Conversion
from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension


class Counts(TensorHubWorkerExtension):
    def tensorhub_test_tried(self) -> bool:
        """Return whether the trial was made that belongs before the first version."""
        kept = vars(self._model).get(intake.KEPT)
        updater = vars(self._model).get("tensorhub_updater")
        kept = kept if updater is None else updater._intake
        return kept is not None and kept.conversion._tried is not None

    def tensorhub_test_counted(self, method: str, *given: Any) -> tuple[Any, float]:
        """Return what a method returns, and how often it wrote, digested or compared all weights: in passes."""
        size_bytes = sum(tensor.nbytes for tensor in weights.tensors(self._model).values())
        with Passes() as passes:
            result = getattr(self, method)(*given)
        return result, passes.size_bytes / size_bytes

    @property
    def _model(self) -> torch.nn.Module:
        return self.model_runner.get_model()


class WithoutTrial(Counts):
    """A worker as it was before there was a trial at the start."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        intake.keep_tried = lambda *_: None
        return super().__new__(cls, *args, **kwargs)


class FailsHalfWay(Counts):
    """A worker, of all the first one, whose trial at the start leaves noise where the weights were."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        original = Conversion.install

        def install(conversion: Any, given: Any) -> Any:
            from vllm.distributed import get_tp_group

            Conversion.install = original  # type: ignore[method-assign]
            original(conversion, given)
            if get_tp_group().rank_in_group:
                return None
            for parameter in conversion._model.parameters():
                parameter.data.normal_()
            raise RuntimeError("injected: the trial stopped half way")

        Conversion.install = install  # type: ignore[method-assign]
        return super().__new__(cls, *args, **kwargs)


class ChangesABit(FailsHalfWay):
    """A worker whose trial ends well, with other weights."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        worker, failing = super().__new__(cls, *args, **kwargs), Conversion.install

        def install(conversion: Any, given: Any) -> Any:
            with suppress(RuntimeError):
                failing(conversion, given)

        Conversion.install = install  # type: ignore[method-assign]
        return worker
