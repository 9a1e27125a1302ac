"""What vLLM's workers keep of a request from step to step, which must be dropped when the request begins again.

vLLM computes a preempted request anew from its first token, which is what happens to all that run at an install. But
data gathered over several steps (the rows of a long prompt that is pooled token by token) it keeps and appends to
(vllm#55192): more rows than tokens, and from two versions. `begin_again` drops that data, for requests that are resumed
(memory may have been short, too) and, at an install, for all.

State in no list here may stem from the version before: `check` refuses a vLLM that keeps more than was reviewed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from tensorhub_plugins.core import UsageError

# Fields of vLLM's PoolingStates and CachedRequestState that are made of the model's results. `begin_again` drops them.
GATHERED = frozenset({"hidden_states_cache", "in_progress_prompt_logprobs_cpu", "pooling_states"})
# Fields that depend on the request alone, or that the scheduler sets anew with every step and resumption.
OF_THE_REQUEST = frozenset(
    {
        "req_id", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "mm_features", "sampling_params",
        "pooling_params", "generator", "lora_request", "mrope_positions", "mrope_position_delta",
        "xdrope_positions", "block_ids", "num_computed_tokens", "output_token_ids", "prev_num_draft_len",
    }
)  # fmt: skip


def check() -> None:
    """Raise UsageError if this vLLM keeps data of requests that may stem from the weights before an install."""
    from vllm.v1.pool.metadata import PoolingStates
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    kept = {*vars(PoolingStates()), *(field.name for field in dataclasses.fields(CachedRequestState))}
    unknown = sorted(kept - GATHERED - OF_THE_REQUEST)
    if unknown:
        raise UsageError(
            f"this vLLM keeps {', '.join(unknown)} of each request from step to step, which an update might leave of "
            "the version before: use a vLLM that the store was tested with"
        )


def begin_again(model_runner: Any, requests: Iterable[str] | None = None) -> None:
    """Drop what was gathered of these requests; None: of all, and what is kept of one request for others."""
    known = getattr(model_runner, "requests", {})  # of vLLM's first runner; the second one removes what it preempts
    for name in known if requests is None else requests:
        state = known.get(name)
        if state is not None:
            state.in_progress_prompt_logprobs_cpu = None
            if state.pooling_states is not None:
                state.pooling_states.clean()
    if requests is not None:
        return
    pooling = getattr(model_runner, "pooling_runner", None)
    for states in getattr(pooling, "pooling_states", {}).values():
        states.clean()
    prompts = getattr(model_runner, "prompt_logprobs_worker", None)
    for chunks in getattr(prompts, "in_progress_prompt_logprobs", {}).values():
        chunks.clear()
    # Embeddings of queries, with which documents are scored later, in either runner; and encoders' outputs.
    for name in ("reset_encoder_cache", "reset_mm_cache"):
        if hasattr(model_runner, name):
            getattr(model_runner, name)()


def ask_again(model_runner: Any, scheduled: Any) -> None:
    """Have log probabilities of prompts made once more of which vLLM has dropped what a step had made: of requests that
    are resumed before their first token. scheduled: vLLM's CachedRequestData."""
    owed = getattr(model_runner, "num_prompt_logprobs", None)  # as in `begin_again`
    if owed is None or not scheduled.resumed_req_ids:  # as in nearly every step
        return
    for name, tokens in zip(scheduled.req_ids, scheduled.num_output_tokens, strict=True):
        if not tokens and name in scheduled.resumed_req_ids:
            asked = getattr(model_runner.requests[name].sampling_params, "prompt_logprobs", None)
            if asked is not None:
                owed[name] = model_runner.input_batch.vocab_size if asked == -1 else asked
