"""What a sample has got so far: no framework is needed."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from tensorhub_plugins.openrlhf.partial_answers import Call, GivenBack, Journal, beside, joined, rest_of


def output(*tokens: int, text: str = "", logprobs: bool = True) -> SimpleNamespace:
    found = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens]
    return SimpleNamespace(
        token_ids=list(tokens),
        text=text,
        logprobs=found if logprobs else None,
        cumulative_logprob=-float(sum(tokens)) if logprobs else None,
        finish_reason="length",
    )


class Bytes:
    """A tokenizer: token n is the byte n."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def moved(journal: Journal) -> Journal:
    """To another process."""
    return pickle.loads(pickle.dumps(journal))  # type: ignore[no-any-return]


def test_the_next_engine_gets_the_same_answers_and_goes_on_with_the_last() -> None:
    journal = Journal()
    assert journal.find([1]) is None
    journal.note(Call((1,), output(2, 3), (4, 4), is_whole=True))
    assert journal.find([1, 2, 3, 9]) is None
    journal.note(Call((1, 2, 3, 9), output(5), (4, 5), is_whole=False))
    there = moved(journal)
    first = there.find([1])
    assert first is not None and first.is_whole and first.output.token_ids == [2, 3] and first.versions == (4, 4)
    last = there.find([1, 2, 3, 9])
    assert last is not None and not last.is_whole and last.output.token_ids == [5]
    there.note(Call(last.prompt, output(5, 6), (4, 7), is_whole=True), last)
    # Once more, in the middle of nothing: all is there.
    again = moved(there)
    assert [again.find(prompt).output.token_ids for prompt in ([1], [1, 2, 3, 9])] == [[2, 3], [5, 6]]  # type: ignore[union-attr]
    assert again.find([7]) is None


def test_an_engine_that_leaves_before_it_asks_gives_back_what_it_was_given() -> None:
    journal = Journal([Call((1,), output(2), (0, 0), True), Call((1, 2, 9), output(3, 4), (0, 0), False)])
    there = moved(journal)
    assert there.find([1]) is not None and there.find([1, 2, 9]) is not None
    back = moved(GivenBack([there]).journals[0])  # type: ignore[index]
    assert GivenBack([back]).tokens == 3 and not back.calls[-1].is_whole
    back.find([1])
    back.note(Call((1, 2, 9), output(3, 4, 5), (0, 1), True), back.find([1, 2, 9]))  # the control: it is there once
    assert [call.output.token_ids for call in back.calls] == [[2], [3, 4, 5]]


def test_an_agent_that_asks_something_else_is_answered_anew() -> None:
    journal = Journal([Call((1,), output(2), (0, 0), True), Call((1, 2, 9), output(3), (0, 0), True)])
    assert journal.find([1]) is not None
    assert journal.find([1, 2, 8]) is None  # its environment said 8 this time
    assert journal.find([1, 2, 9]) is None and len(journal.calls) == 1
    journal.note(Call((1, 2, 8), output(4), (0, 0), True))
    assert [call.prompt for call in moved(journal).calls] == [(1,), (1, 2, 8)]


def test_what_is_asked_several_times_at_once_is_answered_each_time_with_another_answer() -> None:
    """As an agent asks that takes the best of several: all of them went on from the first one's tokens."""
    journal = moved(Journal([Call((1,), output(2), (0,), False), Call((1,), output(3), (0,), False)]))
    first, second = journal.find([1]), journal.find([1])
    assert first is not None and second is not None and journal.find([1]) is None
    journal.note(Call((1,), output(3, 5), (0, 0), True), second)
    assert [call.output.token_ids for call in moved(journal).calls] == [[2], [3, 5]]  # the engine leaves now
    journal.note(Call((1,), output(2, 4), (0, 0), True), first)
    journal.note(Call((1,), output(6), (0,), True))
    assert [call.output.token_ids for call in journal.calls] == [[2, 4], [3, 5], [6]]


@pytest.mark.parametrize(("params", "images"), [("seed=1", b"a"), ("seed=0", b"b")])
def test_another_image_or_another_way_to_sample_is_another_question(params: str, images: bytes) -> None:
    """A screenshot is the same tokens as the one before it."""
    asked = beside("seed=0", {"image": [b"a"]})
    journal = Journal([Call((1,), output(2), (0,), True, asked)])
    assert moved(journal).find([1], beside("seed=0", {"image": [b"a"]})) is not None  # the control
    assert moved(journal).find([1], beside(params, {"image": [images]})) is None


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias"])
def test_all_ways_to_sample_tell_questions_apart(name: str) -> None:
    """Those that vLLM's own text of its parameters leaves out, as of an agent that scores each of its choices."""
    sampling = pytest.importorskip("vllm.sampling_params")
    asked = [
        sampling.SamplingParams(**{name: {token: 1.0} if name == "logit_bias" else [token]}) for token in (1, 1, 2)
    ]
    first, same, other = (beside(params, None) for params in asked)
    assert first == same != other


def test_what_an_agent_does_to_its_answer_is_not_in_the_journal() -> None:
    """As one that puts what its environment says at the end of the tokens: that came twice from the next engine."""
    journal = Journal()
    journal.note(Call((1,), output(2, 3), (4, 4), is_whole=True, told={"prompt_token_ids": [1]}))
    for _ in range(2):
        found = moved(journal).find([1])
        assert found is not None
        (answered,) = found.answer.outputs
        assert (answered.token_ids, len(answered.logprobs), found.answer.prompt_token_ids) == ([2, 3], 2, [1])
        answered.token_ids += [9]
        answered.logprobs.append({})
        found.answer.prompt_token_ids.append(9)
        journal = moved(Journal([found]))


@pytest.mark.parametrize(
    ("text", "params", "expected"),
    [
        ("so </sea", {"stop": ["\n\n", "</search>"]}, False),
        ("so </search", {"stop": "</search>"}, False),
        ("so </sea of", {"stop": ["</search>"]}, True),
        ("1", {"structured_outputs": {"regex": "[0-9]{4}"}}, False),
        ("1", {"presence_penalty": 0.5}, False),
        ("1", {"seed": 0}, False),
        ("1", {"thinking_token_budget": 0}, False),
        ("1", {"extra_args": {"budget": 5}}, False),  # of a logits processor that counts tokens
        ("1", {"presence_penalty": 0.0, "stop": None}, True),
        ("1", {}, True),
    ],
)
def test_what_depends_on_the_whole_answer_is_not_continued(
    text: str, params: dict[str, object], expected: bool
) -> None:
    """The rest of it alone never ended at a stop string that had begun; grammar and random numbers began anew."""
    call = Call((1,), output(2, text=text), (0,), is_whole=False)
    rest = rest_of(SimpleNamespace(max_tokens=9, min_tokens=0, **params), call, Bytes())
    assert (rest is not None) is expected


@pytest.mark.parametrize(("length", "expected"), [(0, False), (1, False), (2, False), (3, True)])
def test_what_ends_inside_a_character_is_not_continued(length: int, expected: bool) -> None:
    """vLLM began the text of the rest with all of the prompt, and ended it at a stop string of that."""
    call = Call((1,), output(*"字".encode()[:length]), (0,), is_whole=False)
    rest = rest_of(SimpleNamespace(max_tokens=9, min_tokens=0), call, Bytes())
    assert (rest is not None) is expected


@pytest.mark.parametrize(("length", "expected"), [(1, "?字"), (3, "")])
def test_vllm_takes_a_prompt_that_ends_inside_a_character_for_text(length: int, expected: str) -> None:
    """The control of the test above, and why."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    detokenizer = pytest.importorskip("vllm.v1.engine.detokenizer")
    model = tokenizers.models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True)
    fast = tokenizers.Tokenizer(model)
    fast.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    params = pytest.importorskip("vllm").SamplingParams()
    asked = SimpleNamespace(request_id="", prompt_token_ids=[*"?字".encode()[: 1 + length]], sampling_params=params)
    made = detokenizer.IncrementalDetokenizer.from_new_request(
        transformers.PreTrainedTokenizerFast(tokenizer_object=fast), asked
    )
    made.update([*"字".encode()[length:]], False)
    assert made.get_next_output_text(True, False) == expected


@pytest.mark.parametrize(("maximum", "minimum", "expected"), [(5, 1, (3, 0)), (5, 4, (3, 2)), (None, 0, (None, 0))])
def test_what_is_missing_is_asked_for(maximum: int | None, minimum: int, expected: tuple[int | None, int]) -> None:
    params = SimpleNamespace(max_tokens=maximum, min_tokens=minimum, temperature=0.5)
    rest = rest_of(params, Call((1,), output(2, 3), (0, 0), False), Bytes())
    assert rest is not None and (rest.max_tokens, rest.min_tokens) == expected
    assert (params.max_tokens, params.min_tokens) == (maximum, minimum)


def test_both_parts_are_one_output() -> None:
    whole = joined(Call((1,), output(2, 3, text="ab"), (0, 0), False), output(4, text="c"))
    assert (whole.token_ids, whole.text, whole.cumulative_logprob, whole.finish_reason) == (
        [2, 3, 4],
        "abc",
        -9.0,
        "length",
    )
    assert [next(iter(found)) for found in whole.logprobs] == [2, 3, 4]
    plain = joined(Call((1,), output(2, logprobs=False), (0, 0), False), output(4, logprobs=False))
    assert plain.token_ids == [2, 4] and plain.logprobs is None


def test_what_is_given_back_says_how_many_tokens_are_kept() -> None:
    journals = [
        Journal([Call((1,), output(2, 3), (0, 0), True)]),
        Journal(),
        Journal([Call((1,), output(4), (0, 0), False)]),
    ]
    assert GivenBack(journals).tokens == 3 and GivenBack(None).tokens == 0
