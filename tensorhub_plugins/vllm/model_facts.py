"""What tells one model from another before a weight is read: of transformers' configuration, what shapes depend on.

Two sides that were started by different people compare these. Versions of transformers name other things differently.
"""

from __future__ import annotations

from typing import Any

FACTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def facts_of(config: Any) -> dict[str, Any]:
    """Return the facts. config: a transformers configuration, of text or of more than text."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {name: getattr(text, name) for name in FACTS if getattr(text, name, None) is not None}
    names = list(getattr(config, "architectures", None) or ())  # none: it was made here, and not saved since
    return {**({"architectures": names} if names else {}), **found}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return what both sides name and is not the same, in words."""
    return [
        f"{name} {theirs[name]} instead of {ours[name]}"
        for name in ours
        if name in theirs and ours[name] and theirs[name] != ours[name]
    ]
