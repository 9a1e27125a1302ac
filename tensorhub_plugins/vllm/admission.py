"""What a server that follows the store does with HTTP requests before vLLM has them.

A request may ask to be answered from a version: by the header `X-TensorHub-Min-Version`, or `min_version` in its JSON
body: a step, or attempt/step; of several the latest counts. It waits until this server has that version or a later one,
while its client stays, for at most `X-TensorHub-Wait` seconds (10), and is then refused with 409, which says what there
is. An answered one carries `X-TensorHub-Version`, what the server had when it began: no token of its answer is of an
older one, unless operators withdraw that or pin another. Every answer that is no stream carries the oldest and the
newest version of its tokens, `X-TensorHub-Version-First` and `-Last` (0: none of the store's), and a stream that was
asked for with `X-TensorHub-Versions: 1` the same as a comment before its end; not that of a request with a name of its
own (`X-Request-Id`, or `request_id` in its body), or of an engine that does not answer for 10 s. `GET /ready` is 503
with "behind" while a newer version has not been installed for `?max_behind_s=` (60): a router that does not know the
store holds traffic back by it. Before `GET /metrics` is answered the store's figures are renewed (exposition.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from tensorhub_plugins.core import UsageError, parse_version, version_label
from tensorhub_plugins.vllm.engine.core_follower import of_all_cores, starts_in
from tensorhub_plugins.vllm.engine.pooling import answer_name
from tensorhub_plugins.vllm.engine.spans import PREFIX
from tensorhub_plugins.vllm.engine.status import Following, lag_of, why_refused
from tensorhub_plugins.vllm.exposition import figures
from tensorhub_plugins.vllm.names import NAME

MIN_VERSION, WAIT, VERSION = b"x-tensorhub-min-version", b"x-tensorhub-wait", b"x-tensorhub-version"
FIRST, LAST = b"x-tensorhub-version-first", b"x-tensorhub-version-last"
VERSIONS, REQUEST_ID, END_OF_STREAM = b"x-tensorhub-versions", b"x-request-id", b"\ndata: [DONE]"
ANSWERING = re.compile("/(v1|v2|cohere|inference|generat|invocations|pooling|classify|score|rerank)")  # begins so
IN_BODY, LEFT = "min_version", 499  # a client that has left: Starlette takes no answer at all for an error
HIDES_NAMES = re.compile(rb"\\u00[5-7]|\0")  # JSON may write letters so, or be UTF-16
WAIT_S, WAIT_MAX_S, POLL_S = 10.0, 600.0, 0.1
SHARED_S = 0.05  # for so long what the engine has said answers other requests that wait, too
BEHIND_S = 60.0
SCRAPE_S = 2.0  # for the engine to say how it does; it may be busy with an install

Header = tuple[bytes, bytes]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def furthest_behind(cores: Sequence[Following | None]) -> Following | None:
    """Return what all data parallel engines have: what the one says that is the furthest behind. None: it follows
    nothing."""
    if None in cores or not cores:
        return None
    return min((each for each in cores if each), key=lambda said: (not said["broken"], said["version"]))


def of_model(cores: Sequence[Following | None], model: Callable[[], object]) -> Following | None:
    """Return the same for requests that name this model. None: nothing of the store's answers them, as the weights
    under adapters. model: called where there are adapters."""
    if not any(said and said.get("adapters") for said in cores):
        return furthest_behind(cores)
    return furthest_behind([said and said.get("adapters", {}).get(str(model())) for said in cores])


def readiness(said: Following | None, max_behind_s: float = BEHIND_S) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status of `/ready`, and its body. said: of the engine, None: it does not follow."""
    if said is None:
        return 200, {"ready": True, "follows": False}
    behind_s, wanted, refused = said.get("behind_s", 0.0), said.get("wanted", 0), why_refused(said)
    why = ""
    if said["broken"]:
        why = "its weights are not whole: an install failed half way, the next one repairs it"
    elif said.get("paused"):
        why = "paused: by another client, which resumes it, or by an update of that client's which has failed"
    elif wanted and not said["version"]:
        why = "it has none of the store's versions yet"
    elif behind_s > max_behind_s:
        why = "behind" if refused is None else f"behind: it cannot install version {version_label(wanted)}: {refused}"
    body = {
        "ready": not why,
        "why": why,
        "version": said["version"],
        "wanted": wanted,
        "lag_steps": lag_of(said),
        "behind_s": round(behind_s, 3),
    }
    return (503 if why else 200), body


def refusal_of(said: Following | None, wanted: int) -> str | None:
    """Return why a request for this version cannot be answered by waiting; None: it can."""
    if said is None:
        return "this server does not follow the store, or only with adapters, of which this request names none"
    refused, why = said.get("refusal", (0, ""))
    return f"it cannot install version {version_label(refused)}: {why}" if refused >= wanted > said["version"] else None


class Admission:
    """An ASGI middleware of vLLM's server, which does nothing in one without `--load-format tensorhub`."""

    def __init__(self, app: App, *, state: Any) -> None:
        """Stand before this application. state: of vLLM's own one, which gets its engine later."""
        self._app, self._state = app, state
        self._asked: asyncio.Task[list[Following | None]] | None = None
        self._asked_at = -SHARED_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = getattr(self._state, "engine_client", None)
        if scope["type"] != "http" or engine is None or engine.vllm_config.load_config.load_format != NAME:
            await self._app(scope, receive, send)
        elif _path(scope).startswith("/metrics"):
            await self._renew(engine)
            await self._app(scope, receive, send)
        elif scope["method"] == "POST":
            await self._admit(engine, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _renew(self, engine: Any) -> None:
        ask = partial(of_all_cores, engine.engine_core)
        try:
            said = furthest_behind(await asyncio.wait_for(ask("tensorhub_status"), SCRAPE_S))
            taken = await asyncio.wait_for(ask("tensorhub_updates"), SCRAPE_S)
            figures().renew(said, [update for core in taken for update in core])
        except Exception:  # it is busy, or dead: vLLM's own figures say so
            figures().missed()

    def _shared(self, engine: Any) -> asyncio.Task[list[Following | None]]:
        """Return a question to the engine of at most SHARED_S ago, or a new one: all requests that wait share it."""
        if self._asked is None or (self._asked.done() and time.monotonic() - self._asked_at >= SHARED_S):
            self._asked = asyncio.ensure_future(of_all_cores(engine.engine_core, "tensorhub_status"))
            self._asked_at = time.monotonic()
        return self._asked

    async def _admit(self, engine: Any, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        body = _Body(receive)
        content = await body.read() if b"json" in headers.get(b"content-type", b"json").lower() else b""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == MIN_VERSION]
        given += [str(named) for named in [_named_in(content, IN_BODY)] if named is not None]
        has_name = REQUEST_ID in headers or _named_in(content, "request_id") is not None
        is_named = has_name or not ANSWERING.match(_path(scope))
        answer = self._app if is_named else partial(self._answer, engine, body if content else None)
        if not given:
            await answer(scope, body.receive, send)
            return
        try:
            wanted, wait_s = max(map(parse_version, given)), _wait_s(headers.get(WAIT))
        except (UsageError, ValueError) as error:
            await _answer(send, 400, {"error": _error(400, f"{IN_BODY}: {error}")})
            return
        model = cache(partial(_named_in, await body.read(), "model"))
        deadline, said = time.monotonic() + wait_s, None
        try:
            while True:
                asked, why = self._shared(engine), None
                if not asked.done() and await body.has_left(max(SCRAPE_S, deadline - time.monotonic()), unless=asked):
                    return await _answer(send, LEFT, {})
                if asked.done():
                    said = of_model(asked.result(), model)
                    why = refusal_of(said, wanted)
                else:
                    why = "its engine does not answer, as long as it installs a version"
                if why is None and said is not None and said["version"] >= wanted and not said["broken"]:
                    break
                left_s = deadline - time.monotonic()
                if why is not None or left_s <= 0:
                    have = said["version"] if said else 0
                    text = why or f"no version {version_label(wanted)} or later within {wait_s:g} s"
                    text = f"{text}; this server has {version_label(have) if have else 'none'}"
                    await _answer(send, 409, {"error": _error(409, text), "version": have, "min_version": wanted})
                    return
                if await body.has_left(min(POLL_S, left_s)):
                    return await _answer(send, LEFT, {})
            await answer(scope, body.receive, _with_version(send, said["version"]))
        finally:
            body.close()

    async def _answer(self, engine: Any, body: _Body | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Have it answered, and say of which versions its tokens are. body: JSON."""
        name = f"{PREFIX}{uuid.uuid4().hex}"
        answer_name.set(name)
        if body is not None and _path(scope).endswith("/responses"):  # of which vLLM takes the name from no header
            body.put("request_id", f"resp_{name}")
        named = {**scope, "headers": [*scope["headers"], (REQUEST_ID, name.encode())]}
        versions = _Versions(engine, name, send, in_streams=dict(scope["headers"]).get(VERSIONS) == b"1")
        try:
            await self._app(named, receive, versions.send)
        finally:
            await versions.ask()  # the engine forgets it, however it has ended


class _Versions:
    """Says of which versions the tokens of one answer are."""

    def __init__(self, engine: Any, name: str, send: Send, *, in_streams: bool) -> None:
        """Ask of the request with this name, as the engine knows it."""
        self._engine, self._name, self._send = engine, name, send
        self._in_streams, self._is_stream, self._asked = in_streams, False, False

    async def ask(self) -> list[Header]:
        """Return the headers that say it, the first time; none: it is not known."""
        if self._asked:
            return []
        self._asked = True
        with suppress(Exception):  # whatever it is, the answer is there
            asked = starts_in(self._engine.engine_core, self._name, forget=True)
            found = [version for _, starts in await asyncio.wait_for(asked, WAIT_S) for version, _ in starts]
            if found:
                ends = ((FIRST, min(found)), (LAST, max(found)))
                return [(name, (version_label(version) if version else "0").encode()) for name, version in ends]
        return []

    async def send(self, message: Message) -> None:
        """Send it on; with the versions, once all tokens are there."""
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if message["status"] == 200 and not self._is_stream:
                message["headers"] = [*message.get("headers", ()), *await self.ask()]
        elif self._is_stream and self._in_streams and _ends(message):
            said = b", ".join(b"%s: %s" % each for each in await self.ask())
            if said:
                await self._send({"type": message["type"], "body": b": %s\n\n" % said, "more_body": True})
        await self._send(message)


def _wait_s(given: bytes | None) -> float:
    seconds = WAIT_S if given is None else float(given)
    if not 0 <= seconds <= WAIT_MAX_S:
        raise UsageError(f"{WAIT.decode()}: from 0 to {WAIT_MAX_S:g} seconds")
    return seconds


class _Body:
    """The body of a request, which is read here, and received again by the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] | None = None  # None: it has not been read
        self._next: asyncio.Future[Message] | None = None  # what comes after it: the client leaves

    async def read(self) -> bytes:
        if self._messages is None:
            self._messages = deque([await self._receive()])
            while self._messages[-1].get("more_body"):
                self._messages.append(await self._receive())
        return b"".join(message.get("body", b"") for message in self._messages)

    def put(self, name: str, value: str) -> None:
        """Have the application find this field in the object that was read, if it is one."""
        with suppress(ValueError, TypeError, RecursionError):  # vLLM says what is wrong with it
            given = json.loads(b"".join(message.get("body", b"") for message in self._messages or ()))
            changed = json.dumps({**given, name: value}).encode()
            self._messages = deque([{"type": "http.request", "body": changed}])

    async def has_left(self, timeout_s: float, *, unless: asyncio.Future[Any] | None = None) -> bool:
        """Return whether the client has left by then, or before this is done; once the body was read."""
        self._next = self._next or asyncio.ensure_future(self._receive())
        await asyncio.wait({self._next, unless or self._next}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return self._next.done()

    async def receive(self) -> Message:
        """Return the next message, as for the application."""
        if self._messages:
            return self._messages.popleft()
        coming, self._next = self._next, None
        return await (coming or self._receive())

    def close(self) -> None:
        """Wait for nothing more."""
        if self._next is not None:
            self._next.cancel()


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _ends(message: Message) -> bool:
    """Return whether the end of a stream is in this message: vLLM's mark, or none as in those of other APIs."""
    return not message.get("more_body") or END_OF_STREAM in b"\n" + message.get("body", b"")


def _named_in(body: bytes, name: str) -> object:
    """Return this field of a JSON body; None: there is none. Only a body that may have one is parsed."""
    if name.encode() not in body and not HIDES_NAMES.search(body):
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM says what is wrong with it
    return found.get(name) if isinstance(found, Mapping) else None


def _with_version(send: Send, version: int) -> Send:
    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (VERSION, version_label(version).encode())]
        await send(message)

    return send_with_version


def _error(code: int, text: str) -> dict[str, Any]:
    return {"message": text, "type": "Conflict" if code == 409 else "BadRequestError", "param": IN_BODY, "code": code}


async def _answer(send: Send, code: int, body: Mapping[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": content})
