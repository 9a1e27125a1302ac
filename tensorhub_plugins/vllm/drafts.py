"""PURE: what drafts tokens in speculative decoding (a draft model, MTP heads), and where its weights come from.

    "store"   MTP heads of the model itself: versions hold them, and both change at once (worker/draft.py)
    "disk"    as they were read at the start. Answers stay right, and fewer drafts are accepted as the policy moves on

A draft that is not read, and that no version brings, would keep random weights, of which hardly any draft is accepted:
that is refused, by workers (worker/extension.py) and before a run by the adapters of frameworks.
"""

from __future__ import annotations

from typing import Any, Literal

from tensorhub_plugins.core import UsageError

WITHOUT_WEIGHTS = ("ngram", "suffix")  # of vLLM's methods
UNREAD = ("dummy",)  # load formats that read nothing

Source = Literal["store", "disk"]


def has_weights(method: str | None) -> bool:
    """Return whether what drafts by this method of vLLM's has weights of its own."""
    return method is not None and not method.startswith(WITHOUT_WEIGHTS)


def is_of_the_model(method: str | None) -> bool:
    """Return whether it consists of heads that the checkpoint of the model itself may hold."""
    return method is not None and method.endswith("mtp")


def source(wanted: Source | None, method: str | None, load_format: str, *, remedy: str) -> Source | None:
    """Return where the draft's weights come from; None: it has none. wanted: what an option says. load_format: the
    draft's, which is the model's unless it has one of its own.

    Raises UsageError for a draft that would keep random weights. remedy: how a user of this framework has none, or has
    it read."""
    if not has_weights(method):
        return None
    found = wanted or ("store" if load_format in UNREAD and is_of_the_model(method) else "disk")
    if found == "store" and not is_of_the_model(method):
        raise UsageError(
            f'speculative decoding ({method}): no version holds the weights of another model, so option draft="store" '
            "is for MTP heads (method mtp): leave it out"
        )
    if found == "disk" and load_format in UNREAD:
        raise UsageError(
            f"speculative decoding ({method}): no version brings the draft's weights, and with load_format "
            f"{load_format!r} they are not read, so it would draft with random ones: {remedy}"
        )
    return found


def source_in(vllm_config: Any, wanted: Source | None = None) -> Source | None:
    """Return the same for an engine."""
    speculative = getattr(vllm_config, "speculative_config", None)
    load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    remedy = "leave --speculative-config out, or read the weights"
    return source(wanted, getattr(speculative, "method", None), load_config.load_format, remedy=remedy)
