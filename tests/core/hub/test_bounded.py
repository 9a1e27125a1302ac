"""What one message or session can take of the hub: sizes, queues, rates, and what our own faults cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hub_peer import ask, peer
from hub_scenarios import Scenario, source_of

from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.core.errors import ProtocolError, UsageError
from tensorhub_plugins.core.hub import hub, outbox, rates, server
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive
from tensorhub_plugins.core.protocol.fields import SERIAL_MAX
from tensorhub_plugins.core.types import CHECKPOINT, HOSTS_MAX, SHARDS_MAX, Location, ShardKey, check_name, printable

LONG = "x" * 257
KEY = ShardKey(1, CHECKPOINT)
HELD = m.Holding(KEY, b"r" * 16, 1)
ENDPOINTS = {"tcp": "tcp://1.2.3.4:5"}


def hello(**fields: object) -> m.Hello:
    said: dict[str, object] = {"run": "r", "model": "m", "replica": "a", "shard": 0, "shard_count": 1}
    return m.Hello(**{**said, "location": Location(), "endpoints": ENDPOINTS, "request_id": 1, **fields})


# --- what is decoded ---


@pytest.mark.parametrize(
    "message",
    [
        hello(location=Location(LONG)),
        hello(location=Location("", LONG)),
        hello(location=Location("", "", LONG)),
        hello(endpoints={"tcp": LONG}),
        hello(endpoints={"t" * 33: ""}),
        hello(endpoints={str(n): "" for n in range(9)}),
        hello(holdings=(HELD,) * (m.HOLDINGS_MAX + 1)),
        hello(shard_count=0),
        hello(leases=(m.HeldLease(1, 1, CHECKPOINT, {-1: b"s" * 16}, 1.0),)),
        hello(leases=(m.HeldLease(1, 1, CHECKPOINT, {SHARDS_MAX: b"s" * 16}, 1.0),)),
        hello(leases=(m.HeldLease(1, 1, CHECKPOINT, {0: b"s" * 16}, math.nan),)),
        hello(leases=(m.HeldLease(1, 0, CHECKPOINT, {0: b"s" * 16}, 1.0),)),
        hello(leases=(m.HeldLease(1, 1, CHECKPOINT, {0: b"s" * 16}, 1.0),) * 1025),
        m.Unpublish(1, (KEY,) * (m.HOLDINGS_MAX + 1), 1.0),
        m.Acquire(1, 1, 0, (CHECKPOINT,), math.inf),
        m.Acquire(1, 1, 0, (CHECKPOINT,), 1.0, shards=(0,) * (SHARDS_MAX + 1)),
    ],
)
def test_what_is_out_of_bounds_does_not_decode(message: m.ClientMessage) -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        m.decode_from_client(m.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        hello(location=Location(LONG[1:], LONG[1:], LONG[1:]), endpoints={"t" * 32: LONG[1:]}),
        hello(holdings=tuple(m.Holding(ShardKey(n + 1, LONG[1:]), b"r" * 16, 1) for n in range(m.HOLDINGS_MAX))),
        hello(leases=(m.HeldLease(1, 1, CHECKPOINT, {SHARDS_MAX - 1: b"s" * 16}, 1.0),) * 1024),
    ],
)
def test_the_control_the_largest_that_may_be_do(message: m.Hello) -> None:
    assert m.decode_from_client(m.encode(message)) == message


def test_the_largest_answer_can_be_decoded() -> None:
    location, endpoints = Location(*(LONG[1:],) * 3, "m" * 64), {f"{n:032}": LONG[1:] for n in range(8)}
    ticket = m.Ticket(m.Claim(b"h" * 16, "r" * 64, 1.0), b"k" * 32)
    grant = m.Grant(
        0,
        b"s" * 16,
        f"{LONG[1:]}/65535",
        endpoints,
        location,
        b"r" * 16,
        1 << 48,
        1 << 48,
        ticket,
        (LONG[1:],) * (HOSTS_MAX - 1),
    )
    granted = m.Granted(1, 1, LONG[1:], SHARDS_MAX, (grant,) * m.GRANTS_MAX)
    assert len(m.encode(granted)) < m.FROM_HUB_SIZE_BYTES_MAX and m.decode_from_hub(m.encode(granted)) == granted


def test_answers_with_the_longest_names_of_others_can_be_read() -> None:
    story, long = Scenario(), f"{LONG[1:]}/0"  # it decodes each answer
    story.sessions[long], story.roles[long] = b"l" * 16, "reader"
    story.join_all("trainer/0", long, "rollout/0")
    story.publish("trainer/0", 1)
    story.acquire(long, 1)
    story.unpublish("trainer/0", 1, timeout_s=0.0)  # the version is retained
    story.publish("trainer/0", 2)
    story.acquire(long, 2)
    story.unpublish("trainer/0", 1, timeout_s=0.0)
    assert f"unpublished cut off {long}" in story.heard("trainer/0")
    story.publish(long, 2, origin="replicated")
    story.silent = ("trainer/0",)
    story.wait(20.0)
    story.acquire("rollout/0", 2)
    assert source_of(story, "rollout/0") == long
    for number in range(16):  # their names alone are longer than any text
        story.publish(long, 2, f"{number:02}{LONG[3:]}", origin="published")
    story.acquire("rollout/0", 2, ("another",), timeout_s=1.0)
    story.wait(2.0)
    assert story.heard("rollout/0") == ["refused DeadlineExceeded"]


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ((0,) * 65536, "65536 shards were asked for"),
        ((0,) * m.GRANTS_MAX, "asked for twice"),
        ((0, 2), "shard 2 of 2 was asked for"),
    ],
)
def test_an_acquire_that_makes_no_sense_is_refused_at_once(shards: tuple[int, ...], words: str) -> None:
    story = Scenario()
    story.join("trainer/0")
    story.join("rollout/0")
    story.publish("trainer/0", 1)
    story.acquire("rollout/0", 1, shards=shards, shards_layout=CHECKPOINT, shard_count=2)
    (refused,) = (message for message in story.inbox["rollout/0"] if isinstance(message, m.Refused))
    assert words in refused.message and not story.hub.registry.workers[story.sessions["rollout/0"]].pending


def test_a_serial_that_leaves_operators_none_is_not_believed() -> None:
    story = Scenario()
    story.join("trainer/0")
    story.publish("trainer/0", 1)
    story.join("other/0", directive=Directive(SERIAL_MAX, 9, ()))
    assert story.hub.registry.histories["run", "actor"].directive == NO_DIRECTIVE
    story.say("trainer/0", m.Pin, version=1, timeout_s=1.0)
    assert isinstance(story.inbox["trainer/0"][-1], m.Done)
    story.join("third/0", directive=Directive(1000, 0, ()))  # the control
    assert story.hub.registry.histories["run", "actor"].directive.serial == 1000


@pytest.mark.parametrize("sign", ["\n", "\r", "\x1b[2J", "\x00", "\u202e", "\u2028", "\x85"])
def test_what_would_forge_lines_does_not_decode(sign: str) -> None:
    bad = f"a{sign}"
    key = ShardKey(1, bad)
    said: list[m.ClientMessage] = [
        *(hello(**{field: bad}) for field in ("run", "model", "replica", "process", "job")),
        *(hello(location=Location(*(bad if n == at else "" for n in range(3)))) for at in range(3)),
        *(hello(endpoints=endpoints) for endpoints in ({bad: ""}, {"tcp": bad})),
        hello(holdings=(m.Holding(key, b"r" * 16, 1),)),
        hello(leases=(m.HeldLease(1, 1, bad, {0: b"s" * 16}, 1.0),)),
        hello(claims=(key,)),
        m.Publish(1, m.Holding(key, b"r" * 16, 1)),
        m.Unpublish(1, (key,), 1.0),
        m.Acquire(1, 1, 0, (bad,), 1.0),
        m.Abandon(1, key),
        m.Begin(1, 0, 1.0, bad),
        m.Begin(1, 0, 1.0, "", (bad,)),
    ]
    for message in said:
        with pytest.raises(ProtocolError, match="malformed message") as refused:
            m.decode_from_client(m.encode(message))
        assert refused.value.message == printable(refused.value.message)
    with pytest.raises(UsageError, match="control how it is printed"):
        check_name("replica", bad)


def test_the_control_names_of_all_languages_do() -> None:
    for name in ("trainer 1", "modèle-é", "模型", "a/b:c=d\\n", "x" * 256):
        assert m.decode_from_client(m.encode(hello(replica=name))) == hello(replica=name)
        assert check_name("replica", name) == printable(name) == name


def test_what_is_printed_is_escaped_and_of_one_line(running: Server, caplog: pytest.LogCaptureFixture) -> None:
    with peer(running.address) as stranger:
        stranger.send(b"\n2026-01-01 tensorhub.hub INFO forged")
        stranger.recv()
        unknown = msgspec.msgpack.encode(["Hel\nlo\x1b[2J", "r"])
        stranger.send(m.encode(m.Bye())[:3] + unknown)
        stranger.recv()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    report = fetch_status(running.address)
    report["models"] = [{**MODEL, "run": "r\nhub forged", "versions": [], "workers": [], "leases": []}]
    assert "r\\nhub forged/m" in status_text(report)


MODEL = {"run": "r", "model": "m", "newest": 0}


def test_lines_are_left_out_beyond_so_many_a_second(running: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = len(caplog.records)
    running._carry_out([hub.Log(f"line {n}") for n in range(3 * server.LOGGED_PER_S)])
    assert len(caplog.records) - before <= server.LOGGED_PER_S


# --- what is kept ---


def test_remembered_answers_have_a_budget() -> None:
    story = Scenario()
    story.join("a/0")
    worker = story.hub.registry.workers[story.sessions["a/0"]]
    box = outbox.Outbox()
    large = m.Refused(0, "UsageError", "x" * (outbox.REPLIES_KEPT_BYTES_MAX // 4))
    for number in range(1, 1000):
        box.remember(worker, m.Refused(number, "UsageError", large.message))
        assert worker.replies_size_bytes == sum(map(outbox._size_bytes, worker.replies.values()))
        assert worker.replies_size_bytes <= outbox.REPLIES_KEPT_BYTES_MAX
    assert list(worker.replies) == [997, 998, 999]
    box.remember(worker, m.Refused(1000, "UsageError", 8 * large.message))
    assert list(worker.replies) == [1000]  # the last one always: it may be asked for again
    for number in range(2000, 3000):
        box.remember(worker, m.Done(number))
    assert len(worker.replies) == outbox.REPLIES_KEPT_MAX


def kept_of_versions(count: int, *, beats: bool) -> int:
    """Return how many answers, bounds and withdrawn shards are kept of a worker that has read so many versions."""
    story = Scenario()
    story.join_all("trainer/0", "rollout/0")
    for version in range(1, count + 1):
        story.publish("trainer/0", version)
        story.tell("rollout/0", m.Release(story.acquire("rollout/0", version), 0))
        story.publish("rollout/0", version, "runtime:f")
        story.unpublish("rollout/0", version, "runtime:f")
        story.unpublish("trainer/0", version - 1)
        if beats:
            story.beat("rollout/0")
    worker = story.hub.registry.workers[story.sessions["rollout/0"]]
    assert worker.replies_size_bytes == sum(map(outbox._size_bytes, worker.replies.values()))
    return len(worker.replies) + len(worker.lease_bounds) + len(worker.withdrawn)


def test_a_heartbeat_says_which_answers_have_come_and_nothing_is_kept_of_these() -> None:
    assert kept_of_versions(40, beats=True) == 0
    assert kept_of_versions(40, beats=False) >= 5 * 40, "the control: what may still be asked for is kept"


def test_what_a_worker_waits_for_is_kept_and_what_it_has_is_not_done_again() -> None:
    story = Scenario()
    story.join_all("trainer/0", "rollout/0")
    story.publish("trainer/0", 1)
    number = story.acquire("rollout/0", 1)
    again = m.Acquire(number, 1, 0, (CHECKPOINT,), 60.0)
    assert story.heard("rollout/0") == ["read 1 checkpoint 0<-trainer/0"]
    story.beat("rollout/0", pending=(number,))
    assert "read 1 checkpoint 0<-trainer/0" in story.heard("rollout/0"), "the answer was lost, and is sent again"
    story.tell("rollout/0", m.Release(number, 0))
    story.beat("rollout/0")
    story.heard("rollout/0")
    story.beat("rollout/0", pending=(number,))  # from before, delayed on the way
    story.tell("rollout/0", again)
    assert "read 1 checkpoint 0<-trainer/0" not in story.heard("rollout/0")
    assert not story.hub.workers[story.sessions["rollout/0"]].leases


@pytest.fixture
def running() -> Iterator[Server]:
    with start_server(limits=HubLimits(grace_s=0.0)) as one:
        yield one


def test_a_refusal_is_a_refusal_for_commands(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensorhub status` said that no hub answers."""
    monkeypatch.setattr(server, "_frame", lambda message: m.encode(m.Refused(1, "UsageError", "too\nlong")))
    with pytest.raises(UsageError, match=r"the hub refuses it: too\\nlong"):
        fetch_status(running.address)


# --- how much one session may say ---


def test_a_bucket_fills_with_time_and_takes_sizes_and_debts_into_account() -> None:
    limited = rates.Rates(10.0)
    said = [limited.admits(b"a", 0, 0.0) for _ in range(200)]
    assert said == [True] * 160 + [False] * 40
    assert limited.admits(b"b", 0, 0.0)  # another one's is its own
    assert not limited.admits(b"a", 0, 0.0) and limited.admits(b"a", 0, 0.2)
    assert limited.admits(b"c", 1 << 20, 0.0) and not limited.admits(b"c", 0, 80.0) and limited.admits(b"c", 0, 90.0)
    limited.charge(b"d", 200)
    assert not limited.admits(b"d", 0, 0.0) and limited.admits(b"d", 0, 5.0)
    assert limited.may_notify(b"a", 0.0) and not limited.may_notify(b"a", 0.9) and limited.may_notify(b"a", 1.0)


def test_buckets_are_bounded() -> None:
    limited = rates.Rates(10.0)
    for number in range(3 * rates.BUCKETS_KEPT_MAX):
        assert limited.admits(number.to_bytes(16, "big"), 0, 0.0)
    assert len(limited) <= rates.BUCKETS_KEPT_MAX


def test_who_floods_hears_it_once_and_nobody_else_notices() -> None:
    now = [100.0]
    with (
        Server(limits=HubLimits(grace_s=0.0, messages_per_s_max=10), clock=lambda: now[0]) as running,
        peer(running.address) as flood,
        peer(running.address) as worker,
    ):
        assert isinstance(ask(worker, hello()), m.Welcome)
        for number in range(1, 1001):
            flood.send(m.encode(m.Retain(number, 1)))
        heard = [m.decode_from_hub(flood.recv())]
        while isinstance(heard[-1], m.Unknown):
            heard.append(m.decode_from_hub(flood.recv()))
        assert 150 < len(heard) < 170 and "10 messages a second" in getattr(heard[-1], "message", "")
        assert isinstance(ask(worker, m.Publish(2, HELD)), m.Done)
        flood.send(m.encode(m.Retain(1001, 1)))
        assert isinstance(ask(worker, m.Retain(3, 1)), m.Done) and not flood.poll(500)  # not told again, nor answered
        now[0] += 1.0
        assert isinstance(ask(flood, m.Retain(2000, 1)), m.Unknown)  # it may speak again


@pytest.mark.parametrize("is_noticed", [True, False], ids=["", "the control: the hub does not know that it is behind"])
def test_a_hub_that_is_behind_takes_no_worker_for_silent(monkeypatch: pytest.MonkeyPatch, is_noticed: bool) -> None:
    """What workers have sent waits behind 500 messages of others, each of which takes a tenth of a second."""
    now, step, behind = [100.0], [0.0], [0]

    def clock() -> float:
        now[0] += step[0]
        return now[0]

    if not is_noticed:
        monkeypatch.setattr(Registry, "was_deaf", lambda *_: 0.0)
    with (
        Server(limits=HubLimits(grace_s=0.0), clock=clock) as running,
        peer(running.address) as others,
        peer(running.address) as worker,
    ):
        receive = running._receive_one

        def first() -> tuple[bytes, bytes, Any]:
            identity, frame, role = receive() if not behind[0] else others_say[0]
            if m.decode_from_client(frame) == m.Retain(7, 1):  # the first of them
                behind[0], others_say[0] = (behind[0] or 501) - 1, (identity, frame, role)
                step[0] = 0.1 if behind[0] else 0.0
            return identity, frame, role

        others_say: list[tuple[bytes, bytes, Any]] = [(b"", b"", "publisher")]
        monkeypatch.setattr(running, "_receive_one", first)
        assert isinstance(ask(worker, hello()), m.Welcome)
        assert isinstance(ask(worker, m.Publish(2, HELD)), m.Done)
        others.send(m.encode(m.Retain(7, 1)))
        assert all(isinstance(m.decode_from_hub(others.recv()), m.Unknown) for _ in range(501))
        assert now[0] > 150 - 1e-6  # more than three times as long as silence may last
        assert isinstance(ask(worker, m.Retain(3, 1)), m.Done if is_noticed else m.Unknown)


def test_of_a_deaf_time_counts_what_came_after_a_worker_was_heard() -> None:
    registry = Registry(bytes(16), 0.0, HubLimits())
    assert registry.was_deaf(10.0, now=20.0) == 10.0
    for heard, deaf_s in ((5.0, 10.0), (12.0, 8.0), (20.0, 0.0)):
        assert registry.silent_after(heard, 5.0) == heard + 5.0 + deaf_s
    assert registry.was_deaf(1.0, now=21.0) == 11.0  # it went on
    assert registry.was_deaf(1.0, now=30.0) == 1.0
    assert registry.silent_after(12.0, 5.0) == 12.0 + 5.0 + 9.0 + 1.0


def test_what_workers_do_is_far_below_the_limit() -> None:
    """A worker that ends the leases of 8,192 shards at once, tells all it holds, and beats its heart for a minute."""
    limited, now = rates.Rates(HubLimits().messages_per_s_max), 0.0
    held = hello(holdings=tuple(m.Holding(ShardKey(n + 1, CHECKPOINT), b"r" * 16, 1) for n in range(m.HOLDINGS_MAX)))
    assert all(limited.admits(b"a", len(m.encode(m.Release(n, n))), now) for n in range(8192))
    for _ in range(6):
        now += 0.5
        assert limited.admits(b"a", len(m.encode(held)), now)
    for _ in range(60):
        now += 1.0
        assert limited.admits(b"a", len(m.encode(m.Heartbeat(b"h" * 16, 1, tuple(range(256))))), now)


# --- our own faults ---


def failing_over(monkeypatch: pytest.MonkeyPatch, damage: Callable[[hub.Hub], object] = lambda hub: None) -> None:
    true_request = hub.Hub._request

    def request(self: hub.Hub, worker: object, message: m.Request, now: float) -> None:
        if isinstance(message, m.Retain):
            damage(self)
            raise KeyError("a bug")
        true_request(self, worker, message, now)

    monkeypatch.setattr(hub.Hub, "_request", request)


def test_a_fault_costs_the_session_that_it_came_with_and_no_other(
    running: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing_over(monkeypatch)
    life = running._hub.session
    with peer(running.address) as bad, peer(running.address) as good, peer(running.address) as reader:
        for socket, name in ((bad, "bad"), (good, "good"), (reader, "reader")):
            assert isinstance(ask(socket, hello(replica=name)), m.Welcome)
        assert isinstance(ask(good, m.Publish(2, HELD)), m.Done)
        assert isinstance(ask(reader, m.Acquire(2, 1, 0, (CHECKPOINT,), 60.0)), m.Granted)
        reader.send(m.encode(m.Wait(3, 2, 0, 60.0)))
        for _ in range(server.FAILURES_PER_SESSION_MAX):
            refused = ask(bad, m.Retain(3, 1))
            assert isinstance(refused, m.Refused) and "the hub failed over this" in refused.message
            said = ask(bad, m.AskVersions(4))  # it is not known any more, and may come back
            if isinstance(said, m.Unknown):
                assert isinstance(ask(bad, hello(replica="bad", request_id=9)), m.Welcome)
        assert "too often" in getattr(said, "message", "")
        assert running._hub.session == life
        second = m.Holding(ShardKey(2, CHECKPOINT), b"s" * 16, 1)
        assert isinstance(ask(good, m.Publish(3, second)), m.Done)
        visible = m.decode_from_hub(reader.recv())  # what waited before waits still, and is answered
        assert isinstance(visible, m.Visible) and visible.version == 2
        (source,) = (w for w in running._hub.workers.values() if w.name == "good/0")
        assert len(source.readers) == 1 and len(source.holdings) == 2
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == server.FAILURES_PER_SESSION_MAX and "starts afresh" not in " ".join(errors)


def test_the_control_damaged_records_are_not_kept(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_over(monkeypatch, lambda self: [w.holdings.clear() for w in self.workers.values()])
    life = running._hub.session
    with peer(running.address) as bad, peer(running.address) as good:
        for socket, name in ((bad, "bad"), (good, "good")):
            assert isinstance(ask(socket, hello(replica=name)), m.Welcome)
        assert isinstance(ask(good, m.Publish(2, HELD)), m.Done)
        assert isinstance(ask(bad, m.Retain(2, 1)), m.Refused)
        assert running._hub.session != life
        assert isinstance(ask(good, m.AskVersions(3)), m.Unknown)
