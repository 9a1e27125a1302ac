"""How one model takes checkpoints, and the trial of that (conversion.py) where its weights were read from a disk.

The trial writes noise where the weights are, so it belongs before the first answer. An engine that gets its first
version from the store makes it then. One that has read its weights from a disk would make it in its first pause: it is
made here with those files, mapped, before memory for caches is taken and graphs are captured. What is published is like
them, or the first install makes a trial of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.model_size import folder_of
from tensorhub_plugins.vllm.names import NAME
from tensorhub_plugins.vllm.worker import online_quantization, reload
from tensorhub_plugins.vllm.worker.checkpoint_contract import Contract, some
from tensorhub_plugins.vllm.worker.conversion import Conversion
from tensorhub_plugins.vllm.worker.plan import Given
from tensorhub_plugins.vllm.worker.quantize import Quantizer
from tensorhub_plugins.vllm.worker.votes import Gather, Steps

logger = get_logger(__name__)

KEPT = "tensorhub_intake"  # in a model that joins the store later
MAPPED = (NAME, "auto", "hf", "safetensors")  # load formats by which vLLM maps files instead of reading them
LAZY = (None, "lazy", "prefetch")  # strategies of these


class Intake:
    """What knows which checkpoints a model takes, and how."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, gather: Gather) -> None:
        self.model = model
        self.steps = Steps(gather, together=online_quantization.shares_scales(vllm_config))
        self.contract = Contract(model, vllm_config)
        self.quantizer = Quantizer(model, vllm_config)
        self.conversion = Conversion(model, vllm_config, self.steps)

    def given(self, published: Given) -> Given:
        """Return a checkpoint as this model's loaders want it; raise as `Contract.rehearse` does. Where the model does
        not compute."""
        self.quantizer.learn(published.shapes)
        given = self.quantizer.given(published)
        self.contract.rehearse(given.tensors, given.shapes)
        return given

    def install(self, given: Given) -> str:
        """Replace all weights by what `given` has returned, and return how; raise as `Conversion.install` does."""
        given.plan = self.contract.plan_for(given.shapes)
        return self.conversion.install(given)


def of(model: torch.nn.Module, vllm_config: Any, gather: Gather) -> Intake:
    """Return what a trial has left for this model, or one that has tried nothing."""
    kept: Intake | None = vars(model).pop(KEPT, None)
    return kept if kept is not None and kept.model is model else Intake(model, vllm_config, gather)


def is_from_files(vllm_config: Any) -> bool:
    """Return whether vLLM has read this engine's weights from files, unless the store had them, and whole versions may
    replace them."""
    elastic = getattr(vllm_config.parallel_config, "enable_elastic_ep", False)  # whose workers do not start at once
    return vllm_config.load_config.load_format in MAPPED and vllm_config.lora_config is None and not elastic


def keep_tried(
    model: torch.nn.Module, vllm_config: Any, gather: Gather, check: Callable[[], None] = lambda: None
) -> None:
    """Make the trial with the files that these weights came from, in all workers of an engine at once, and keep what it
    has shown for the updater of this model. The weights are what they were afterwards.

    check: raises for an engine that cannot be updated. A trial that is not possible, or fails, is left to the first
    install, which says why.
    """
    began, intake, given = time.monotonic(), Intake(model, vllm_config, gather), None
    try:
        check()
        given = _on_disk(model, vllm_config)
        given = None if given is None else intake.given(given)
    except Exception as error:  # such as of files that no update could bring
        logger.info("the first update finds out how they are installed: %s", error)
        given = None
    if not intake.steps.vote(0, given is not None) or given is None:
        return
    failure: Exception | None = None
    try:
        before = intake.conversion.state()
        intake.install(given)
        if changed := intake.conversion.changed_since(before):
            raise UsageError(f"{some(sorted(changed))} are not what they were")
    except Exception as error:
        logger.exception("the first update finds out how they are installed; the weights are read again")
        failure = error
    if intake.steps.vote(0, failure is None):
        vars(model)[KEPT] = intake
        logger.info("how updates are installed was tried in %.2f s", time.monotonic() - began)
        return
    files = _loader(vllm_config).get_all_weights(vllm_config.model_config, model)
    with online_quantization.in_step(model, intake.steps):
        reload.reload_checkpoint(model, vllm_config, files)


def _loader(vllm_config: Any) -> Any:
    """Return vLLM's loader of these files: mapped, and in silence."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    how = vllm_config.load_config
    load_format = "auto" if how.load_format == NAME else how.load_format
    plain = dataclasses.replace(how, load_format=load_format, model_loader_extra_config={}, use_tqdm_on_load=False)
    return DefaultModelLoader(plain)


def _on_disk(model: torch.nn.Module, vllm_config: Any) -> Given | None:
    """Return what is in the files, none of which takes memory; None: it would."""
    folder = folder_of(vllm_config.model_config.model)
    if folder is None or not any(folder.glob("*.safetensors")):
        return None
    if getattr(vllm_config.load_config, "safetensors_load_strategy", None) not in LAZY:
        return None
    return Given.of(dict(_loader(vllm_config).get_all_weights(vllm_config.model_config, model)))
