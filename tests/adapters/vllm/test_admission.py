"""A request that asks for a version, `/ready` and the figures of a server that follows; its engine is played."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

pytest.importorskip("vllm")

from tensorhub_plugins.core import version_of  # noqa: E402
from tensorhub_plugins.vllm import admission, routes  # noqa: E402
from tensorhub_plugins.vllm.admission import FIRST, Admission, furthest_behind, readiness  # noqa: E402
from tensorhub_plugins.vllm.engine import core_follower  # noqa: E402
from tensorhub_plugins.vllm.engine.status import lag_of  # noqa: E402
from tensorhub_plugins.vllm.exposition import DURATION, FIGURES, IN_FLIGHT, PREFIX  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def said(version: int = 5, **more: Any) -> Any:
    """What an engine says of itself."""
    of = {"run": "r", "model": "m", "replica": "a", "broken": False, "hub_silent_s": 0.0, "wanted": version}
    return {**of, "version": version, **more}


async def dead() -> Any:
    raise RuntimeError("EngineCore encountered an issue")


class Server:
    """vLLM's application with our middleware before it. `says`: what its engine says each time, the last for ever."""

    def __init__(self, *says: Any, load_format: str = "tensorhub") -> None:
        self.says, self.asked, self.bodies = list(says), 0, []
        self.updates: list[tuple[float, float]] = []
        self.leaves_after_s = 1e6  # the client
        self.twice: list[tuple[bytes, bytes]] = []  # more headers
        self.starts: list[Any] = []  # of the request that is answered
        self.installs_s = 0.0  # for so long it does not say so
        self.ids: list[str] = []  # of requests, as vLLM takes them from the header
        self.named: list[str] = []  # of those, which the engine was asked for
        self.answer = [{"status": 200, "headers": [(b"x", b"y")]}, {"body": b"text"}]
        config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        engine = SimpleNamespace(vllm_config=config, engine_core=self)
        self.middleware = Admission(self.application, state=SimpleNamespace(engine_client=engine))

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        if method == "tensorhub_updates":
            return [self.updates.pop() for _ in list(self.updates)]
        if method == "tensorhub_starts":
            name, forget = arguments
            await asyncio.sleep(self.installs_s)
            self.named.append(name)
            return self.starts if forget and name in self.ids[-1] else []
        assert method == "tensorhub_status"
        self.asked += 1
        found = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        return await found if asyncio.iscoroutine(found) else found

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        self.ids.append(dict(scope["headers"]).get(b"x-request-id", b"").decode())
        for message in self.answer:
            await send({"type": "http.response.start" if "status" in message else "http.response.body", **message})

    def post(
        self, *chunks: bytes, path: str = "/v1/completions", method: str = "POST", root: str = "", **headers: str
    ) -> Any:
        """The status, headers and body of an answer. Headers with _ for -."""
        sent: list[Any] = []
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": given + self.twice, "root_path": root}
        chunks = chunks or (b"",)
        parts = iter([{"type": "http.request", "body": x, "more_body": x is not chunks[-1]} for x in chunks])

        async def receive() -> Any:
            if (part := next(parts, None)) is None:
                await asyncio.sleep(self.leaves_after_s)
            return part or {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(asyncio.wait_for(self.middleware(scope, receive, send), 20))
        start, *rest = sent
        return start["status"], dict(start["headers"]), b"".join(each["body"] for each in rest)


def test_a_request_that_asks_for_none_is_as_it_was() -> None:
    server = Server(said())
    assert server.post(b'{"prompt": ', b'"x"}') == (200, {b"x": b"y"}, b"text")
    assert server.post(b'{"prompt": "say min_version"}')[0] == 200 and server.post(b"min_version {")[0] == 200
    assert server.bodies == [b'{"prompt": "x"}', b'{"prompt": "say min_version"}', b"min_version {"]
    assert server.asked == 0


@pytest.mark.parametrize("asks", [{"x_tensorhub_min_version": "7"}, {}], ids=["header", "body"])
def test_it_waits_for_the_version_it_asks_for(asks: dict[str, str]) -> None:
    server = Server(said(5), said(6), said(7))
    status, headers, _ = server.post(b'{"prompt": "x"' + (b"}" if asks else b', "min_version": 7}'), **asks)
    assert (status, headers[b"x-tensorhub-version"], server.asked) == (200, b"7", 3)
    assert json.loads(server.bodies[0])["prompt"] == "x"


def test_it_is_refused_with_what_there_is() -> None:
    server = Server(said(5))
    status, _, body = server.post(b"{}", x_tensorhub_min_version="7", x_tensorhub_wait="0.2")
    told = json.loads(body)
    assert (status, told["version"], told["min_version"], server.bodies) == (409, 5, 7, [])
    assert told["error"]["message"] == "no version 7 or later within 0.2 s; this server has 5" and server.asked > 2
    assert server.post(b"{}", x_tensorhub_min_version="1/2", x_tensorhub_wait="0")[0] == 409  # of a later attempt
    assert Server(said(version_of(1, 3))).post(b"{}", x_tensorhub_min_version="1/2")[0] == 200


def test_of_many_that_wait_one_asks() -> None:
    server = Server(said(5))

    async def ask() -> int:
        sent: list[Any] = []

        parts = iter([{"type": "http.request", "body": b"{}"}])

        async def receive() -> Any:
            return next(parts, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        given = [(b"x-tensorhub-min-version", b"7"), (b"x-tensorhub-wait", b"0.2")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": given}
        await server.middleware(scope, receive, send)
        return int(sent[0]["status"])

    async def ask_all() -> list[int]:
        return list(await asyncio.gather(*(ask() for _ in range(200))))

    assert set(asyncio.run(ask_all())) == {409} and server.asked < 200  # one by one they would have asked 600 times


def test_a_client_that_has_left_is_not_waited_for() -> None:
    server = Server(said(5), said(5), said(7))
    server.leaves_after_s = 0.05
    for asks in ({"x_tensorhub_min_version": "8"}, {}):
        assert server.post(b'{"min_version": 8}', x_tensorhub_wait="600", **asks)[0] == admission.LEFT
    assert server.bodies == []
    assert server.post(b"{}", x_tensorhub_min_version="7")[0] == 200  # the control: it is there by then


def test_a_client_that_leaves_while_the_engine_does_not_answer_is_not_waited_for() -> None:
    """What was asked for goes on: others wait for it, too."""
    server = Server(asyncio.sleep(30, said(7)))
    server.leaves_after_s = 0.05
    assert server.post(b"{}", x_tensorhub_min_version="7", x_tensorhub_wait="600")[0] == admission.LEFT
    assert server.bodies == []
    server = Server(asyncio.sleep(0.2, said(7)))
    assert server.post(b"{}", x_tensorhub_min_version="7", x_tensorhub_wait="600")[0] == 200  # the control


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"min_version": 7}', {"content_type": "application/JSON"}),
        (b'{"min\\u005fversion": 7}', {}),
        (b'{"\\u006Din_version": 7}', {}),
        ('{"min_version": 7}'.encode("utf-16"), {}),
        (b'{"min_version": 7}', {"x_tensorhub_min_version": "3"}),
        (b'{"min_version": 3}', {"x_tensorhub_min_version": "7"}),
        (b'{"min_version": 3, "min_version": 7}', {}),  # vLLM takes the last one as well
    ],
)
def test_a_version_is_heard_however_it_is_asked_for(body: bytes, headers: dict[str, str]) -> None:
    how = {"x_tensorhub_wait": "0", **headers}
    status, _, answer = Server(said(5)).post(body, **how)
    assert status == 409 and json.loads(answer)["min_version"] == 7
    assert Server(said(7)).post(body, **how)[0] == 200  # the control


def test_of_a_header_that_comes_twice_the_latest_version_counts() -> None:
    server = Server(said(5))
    for values in (("7", "3"), ("3", "7")):
        server.twice = [(b"x-tensorhub-min-version", value.encode()) for value in values]
        assert server.post(b"{}", x_tensorhub_wait="0")[0] == 409
    server.twice = server.twice[:1]
    assert server.post(b"{}", x_tensorhub_wait="0")[0] == 200  # the control: 3


def test_an_engine_that_does_not_answer_is_waited_for_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while it installs a version."""
    monkeypatch.setattr(admission, "SCRAPE_S", 0.1)
    status, _, body = Server(asyncio.sleep(15)).post(b"{}", x_tensorhub_min_version="7", x_tensorhub_wait="0.1")
    assert status == 409 and "does not answer" in json.loads(body)["error"]["message"]
    answers = asyncio.sleep(0.2, said(7))  # the control
    assert Server(answers).post(b"{}", x_tensorhub_min_version="7", x_tensorhub_wait="5")[0] == 200


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (said(5, refusal=(8, "no tensor 'w'")), "it cannot install version 8: no tensor 'w'"),
        (None, "this server does not follow the store"),
    ],
)
def test_what_will_not_come_is_not_waited_for(says: Any, why: str) -> None:
    server = Server(says)
    status, _, body = server.post(b"{}", x_tensorhub_min_version="7", x_tensorhub_wait="600")
    assert status == 409 and why in json.loads(body)["error"]["message"] and server.asked == 1


def test_a_request_for_an_adapter_waits_for_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tells of another one, with later numbers. Without adapters a body, which may be large, is not read."""
    server = Server(said(300, adapters={"a": said(300), "b": said(5, refusal=(9, "rank"))}))
    for model, wanted, status, version in (("a", 7, 200, 300), ("b", 7, 409, 5), ("b", 5, 200, 5), ("base", 5, 409, 0)):
        how = {"x_tensorhub_min_version": str(wanted), "x_tensorhub_wait": "0"}
        got, headers, body = server.post(json.dumps({"model": model}).encode(), **how)
        assert got == status, (model, wanted)
        assert version == (json.loads(body)["version"] if got == 409 else int(headers[b"x-tensorhub-version"]))
    monkeypatch.setattr(admission, "_named_in", lambda body, name: 1 / 0 if name == "model" else None)
    assert Server(said(7)).post(b'{"model": "a"}', x_tensorhub_min_version="7")[0] == 200
    with pytest.raises(ZeroDivisionError):  # the control
        server.post(b'{"model": "a"}', x_tensorhub_min_version="7")


def test_broken_weights_are_waited_for_and_an_older_version_is_enough() -> None:
    assert Server(said(7, broken=True), said(7)).post(b"{}", x_tensorhub_min_version="7")[0] == 200
    assert Server(said(7, broken=True)).post(b"{}", x_tensorhub_min_version="7", x_tensorhub_wait="0")[0] == 409
    assert Server(said(9)).post(b"{}", x_tensorhub_min_version="7")[1][b"x-tensorhub-version"] == b"9"


@pytest.mark.parametrize("given", ["x", "-1", "0", "1e3", "9" * 100, "٣"])
def test_what_is_no_version_or_time_is_said(given: str) -> None:
    server = Server(said())
    for body, headers in ((json.dumps({"min_version": given}).encode(), {}), (b"{}", {"x_tensorhub_wait": "nan"})):
        status, _, answer = server.post(body, **({"x_tensorhub_min_version": "1"} if headers else {}), **headers)
        assert status == 400 and b"error" in answer and not server.bodies


def test_a_server_without_the_store_has_nothing_of_it() -> None:
    server = Server(said(), load_format="auto")
    assert server.post(b"{}", x_tensorhub_min_version="99")[0] == 200 and server.asked == 0


def test_ready_says_behind() -> None:
    assert readiness(said())[0] == readiness(None)[0] == 200
    late = said(5, wanted=9, behind_s=61.0)
    assert readiness(late)[0] == 503 and readiness(late)[1]["why"] == "behind" and readiness(late)[1]["lag_steps"] == 4
    assert readiness(late, 100.0)[0] == 200
    refusing = said(5, refusal=(6, "other"), wanted=6, behind_s=61.0)
    assert readiness(refusing)[1]["why"] == "behind: it cannot install version 6: other"
    assert readiness({**refusing, "wanted": 5, "behind_s": 0.0})[0] == 200  # that was withdrawn
    assert readiness(said(5, broken=True))[0] == 503
    paused = readiness(said(5, paused=True))
    assert paused[0] == 503 and str(paused[1]["why"]).startswith("paused: by another client")
    assert readiness(said(5, paused=False))[0] == 200
    assert readiness(said(0, wanted=3))[0] == 503 and readiness(said(0))[0] == 200  # nothing is published yet
    assert furthest_behind([said(5), said(4), None]) is None and furthest_behind([said(5), said(4)]) == said(4)
    assert lag_of(said(5, wanted=3)) == 0  # it goes back


STARTS = [((0, 0), [(7, 0), (8, 3)]), ((1, 0), [(6, 0)])]
SSE = [{"status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}]
SSE += [{"body": b'data: {"text": "a"}\n\n', "more_body": True}, {"body": b"data: [DONE]\n\n", "more_body": True}]
SSE += [{"body": b""}]


def test_an_answer_says_of_which_versions_its_tokens_are() -> None:
    server = Server(said())
    server.starts = STARTS
    _, headers, body = server.post(b"{}", x_tensorhub_min_version="5")
    assert (headers[b"x-tensorhub-version-first"], headers[b"x-tensorhub-version-last"], body) == (b"6", b"8", b"text")
    assert headers[b"x-tensorhub-version"] == b"5" and len(server.named) == 1 and server.named[0] == server.ids[0]
    server.starts = [((0, 0), [(0, 0)])]
    assert server.post(b"{}")[1][b"x-tensorhub-version-first"] == b"0"  # none of the store's
    assert len(set(server.named)) == 2


@pytest.mark.parametrize("waits_s", [admission.WAIT_S, 0.1])
def test_an_answer_as_an_install_begins_says_its_versions(waits_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said nothing of them where the engine was busy for two seconds. The control waits for less."""
    monkeypatch.setattr(admission, "SCRAPE_S", 0.1)
    monkeypatch.setattr(admission, "WAIT_S", waits_s)
    server = Server(said())
    server.starts, server.installs_s = STARTS, 0.5
    status, headers, body = server.post(b"{}")
    assert (status, body, FIRST in headers) == (200, b"text", waits_s > server.installs_s)


def test_an_answer_that_the_engine_knows_nothing_of_is_as_it_was() -> None:
    server = Server(said())
    assert server.post(b"{}") == (200, {b"x": b"y"}, b"text")
    server.starts = STARTS
    assert server.post(b"{}", x_request_id="mine")[1] == {b"x": b"y"} and server.ids[-1] == "mine"
    for own in (b'{"request_id": "mine"}', b'{"request_id": "mine", "min_version": 5}'):  # as a run's servers are asked
        assert FIRST not in server.post(own)[1] and server.ids[-1] == ""  # vLLM takes it from the body
    assert FIRST in server.post(b'{"request_id": null}')[1] and FIRST in server.post(b'["request_id"]')[1]
    for hidden in (b'{"request\\u005fid": "mine"}', '{"request_id": "mine"}'.encode("utf-16")):
        assert FIRST not in server.post(hidden, content_type="Application/JSON")[1] and server.ids[-1] == ""
    for path in ("/generative_scoring", "/cohere/v2/chat", "/v1/messages"):
        assert FIRST in server.post(b"{}", path=path)[1]
    server.named.clear()
    assert server.post(b"{}", path="/sleep")[1] == {b"x": b"y"} and server.ids[-1] == ""
    server.answer = [{"status": 400, "headers": []}, {"body": b"text"}]
    assert server.post(b"{}")[1] == {} and len(server.named) == 1  # it is forgotten all the same


def test_a_response_has_the_name_in_its_body_where_vllm_looks_for_it() -> None:
    """In no header. The controls: of another route the body stays, and so does a name of its own."""
    server = Server(said())
    server.starts = STARTS
    for body in (b'{"input": "a"}', b'{"input": "a", "min_version": 5}'):
        server.post(body[:4], body[4:], path="/v1/responses", content_type="application/json")
        asked = json.loads(server.bodies[-1])
        assert asked.pop("request_id") == f"resp_{server.named[-1]}" and asked == json.loads(body)
    for body, path in (
        (b'{"input": "a"}', "/v1/completions"),
        (b'{"request_id": "resp_mine"}', "/v1/responses"),
        (b"[1]", "/v1/responses"),
        (b"{", "/v1/responses"),
        (b"", "/v1/responses"),
    ):
        server.post(body, path=path)
        assert server.bodies[-1] == body


def test_a_stream_says_it_before_its_end_if_it_was_asked() -> None:
    server = Server(said())
    server.starts, server.answer = STARTS, SSE
    plain = server.post(b"{}")
    assert plain[2] == b'data: {"text": "a"}\n\ndata: [DONE]\n\n' and len(server.named) == 1
    status, headers, body = server.post(b"{}", x_tensorhub_versions="1")
    assert (status, set(headers), len(server.named)) == (200, {b"content-type"}, 2)
    assert body == (
        b'data: {"text": "a"}\n\n: x-tensorhub-version-first: 6, x-tensorhub-version-last: 8\n\ndata: [DONE]\n\n'
    )


def test_a_stream_without_a_mark_at_its_end_says_it_at_its_end() -> None:
    """Those of /v1/messages end with an event."""
    server = Server(said())
    server.starts, server.answer = STARTS, [*SSE[:2], {"body": b"event: message_stop\n\n", "more_body": True}, SSE[-1]]
    body = server.post(b"{}", x_tensorhub_versions="1")[2]
    assert body.endswith(b"stop\n\n: x-tensorhub-version-first: 6, x-tensorhub-version-last: 8\n\n")


def test_a_server_behind_a_path_of_a_proxy_is_no_other() -> None:
    server = Server(said())
    server.starts = STARTS
    for path in ("/api/v1/completions", "/v1/completions"):  # proxies pass it on, or not
        assert server.post(b"{}", path=path, root="/api")[1][b"x-tensorhub-version-last"] == b"8"
    assert b"x-tensorhub-version-last" not in server.post(b"{}", path="/api/sleep", root="/api")[1]
    server.post(path="/api/metrics", root="/api", method="GET")
    assert server.asked == 1


def test_an_answer_that_speaks_of_the_end_of_a_stream_does_not_end_it() -> None:
    server = Server(said())
    server.starts, spoken = STARTS, {"body": b'data: {"text": "data: [DONE]"}\n\n', "more_body": True}
    server.answer = [SSE[0], spoken, *SSE[1:]]
    body = server.post(b"{}", x_tensorhub_versions="1")[2]
    assert body.endswith(b": x-tensorhub-version-first: 6, x-tensorhub-version-last: 8\n\ndata: [DONE]\n\n")


def test_the_names_of_vllm_count_each_update_once() -> None:
    server = Server(said(5, updating=True), said(7))
    server.updates = [(2.0, 0.05), (20.0, 0.5)]

    def of(name: str, operation: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:rl_weight_update_operation{name}", {"operation": operation})

    before = {operation: of("_duration_seconds_count", operation) or 0.0 for operation in ("update", "finish")}
    server.post(path="/metrics", method="GET")
    assert of("s_in_flight", "update") == 1
    server.post(path="/metrics", method="GET")
    assert of("s_in_flight", "update") == 0
    after = {operation: of("_duration_seconds_count", operation) or 0.0 for operation in before}
    assert after == {operation: count + 2 for operation, count in before.items()}
    assert REGISTRY.get_sample_value(f"{DURATION}_bucket", {"operation": "finish", "le": "0.1"}) == 1.0


def value(name: str) -> float | None:
    return REGISTRY.get_sample_value(PREFIX + name, {"run": "r", "model": "m"})


def test_the_figures_are_those_of_the_moment_of_the_scrape() -> None:
    server = Server(
        said(5, wanted=9, behind_s=3.0, failure="no memory", last={"pull_s": 2.0}), said(9), asyncio.sleep(9)
    )
    assert server.post(path="/metrics", method="GET")[0] == 200
    found = {name: value(name) for name in FIGURES}
    assert (found["step"], found["lag_steps"], found["behind_seconds"], found["failing"]) == (5, 4, 3, 1)
    assert (found["pull_seconds"], found["answers"], found["broken"]) == (2, 1, 0)
    server.post(path="/metrics", method="GET")
    assert (value("step"), value("lag_steps"), value("failing")) == (9, 0, 0)
    server.post(path="/metrics", method="GET")  # an engine that is busy with an install
    assert (value("answers"), value("step")) == (0, 9)
    server.says = [said(9), dead()]
    for answers in (1, 0):  # one that is dead has figures of vLLM's own
        assert server.post(path="/metrics", method="GET")[0] == 200 and value("answers") == answers


def test_the_page_has_all_of_them() -> None:
    told = set(re.findall(rf"^\| `{PREFIX}(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE))
    assert told == set(FIGURES)
    assert set(re.findall(r"^\| `(vllm:\w+)` \|", PAGE.read_text(), flags=re.MULTILINE)) == {DURATION, IN_FLIGHT}


async def test_a_hold_whose_client_has_left_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server waited for a version that did not come, for one who was gone. The control: one who stays."""
    from fastapi import HTTPException

    monkeypatch.setattr(routes, "LEFT_POLL_S", 0.01)
    released = asyncio.Event()

    async def tensorhub_ask(_: str, question: str, given: Any) -> Any:
        if question == "abandon":
            released.set()
            return ("", "", 0), None
        await asyncio.sleep(0.05)
        if not gone:
            return ("", "", 0), given[0]
        await released.wait()
        return ("UpdateFailed", "released before it was held", 0), None

    config = SimpleNamespace(
        load_config=SimpleNamespace(load_format="tensorhub", model_loader_extra_config={"may_be_held": True}),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    engine = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace(call_utility_async=tensorhub_ask))

    async def is_disconnected() -> bool:
        return gone

    request: Any = SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(engine_client=engine)), is_disconnected=is_disconnected
    )
    gone = False
    assert await routes.hold(request, 7, 60.0) == {"version": 7} and not released.is_set()
    gone = True
    with pytest.raises(HTTPException, match="released before it was held"):
        await asyncio.wait_for(routes.hold(request, 8, 60.0), 10.0)


@pytest.mark.parametrize("cores", [1, 2])
async def test_what_a_dead_core_was_asked_ends(cores: int) -> None:
    """vLLM leaves it unanswered, and a server whose core was killed waited at its end for those that asked: for a hold
    as long as its client did. The control: while they live, they are waited for."""
    exceptions = pytest.importorskip("vllm.v1.engine.exceptions")
    waits = asyncio.Event()

    async def ask(*_: Any, **__: Any) -> None:
        waits.set()
        await asyncio.Event().wait()

    resources = SimpleNamespace(engine_dead=False)
    client = SimpleNamespace(core_engines=[b""] * cores, resources=resources)
    client.call_utility_async = client._call_utility_async = ask
    asked = asyncio.ensure_future(core_follower.of_all_cores(client, "tensorhub_status"))
    await waits.wait()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(asked), 1.5 * core_follower.DEAD_POLL_S)
    resources.engine_dead = True
    with pytest.raises(exceptions.EngineDeadError):
        await asyncio.wait_for(asked, 10.0)
