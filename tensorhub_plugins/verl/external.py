"""A `vllm serve` that verl has not started, as one of its replicas (../vllm/ray/external.py says how it joins).

`ExternalServer` is what verl's router takes for a server actor: the same `generate`, heartbeat and abort. What verl's
own server does to a request before vLLM gets it is done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from verl.workers.rollout.replica import TokenOutput

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl.config import Options
from tensorhub_plugins.verl.routing import ReplicaLost
from tensorhub_plugins.verl.versions import told
from tensorhub_plugins.vllm.model_facts import facts_of
from tensorhub_plugins.vllm.ray import external
from tensorhub_plugins.vllm.ray.external import Expected, ServerLost

logger = get_logger(__name__)

BANNED_MAX = 8192  # token ids that are the model's and not the tokenizer's; they are sent with every request
BANNED_BIAS = -100.0  # the lowest that vLLM takes


class Rollout(msgspec.Struct, frozen=True):
    """The fields of verl's configuration that requests depend on."""

    max_model_len: int
    prompt_length: int
    response_length: int
    repetition_penalty: float
    ignore_eos: bool
    banned: tuple[int, ...]  # token ids that the tokenizer does not know: verl's own servers never sample them


def rollout_of(config: Any, model_config: Any) -> tuple[Rollout, Expected | None]:
    """Return what verl's rollout and model configuration say; the second without hub and run. UsageError for what no
    server of this kind can do."""
    if getattr(model_config, "processor", None) is not None:
        raise UsageError("a model that takes images needs verl's own replicas: add replicas instead of a server")
    if config.get("enable_rollout_routing_replay", False) or config.get("full_determinism", False):
        raise UsageError(
            "rollout.enable_rollout_routing_replay and rollout.full_determinism need verl's own replicas: switch them "
            "off, or add replicas instead of a server"
        )
    vocabulary = int(facts_of(model_config.hf_config)["vocab_size"])
    known = len(model_config.tokenizer)
    if vocabulary - known > BANNED_MAX:
        raise UsageError(
            f"the model knows {vocabulary} tokens and its tokenizer {known}: verl's own replicas never give the "
            "others, and a server would: add replicas instead of a server"
        )
    limit = config.max_model_len or config.prompt_length + config.response_length
    rollout = Rollout(
        max_model_len=int(limit),
        prompt_length=int(config.prompt_length),
        response_length=int(config.response_length),
        repetition_penalty=float(config.get("repetition_penalty", 1.0)),
        ignore_eos=bool(config.get("ignore_eos", False)),
        banned=tuple(range(known, vocabulary)),
    )
    expected = Expected("", "", facts_of(model_config.hf_config), int(limit), config.get("logprobs_mode", None))
    return rollout, expected


def request_of(given: Mapping[str, Any], prompt_tokens: int, rollout: Rollout) -> dict[str, Any]:
    """Return vLLM's sampling parameters for verl's, as vLLMHttpServer.generate of verl 0.9.1 makes them."""
    params = dict(given)
    room = rollout.max_model_len - prompt_tokens
    if room < 1:
        raise ValueError(f"a prompt of {prompt_tokens} tokens leaves no room below {rollout.max_model_len}")
    budget = rollout.prompt_length + rollout.response_length - prompt_tokens
    limit = min(rollout.response_length, budget)
    for name in ("max_new_tokens", "max_tokens"):
        limit = params.pop(name, limit)
    params["max_tokens"] = max(1, min(int(limit), room))
    params["logprobs"] = 0 if params.pop("logprobs", False) else None
    params.setdefault("repetition_penalty", rollout.repetition_penalty)
    params.setdefault("ignore_eos", rollout.ignore_eos)
    if rollout.banned:
        params["logit_bias"] = {**(params.get("logit_bias") or {}), **dict.fromkeys(rollout.banned, BANNED_BIAS)}
    return params


class ExternalServer(external.External):
    """Stand for an external server as a verl replica. options: with hub and run."""

    def __init__(self, name: str, url: str, options: Options, rollout: Rollout, expected: Expected) -> None:
        super().__init__(name, url, options, expected, timeout_s=options.replica_timeout_s)
        self._splits, self._rollout = options.spans == "split", rollout

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        if self.why_not:
            raise ReplicaLost(self.why_not, peer=self.url)
        if any(others.get(f"{kind}_data") for kind in ("image", "video", "audio")):
            raise UsageError(f"{self.url} cannot be given images: add replicas instead of a server")
        params = request_of(sampling_params, len(prompt_ids), self._rollout)
        try:
            answer = await self.ask(prompt_ids, params)
        except ServerLost as error:
            logger.warning("%s: %s", self.worker, error.message)
            raise ReplicaLost(error.message, peer=self.url) from error
        if answer.finish_reason == "abort" and not self._splits:  # verl's client here would take the part for the whole
            raise ReplicaLost(f"{self.url} was told to give its requests back", peer=self.url)
        return TokenOutput(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs if params["logprobs"] is not None else None,
            stop_reason={"abort": "aborted"}.get(answer.finish_reason, "completed"),
            extra_fields={**told(answer.spans, split=self._splits), "num_cached_tokens": None},
        )
