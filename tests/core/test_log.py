"""Loggers by the name of their module, those of adapters where vLLM shows them, and the form of the lines."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.log import begin, get_logger


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


def in_a_process(program: str, **environment: str) -> list[str]:
    """Return the lines that this program writes to stderr, in a process without any logging of its own."""
    words = [sys.executable, "-c", f"from tensorhub_plugins.core import log, run_log\n{program}"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
    return done.stderr.splitlines()


SAYS = (
    "run_log.use(None); run_log.use(None)\n"
    "log.get_logger('tensorhub_plugins.verl.hub').info('the hub\\nis at %s', 'x')\n"
    "log.get_logger('tensorhub_plugins.core.device.devices').info('a detail')\n"
    "try:\n    1 / 0\n"
    "except ZeroDivisionError:\n    log.get_logger('tensorhub_plugins.verl.hub').exception('broken')\n"
)


def test_where_nothing_shows_lines_of_an_adapter_they_are_shown_once() -> None:
    lines = in_a_process(SAYS)
    assert lines[0].endswith("vllm.tensorhub_plugins.verl.hub INFO the hub") and lines[1] == "is at x"
    assert not [line for line in lines if "a detail" in line] and len([line for line in lines if "broken" in line]) == 1
    own = f"import logging; logging.basicConfig(level='ERROR')\n{SAYS}"  # the control: a program's own choice stays
    assert in_a_process(own)[0] == "ERROR:vllm.tensorhub_plugins.verl.hub:broken"


def test_lines_are_json_on_demand() -> None:
    lines = [json.loads(line) for line in in_a_process(SAYS, TENSORHUB_LOG="json")]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "the hub\nis at x"),
        ("INFO", "a detail"),
        ("ERROR", "broken"),
    ]
    assert "ZeroDivisionError" in lines[2]["traceback"] and lines[0]["t"] > 1e9


def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_LOG", "jsno")
    with pytest.raises(UsageError, match="TENSORHUB_LOG='jsno': json, or leave it out"):
        begin()
