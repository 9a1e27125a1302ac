"""PURE: which prompt is where. Handed out as answers come: an engine has a few more than it can work on at once, the
rest waits here.

So an engine that joins, or comes back, gets work at once and not with the next batch, and a slow one does not hold up
what others could answer. A prompt is in exactly one place: waiting, or at one engine. One whose engine is lost, or
gives it back, waits again, before the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# Prompts at an engine, times what its vLLM runs at once: the samples of a prompt end one by one, and the next prompt
# comes when all of them have. With less an engine would idle; with more there would be less left for others.
QUEUE_FACTOR = 2


@dataclass(frozen=True)
class Prompt:
    """arguments: of the engine's `generate_responses`. version: the oldest it may be answered from. lost: the engines
    that it was asked and that were gone before they had answered. number: of this prompt in the run, for the event log.
    epoch: of the engine that has it, when that was asked.
    """

    arguments: dict[str, Any]
    version: int = 0
    lost: tuple[str, ...] = ()
    number: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class Place:
    """An engine that may get prompts. requests_max: sequences that its vLLM runs at once."""

    name: str
    requests_max: int


@dataclass
class Work:
    """per_engine: prompts that one engine has at most; None: by what it runs at once."""

    per_engine: int | None = None
    waiting: deque[Prompt] = field(default_factory=deque)
    asked: dict[Hashable, tuple[str, Prompt]] = field(default_factory=dict)  # what an answer will come by
    in_flight: Counter[str] = field(default_factory=Counter)  # prompts at each engine

    def __bool__(self) -> bool:
        return bool(self.waiting or self.asked)

    def hand_out(self, places: Sequence[Place], count_max: int | None = None) -> list[tuple[str, Prompt]]:
        """Return what to ask now, each of the least busy engine that has room. Every one must be `note`d."""
        counts = Counter(self.in_flight)
        given: list[tuple[str, Prompt]] = []
        while self.waiting and (count_max is None or len(given) < count_max):
            samples = int(self.waiting[0].arguments.get("num_samples", 1))
            free = [place for place in places if counts[place.name] < self._room(place, samples)]
            if not free:
                break
            place = min(free, key=lambda place: counts[place.name])
            counts[place.name] += 1
            given.append((place.name, self.waiting.popleft()))
        return given

    def _room(self, place: Place, samples: int) -> int:
        if self.per_engine is not None:
            return self.per_engine
        return QUEUE_FACTOR * max(1, -(-place.requests_max // samples))

    def note(self, ticket: Hashable, name: str, prompt: Prompt) -> None:
        """Note that this engine has been asked; its answer comes by `ticket`."""
        if ticket in self.asked:
            raise AssertionError(f"{ticket!r} is asked twice")
        self.asked[ticket] = (name, prompt)
        self.in_flight[name] += 1

    @property
    def version(self) -> int:
        """Return the newest version that is asked for by what waits."""
        return max((prompt.version for prompt in self.waiting), default=0)

    def ask_for(self, version: int) -> None:
        """Let all that waits be answered from this version, and from none before."""
        self.waiting = deque(replace(prompt, version=version) for prompt in self.waiting)

    def answered(self, ticket: Hashable) -> tuple[str, Prompt]:
        name, prompt = self.asked.pop(ticket)
        self.in_flight[name] -= 1
        return name, prompt

    def lost(self, ticket: Hashable) -> Prompt:
        """Let the prompt wait again: the engine is gone, and its answer with it."""
        name, prompt = self.answered(ticket)
        again = replace(prompt, lost=(*prompt.lost, name))
        self.waiting.appendleft(again)
        return again

    def given_back(self, ticket: Hashable, **more: Any) -> None:
        """Let the prompt wait again: the engine has to leave. more: arguments for the next engine."""
        _, prompt = self.answered(ticket)
        self.waiting.appendleft(replace(prompt, arguments={**prompt.arguments, **more}))

    def abandon(self, name: str) -> None:
        """Expect nothing of this engine any more: what it has goes on elsewhere."""
        for ticket in [ticket for ticket, (where, _) in self.asked.items() if where == name]:
            self.lost(ticket)
