"""The table of (role, message, state) and what follows, whole: every message, every role, every state of a story.

What others have is compared before and after (`books`); a publisher who says the same is the control of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hub_scenarios import LIMITS, RUNTIME, Scenario

from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.permissions import DECIDED_BY_PUBLISHERS, RIGHTS, believed, refusal, standing
from tensorhub_plugins.core.hub.state import Version
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive
from tensorhub_plugins.core.protocol.fields import SERIAL_MAX
from tensorhub_plugins.core.protocol.lineage import Attempt
from tensorhub_plugins.core.types import CHECKPOINT, Location, Role, ShardKey, version_of

ROLES: tuple[Role, ...] = get_args(Role)
KINDS = {kind.__name__: kind for kind in (*get_args(m.ClientMessage),)}
FAR = version_of(281_473, 5)
ONE, TWO, NEXT = (ShardKey(n, CHECKPOINT) for n in (1, 2, 3))
FORGED = b"forged".ljust(16, b"!")


def root_of(key: ShardKey) -> bytes:
    """As `Scenario.publish` has it."""
    return f"{key.version}{key.layout}{key.shard}".encode()[:16].ljust(16, b"-")


def held(key: ShardKey, origin: m.Origin = "published", root: bytes | None = None) -> m.Holding:
    return m.Holding(key, root_of(key) if root is None else root, 100, True, origin)


# --- the table itself ---


def test_the_table_has_every_message_and_role() -> None:
    allowed = {role: {kind for kind in KINDS.values() if RIGHTS[role][kind] != "never"} for role in ROLES}
    assert allowed["publisher"] == set(KINDS.values())
    assert allowed["reader"] == set(KINDS.values()) - {m.Pin, m.Withdraw, m.Retain, m.Begin}
    assert allowed["observer"] == {m.AskStatus}


def test_every_field_of_a_hello_is_somebodys_to_say() -> None:
    """A new field is to be put on one of the two sides."""
    of_itself = {
        "run", "model", "replica", "shard", "shard_count", "location", "endpoints", "holdings", "leases", "claims",
        "request_id", "pending", "seen", "resolved", "generation", "hub", "process", "job", "welcomed", "preemptible",
        "tls_only", "until", "name_proof", "hosts", "restarts", "heartbeat_s",
    }  # fmt: skip
    assert of_itself | set(DECIDED_BY_PUBLISHERS) == set(m.Hello.__struct_fields__)
    assert of_itself.isdisjoint(DECIDED_BY_PUBLISHERS)
    plain = m.Hello("r", "m", "a", 0, 1, Location(), {})
    assert all(getattr(plain, name) == value for name, value in DECIDED_BY_PUBLISHERS.items())


def test_what_is_believed_of_a_readers_hello_and_publish() -> None:
    runtime = ShardKey(1, RUNTIME)
    said = m.Hello(
        "r", "m", "a", 0, 1, Location(), {}, (held(ONE), held(runtime)), retain_newest=9, mark=b"m" * 16,
        directive=Directive(7, 0, (1,), (Attempt(3, 1, b"m"),)), retain_domains=2, retain_across="rack",
        retain_serial=8, seen=4,
    )  # fmt: skip
    expected = m.Hello("r", "m", "a", 0, 1, Location(), {}, (held(ONE, "replicated"), held(runtime)), seen=4)
    assert believed("reader", said) == expected and believed("publisher", said) == said
    assert believed("reader", m.Publish(1, held(ONE))) == m.Publish(1, held(ONE, "replicated"))


@pytest.mark.parametrize("recovering", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("state", ["unknown", "in part", "visible", "lost", "visible without this shard"])
@pytest.mark.parametrize("layout", [CHECKPOINT, RUNTIME])
def test_what_a_word_for_a_shard_is_worth(layout: str, state: str, is_new: bool, recovering: bool) -> None:
    key, version = ShardKey(1, layout), Version(1, visible=state.startswith("visible"))
    version.was_visible = version.visible or state == "lost"
    if "without" not in state:
        version.contents[CHECKPOINT, 1, 0] = root_of(ONE), 100
    known = None if state == "unknown" else version
    expected = "aside" if recovering or not is_new else "refused"
    if state in ("visible", "lost") or (state == "visible without this shard" and layout != CHECKPOINT):
        expected = "counts"
    assert standing("reader", key, known, recovering=recovering, is_new=is_new) == expected
    assert standing("publisher", key, known, recovering=recovering, is_new=is_new) == "counts"


# --- what others have, in every state ---


def settled(story: Scenario) -> None:
    story.join("trainer/0")
    story.publish("trainer/0", 1)
    story.publish("trainer/0", 2)


def begun(story: Scenario) -> None:
    mark = story.hub.registry.new_mark("w")
    story.join("trainer/0", mark=mark, directive=Directive(attempts=(Attempt(0, 0, mark),)))
    story.publish("trainer/0", 1)
    story.publish("trainer/0", 2)


def reading(story: Scenario) -> None:
    """A replica of two shards has agreed, and one of them reads and passes on."""
    settled(story)
    for shard in (0, 1):
        story.join(f"rollout/{shard}", 2)
    for shard in (0, 1):
        story.acquire(f"rollout/{shard}", serve=True)


def leaving(story: Scenario) -> None:
    """A retained version that its trainer wants to give up."""
    settled(story)
    story.unpublish("trainer/0", 2)


def empty(story: Scenario) -> None:
    """The trainer has not come yet."""


STATES: dict[str, Callable[[Scenario], None]] = {
    each.__name__: each for each in (settled, begun, reading, leaving, empty)
}


def books(story: Scenario) -> dict[str, Any]:
    """What others have: the model, and each worker but the stranger."""
    history = story.hub.registry.histories.get(("run", "actor"))
    if history is None or not any(w.role == "publisher" for w in history.workers.values()) and not history.versions:
        return {"visible": [], "directive": NO_DIRECTIVE}
    others = {w.name: w for w in history.workers.values() if w.role == "publisher"}
    return {
        "visible": history.visible(),
        "newest": history.newest_visible,
        "versions": sorted(history.versions),
        "checkpoints": {
            (number, at): found
            for number, version in history.versions.items()
            for at, found in version.contents.items()
            if at[0] == CHECKPOINT
        },
        "directive": history.directive,
        "retained": (history.retain_newest, history.retain_domains, history.retain_serial),
        "budget": history.published_size_bytes,
        "agreed": {w.group: (g.generation, g.version) for w in others.values() for g in [history.group(w)]},
        "workers": {
            name: (
                w.hello,
                w.mark,
                w.seen_version,
                w.is_replaced,
                {key: (h.root, h.complete, h.origin, h.unpublishing, h.must_retain) for key, h in w.holdings.items()},
                {number: dict(lease.sources) for number, lease in w.leases.items()},
                list(w.pending),
            )
            for name, w in others.items()
        },
    }  # fmt: skip


def messages_of(kind: type, story: Scenario) -> list[m.ClientMessage]:
    """What a stranger may say with messages of this kind, meant to have a say for others."""
    trainer = story.sessions.get("trainer/0", b"t" * 16)
    every = (ONE, TWO, NEXT, ShardKey(FAR, CHECKPOINT), ShardKey(2, CHECKPOINT, 1, 2), ShardKey(1, RUNTIME))
    said = [held(key, origin, root) for key in every for origin in get_args(m.Origin) for root in (None, FORGED)]
    hub = story.hub.session
    mark = story.hub.registry.new_mark("w")
    directive = Directive(9, 1, (2,), (Attempt(7, 0, mark),))
    lease = m.HeldLease(3, 2, CHECKPOINT, {0: trainer}, 60.0)
    hello = m.Hello(
        "run", "actor", "evil", 0, 1, Location(), {}, tuple(said), (lease,), every, 1024, 1, (3,), FAR, FAR, 1 << 40,
        directive, hub, "", mark, "", hub, 16, "rack", True, SERIAL_MAX, True,
    )  # fmt: skip
    found: dict[type, list[m.ClientMessage]] = {
        m.Hello: [
            msgspec.structs.replace(hello, replica=replica, shard=shard, shard_count=count, request_id=1000 + number)
            for number, replica in enumerate(("known", "relay", "evil", "trainer", "rollout"))
            for shard, count in ((0, 1), (1, 2), (1, 8), (7, 8))
        ],
        m.Heartbeat: [m.Heartbeat(hub, 99, (1, 2), {3: 1}, 5, 6, {3: 9}, 1 << 40, True)],
        m.Bye: [m.Bye()],
        m.Release: [m.Release(number, 0, True, (0, 1), True) for number in range(1, 9)],
        m.Acquire: [m.Acquire(50 + n, n, 0, (RUNTIME, CHECKPOINT), 60.0, True, serve=True) for n in range(4)],
        m.Abandon: [m.Abandon(60 + n, key) for n, key in enumerate(every)],
        m.Wait: [m.Wait(70, FAR, 0, 60.0), m.Wait(71, 0, FAR, 60.0)],
        m.Target: [m.Target(80, FAR, 60.0, (2,), SERIAL_MAX)],
        m.Publish: [m.Publish(100 + n, holding) for n, holding in enumerate(said)],
        m.Unpublish: [m.Unpublish(200, every, 0.0, True), m.Unpublish(201, every, 60.0)],
        m.AskVersions: [m.AskVersions(210)],
        m.AskStatus: [m.AskStatus(211)],
        m.Pin: [m.Pin(220, 1, 60.0)],
        m.Withdraw: [m.Withdraw(221, 2, 60.0)],
        m.Retain: [m.Retain(222, 1024, 2, "rack")],
        m.Begin: [m.Begin(223, 0, 60.0, "w", ("",), True)],
    }
    return found[kind]


def story_of(state: str, *, recovering: bool) -> Scenario:
    story = Scenario(recovering=recovering, secret=True)
    STATES[state](story)
    story.inbox.clear()
    return story


def strangers(story: Scenario, role: Role) -> list[str]:
    """One that has said Hello, one that has read a version and passes it on, and one that has not said a word."""
    for name in ("silent/0", "known/0", "relay/0"):
        story.roles[name], story.sessions[name] = role, name.encode().ljust(16, b".")
    if role == "observer":
        return ["silent/0"]
    story.join("known/0")
    story.join("relay/0", request_id=1, holdings=(held(TWO, "replicated"),))
    return ["silent/0", "known/0", "relay/0"]


def spoken_for(story: Scenario, name: str, message: m.ClientMessage) -> str:
    """The session that says this: a Hello of another name comes from a new one."""
    if not isinstance(message, m.Hello) or message.replica == name.split("/")[0]:
        return name
    new = f"new/{len(story.sessions)}"
    story.sessions[new], story.roles[new] = new.encode().ljust(16, b"."), story.roles[name]
    return new


@pytest.mark.parametrize("recovering", [False, True], ids=["", "in the grace time"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_whatever_a_reader_or_an_observer_says_what_others_have_stays(state: str, kind: str, recovering: bool) -> None:
    roles: tuple[Role, ...] = ("reader", "observer")
    for role in roles:
        story = story_of(state, recovering=recovering)
        names = strangers(story, role)
        before = books(story)
        for name in names:
            for message in messages_of(KINDS[kind], story):
                story.tell(spoken_for(story, name, message), message)
                assert books(story) == before, (role, name, message)
        # and at the end of the grace time, when all that was said is acted on
        story.silent = tuple(names)
        story.wait(LIMITS.grace_s + 1.0)
        after = books(story)
        for known in ("visible", "directive", "checkpoints", "agreed") if state != "leaving" else ("directive",):
            assert after.get(known) == before.get(known), (role, known)
        if state != "empty":
            story.join("trainer/0", request_id=1000)
            story.requests["trainer/0"] = 1000
        else:
            story.join("trainer/0")
        story.heard("trainer/0")
        story.publish("trainer/0", 3)  # and it goes on
        assert not story.heard("trainer/0") and story.hub.registry.histories["run", "actor"].newest_visible == 3


@pytest.mark.parametrize("kind", ["Hello", "Publish", "Pin", "Withdraw", "Retain", "Begin"])
def test_the_control_a_publisher_has_a_say(kind: str) -> None:
    story = story_of("settled", recovering=False)
    before = books(story)
    for name in strangers(story, "publisher")[1:]:
        for message in messages_of(KINDS[kind], story):
            story.tell(spoken_for(story, name, message), message)
    if kind == "Begin":  # the trainer that it calls gone is heard, or has been until now
        story.silent = ("trainer/0",)
        story.wait(4 * LIMITS.heartbeat_s)
    changed = {what for what, now in books(story).items() if now != before[what]} - {"workers", "agreed"}
    assert changed


def test_refusals_name_the_key() -> None:
    for role, kinds in (("reader", (m.Pin, m.Begin)), ("observer", tuple(KINDS.values()))):
        story = story_of("settled", recovering=False)
        for kind in kinds:
            for message in messages_of(kind, story) if kind is not m.AskStatus else ():
                assert f"{kind.__name__} was sent with a" in (refusal(role, message, None) or "")


# --- what was found, one by one ---


def begin(story: Scenario, worker: str = "trainer/0", **fields: object) -> list[str]:
    story.say(worker, m.Begin, **{"step": 0, "timeout_s": 5.0, "launch_id": "w", **fields})
    return [line for line in story.heard(worker) if line != "Alive"]


def test_no_reader_counts_as_the_trainer() -> None:
    """It passed on a checkpoint as "published", and every Begin was refused for as long as it sent heartbeats."""
    story = story_of("settled", recovering=False)
    story.roles["evil/0"] = "reader"
    story.join("evil/0")
    story.say("evil/0", m.Publish, holding=held(TWO))
    story.tell("trainer/0", m.Bye())
    story.join("second/0")
    assert begin(story, "second/0") == ["attempt 1 at 0"]


@pytest.mark.parametrize("role", ["reader", "publisher"])
def test_no_reader_uses_up_the_numbers_of_attempts(role: Role) -> None:
    """It claimed to convert a version of the last attempt that there can be."""
    story = story_of("empty", recovering=True)
    story.roles["evil/0"] = role
    story.join("evil/0", claims=(ShardKey(FAR, RUNTIME),), seen=FAR)
    story.wait(LIMITS.grace_s + 0.1)
    story.join("trainer/0")
    assert begin(story) == (["attempt 0 at 0"] if role == "reader" else ["refused UsageError"])


def test_a_reader_keeps_no_name_from_a_worker_with_the_secret() -> None:
    story = story_of("empty", recovering=False)
    story.roles["evil/0"] = "reader"
    story.sessions["evil/0"] = b"evil".ljust(16)
    hello = m.Hello("run", "actor", "trainer", 0, 1, Location(), {}, request_id=1)
    story.tell("evil/0", hello)
    story.join("trainer/0")
    assert [w.role for w in story.hub.workers.values()] == ["publisher"]
    story.publish("trainer/0", 1)
    assert story.hub.registry.histories["run", "actor"].visible() == [1]
    story.heard("evil/0")
    story.tell("evil/0", msgspec.structs.replace(hello, request_id=2))
    assert story.heard("evil/0") == ["refused UsageError"]


@pytest.mark.parametrize("role", ["reader", "publisher"])
def test_in_the_grace_time_readers_make_no_version_and_keep_what_they_have(role: Role) -> None:
    """What readers say that they hold is kept aside, until a publisher has named the version and its bytes."""
    story = story_of("empty", recovering=True)
    for name, said in (("relay/0", held(ONE, "replicated")), ("evil/0", held(ONE, "replicated", FORGED))):
        story.roles[name] = role
        story.join(name, holdings=(said,))
    history = story.hub.registry.histories["run", "actor"]
    assert history.visible() == ([] if role == "reader" else [1])
    if role == "publisher":  # the control
        return
    story.beat("relay/0", holdings_checksum=m.holdings_checksum([(ONE, True)]))
    assert story.heard("relay/0") == ["Alive"]  # it need not say it again
    story.wait(LIMITS.grace_s + 1.0)
    assert history.visible() == [] and story.warned == []
    story.join("trainer/0", holdings=(held(ONE),))
    assert history.visible() == [1]
    story.tell("trainer/0", m.Bye())
    assert history.visible() == [1]  # the relay's copy counts
    story.join("reader/0")
    story.acquire("reader/0", 1)
    assert story.heard("reader/0") == [f"read 1 {CHECKPOINT} 0<-relay/0"]


def test_what_is_kept_aside_ends_with_the_word_the_session_and_the_unpublish() -> None:
    story = story_of("empty", recovering=True)
    story.roles["relay/0"] = "reader"
    story.join("relay/0", holdings=tuple(held(key, "replicated") for key in (ONE, TWO, NEXT)))
    history = story.hub.registry.histories["run", "actor"]
    assert set(history.aside) == {1, 2, 3}
    story.join("relay/0", request_id=1, holdings=(held(ONE, "replicated"), held(TWO, "replicated")))
    assert set(history.aside) == {1, 2}
    story.requests["relay/0"] = 1
    story.say("relay/0", m.Unpublish, keys=(TWO,), timeout_s=0.0, gone=True)
    assert set(history.aside) == {1}
    story.tell("relay/0", m.Bye())
    assert not history.aside


def test_a_stranger_has_no_say_in_what_latest_means_to_a_replica() -> None:
    """It said Hello as a further shard of it, in a later generation: the shards of the replica read two versions."""
    story = story_of("settled", recovering=False)
    for shard in (0, 1):
        story.roles[f"rollout/{shard}"] = "reader"
        story.join(f"rollout/{shard}", 2, job="j")
    story.acquire("rollout/0")
    assert story.heard("rollout/0") == [f"read 2 {CHECKPOINT} 0<-trainer/0"]
    for number, (shard, count, job) in enumerate([(2, 3, "j"), (1, 2, "k"), (1, 8, "j"), (1, 2, "")]):
        story.roles[f"evil{number}"], story.sessions[f"evil{number}"] = "reader", b"evil%012d" % number
        said = m.Hello("run", "actor", "rollout", shard, count, Location(), {}, generation=99, resolved=1, job=job)
        story.tell(f"evil{number}", said)
    story.publish("trainer/0", 3)
    story.acquire("rollout/1")
    assert story.heard("rollout/1") == [f"read 2 {CHECKPOINT} 0<-trainer/0"]


def test_who_waits_for_a_conversion_waits_for_somebody_who_reads_it() -> None:
    """A holding of a reader that is still arriving, and under no lease, kept all others from converting."""
    story = Scenario(limits=HubLimits(readers_per_source_max=1))
    settled(story)
    for name in ("evil/0", "helper/0", "rollout/0"):
        story.roles[name] = "reader"
        story.join(name)
    story.say("evil/0", m.Publish, holding=m.Holding(ShardKey(2, RUNTIME), FORGED, 100, False, "replicated"))
    story.acquire("helper/0", 2, (RUNTIME,))
    assert story.heard("helper/0") == [f"read 2 {RUNTIME} 0<-evil/0"]
    story.acquire("rollout/0", 2, (RUNTIME, CHECKPOINT), claim=True)
    assert story.heard("rollout/0") == [f"read 2 {CHECKPOINT} 0<-trainer/0 and convert"]


@pytest.mark.parametrize("job", ["j", "k"])
def test_who_is_of_another_job_is_no_shard_of_a_replica(job: str) -> None:
    story = story_of("settled", recovering=False)
    story.roles = {"rollout/0": "reader", "rollout/1": "reader"}
    story.join("rollout/0", 2, job="j")
    story.join("rollout/1", 2, job=job)
    story.acquire("rollout/0")
    assert story.heard("rollout/0") == ([f"read 2 {CHECKPOINT} 0<-trainer/0"] if job == "j" else [])


@pytest.mark.parametrize("layout", [CHECKPOINT, RUNTIME])
def test_a_lost_version_comes_back_with_its_checkpoint_only(layout: str) -> None:
    story = story_of("settled", recovering=False)
    story.join("other/0")
    story.tell("trainer/0", m.Bye())
    history = story.hub.registry.histories["run", "actor"]
    assert history.visible() == []
    story.roles["relay/0"] = "reader"
    story.join("relay/0", holdings=(held(ShardKey(2, layout), "replicated"),))
    assert history.visible() == ([2] if layout == CHECKPOINT else [])


@pytest.mark.parametrize("role", ["reader", "publisher"])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_reader_says_of_a_layout_bars_no_publisher_that_has_other_bytes(role: Role, restarted: bool) -> None:
    story, key = Scenario(recovering=restarted), ShardKey(1, RUNTIME)
    story.roles = {"evil/0": role, "helper/0": "reader"}
    story.join_all("trainer/0", "helper/0")
    story.publish("trainer/0", 1)
    story.join("evil/0", holdings=(m.Holding(key, FORGED, 100),), request_id=1, hub=story.hub.session)
    story.acquire("helper/0", 1, (RUNTIME,))
    if restarted:  # and the engine says Hello after it
        story.join("engine/0", holdings=(held(key),), request_id=1, hub=story.hub.session)
    else:
        story.join("engine/0")
        story.publish("engine/0", 1, RUNTIME)
    holders = story.hub.registry.histories["run", "actor"].versions[1].holders(key).values()
    is_overruled = role == "reader"  # the latter: the control
    assert [(each.worker.name, each.root) for each in holders] == [
        ("engine/0", root_of(key)) if is_overruled else ("evil/0", FORGED)
    ]
    assert not (story.hub.registry.workers[story.sessions["helper/0"]].leases and is_overruled)
