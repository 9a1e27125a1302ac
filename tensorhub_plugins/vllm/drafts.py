"""PURE: what drafts tokens in speculative decoding (a draft model, MTP heads), with weights that no version brings.

A draft that was read from MODEL keeps those weights: answers stay right, and fewer drafts are accepted as the policy
moves on. A draft that was never read keeps random ones, of which hardly any draft is accepted: that is refused, by
workers (worker/extension.py) and before a run by the adapters of frameworks.
"""

from __future__ import annotations

from tensorhub_plugins.core import UsageError

WITHOUT_WEIGHTS = ("ngram", "suffix")  # of vLLM's methods
UNREAD = ("dummy",)  # load formats that read nothing


def has_weights(method: str | None) -> bool:
    """Return whether what drafts by this method of vLLM's has weights of its own."""
    return method is not None and not method.startswith(WITHOUT_WEIGHTS)


def check(method: str | None, load_format: str, *, remedy: str) -> None:
    """UsageError for a draft that would keep random weights. load_format: the draft's, which is the model's unless it
    has one of its own. remedy: how a user of this framework has none, or has it read."""
    if has_weights(method) and load_format in UNREAD:
        raise UsageError(
            f"speculative decoding ({method}): no version brings the draft's weights, and with load_format "
            f"{load_format!r} nobody reads them, so it would draft with random ones: {remedy}"
        )
