"""An adversary with a reader's key, and one without any: whatever it says, the books of others stay what they are.

It knows all that a reader can know: names of replicas, versions and layouts, the public names of sessions. It says
legal and illegal messages, numbers of requests that others have used, replays, and floods.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from client_messages import KEYS, hostile_messages
from hub_peer import ask, peer
from hub_scenarios import Scenario
from mutations import mutated

from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.hub.hub import Received, Tick
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.names import public_name
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.address import new_session
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.types import CHECKPOINT, Location, Role, ShardKey

HONEST = ("trainer/0", "reader/0", "waiter/0")
EVIL = [b"evil%012d" % n for n in range(3)]
ROUNDS, SEEDS = 300, 8
KEYS_OF_RUN = Keys.of(b"1" * 32)


# --- the machine ---


def honest_story() -> Scenario:
    """A trainer with two versions, a reader that reads one and serves it, a follower that waits for the next."""
    story = Scenario()
    for worker in HONEST:
        story.join(worker, retain_newest=2)
    for version in (1, 2):
        story.publish("trainer/0", version)
    story.acquire("reader/0", 2, serve=True)
    story.publish("reader/0", 2, complete=False, origin="replicated")
    story.say("waiter/0", m.Wait, version=0, newer_than=2, timeout_s=1e6)
    story.inbox.clear()
    return story


def books(story: Scenario) -> dict[str, object]:
    """What is known of the honest, and of the model."""
    (history,) = (h for h in story.hub.registry.histories.values() if h.id == ("run", "actor"))
    workers = {worker: story.hub.registry.workers.get(story.sessions[worker]) for worker in HONEST}
    said: dict[str, object] = {
        "newest": history.newest_visible,
        "visible": history.visible(),
        "directive": history.directive,
        "retained": history.retain_newest,
        # what a reader converts is its own word, see docs/guarantees.md
        "contents": {
            (n, *at): found
            for n, v in history.versions.items()
            for at, found in v.contents.items()
            if n in (1, 2) and at[0] == CHECKPOINT
        },
    }
    for name, worker in workers.items():
        assert worker is not None, f"{name} is gone"
        said[name] = (
            worker.hello,
            {key: (h.root, h.complete, h.unpublishing, h.must_retain) for key, h in worker.holdings.items()},
            {number: dict(lease.sources) for number, lease in worker.leases.items()},
            list(worker.pending),
            worker.seen_version,
            worker.last_request_id,
            worker.is_replaced,
        )
    return said


def attack(story: Scenario, seed: int, role: Role, *, kinds: tuple[type, ...] = (), rounds: int = ROUNDS) -> None:
    """Each message is heard twice now and then. kinds: only such."""
    rng = random.Random(seed)
    sessions = [*story.sessions.values(), *EVIL]
    for number, session in enumerate(EVIL):
        story.sessions[f"evil/{number}"] = session
    before = books(story)
    for _ in range(rounds):
        message = rng.choice(hostile_messages(rng, sessions))
        if rng.random() < 0.3:
            with contextlib.suppress(ProtocolError):
                header = m.encode(message)[:3]
                message = m.decode_from_client(header + mutated(rng, msgspec.msgpack.encode(message)))
        if kinds and not isinstance(message, kinds):
            continue
        story.now += rng.choice((0.0, 0.001, 0.1))
        for worker in HONEST:
            story.hub.registry.workers[story.sessions[worker]].last_heard = story.now
        for _ in range(rng.choice((1, 1, 2))):
            story._deliver(Received(rng.choice(EVIL), message, role))  # it validates, too
        if rng.random() < 0.1:
            story._deliver(Tick())
        assert books(story) == before, message
    assert not any(
        isinstance(each, m.Unpublished | m.Refused | m.Unknown) for w in HONEST for each in story.inbox.get(w, ())
    )


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("role", ["reader", "observer"])
def test_whatever_a_reader_says_the_books_of_others_stay(role: Role, seed: int) -> None:
    story = honest_story()
    attack(story, seed, role)
    story.publish("trainer/0", 3)  # and all goes on for them
    assert "visible 3" in story.heard("waiter/0")
    story.acquire("waiter/0", 3)
    assert any(line.startswith(f"read 3 {CHECKPOINT} 0<-trainer/0") for line in story.heard("waiter/0"))


@pytest.mark.parametrize("kind", [m.Withdraw, m.Retain, m.Publish])
def test_the_control_a_publisher_can(kind: type) -> None:
    with pytest.raises(AssertionError):
        attack(honest_story(), 1, "publisher", kinds=(m.Hello, kind), rounds=3000)


# --- the port ---


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(keys=KEYS_OF_RUN, limits=HubLimits(grace_s=0.0, session_timeout_s=300.0)) as running:
        yield running


def hello(run: str, replica: str) -> m.Hello:
    return m.Hello(run, "actor", replica, 0, 1, Location(), {"tcp": "tcp://1.2.3.4:5"}, request_id=1)


@pytest.mark.parametrize("seed", range(2))
def test_the_port_under_floods_replays_and_other_peoples_names(server: Server, seed: int) -> None:
    rng, run = random.Random(seed), "run"
    trainer_id, evil_ids = new_session(), [new_session() for _ in range(3)]
    held = m.Holding(ShardKey(1, CHECKPOINT), b"r" * 16, 100)
    reader_key = KEYS_OF_RUN.limited("reader")
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(peer(server.address, KEYS_OF_RUN, trainer_id))
        assert isinstance(ask(trainer, hello(run, "trainer")), m.Welcome)
        assert isinstance(ask(trainer, m.Publish(2, held)), m.Done)
        life = server._hub.session
        thieves = [stack.enter_context(peer(server.address, reader_key, each)) for each in evil_ids]
        thieves.append(stack.enter_context(peer(server.address, reader_key, public_name(trainer_id))))
        replayed = [m.encode(hello(run, "trainer")), m.encode(m.Publish(2, held)), m.encode(m.Bye())]
        for _ in range(400):
            body = msgspec.msgpack.encode(rng.choice(hostile_messages(rng, [public_name(trainer_id)])))
            frame = replayed[0][:3] + (body if rng.random() < 0.6 else mutated(rng, body))
            thief = rng.choice(thieves)
            for each in [rng.choice((frame, rng.choice(replayed)))] * rng.choice((1, 1, 1, 20)):
                with contextlib.suppress(zmq.Again):
                    thief.send(each, zmq.NOBLOCK)
            while thief.poll(0):
                m.decode_from_hub(thief.recv())
        for thief in thieves:  # all of it was heard
            thief.send(m.encode(m.AskStatus(77)))
            while getattr(m.decode_from_hub(thief.recv()), "request_id", 0) != 77:
                pass
        assert server._hub.session == life
        versions = ask(trainer, m.AskVersions(3))
        assert isinstance(versions, m.Versions)
        assert [(v.version, v.visible) for v in versions.versions if v.visible] == [(1, True)]
        assert "trainer/0" in versions.versions[0].layouts[CHECKPOINT]
        second = m.Holding(ShardKey(2, CHECKPOINT), b"s" * 16, 100)
        assert isinstance(ask(trainer, m.Publish(4, second)), m.Done)
        assert isinstance(ask(trainer, m.Wait(5, 2, 0, 10.0)), m.Visible)
        assert isinstance(ask(trainer, m.Unpublish(6, (held.key, *KEYS[:0]), 0.0, gone=True)), m.Unpublished)
        trainer.send(m.encode(m.Bye()))


def test_a_stranger_without_a_key_is_not_heard_at_all(server: Server) -> None:
    with peer(server.address, None, new_session()) as stranger:
        stranger.setsockopt(zmq.RCVTIMEO, 500)
        with contextlib.suppress(zmq.Again):
            stranger.send(m.encode(hello("run", "x")), zmq.NOBLOCK)
        with pytest.raises(zmq.Again):
            stranger.recv()
    with peer(server.address, KEYS_OF_RUN, new_session()) as known:
        assert isinstance(ask(known, hello("another", "x")), m.Welcome)  # the control
