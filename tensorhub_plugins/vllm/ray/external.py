"""A `vllm serve` that no framework started, as a member of a running job: tokens in, tokens out, over HTTP.

    vllm serve MODEL --load-format tensorhub --model-loader-extra-config \
      '{"hub": "tcp://HUB", "run": "RUN", "model": "actor", "follow": "now"}'
    tensorhub fleet add --url http://host:8000

It has the secret of the job's hub by TENSORHUB_SECRET_FILE; the job says, as it starts, in which file that is.

The server gets its weights itself (engine/core_follower.py), so there is nothing to manage here: `External` is the
actor that stands for it, asks for tokens, tells the version of every one of them, and watches whether the server is
there. Frameworks translate their requests and answers: verl/external.py, openrlhf/external.py.

One that "may_be_held" stays with one version during an evaluation (`tensorhub_hold`). The hold is renewed, and ends by
itself if the job does. Whatever the server does, an answer of another version counts for none meanwhile.

Which version a token came from the server's engine core says, where requests and weights change one after the other
(engine/spans.py). It is exact with both kinds of "follow". An answer whose versions cannot be told is not used.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Annotated, Any, TypedDict

import aiohttp
import msgspec
import ray

from tensorhub_plugins.core import Client, TensorHubError, UsageError, attempt_of, record, run_log, version_text
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm import names
from tensorhub_plugins.vllm.engine.spans import PREFIX, Span, spans_of
from tensorhub_plugins.vllm.engine.status import Following, Status
from tensorhub_plugins.vllm.model_facts import differences
from tensorhub_plugins.vllm.ray.config import connect
from tensorhub_plugins.vllm.ray.hub import ON_HEAD
from tensorhub_plugins.vllm.ray.members import Heartbeat
from tensorhub_plugins.vllm.ray.owned import heartbeat

logger = get_logger(__name__)

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 10.0
STARTS_TIMEOUT_S = 30.0  # for the versions of an answer: its engine may be in the middle of an install
JOIN_TIMEOUT_S = 60.0  # for a server that is there to hold a version of this run
LINE_SIZE_BYTES_MAX = 1 << 20  # of one line of a stream: a few tokens, with log-probabilities
ROUTE = "tensorhub"
ANSWER_ERRORS = (ValueError, LookupError, TypeError, msgspec.ValidationError)  # of one that is read as what it is not
REFUSED_S = 30.0  # no requests after one was refused for no fault of its own, or prompts would be lost there in a row
REDIRECTS = range(300, 400)
REFUSALS = (400, 422)  # of this request, by whomever; others, like 401, 404 and 429, are of this server or its proxy
HOLD_S = 60.0  # a server goes on by itself when it was not told for so long to stay
HOLD_AGAIN_S = HOLD_S / 4
HOLD_TIMEOUT_S = 600.0  # for it to have the version
CALLS_MAX = 100_000  # of one actor at a time: requests wait in vLLM, and heartbeats must not wait behind them


class ServerLost(TensorHubError):
    """This server cannot answer any more: ask another one."""


class Expected(msgspec.Struct, frozen=True):
    """What a server must be to join. logprobs_mode: vLLM's; None: any."""

    run: str
    model: str
    facts: dict[str, Any]  # see model_facts.py
    max_model_len: int
    logprobs_mode: str | None = None
    staleness_s: float | None = None  # see core.options.TrainingOptions


class Answer(msgspec.Struct, frozen=True):
    """spans: they add up to all tokens, and there is at least one."""

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: str  # "stop", "length" or "abort"
    spans: tuple[Span, ...]


class About(TypedDict):
    """What a server says of itself, see routes.py. following: None: it does not."""

    following: Following | None
    facts: dict[str, Any]
    max_model_len: int
    logprobs_mode: str
    engines: int
    by_hand: bool


class Held(TypedDict):
    """At which version a server stays."""

    version: Annotated[int, msgspec.Meta(ge=1)]


class Starts(TypedDict):
    """Where the versions of an answer start; None: it cannot be told."""

    starts: Annotated[list[tuple[int, int]], msgspec.Meta(min_length=1)] | None


class _OtherAnswerError(ValueError):
    """What answers there is no server of ours."""


def _raise_for_status(reply: aiohttp.ClientResponse) -> None:
    """Raise for every status but success, redirects included."""
    reply.raise_for_status()
    if reply.status in REDIRECTS:
        raise aiohttp.ClientResponseError(
            reply.request_info, reply.history, status=reply.status, message=reply.headers.get("Location", "nowhere")
        )


def refusal(url: str, expected: Expected, about: About) -> str | None:
    """Return why a server that says this of itself cannot join, and what to do about it; None: it can."""
    following = about["following"]
    if following is None:
        return f'{url} does not follow the store: start it with "follow": "now" in --model-loader-extra-config'
    if "adapters" in following:
        return f"{url} answers with LoRA adapters, which jobs do not ask servers for: let the job start more engines"
    if (following["run"], following["model"]) != (expected.run, expected.model):
        return (
            f"{url} follows run {following['run']}, model {following['model']}, and this job is run {expected.run}, "
            f"model {expected.model}: start it with these"
        )
    differing = differences(expected.facts, about["facts"])
    if differing:
        return f"{url} serves another model ({'; '.join(differing)}): start it with the model of this job"
    if about["max_model_len"] < expected.max_model_len:
        return (
            f"{url} takes {about['max_model_len']} tokens at most, and this job needs {expected.max_model_len}: "
            f"start it with --max-model-len {expected.max_model_len}"
        )
    if expected.logprobs_mode not in (None, about["logprobs_mode"]):
        return (
            f"{url} gives {about['logprobs_mode']}, and this job counts on {expected.logprobs_mode}: start it with "
            f"--logprobs-mode {expected.logprobs_mode}"
        )
    if about["engines"] > 1:
        return (
            f"{url} is {about['engines']} engines behind one address, each with a version of its own: start it with "
            "--data-parallel-size 1, and add one address for each"
        )
    if about["by_hand"]:
        return f"{url} is also updated by hand, so its versions are not sure: start it without --weight-transfer-config"
    return None


class External:
    """Stand for a server in a framework, which adds how it asks: an asyncio actor. options: with hub and run; expected:
    of the server, without these; timeout_s: of silence, until its requests are given back."""

    def __init__(self, name: str, url: str, options: TrainingOptions, expected: Expected, *, timeout_s: float) -> None:
        assert options.run is not None
        self.worker, self.url, self.timeout_s = f"{name}/0", url.rstrip("/"), timeout_s
        run, model, staleness_s = options.run, options.model, options.staleness_s
        self.expected = msgspec.structs.replace(expected, run=run, model=model, staleness_s=staleness_s)
        self.status = Status()  # as the server's follower has told last
        self.why_not = f"{url} has not joined"  # it gets no requests; "": it does
        self._options = options
        self._heard_at, self._refused_until = time.monotonic(), 0.0
        self._streams: dict[str, tuple[asyncio.Task[None], _Received]] = {}
        self._aborted: set[str] = set()
        self._watch: asyncio.Task[None] | None = None  # once it has joined
        self._held, self._hold_at = 0, 0.0  # at which version, for an evaluation; and when to tell it again
        self._has_asked = False  # for a hold, and for no release since
        self._telling = asyncio.Lock()  # a hold that comes after its release would last
        self._open = AsyncExitStack()
        self._store: Client
        self._http: aiohttp.ClientSession

    @classmethod
    async def start(cls, *arguments: Any, **options: Any) -> Any:
        """Return an actor of this class once it has joined; UsageError if it cannot. It lives as long as its handle."""
        actor: Any = ray.remote(cls).options(max_concurrency=CALLS_MAX, **ON_HEAD)
        handle = actor.remote(*arguments, **options)
        try:
            await handle.join.remote()
        except ray.exceptions.RayTaskError as error:
            ray.kill(handle)
            raise error.cause if isinstance(error.cause, UsageError) else error from None
        return handle

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    async def tensorhub_heartbeat(self) -> Heartbeat:
        """Return what a dispatcher asks. It may take requests unless it says why not."""
        silent_s = self.silent_s if self._watch is not None else 0.0
        own = {"ready": not self.why_not, "why": self.why_not, "worker": self.worker, "timeout_s": self.timeout_s}
        if self._watch is not None:
            own["stays"] = self.status.refusal[0] > 0 or self._store.pinned is not None
        return heartbeat(self.status, silent_s, **own)

    # --- joining, and being watched -----------------------------------------------------------------------------------

    async def join(self) -> None:
        """Return when it can answer for this job; UsageError says in one sentence why it cannot be used."""
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"{self.url!r} is no address of a server: give one like http://host:8000")
        try:
            await self._connect()
            await self._join()
        except BaseException:
            await self.tensorhub_leave()
            raise
        record("external_joined", worker=self.worker, address=self.url, version=self.status.version)

    async def _connect(self) -> None:
        replica = f"server-{self.worker.partition('/')[0]}"
        self._store = await asyncio.to_thread(connect, self._options, replica=replica)
        self._open.push_async_callback(asyncio.to_thread, self._store.close)
        key = os.environ.get("VLLM_API_KEY")  # as vLLM's own servers read it
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # A connection for every request: a kept one may be closed by the server (vLLM's does after 5 s) just as the
            # next request goes out on it, which is then lost, and the server with it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=LINE_SIZE_BYTES_MAX,
        )
        self._open.push_async_callback(self._http.close)

    async def _join(self) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            about = await self._first_about()
            why_not = refusal(self.url, self.expected, about)
            if why_not is not None:
                raise UsageError(why_not)
            following = about["following"]
            assert following is not None  # or it is refused
            if following["version"] > 0 and await asyncio.to_thread(self._holds_something, following["replica"]):
                break
            number, why_not = following.get("refusal", (0, ""))
            if number and not following["version"]:
                raise UsageError(f"{self.url} cannot install version {version_text(number)}: {why_not}")
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{self.url} follows run {following['run']} with version {following['version']}, which the hub of "
                    "this job knows nothing of: start it with the address of this job's hub"
                )
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._heard(about)
        self._watch = asyncio.create_task(self._probe())

    def _holds_something(self, replica: str) -> bool:
        """Return whether the hub of this job knows it."""
        held = [workers for info in self._store.versions() for workers in info.layouts.values()]
        return any(worker.startswith(f"{replica}/") for workers in held for worker in workers)

    async def _first_about(self) -> About:
        try:
            return await self._about()
        except (aiohttp.ClientResponseError, _OtherAnswerError) as error:
            if isinstance(error, _OtherAnswerError) or error.status == 404:
                raise UsageError(
                    f"{self.url} is no `vllm serve --load-format tensorhub` with this release and a vLLM that it was "
                    f"tested with ({names.listed(names.run_with('vllm'), 'or')}): start it as one"
                ) from error
            if error.status in REDIRECTS:
                raise UsageError(
                    f"{self.url} sends elsewhere ({error.message}): give the address of the server"
                ) from error
            raise UsageError(f"{self.url} answers {error.status} {error.message}: look into its log") from error
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            raise UsageError(
                f"no server answers at {self.url} ({error or type(error).__name__}): correct the address, or start the "
                "server first"
            ) from error

    async def _probe(self) -> None:
        """Ask its engine, not only its HTTP side, all the time; during an install that side is all there is to ask."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            try:
                self._heard(await self._about())
                if not self._telling.locked():
                    await self._hold_on()
            except asyncio.TimeoutError:
                with suppress(aiohttp.ClientError, asyncio.TimeoutError, ValueError):
                    await self._get("health", parse=False)
                    self._heard_at = time.monotonic()
            except (aiohttp.ClientError, ValueError, RecursionError, ServerLost) as error:
                logger.debug("%s: %s", self.url, error)
            if self.silent_s > self.timeout_s:
                self._end_streams()

    async def _about(self) -> About:
        try:
            return msgspec.convert(await self._get(ROUTE), About)
        except msgspec.ValidationError as error:
            raise _OtherAnswerError(f"{self.url} answers as something else: {error}") from error

    def _heard(self, about: About) -> None:
        self._heard_at = time.monotonic()
        why_not = refusal(self.url, self.expected, about) or ""  # it may have been started again as something else
        self.status, limit_s = msgspec.convert(about["following"] or {}, Status), self.expected.staleness_s
        hub_silent_s = about["following"]["hub_silent_s"] if about["following"] else 0.0
        if not why_not and not self.status.version:
            why_not = f"{self.url} has no version yet"
        elif not why_not and attempt_of(self.status.version) < self._store.attempt and self._store.pinned is None:
            # The job knows: a server that is cut off from the hub does not.
            why_not = f"{self.url} has a version of a former attempt, and waits for the first of the trainer's newest"
        elif not why_not and (self.status.is_broken or self.status.why_not):
            why_not = f"{self.url}: {self.status.why_not or 'waits for whole weights'}"
        elif not why_not and limit_s is not None and hub_silent_s > limit_s:
            why_not = f"{self.url} has not heard of the hub for longer than staleness_s, {limit_s:g} s"
        if why_not and why_not != self.why_not:
            logger.warning("no requests for a while: %s", why_not)
        if why_not or self._heard_at >= self._refused_until:
            self.why_not = why_not

    async def _get(self, route: str, *, parse: bool = True, timeout_s: float | None = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S if timeout_s is None else timeout_s)
        async with self._http.get(f"{self.url}/{route}", timeout=timeout, allow_redirects=False) as reply:
            _raise_for_status(reply)
            return await reply.json() if parse else await reply.read()

    # --- one evaluation, one version ----------------------------------------------------------------------------------

    async def tensorhub_hold(self, version: int) -> int:
        """See `Follower.hold`, and there it may be held no longer than the job is there. ServerLost: it cannot be."""
        async with self._telling:
            self._held = 0
            self._held = await self._hold(version, HOLD_TIMEOUT_S)
            return self._held

    async def tensorhub_release(self) -> None:
        """Have it go on to new versions, if it was to be held."""
        async with self._telling:
            self._held, has_asked, self._has_asked = 0, self._has_asked, False
            if has_asked:  # even if that failed: the server may install it still
                with suppress(ServerLost):  # it goes on by itself, later
                    await self._post("release", PROBE_TIMEOUT_S)

    async def _hold_on(self) -> None:
        """Renew the hold, if it is time."""
        async with self._telling:
            if self._held and time.monotonic() >= self._hold_at:
                await self._hold(self._held, PROBE_TIMEOUT_S)

    async def _hold(self, version: int, timeout_s: float) -> int:
        self._hold_at, self._has_asked = time.monotonic() + HOLD_AGAIN_S, True
        told = await self._post("hold", timeout_s, version=version, for_s=HOLD_S)
        try:
            held = msgspec.convert(told, Held)["version"]
        except msgspec.ValidationError as error:
            raise ServerLost(f"{self.url} answers as something else: {error}", peer=self.url) from error
        if version not in (0, held):
            raise ServerLost(f"{self.url} is held at version {held}, and not at {version}", peer=self.url)
        return held

    async def _post(self, action: str, timeout_s: float, **told: float) -> Any:
        timeout, url = aiohttp.ClientTimeout(total=timeout_s), f"{self.url}/v1/{ROUTE}/{action}"
        try:
            async with self._http.post(url, params=told, timeout=timeout, allow_redirects=False) as reply:
                if reply.status in (403, 409):
                    raise ServerLost(f"{self.url} cannot be held: {(await reply.text())[:500]}", peer=self.url)
                _raise_for_status(reply)
                return await reply.json()
        except (*ANSWER_ERRORS, aiohttp.ClientError, asyncio.TimeoutError, RuntimeError) as error:  # it has left, too
            raise ServerLost(f"{self.url}: {error or type(error).__name__}", peer=self.url) from error

    def check(self) -> None:
        """Raise ServerLost while it gets no requests."""
        if self.why_not:
            raise ServerLost(self.why_not, peer=self.url)

    # --- generation ---------------------------------------------------------------------------------------------------

    async def ask(self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Answer:
        """Return the answer. sampling_params: vLLM's, as JSON. ServerLost; UsageError for a request that it refuses."""
        started = time.monotonic()
        try:
            self.check()
            answer = await self._ask([int(token) for token in prompt_ids], sampling_params)
        except ServerLost:
            run_log.record_request(self.worker, started, "error")
            raise
        versions = [version for version, _ in answer.spans]
        run_log.record_request(self.worker, started, answer.finish_reason, versions, len(answer.token_ids))
        return answer

    async def _ask(self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Answer:
        name = f"{PREFIX}{uuid.uuid4().hex}"
        got = _Received([], [] if sampling_params.get("logprobs") is not None else None)
        held = self._held
        stream = asyncio.create_task(self._stream(name, prompt_ids, sampling_params, got))
        self._streams[name] = stream, got
        try:
            await asyncio.wait({stream})
            if stream.cancelled() and name not in self._aborted:
                raise ServerLost(f"{self.url} has not answered for {self.silent_s:.0f} s", peer=self.url)
            if not stream.cancelled():
                stream.result()
            told = await self._get(f"{ROUTE}/starts/{name}?forget=true", timeout_s=STARTS_TIMEOUT_S)
            starts = msgspec.convert(told, Starts)["starts"]
        except UsageError:
            raise
        except (*ANSWER_ERRORS, aiohttp.ClientError, asyncio.TimeoutError) as error:
            if isinstance(error, aiohttp.ClientResponseError):
                self._refused_until = time.monotonic() + REFUSED_S
                self.why_not = f"{self.url} has refused a request with {error.status} {error.message}"
            raise ServerLost(f"{self.url}: {error or type(error).__name__}", peer=self.url) from error
        finally:
            stream.cancel()
            self._streams.pop(name, None)
            self._aborted.discard(name)
        if starts is None or not all(version for version, _ in starts):
            if not got.token_ids:  # aborted before its engine had heard of it
                starts = [(self.status.version, 0)]
            else:
                raise ServerLost(f"{self.url} cannot tell the version of an answer", peer=self.url)
        if held and any(version != held for version, _ in starts):
            raise ServerLost(f"{self.url} has left version {version_text(held)} in an evaluation", peer=self.url)
        return Answer(got.token_ids, got.log_probs, got.finish_reason, spans_of(starts, len(got.token_ids)))

    def running(self) -> dict[str, int]:
        """Return the requests that have not ended, with the tokens that have come of each."""
        return {name: len(got.token_ids) for name, (_, got) in self._streams.items()}

    async def tensorhub_give_back(self) -> int:
        """End what is under way, and return how much that was. It is answered with what has come, as "abort"."""
        self._aborted.update(self._streams)
        return self._end_streams()

    async def tensorhub_leave(self) -> None:
        """Stand for it no more. The server goes on."""
        self.why_not = f"{self.url} has not joined"
        if not self._telling.locked():  # else it goes on by itself, later
            await self.tensorhub_release()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._end_streams()
        await self._open.aclose()

    def _end_streams(self) -> int:
        for stream, _ in self._streams.values():
            stream.cancel()  # vLLM ends a request whose connection is closed
        return len(self._streams)

    async def _stream(self, name: str, prompt_ids: Sequence[int], params: Mapping[str, Any], got: _Received) -> None:
        body = {"request_id": name, "token_ids": list(prompt_ids), "sampling_params": dict(params), "stream": True}
        # A redirected POST becomes a GET.
        async with self._http.post(f"{self.url}/inference/v1/generate", json=body, allow_redirects=False) as reply:
            if reply.status in REFUSALS:
                raise UsageError(f"{self.url} refuses a request: {(await reply.text())[:500]}")
            _raise_for_status(reply)
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                got.take(json.loads(line[len(b"data: ") :]), self.url)
        raise ServerLost(f"{self.url} has broken off an answer", peer=self.url)


class _Received(msgspec.Struct):
    """What has come of an answer."""

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: str = "abort"  # unless it says how it ended

    def take(self, part: Mapping[str, Any], url: str) -> None:
        if "error" in part:
            raise ServerLost(f"{url}: {part['error']}", peer=url)
        for choice in part["choices"]:
            self.token_ids += choice["token_ids"]
            if self.log_probs is not None:
                self.log_probs += [token["logprob"] for token in choice["logprobs"]["content"]]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
