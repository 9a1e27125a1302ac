"""The name of every logger: `logger = get_logger(__name__)`."""

from __future__ import annotations

import logging

CORE = "tensorhub_plugins.core"


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module: in core named as the module, in an adapter below "vllm".

    vLLM gives handlers only to the logger "vllm", and what its API server imports sets the root logger to ERROR: in
    its processes no other name is shown.
    """
    is_core = module == CORE or module.startswith(f"{CORE}.")
    return logging.getLogger(module if is_core else f"vllm.{module}")
