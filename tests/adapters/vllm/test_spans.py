"""Which version each token came from, as the engine core notes it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from tensorhub_plugins.vllm import routes  # noqa: E402
from tensorhub_plugins.vllm.engine.spans import PREFIX, Spans, spans_of  # noqa: E402

A, B = f"{PREFIX}{'a' * 32}", f"{PREFIX}{'b' * 32}"


def internal(name: str) -> str:
    """As vLLM calls it."""
    return f"generate-tokens-{name}-1a2b3c4d"


def of(spans: Spans, name: str) -> object:
    """Of a request with one answer."""
    ((place, starts),) = spans.of(name)
    assert place == (0, 0)
    return starts


def test_each_answer_of_a_request_has_its_own_versions() -> None:
    """Several prompts, n > 1, and both: one answer's tokens stood for all."""
    spans = Spans()
    spans.settle(1, {})
    names = {(p, n): f"{n}_cmpl-{A}-{p}-1234567{n}" for p in (0, 1) for n in (0, 1)}
    for name in names.values():
        spans.added(name)
    spans.switched(2, {names[0, 0]: 4, names[0, 1]: 0, names[1, 1]: 7})  # one has ended before
    assert spans.of(A) == [
        ((0, 0), [(1, 0), (2, 4)]),
        ((0, 1), [(2, 0)]),
        ((1, 0), [(1, 0)]),
        ((1, 1), [(1, 0), (2, 7)]),
    ]
    spans.added(f"chatcmpl-{B}-12345678")  # what vLLM adds may be a number
    assert of(spans, B) == [(2, 0)]


def test_prompts_of_a_batch_of_chats_are_told_apart() -> None:
    """vLLM numbers them after an underscore: the last one stood for all."""
    spans = Spans()
    spans.settle(1, {})
    names = [f"chatcmpl-{A}_{prompt}-1a2b3c4d" for prompt in (0, 1)]
    for name in names:
        spans.added(name)
    spans.switched(2, {names[0]: 10, names[1]: 3})
    assert spans.of(A) == [((0, 0), [(1, 0), (2, 10)]), ((1, 0), [(1, 0), (2, 3)])]


def told(*cores: Spans, forgets: bool = False) -> Any:
    """What `vllm serve` says of A over HTTP."""

    class Client:
        core_engines = cores

        async def _call_utility_async(self, _: str, name: str, forget: bool, *, engine: Spans) -> Any:
            return engine.pop(name) if forget else engine.of(name)

        async def call_utility_async(self, method: str, name: str, forget: bool) -> Any:
            return await self._call_utility_async(method, name, forget, engine=cores[0])

    config = SimpleNamespace(load_config=SimpleNamespace(load_format="tensorhub"))
    engine = SimpleNamespace(engine_core=Client(), vllm_config=config)
    return asyncio.run(
        routes.starts(A, SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(engine_client=engine))), forgets)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (f"cmpl-{A}-0-1a2b3c4d", f"cmpl-{A}-0-5e6f7a8b"),  # the name was used twice
        (f"cmpl-{A}-{'1' * 32}-beam-0-1a2b3c4d", f"cmpl-{A}-{'2' * 32}-beam-1-1a2b3c4d"),
    ],
)
def test_an_answer_that_several_requests_had_a_part_in_is_not_known(one: str, two: str) -> None:
    """Each step of a beam search is a request, and the last one's version passed for that of all."""
    spans, other = Spans(), Spans()
    for core in (spans, other):
        core.settle(1, {})
    spans.added(one)
    assert told(spans)["starts"] == told(spans, other)["starts"] == [(1, 0)]  # the control
    assert told(other, forgets=True)["starts"] is None and told(spans)["starts"] == [(1, 0)]
    other.added(two)
    assert told(spans, other) == {"starts": None, "answers": []}
    spans.switched(2, {})
    spans.added(two)
    spans.switched(3, {one: 5, two: 6})
    assert told(spans) == {"starts": None, "answers": []}


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    spans = Spans(requests_max=1)
    for name in (A, A, B):
        spans.added(f"cmpl-{name}-{len(spans._requests)}-0")
    assert spans._requests.keys() == spans._starts.keys() == {B}


def test_what_was_asked_for_once_makes_room_for_others() -> None:
    """An agent's short requests would push the long one out under which they run, and its answer could not be used."""
    spans = Spans(requests_max=2)
    spans.settle(1, {})
    spans.added(internal(A))
    for number in range(10):
        spans.added(internal(short := f"{PREFIX}{number:032x}"))
        assert spans.pop(short) == [((0, 0), [(1, 0)])]
    assert of(spans, A) == [(1, 0)] and spans.pop(short) == []
    for number in range(10):  # the control: nobody asks for them
        spans.added(internal(f"{PREFIX}{number:032x}"))
    assert spans.of(A) == []


def test_what_is_of_no_version_is_told() -> None:
    """Somebody has loaded weights that are none of the store's: its tokens passed for the version before."""
    spans = Spans()
    spans.settle(3, {})
    spans.added(internal(A))
    spans.switched(0, {internal(A): 2})
    spans.added(internal(B))
    spans.settle(0, {})
    spans.switched(4, {internal(A): 5, internal(B): 1})
    assert of(spans, A) == [(3, 0), (0, 2), (4, 5)] and of(spans, B) == [(0, 0), (4, 1)]


def test_a_request_of_several_versions() -> None:
    spans = Spans()
    spans.settle(1, {})
    spans.added(internal(A))
    spans.switched(2, {internal(A): 5})
    spans.added(internal(B))
    spans.switched(3, {internal(A): 5, internal(B): 2})  # A has not had a token of version 2
    assert of(spans, A) == [(1, 0), (3, 5)]
    assert of(spans, B) == [(2, 0), (3, 2)]
    assert spans_of([[1, 0], [3, 5]], 9) == ((1, 5), (3, 4))
    assert spans_of([[1, 0], [3, 5]], 5) == ((1, 5),)  # read up to there
    assert spans_of([[1, 0], [3, 5]], 0) == ((1, 0),)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_spans_hold_every_token_once_in_order(tokens_by_version: list[int]) -> None:
    spans, total = Spans(), 0
    spans.settle(1, {})
    spans.added(internal(A))
    for version, tokens in enumerate(tokens_by_version[:-1], 2):
        total += tokens
        spans.switched(version, {internal(A): total})
    total += tokens_by_version[-1]
    ((_, starts),) = spans.pop(A)
    assert spans_of(starts, total) == tuple(
        (version, tokens) for version, tokens in enumerate(tokens_by_version, 1) if tokens
    ) or (total == 0 and spans_of(starts, 0) == ((starts[0][0], 0),))


def test_a_request_that_came_and_went_between_two_switches_has_its_own_version() -> None:
    """Asking for the version before and after would not tell it."""
    spans = Spans()
    spans.settle(1, {})
    spans.switched(2, {})
    spans.added(internal(A))
    spans.switched(3, {})
    assert of(spans, A) == [(2, 0)]


def test_going_back_and_forth_is_told() -> None:
    spans = Spans()
    spans.settle(2, {})
    spans.added(internal(A))
    spans.switched(1, {internal(A): 3})
    spans.switched(2, {internal(A): 4})
    spans.switched(2, {internal(A): 6})  # mended: the same weights
    assert of(spans, A) == [(2, 0), (1, 3), (2, 4)]


def test_what_came_before_the_version_was_known_came_from_it() -> None:
    spans = Spans()
    spans.added(internal(A))
    spans.settle(7, {internal(A): 3})
    assert of(spans, A) == [(7, 0)] and spans.version == 7
    spans.settle(7, {internal(A): 4})
    assert of(spans, A) == [(7, 0)]


def test_only_requests_that_are_named_are_remembered_and_not_without_limit() -> None:
    spans = Spans(requests_max=2)
    for name in ("cmpl-1", A, B, f"{PREFIX}{'c' * 32}"):
        spans.added(internal(name))
    assert spans.of("cmpl-1") == spans.of(A) == []
    assert of(spans, B) == [(0, 0)]
