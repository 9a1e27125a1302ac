"""What an engine core has computed with its weights and keeps: the KV of prompts, and what encoders made of inputs.

vLLM forgets it all on request, but refuses while a request that is not running keeps blocks of KV:

    a streaming-input session that waits for more    is released here and computed anew when its next input comes
    KV that comes from, or goes to, another engine   cannot be taken away from what writes or reads it: see `held_by`

Where weights have changed and vLLM has not forgotten since, the caches are *stale*: nothing may be computed with them.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.vllm.plugin import around

NAMED_MAX = 3  # of the requests that keep blocks
WAY_OUT = "abort them, or wait until they end"


def epoch(core: Any) -> int:
    """Equal before and after what was computed with one version (pooling.py)."""
    return int(getattr(core, "tensorhub_epochs", 0))


class StaleCaches(TensorHubError):
    """vLLM keeps what was computed with other weights: end what holds it, then resume or update again."""


class WeightsMove(TensorHubError):
    """The weights changed each time that an answer of several requests was computed: ask again, or for less at once."""


class Caches:
    """Use it in the core's loop."""

    def __init__(self, core: Any) -> None:
        """Wrap vLLM's resets. core: vLLM's EngineCore, whose own resets release sessions from here on, too."""
        self._core = core
        self._let_go: dict[str, int] = {}  # sessions, and how many tokens of them had been computed
        self._is_asked = False  # when a session goes on
        self.is_stale = False
        self.refusal = ""  # why it has stayed so
        core.tensorhub_epoch = partial(epoch, core)

        def reset_prefix_cache(
            original: Any, reset_running_requests: bool = False, reset_connector: bool = False
        ) -> Any:
            if reset_running_requests:  # the store's own adapters ask for that at each change of the weights
                core.tensorhub_epochs = epoch(core) + 1
                self._release_sessions()
            return original(reset_running_requests, reset_connector)

        around(core, "reset_prefix_cache", reset_prefix_cache)

    def forget(self) -> None:
        """Forget all, or raise StaleCaches, with nothing changed but that requests are computed anew: not all could be
        forgotten."""
        cause: Exception | None = None
        try:
            done = self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            self._core.reset_encoder_cache()
        except RuntimeError as error:
            done, cause = False, error
        if done is False:  # vLLM's own text guesses at what keeps it
            why = self.held_by() or f"vLLM keeps what it has computed ({cause or 'it does not say why'})"
            self.refusal = f"the weights have changed, and what others have computed stays: {why}" * self.is_stale
            raise StaleCaches(self.refusal or why) from cause
        self.is_stale, self.refusal = False, ""

    def check_steps(self) -> None:
        """UsageError while a step is under way that makes log probabilities of a prompt: vLLM would drop what comes of
        it, and workers do not make them again."""
        requests = self._core.scheduler.requests.items() if getattr(self._core, "batch_queue", None) else ()
        owed = [
            name
            for name, request in requests
            if getattr(request.sampling_params, "prompt_logprobs", None) is not None
            and request.num_computed_tokens
            and not request.num_output_tokens
        ]
        if owed:
            named = f"{', '.join(owed[:NAMED_MAX])}{', ...' * (len(owed) > NAMED_MAX)}"
            raise UsageError(f"prompt_logprobs are being made for {named}: pause the engine first")

    def why_stale(self) -> str:
        """Forget what is stale; why that cannot be, or ""."""
        if self.is_stale:
            with suppress(StaleCaches):
                self.forget()
        return self.refusal

    def held_by(self) -> str:
        """Return what keeps blocks of KV that cannot be computed anew, and the way out, in words; "": nothing does."""
        kept: dict[str, list[str]] = {}
        for name, request in self._core.scheduler.requests.items():
            status = request.status.name
            if status == "WAITING_FOR_REMOTE_KVS":
                kept.setdefault("wait for KV of another engine", []).append(name)
            elif status.startswith("FINISHED"):
                kept.setdefault("have ended, and another engine reads their KV", []).append(name)
            elif status == "WAITING_FOR_STREAMING_REQ" and not self._knows_sessions:
                kept.setdefault("are open streaming-input sessions", []).append(name)
        said = [
            f"{len(names)} requests ({', '.join(names[:NAMED_MAX])}{', ...' * (len(names) > NAMED_MAX)}) {how}"
            for how, names in kept.items()
        ]
        return f"{'; '.join(said)}: {WAY_OUT}" if said else ""

    @property
    def _knows_sessions(self) -> bool:
        scheduler = self._core.scheduler
        return hasattr(scheduler, "_update_request_as_session") and hasattr(scheduler, "_free_request_blocks")

    def _release_sessions(self) -> None:
        """Release sessions as vLLM preempts a request that is running: what waits and has been computed is computed
        anew."""
        scheduler = self._core.scheduler
        if not self._knows_sessions:
            return
        if not self._is_asked:  # only now there is a scheduler
            self._is_asked = True
            around(scheduler, "_update_request_as_session", self._continue)
        self._let_go = {name: count for name, count in self._let_go.items() if name in scheduler.requests}
        for name, request in scheduler.requests.items():
            if not (request.resumable and request.num_computed_tokens):
                continue
            if request.status.name == "WAITING_FOR_STREAMING_REQ":
                self._let_go[name] = request.num_computed_tokens
            elif request.status.name != "WAITING":  # one whose next input has come, but no step since
                continue
            scheduler._free_request_blocks(request)
            scheduler.encoder_cache_manager.free(request)
            request.num_computed_tokens = 0

    def _continue(self, original: Any, session: Any, update: Any) -> Any:
        """Wrap an update of a session: vLLM keeps of it the tokens that were computed, which it asks for by their
        number."""
        computed = self._let_go.pop(session.request_id, None)
        if computed is None:
            return original(session, update)
        session.num_computed_tokens = computed
        try:
            return original(session, update)
        finally:
            session.num_computed_tokens = 0
