"""The name of every logger, and the form of its lines.

ERROR: something stays broken until a person or a restart mends it. WARNING: something went wrong, and this goes on
without it. INFO: what happened as it should, at most a few lines for each version. DEBUG: each decision.

Where nothing else in a process shows an adapter's lines, `begin` has them shown on stderr; with TENSORHUB_LOG=json all
of ours go there, as one JSON object a line.
"""

from __future__ import annotations

import json
import logging
import os

from tensorhub_plugins.core.errors import UsageError

CORE = "tensorhub_plugins.core"
VARIABLE = "TENSORHUB_LOG"
FORM = "%(asctime)s %(name)s %(levelname)s %(message)s"
OURS = ("tensorhub", "tensorhub_plugins", "vllm.tensorhub_plugins")  # above every logger of ours


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module: in core named as the module, in an adapter below "vllm".

    vLLM gives handlers only to the logger "vllm", and what its API server imports sets the root logger to ERROR: in
    its processes no other name is shown."""
    is_core = module == CORE or module.startswith(f"{CORE}.")
    return logging.getLogger(module if is_core else f"vllm.{module}")


class Json(logging.Formatter):
    """Makes a line one JSON object: t (Unix time in seconds), level, logger, message, and the traceback, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line break in it."""
        line = {"t": round(record.created, 6), "level": record.levelname, "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter() -> logging.Formatter:
    """Return what TENSORHUB_LOG asks for. Raise UsageError for what it cannot ask for."""
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "json"):
        raise UsageError(f"{VARIABLE}={said!r:.80}: json, or leave it out")
    return Json() if said else logging.Formatter(FORM)


def begin() -> None:
    """Have lines of ours shown, once: all as JSON where that is asked for, else those that nothing else would show."""
    form = formatter()
    is_json = isinstance(form, Json)
    if any(isinstance(handler.formatter, Json) for handler in logging.root.handlers):  # `tensorhub server`
        return
    for name in OURS:
        logger = logging.getLogger(name)
        if logger.handlers or not (is_json or (name.startswith("vllm.") and not logger.hasHandlers())):
            continue
        handler = logging.StreamHandler()
        handler.setFormatter(form)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
