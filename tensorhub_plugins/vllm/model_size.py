"""How large a model is that is on this machine: from the heads of its files, or else from its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from tensorhub_plugins.vllm.outlook import Model

HEAD_SIZE_BYTES_MAX = 100 << 20  # safetensors' own limit


def model_of(name: object) -> Model | None:
    """Return the model of this name: a folder, or one of the Hugging Face hub that is in the cache of this machine (all
    of it, or its config.json). None: it is not here, or neither files nor configuration say its size."""
    folder = folder_of(name)
    if folder is None:
        return None
    exact = elements_of(folder)
    elements = _elements_by_configuration(folder) if exact is None else exact
    return None if elements is None else Model(elements, exact is not None, _heads(folder))


def folder_of(name: object) -> Path | None:
    """Return where its files are, as transformers and vLLM would find them."""
    if not isinstance(name, str) or not name:
        return None
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        config = try_to_load_from_cache(name, "config.json")
        if isinstance(config, str):
            return Path(config).parent
    return None


def elements_of(folder: object) -> int | None:
    """Return how many numbers the checkpoint in this folder has; None: it is not here, not whole, or no safetensors."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        files = {file.name: file for file in Path(str(folder)).glob("*.safetensors")}
        index = Path(str(folder), "model.safetensors.index.json")
        whole = {"model.safetensors"} & set(files) or set(files)
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else whole
        if names <= set(files):
            return sum(prod(tensor["shape"]) for name in sorted(names) for tensor in _head(files[name])) or None
    return None


def _head(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as opened:
        size_bytes = int.from_bytes(opened.read(8), "little")
        head = json.loads(opened.read(min(size_bytes, HEAD_SIZE_BYTES_MAX)))
    yield from (tensor for name, tensor in head.items() if name != "__metadata__")


def _heads(folder: Path) -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((folder / "config.json").read_bytes())
        heads = {**config, **config.get("text_config", {})}.get("num_attention_heads")
        return heads if isinstance(heads, int) else None
    return None


def _elements_by_configuration(folder: Path) -> int | None:
    """Count on the meta device, where a model of any size takes no memory. Return None for a configuration that the
    installed transformers does not know, or knows only with code of the model's own."""
    if not (folder / "config.json").exists():
        return None
    import torch
    import transformers

    with suppress(Exception):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        (name,) = config.architectures or ("",)
        made_by = getattr(transformers, name, None)
        with torch.device("meta"):
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config) if made_by is None else made_by._from_config(config)
        return sum(parameter.numel() for parameter in model.parameters())
    return None
