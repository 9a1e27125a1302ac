"""TRL's AsyncGRPOTrainer over the store: the trainer publishes each version, and its vLLM servers pull it.

    AsyncGRPOTrainer(MODEL, ..., weight_transfer=StoreTransfer("tcp://hub:7070", MODEL, servers=["http://server:8000"]))

    vllm serve MODEL --load-format tensorhub \
      --model-loader-extra-config '{"hub": "tcp://hub:7070", "model": "actor", "disk": "fallback", "follow": "now"}'

TRL by itself pauses its server, broadcasts to it and resumes it. Here the trainer waits for no broadcast; servers join,
leave and die beside it. TRL counts how stale a sample is by the versions that it has sent: `servers` are asked until
they have each one, so that a sample is not taken to be newer than it is.

What TRL sends are the trained parameters by the names of transformers. A version is a whole checkpoint: what fuses
comes apart again (checkpoint_names.py), and what is frozen (the tower of a model that sees) is added from MODEL.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch

from tensorhub_plugins.core import Client, Publisher, UsageError, VersionRefused, version_label
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm import checkpoint_names, model_size
from tensorhub_plugins.vllm.checkpoint_names import Step

logger = get_logger(__name__)

ASK_TIMEOUT_S = 2.0  # of one server
POLL_INTERVAL_S = 0.05


class StoreTransfer:
    """A weight transfer of TRL's (`WeightTransferProtocol`) that publishes. TRL calls it on its main process.

    model_path: what the trainer and the servers were given, a folder or a name in the Hugging Face cache. servers:
    base URLs. model, run: name the history at the hub, as for the servers. keep: versions on offer. dtype: what floats
    are published as; None: as they are trained. timeout_s: for one publish. confirm_s: for the servers to have a
    version; then the training goes on, and it is logged. client: more arguments of `Client`."""

    def __init__(
        self,
        hub: str,
        model_path: str,
        *,
        servers: Sequence[str] = (),
        model: str = "actor",
        run: str = "default",
        keep: int = 1,
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
        confirm_s: float = 60.0,
        **client: Any,
    ) -> None:
        self._hub, self._path, self._servers = hub, model_path, [url.rstrip("/") for url in servers]
        self._joins: dict[str, Any] = {"run": run, "model": model, "replica": "trainer", **client}
        self._publishes: dict[str, Any] = {"keep": keep, "dtype": dtype, "timeout_s": timeout_s}
        self._confirm_s = confirm_s
        self._step = 0
        self._client: Client | None = None
        if wrong := [url for url in self._servers if not url.startswith(("http://", "https://"))]:
            raise UsageError(f"servers are a list of base URLs, such as http://server:8000: {wrong[0]!r} is none")

    # --- what TRL calls ---

    def init_weight_transfer(self) -> None:
        """Join the store."""
        self._client = Client(self._hub, **self._joins)
        self._publisher = Publisher(self._client, rank=0, ranks=1, worker="trainer", begins=True, **self._publishes)

    def pause(self) -> None:
        """Do nothing: servers pause themselves, for a moment, when they have a version."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the model; UsageError for what is not one."""
        self._step += 1
        self._publisher.publish(self._step, self._checkpoint(iterator))

    def resume(self) -> None:
        """Wait until the servers that answer have the version that was sent last, `confirm_s` at most, not for those
        that refuse it, and not while operators have pinned another; VersionRefused where all refuse it."""
        version, end = self._publisher.version(self._step), time.monotonic() + self._confirm_s
        behind = list(self._servers)
        while behind:
            lacking = {url: _lacks(url, version) for url in behind}
            behind = [url for url, why in lacking.items() if why is not None]
            refusals = [why for why in lacking.values() if why]
            if behind and len(refusals) == len(self._servers):
                raise VersionRefused(f"no server can install it: {refusals[0]}", version=version)
            pin = self._client.pinned if self._client is not None else None
            held = [f"version {version_label(pin)} is pinned"] if pin not in (None, version) else []
            if behind and (held or len(refusals) == len(behind) or time.monotonic() >= end):
                refusals += held
                text = "version %s: not yet at %s; training goes on%s"
                logger.warning(text, version_label(version), ", ".join(behind), "".join(f": {why}" for why in refusals))
                return
            time.sleep(POLL_INTERVAL_S)

    def destroy(self) -> None:
        """Leave the store, once another worker holds the last version."""
        if self._client is not None:  # TRL calls this after what fails before it has joined, too
            self._client.hand_over()
            self._publisher.close()
            self._client = None

    # --- a whole checkpoint ---

    @cached_property
    def _model(self) -> torch.nn.Module:
        """Return the model without memory."""
        import transformers

        config = transformers.AutoConfig.from_pretrained(self._path)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if kind is None:
            raise UsageError(f"{self._path}: transformers has no class for its architectures, {config.architectures}")
        with torch.device("meta"):
            made: torch.nn.Module = kind(config)
        return made

    @cached_property
    def _steps(self) -> list[Step]:
        return checkpoint_names.steps(self._model)

    def _checkpoint(self, given: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors of the checkpoint."""
        steps = {source: step for step in self._steps for source in step.sources}
        known, waiting, done = self._model.state_dict().keys(), dict[str, torch.Tensor](), set[str]()
        for sent, tensor in given:
            name = sent.replace("_orig_mod.", "")  # by torch.compile; TRL takes the other prefixes off
            if name not in steps:
                if name in known:  # tied to another
                    continue
                raise UsageError(
                    f"TRL sends {name}, which is no parameter of {self._path}: give the model that it trains"
                )
            waiting[name] = tensor
            step = steps[name]
            if all(source in waiting for source in step.sources):
                converted = checkpoint_names.convert(self._model, {each: waiting.pop(each) for each in step.sources})
                done.update(step.sources)
                yield from ((target, converted[target]) for target in step.targets)
        if waiting:
            raise UsageError(f"TRL sends {min(waiting)} without what it is saved together with: train both, or neither")
        frozen = [target for step in self._steps if done.isdisjoint(step.sources) for target in step.targets]
        yield from self._on_disk(frozen)

    def _on_disk(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        for name in names:
            if name not in self._files:
                raise UsageError(f"TRL does not send {name}, and {self._path} does not hold it")
            with safe_open(self._files[name], framework="pt") as file:
                yield name, file.get_tensor(name)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Return the file of each tensor of the model."""
        from safetensors import safe_open

        folder = model_size.folder_of(self._path)
        if folder is None:
            raise UsageError(f"{self._path} is no folder, and not in the Hugging Face cache of this host")
        found: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        return found


def _lacks(url: str, version: int) -> str | None:
    """Return why a server refuses this version, "" if it is only behind; None if it has it, or does not answer: it will
    start with the newest."""
    try:
        with urlopen(f"{url}/tensorhub", timeout=ASK_TIMEOUT_S) as reply:
            text = reply.read()
    except (OSError, HTTPException) as error:
        if not (isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND):
            return None
        text = b""
    try:
        said = json.loads(text)["following"]
        refused, why = said.get("refusal", (0, ""))
        return None if int(said["version"]) >= version else why * (refused >= version)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f'{url} does not follow the store: start it with --load-format tensorhub and "follow"'
        ) from error
