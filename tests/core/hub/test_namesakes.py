"""Who may take the name of a worker that lives: its own next life, and nobody else. With a secret."""

from __future__ import annotations

import time
from typing import Any

import pytest
from client_processes import SIZE, Process, Worker, tensors_of
from hub_scenarios import Scenario

from tensorhub_plugins.core import Client, HubUnreachable, Keys, UsageError, start_server
from tensorhub_plugins.core.hub.hub import Received, Tick
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import Location, Role

FIRST, SECOND = b"first".ljust(16, b"."), b"second".ljust(16, b".")
BEAT_S = HubLimits().heartbeat_s


class Lives(Scenario):
    """rollout-0/0 is here; another session says Hello under its name."""

    def __init__(
        self,
        *,
        secret: bool = True,
        role: Role = "reader",
        recovering: bool = False,
        life: str = "first",
        session: bytes = b"",
        **first: Any,
    ) -> None:
        super().__init__(secret=secret, recovering=recovering)
        self.role = role
        if session:
            self.sessions[life] = session
        self.hello(life, **first)
        assert self.names() == {self.sessions[life]}

    def hello(self, life: str, **fields: Any) -> str:
        """What this life is answered."""
        session = self.sessions.setdefault(life, life.encode().ljust(16, b"."))
        self.requests[life] = self.requests.get(life, 0) + 1
        fields = {"replica": "rollout-0", "request_id": self.requests[life], "hub": self.hub.session, **fields}
        said = m.Hello("run", "actor", fields.pop("replica"), 0, 1, Location(), {}, **fields)
        self.inbox.pop(life, None)
        self._deliver(Received(session, said, self.role))
        answers = self.inbox.pop(life, [])
        return " ".join(getattr(answer, "message", type(answer).__name__) for answer in answers)

    def names(self) -> set[bytes]:
        return set(self.hub.workers)


def test_a_worker_of_the_same_job_fences_its_former_life() -> None:
    story = Lives(job="j", role="publisher")
    story.join("trainer/0")
    story.publish("trainer/0", 1)
    assert story.hello("second", job="j") == "Welcome"
    assert FIRST not in story.names() and SECOND in story.names()
    story.tell("first", m.Heartbeat(story.hub.session))  # it thaws
    assert [type(x) for x in story.inbox.pop("first")] == [m.Unknown]
    assert "another process has said Hello as rollout-0/0 since" in story.hello(
        "first", job="j", welcomed=story.hub.session
    )
    assert FIRST not in story.names()
    story._deliver(Received(SECOND, m.Bye(), "publisher"))
    assert story.hello("first", job="j", welcomed=story.hub.session) == "Welcome"  # the name is free


@pytest.mark.parametrize("jobs", [("j", "j"), ("j", "k"), ("j", ""), ("", "k"), ("", "")])
def test_who_cannot_show_that_it_is_the_same_worker_is_refused_while_that_one_lives(jobs: tuple[str, str]) -> None:
    story = Lives(job=jobs[0])
    assert story.hello("second", job=jobs[1]) == ""  # it may be a restart: the name may fall silent
    story.wait(2 * BEAT_S)  # with heartbeats
    assert "rollout-0/0 is here already, and lives in another process" in story.hello("second", job=jobs[1])
    assert story.names() == {FIRST}


@pytest.mark.parametrize("jobs", [("j", "j"), ("j", "k"), ("", "")])
def test_a_restart_without_a_word_is_let_in_when_the_name_is_silent(jobs: tuple[str, str]) -> None:
    story = Lives(job=jobs[0])
    story.silent = ("first",)  # kill -9
    answers = []
    for _ in range(12):
        answers.append(story.hello("second", job=jobs[1]))
        story.wait(BEAT_S / 2)
    assert answers[:10] == [""] * 10 and answers[-1] == "Welcome" and story.names() == {SECOND}
    assert HubLimits().session_timeout_s / 2 > 5 * BEAT_S  # long before it would be given up


def test_a_name_is_not_silent_while_the_hub_stands_still() -> None:
    story = Lives()
    assert story.hello("second") == ""
    story.now += 60.0
    story._deliver(Tick(60.0))
    assert story.hello("second") == "" and story.names() == {FIRST}
    story.wait(2 * BEAT_S)  # with heartbeats
    assert "lives in another process" in story.hello("second")


def proof_of(story: Lives, life: str) -> bytes:
    """That this life has in answer to a heartbeat."""
    story.inbox.pop(life, None)
    story._deliver(Received(story.sessions[life], m.Heartbeat(story.hub.session), story.role))
    (proof,) = {said.name_proof for said in story.inbox.pop(life) if isinstance(said, m.Alive)}
    return proof


@pytest.mark.parametrize("shows", ["its own", "none", "another session's", "another name's"])
def test_after_a_restart_of_the_hub_nobody_takes_a_living_readers_name(shows: str) -> None:
    """A stranger with the same key says Hello first, keeps sending heartbeats, and comes again after it was ended."""
    before = Lives()
    proofs = {"none": b"", "its own": proof_of(before, "first")}
    other = Lives(session=SECOND)
    proofs["another session's"] = proof_of(other, "first")
    named = Lives(replica="rollout-1")
    proofs["another name's"] = proof_of(named, "first")
    assert len(set(proofs.values())) == 4

    story = Lives(recovering=True, life="stranger", hub=b"")
    stranger = story.sessions["stranger"]
    assert proof_of(story, "stranger") == b""  # its name may be another's
    answer = story.hello("first", name_proof=proofs[shows])
    if shows != "its own":
        assert answer == "" and story.names() == {stranger}
        return
    assert answer == "Welcome" and story.names() == {FIRST}
    for lie in (b"", proofs["its own"]):
        assert story.hello("stranger", name_proof=lie) == ""
    story.wait(5.0)  # with heartbeats
    assert "lives in another process" in story.hello("stranger") and story.names() == {FIRST}
    assert proof_of(story, "first") == proofs["its own"]  # for the next one


def test_who_has_a_name_by_now_keeps_it_whatever_its_former_owner_shows() -> None:
    story = Lives()
    proof = proof_of(story, "first")
    story.silent = ("first",)
    for _ in range(12):
        story.hello("second")
        story.wait(BEAT_S / 2)
    assert story.names() == {SECOND} and proof_of(story, "second")
    assert story.hello("first", name_proof=proof) == "" and story.names() == {SECOND}


@pytest.mark.parametrize("keys", [None, Keys.of(b"1" * 32).limited("reader")], ids=["no secret", "reader"])
def test_a_reader_shows_the_next_hub_what_the_last_one_has_proved(keys: Keys | None) -> None:
    server = None if keys is None else Keys.of(b"1" * 32)
    limits = HubLimits(grace_s=0.0, heartbeat_s=0.05)
    with (
        start_server(keys=server, limits=limits) as hub,
        Client(hub.address, run="r", model="actor", replica="rollout", transports=("tcp",), keys=keys) as client,
    ):
        machine, deadline = client._hub._machine, time.monotonic() + 60.0
        silent = client._hub.silent_s
        while not machine.name_proof and keys is not None and time.monotonic() < deadline:
            client.versions()
        assert bool(machine.name_proof) is (keys is not None) and silent < 60.0


def test_what_is_no_other_process_is_let_in() -> None:
    assert Lives(process="boot 1 2").hello("second", process="boot 1 2") == "Welcome"  # two clients of one process
    assert Lives(secret=False).hello("second") == "Welcome"  # the control: without a secret anybody may be anybody


def test_a_trainer_is_not_given_up_by_a_hello() -> None:
    story = Scenario(secret=True)
    story.join("trainer/0", job="j")
    story.publish("trainer/0", 1)
    story.sessions["again"] = SECOND
    hello = m.Hello("run", "actor", "trainer", 0, 1, Location(), {}, request_id=1, hub=story.hub.session, job="j")
    story._deliver(Received(SECOND, hello))
    assert len(story.hub.workers) == 2  # attempts.py decides


@pytest.mark.parametrize("why_not", ["", "no secret", "one process"])
def test_a_trainer_whose_name_was_taken_publishes_no_more(why_not: str) -> None:
    """A plain loop that thaws, and never begins an attempt. The controls: who may be two, is."""
    story = Scenario(secret=why_not != "no secret")
    process = "boot 1 2" if why_not == "one process" else ""
    story.join("trainer/0", job="j", process=process)
    story.publish("trainer/0", 1)
    story.sessions["again"] = SECOND
    said = {"request_id": 1, "hub": story.hub.session, "job": "j", "process": process}
    story._deliver(Received(SECOND, m.Hello("run", "actor", "trainer", 0, 1, Location(), {}, **said)))
    story.heard("trainer/0")
    story.publish("trainer/0", 2)
    history = story.hub.registry.histories["run", "actor"]
    assert story.heard("trainer/0") == ([] if why_not else ["refused Superseded"])
    assert len(story.warned) == (why_not == "no secret")
    assert history.is_visible(2) is bool(why_not)
    story.requests["again"] = 1
    story.publish("again", 3)
    assert history.is_visible(3) and history.is_visible(1)  # what the former life holds stays
    story.publish("trainer/0", 4)
    assert len(story.warned) == (why_not == "no secret")  # once
    assert all("two processes publish as trainer/0 in run/actor, and readers get" in text for text in story.warned)


def test_a_trainer_that_starts_again_without_a_secret_is_no_second_one() -> None:
    story = Scenario()
    story.join("trainer/0", process="boot 1 2")
    story.publish("trainer/0", 1)
    story.sessions["again"] = SECOND
    said = {"request_id": 1, "hub": story.hub.session, "process": "boot 3 4"}
    story._deliver(Received(SECOND, m.Hello("run", "actor", "trainer", 0, 1, Location(), {}, **said)))
    story.requests["again"] = 1
    story.publish("again", 2)
    assert story.warned == []


@pytest.mark.parametrize("is_trainer", [False, True])
def test_who_says_that_it_has_begun_an_attempt_takes_no_workers_name(is_trainer: bool) -> None:
    """Two trainers settle it when they begin, the control; who is none has nothing to settle."""
    story = Scenario(secret=True)
    story.join("actor-0/0")
    if is_trainer:
        story.publish("actor-0/0", 1)
    story.sessions["second"] = SECOND
    hello = m.Hello(
        "run", "actor", "actor-0", 0, 1, Location(), {}, request_id=1, hub=story.hub.session, mark=b"m" * 16
    )
    story._deliver(Received(SECOND, hello))
    assert story.sessions["actor-0/0"] in story.hub.workers
    assert (SECOND in story.hub.workers) is is_trainer


@pytest.mark.slow
@pytest.mark.parametrize("job", ["j", None], ids=["of one job", "a plain loop"])
def test_a_killed_reader_starts_again_under_its_name(job: str | None) -> None:
    keys = Keys.of(b"1" * 32)
    limits = HubLimits(grace_s=0.0, heartbeat_s=0.2, session_timeout_s=3600.0)
    options: dict[str, Any] = {"run": "r", "transports": ("tcp",), "keys": keys.limited("reader"), "job": job}
    with (
        start_server(keys=keys, limits=limits) as hub,
        Client(hub.address, run="r", model="actor", replica="trainer", transports=("tcp",), keys=keys) as trainer,
    ):
        trainer.publish(1, tensors_of(1))
        first = Process(Worker, hub.address, "rollout", **options)
        try:
            stranger = {**options, "job": "another"}
            with pytest.raises(UsageError, match="rollout/0 is here already, and lives in another process"):
                Client(hub.address, model="actor", replica="rollout", **stranger)
            first.kill()
            with Client(hub.address, model="actor", replica="rollout", connect_timeout_s=30.0, **options) as second:
                assert second.fetch(1).report.size_bytes == SIZE
        finally:
            first.close()


@pytest.mark.slow
def test_the_former_life_hears_why_its_calls_fail() -> None:
    keys = Keys.of(b"1" * 32)
    options: dict[str, Any] = {"run": "r", "transports": ("tcp",), "keys": keys, "job": "j"}
    with (
        start_server(keys=keys, limits=HubLimits(grace_s=0.0, heartbeat_s=0.2)) as hub,
        Client(hub.address, model="actor", replica="rollout", **options) as former,
    ):
        again = Process(Worker, hub.address, "rollout", **options)
        try:
            with pytest.raises(HubUnreachable, match="another process has said Hello as rollout/0 since"):
                former.wait(1, timeout_s=3.0)
        finally:
            again.close()
