"""Which prompt is where: no framework is needed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tensorhub_plugins.openrlhf.prompt_queue import QUEUE_FACTOR, Place, Prompt, Work


def prompts(count: int, samples: int = 1) -> list[Prompt]:
    return [Prompt({"prompt": f"p{i}", "num_samples": samples}, version=i) for i in range(count)]


@pytest.mark.parametrize("seed", range(50))
def test_every_prompt_is_answered_once_whatever_happens(seed: int) -> None:
    """Engines come and go, answers come in any order."""
    chance = random.Random(seed)
    work = Work(per_engine=chance.choice([None, 1, 3]))
    asked_for = prompts(30, samples=2)
    work.waiting.extend(asked_for)
    answered: Counter[str] = Counter()
    tickets, now = 0, 0
    while work:
        now += 1
        places = [Place(f"e{i}", 4) for i in range(4) if chance.random() < 0.7]
        for name, prompt in work.hand_out(places):
            assert name in {place.name for place in places}
            tickets += 1
            work.note(tickets, name, prompt)
        limit = work.per_engine or QUEUE_FACTOR * 2
        assert all(count <= limit for count in work.in_flight.values())
        if work.asked:
            ticket = chance.choice(list(work.asked))
            name, prompt = work.asked[ticket]
            if chance.random() < 0.3:
                again = work.lost(ticket)
                assert again.lost == (*prompt.lost, name) and again.version == prompt.version
                assert work.waiting[0] is again
            else:
                work.answered(ticket)
                answered[prompt.arguments["prompt"]] += 1
        assert now < 10_000
    assert answered == Counter(prompt.arguments["prompt"] for prompt in asked_for)


def test_an_answer_that_is_counted_twice_is_found() -> None:
    """The control: what the story above would miss is an error in the machine."""
    work = Work()
    (prompt,) = prompts(1)
    work.note("t", "e0", prompt)
    with pytest.raises(AssertionError):
        work.note("t", "e1", prompt)
    work.answered("t")
    with pytest.raises(KeyError):
        work.answered("t")
    with pytest.raises(KeyError):
        work.lost("t")


def test_the_least_busy_engine_gets_the_next_one() -> None:
    work = Work(per_engine=2)
    work.waiting.extend(prompts(6))
    given = work.hand_out([Place("a", 1), Place("b", 1)])
    assert [name for name, _ in given] == ["a", "b", "a", "b"]
    for ticket, (name, prompt) in enumerate(given):
        work.note(ticket, name, prompt)
    assert not work.hand_out([Place("a", 1), Place("b", 1)])
    work.answered(1)
    assert [name for name, _ in work.hand_out([Place("a", 1), Place("b", 1)])] == ["b"]


def test_not_all_is_handed_out_at_a_time() -> None:
    work = Work()
    work.waiting.extend(prompts(6))
    assert [len(work.hand_out([Place("a", 9)], 4)) for _ in range(3)] == [4, 2, 0]


def test_a_joiner_gets_what_waits() -> None:
    work = Work(per_engine=2)
    work.waiting.extend(prompts(4))
    for ticket, (name, prompt) in enumerate(work.hand_out([Place("a", 1)])):
        work.note(ticket, name, prompt)
    assert [name for name, _ in work.hand_out([Place("a", 1), Place("b", 1)])] == ["b", "b"]


@pytest.mark.parametrize(("requests_max", "samples", "room"), [(256, 4, 128), (4, 8, 2), (1, 1, 2), (10, 4, 6)])
def test_the_room_is_what_vllm_runs_at_once_and_as_much_again(requests_max: int, samples: int, room: int) -> None:
    work = Work()
    work.waiting.extend(prompts(1000, samples))
    assert len(work.hand_out([Place("a", requests_max)])) == room
