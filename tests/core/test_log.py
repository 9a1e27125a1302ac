"""Loggers by the name of their module, and those of adapters where vLLM shows them."""

from __future__ import annotations

import logging

import pytest

from tensorhub_plugins.core.log import get_logger


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("tensorhub_plugins.core.client.client", "tensorhub_plugins.core.client.client"),
        ("tensorhub_plugins.vllm.worker.updater", "vllm.tensorhub_plugins.vllm.worker.updater"),
        ("tensorhub_plugins.verl.hub", "vllm.tensorhub_plugins.verl.hub"),
    ],
)
def test_names(module: str, name: str) -> None:
    assert get_logger(module).name == name


def test_what_an_adapter_says_is_shown_where_the_root_logger_is_at_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.getMessage())

    root, vllm = logging.getLogger(), logging.getLogger("vllm")
    monkeypatch.setattr(root, "handlers", [Handler(logging.ERROR)])  # as what vLLM's API server imports leaves it
    monkeypatch.setattr(vllm, "handlers", [Handler()])
    monkeypatch.setattr(vllm, "propagate", False)
    for logger, level in ((root, logging.ERROR), (vllm, logging.INFO)):
        before = logger.level
        monkeypatch.setattr(logger, "level", before)  # put back, through setLevel below
        logger.setLevel(level)
    get_logger("tensorhub_plugins.verl.test_log").warning("the hub is at ...")
    logging.getLogger("tensorhub_plugins.verl.test_log").warning("swallowed")  # the control
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]
    assert shown == ["the hub is at ..."]
