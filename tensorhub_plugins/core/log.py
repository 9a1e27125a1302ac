"""The name of every logger: `logger = get_logger(__name__)`."""

from __future__ import annotations

import logging

CORE = "tensorhub_plugins.core"


def get_logger(module: str) -> logging.Logger:
    """Of core: named as the module. Of an adapter: below "vllm".

    vLLM gives handlers to the logger "vllm" alone, and what its API server imports sets the root logger to ERROR: in
    its processes no other name is shown.
    """
    is_core = module == CORE or module.startswith(f"{CORE}.")
    return logging.getLogger(module if is_core else f"vllm.{module}")
