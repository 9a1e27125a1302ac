"""The nouns hold together, and a frame is a message of this protocol or a ProtocolError, never anything else."""

from __future__ import annotations

import copy
import gc
import pickle

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tensorhub_plugins.core import manifest as manifests
from tensorhub_plugins.core.errors import (
    CorruptBytes,
    DeadlineExceeded,
    HubUnreachable,
    ProtocolError,
    SourceLost,
    TensorHubError,
    UsageError,
)
from tensorhub_plugins.core.hub.hub import Hub, Received, Tick
from tensorhub_plugins.core.hub.report import report, validate
from tensorhub_plugins.core.manifest import (
    DIGEST_SIZE_BYTES,
    LARGE_SIZE_BYTES,
    SHARD_SIZE_BYTES_MAX,
    Manifest,
    Part,
    TensorSpec,
    TensorTable,
)
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive
from tensorhub_plugins.core.protocol.fields import SERIAL_MAX
from tensorhub_plugins.core.protocol.lineage import Attempt
from tensorhub_plugins.core.transports.stream.messages import REPLY_SIZE_BYTES_MAX
from tensorhub_plugins.core.types import (
    ATTEMPTS_MAX,
    CHECKPOINT,
    DECODE_ERRORS,
    HOSTS_MAX,
    STEPS_PER_ATTEMPT,
    VERSION_MAX,
    Location,
    ShardKey,
    VersionInfo,
    check_name,
    check_version,
)

# --- values ---


def spec(name: str, size: int) -> TensorSpec:
    return TensorSpec(name, "uint8", (size,), size)


def a_manifest(*sizes: int, segment_size_bytes: int = 4) -> Manifest:
    specs = TensorTable(spec(f"t{index}", size) for index, size in enumerate(sizes))
    segments = -(-sum(sizes) // segment_size_bytes)
    return Manifest(specs, b"".join(bytes([k] * DIGEST_SIZE_BYTES) for k in range(segments)), segment_size_bytes)


def test_segments_cover_the_stream_once():
    manifest = a_manifest(3, 0, 6, 1).check()
    assert manifest.offsets == (0, 3, 3, 9) and manifest.size_bytes == 10 and manifest.segment_count == 3
    assert [manifest.segment_range(k) for k in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert manifest.digest(2) == bytes([2] * 16)


def test_a_shard_without_bytes_has_no_segments():
    for manifest in (a_manifest(), a_manifest(0, 0)):
        assert manifest.check().segment_count == 0 and manifest.size_bytes == 0
    assert a_manifest().root() != a_manifest(0).root()


def test_the_root_depends_on_everything():
    base = a_manifest(3, 5)
    others = [
        a_manifest(5, 3),
        a_manifest(8),
        msgspec.structs.replace(base, digests=base.digests[::-1]),
        msgspec.structs.replace(base, segment_size_bytes=5),
        msgspec.structs.replace(base, tensors=TensorTable.of((spec("t0", 3), TensorSpec("t1", "int8", (5,), 5)))),
        msgspec.structs.replace(
            base, tensors=TensorTable.of((spec("t0", 3), TensorSpec("t1", "uint8", (5,), 5, (1,))))
        ),
    ]
    assert len({x.root() for x in [base, *others]}) == 7
    assert base.root() == a_manifest(3, 5).root() and len(base.root()) == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": TensorTable((spec("b", 4), spec("a", 4)))}, "not sorted"),
        ({"tensors": TensorTable((spec("a", 4), spec("a", 4)))}, "not sorted by unique name"),
        ({"tensors": TensorTable((spec("a", 12), spec("b", -4)))}, "negative size"),
        ({"tensors": TensorTable((TensorSpec("a", "uint8", (-2, -4), 8),))}, "negative size"),
        ({"tensors": TensorTable((TensorSpec("a", "uint8", (0,), 8),))}, "'a' has sizes that contradict"),
        ({"tensors": TensorTable((TensorSpec("a", "uint8", (3,), 8),))}, "'a' has sizes that contradict"),
        ({"tensors": TensorTable((TensorSpec("a", "uint8", (2, 4), 8, (4,)),))}, "'a' has sizes that contradict"),
        ({"tensors": TensorTable((TensorSpec("a", "uint8", (8,), 8, None, Part((9,), (2,))),))}, "'a' has sizes that"),
        ({"tensors": TensorTable((spec("a", SHARD_SIZE_BYTES_MAX + 1),))}, "the limit is"),
        ({"digests": bytes(16)}, "digests do not match"),
        ({"segment_size_bytes": 0}, "digests do not match"),
        ({"segment_size_bytes": -4}, "digests do not match"),
        ({"digest_algorithm": "crc32"}, "'crc32'"),
        ({"digest_algorithm": "none"}, "digests do not match"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_refused(change, words):
    with pytest.raises(ProtocolError, match=words):
        msgspec.structs.replace(a_manifest(4, 4), **change).check()


@pytest.mark.parametrize(("limit", "most"), [("tensors_max", 2), ("size_bytes_max", 2), ("table_size_bytes_max", 20)])
def test_what_no_reader_would_accept_as_a_shard_is_refused_where_it_is_described(limit, most):
    """Else it is published, and every reader fails, at its deadline."""
    described = [spec(name, 1) for name in "abc"]
    assert len(TensorTable.of(described)) == 3  # the control
    with pytest.raises(UsageError, match=rf"3 tensors of 3 bytes.*the limits of a shard are.* {most}\b.*use several"):
        TensorTable.of(described).within_limits(**{limit: most})
    with pytest.raises(UsageError, match=rf"1 tensors of .* {SHARD_SIZE_BYTES_MAX}\b.*use several"):
        TensorTable.of([spec("a", SHARD_SIZE_BYTES_MAX + 1)])


def test_the_largest_manifest_is_one_message():
    digests = SHARD_SIZE_BYTES_MAX // manifests.SEGMENT_SIZE_BYTES * DIGEST_SIZE_BYTES
    assert manifests.TABLE_SIZE_BYTES_MAX + digests < REPLY_SIZE_BYTES_MAX - (1 << 20)


def test_a_manifest_on_the_wire():
    one, other = a_manifest(3, 0, 6), msgspec.structs.replace(a_manifest(3, 0, 6), digests=bytes(48))
    decoded = [Manifest.decode(manifest.encoded) for manifest in (one, other)]
    assert decoded == [one, other] and decoded[0].root() == one.root() != other.root()
    assert decoded[0].tensors is decoded[1].tensors  # one table, decoded once
    assert Manifest.decode(a_manifest(3, 6).encoded).tensors != one.tensors
    for changes, words in (
        ({"digests": b""}, "digests do not match"),
        ({"tensors": TensorTable(one.tensors[::-1])}, "not sorted"),
    ):
        with pytest.raises(ProtocolError, match=words):
            Manifest.decode(msgspec.structs.replace(one, **changes).encoded)
    for garbage in (b"", one.encoded[:-1], msgspec.msgpack.encode({"tensors": 1}), msgspec.msgpack.encode(7)):
        with pytest.raises(ProtocolError, match="does not decode"):
            Manifest.decode(garbage)


def test_equal_tables_are_one_object_while_they_are_used():
    specs = [spec("b", 4), spec("a", 3)]
    table = TensorTable.of(specs)
    assert [each.name for each in table] == ["a", "b"] and table.positions == {"a": 0, "b": 1}
    assert TensorTable.of(reversed(specs)) is table is TensorTable.of(table) is TensorTable.decode(table.encoded)
    assert TensorTable.of([spec("a", 3)]) is not table
    copies = [pickle.loads(pickle.dumps(table)), copy.deepcopy(table)]
    assert copies[0] is table and copies[1] is table
    lone = TensorTable(table.specs)  # equal to it all the same
    assert lone is not table and lone == table and hash(lone) == hash(table) and lone != TensorTable([spec("a", 3)])


def test_what_is_known_of_a_table_does_not_make_a_bad_one_pass():
    """A table is kept by its encoding, also one that a peer could not have sent."""
    bad = TensorTable.of([spec("a", -4)])
    with pytest.raises(ProtocolError, match="negative size"):
        TensorTable.decode(bad.encoded)


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, VERSION_MAX + 1])
def test_what_is_no_version(version):
    with pytest.raises(UsageError, match="positive integer"):
        check_version(version)


def test_names_have_a_length():
    assert check_name("run", "r" * 256) == "r" * 256 and check_version(1) == 1
    for bad in ("", "r" * 257, None, 7):
        with pytest.raises(UsageError, match="run must be a text of 1 to 256 characters"):
            check_name("run", bad)


# --- errors ---


def test_an_error_says_its_context_and_only_what_is_known():
    error = DeadlineExceeded("too late", version=3, shard=0, peer="a/0", phase="read", timeout_s=1.23456)
    assert str(error) == "too late [version=3, shard=0, peer=a/0, phase=read, timeout_s=1.235]"
    assert (error.message, error.version, error.shard) == ("too late", 3, 0)
    assert str(UsageError("plain")) == "plain"


def test_errors_are_also_what_python_calls_them():
    assert issubclass(DeadlineExceeded, TimeoutError) and issubclass(UsageError, ValueError)
    assert issubclass(HubUnreachable, ConnectionError) and issubclass(CorruptBytes, SourceLost)
    assert all(issubclass(x, TensorHubError) for x in (DeadlineExceeded, UsageError, HubUnreachable, SourceLost))


# --- messages ---

KEY = ShardKey(5, CHECKPOINT, 1, 2)
SESSION, ROOT = b"s" * 16, b"r" * 16
HOLDING = m.Holding(KEY, ROOT, 100, False, "replicated")
GRANT = m.Grant(1, SESSION, "a/1", {"tcp": "tcp://h:1"}, Location("dc", "rack", "host"), ROOT, 100)

DIRECTIVE = Directive(2, 5, (3, 4), (Attempt(1, 5, b"m" * 16),))

FROM_CLIENT: list[m.ClientMessage] = [
    m.Hello(
        "run",
        "actor",
        "rollout",
        1,
        2,
        Location(host="h"),
        {"tcp": "tcp://h:1"},
        holdings=(HOLDING,),
        leases=(m.HeldLease(3, 5, CHECKPOINT, {0: SESSION}, 1.5),),
        claims=(ShardKey(5, "runtime:f", 1, 2),),
        retain_newest=2,
        request_id=9,
        pending=(3,),
        directive=DIRECTIVE,
        hub=SESSION,
        process="boot pid:[1] 7 8",
        mark=b"m" * 16,
        retain_domains=2,
        retain_serial=4,
        tls_only=True,
    ),
    m.Heartbeat(b"h" * 16, 9, (3,), {4: 1}, 7, 8),
    m.Bye(),
    m.Publish(1, HOLDING),
    m.Unpublish(2, (KEY,), 1.5),
    m.Acquire(3, 0, 4, ("runtime:f", CHECKPOINT), 60.0, True, (1,), CHECKPOINT, 2, (SESSION,), (SESSION,)),
    m.Release(3, 1, True, refused=True),
    m.Release(3),
    m.Abandon(4, KEY),
    m.Wait(5, 0, 3, 2.0),
    m.Target(5, 3, 2.0, (4, 5), 7, False),
    m.Pin(5, 3, 2.0),
    m.Withdraw(5, 3, 2.0),
    m.Retain(6, 2),
    m.Begin(6, 5, 2.0, "start 3", ("boot pid:[1] 7 8",), True),
    m.AskVersions(7),
    m.AskStatus(8),
]
FROM_HUB: list[m.HubMessage] = [
    m.Welcome(SESSION, 1.0, 15.0, 3, DIRECTIVE),
    m.Unknown(SESSION),
    m.Alive((3,)),
    m.Alive((), DIRECTIVE),
    m.Done(1),
    m.Unpublished(2, ("a/0",), True),
    m.Granted(3, 5, CHECKPOINT, 2, (GRANT,), KEY),
    m.Visible(5, 4),
    m.Refused(0, "UsageError", "because"),
    m.Begun(6, Attempt(1, 5, b"m" * 16)),
    m.Rivals(6, ("trainer/0",), ("boot pid:[1] 7 8",)),
    m.Versions(7, (VersionInfo(5, True, {CHECKPOINT: ("a/0",)}),)),
    m.Status(8, {"models": [{"run": "r"}]}),
    m.SourceGone(SESSION),
    m.MayRelease((KEY,)),
]


@pytest.mark.parametrize("message", FROM_CLIENT, ids=lambda message: type(message).__name__)
def test_what_a_client_says_arrives(message):
    assert m.decode_from_client(m.encode(message)) == message


@pytest.mark.parametrize("message", FROM_HUB, ids=lambda message: type(message).__name__)
def test_what_a_hub_says_arrives(message):
    assert m.decode_from_hub(m.encode(message)) == message


class OldHello(m._Message, frozen=True, tag="Hello"):
    """As a worker sends it that is older than directives."""

    run: str
    model: str
    replica: str
    shard: int
    shard_count: int
    location: Location
    endpoints: dict[str, str]


class OldLocation(msgspec.Struct, frozen=True):
    data_center: str = ""
    rack: str = ""
    host: str = ""


class OldGrant(m._Message, frozen=True, tag="Grant"):
    """As a worker knows it that is older than further hosts, and than locations with a machine."""

    shard: int
    session: bytes
    worker: str
    endpoints: dict[str, str]
    location: OldLocation
    root: bytes
    size_bytes: int
    as_of: int = 0
    ticket: m.Ticket | None = None


class OldWelcome(m._Message, frozen=True, tag="Welcome"):
    hub: bytes
    heartbeat_s: float
    session_timeout_s: float
    sequence: int = 0


class OldAlive(m._Message, frozen=True, tag="Alive"):
    resend: tuple[int, ...] = ()


class OldUnknown(m._Message, frozen=True, tag="Unknown"):
    pass


def test_workers_that_are_older_than_directives_and_the_hub_understand_each_other():
    hello = m.decode_from_client(m.encode(OldHello("r", "a", "x", 0, 1, Location(), {})))
    assert hello == m.Hello("r", "a", "x", 0, 1, Location(), {}) and hello.directive == NO_DIRECTIVE
    assert hello.hub is None and m.decode_from_hub(m.encode(OldUnknown())) == m.Unknown(b"")
    old = msgspec.msgpack.Decoder(OldWelcome | OldAlive | OldUnknown)
    for said, heard in (
        (m.Welcome(SESSION, 1.0, 15.0, 3, DIRECTIVE), OldWelcome(SESSION, 1.0, 15.0, 3)),
        (m.Alive((4,), DIRECTIVE), OldAlive((4,))),
        (m.Unknown(SESSION), OldUnknown()),
    ):
        assert old.decode(m.encode(said)[3:]) == heard


def test_workers_that_know_one_endpoint_of_a_source_and_others_understand_each_other():
    endpoints, place = {"tcp": "tcp://10.0.0.5:7100"}, Location("dc", "", "a", "boot")
    grant = m.Grant(0, SESSION, "a/0", endpoints, place, b"r" * 16, 8, hosts=("fd77::5",))
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(grant), type=OldGrant)
    assert (old.endpoints, old.location) == (endpoints, OldLocation("dc", "", "a"))
    new = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=m.Grant)
    assert (new.endpoints, new.location, new.hosts) == (endpoints, Location("dc", "", "a"), ())


@pytest.mark.parametrize("hosts", [("h",) * HOSTS_MAX, ("h" * 257,), ("",), ("a\nb",)])
def test_further_hosts_are_bounded(hosts):
    with pytest.raises(ProtocolError):
        m.decode_from_client(m.encode(m.Hello("r", "a", "x", 0, 1, Location(), {}, hosts=hosts)))


def test_nobody_speaks_for_the_other_side():
    for decode, others in ((m.decode_from_client, FROM_HUB), (m.decode_from_hub, FROM_CLIENT)):
        for message in others:
            with pytest.raises(ProtocolError, match="malformed"):
                decode(m.encode(message))


HEADER = m.encode(m.Bye())[:3]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "something else"),
        (b"T", "something else"),
        (b"GET / HTTP/1.1\r\n\r\n", "something else"),
        (pickle.dumps({"os": "system"}), "something else"),
        (b"TH", "protocol version missing"),
        (b"TH\x02" + m.encode(m.Bye())[3:], "protocol version 2, this side speaks 1: install the same"),
        (HEADER, "malformed"),
        (HEADER + pickle.dumps({"os": "system"}), "malformed"),
        (HEADER + msgspec.msgpack.encode({"Bye": 1}), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Bye", 1, 2]) + b"more", "malformed"),
        (HEADER + msgspec.msgpack.encode(["NoSuchMessage", 1]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Wait", 1, 2]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Wait", "1", 2, 3, 4.0]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Wait", -1, 2, 3, 4.0]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Wait", 1, 2, 3, -4.0]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Wait", 1, 2, 3, float("nan")]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Retain", 1, 10**6]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Withdraw", 1, 0, 1.0]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Begin", 1, STEPS_PER_ATTEMPT, 1.0]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Begin", 1, 5, 1.0, "w" * 257]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Target", 1, 2, 1.0, [1] * (m.REFUSED_MAX + 1)]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Target", 1, 2, 1.0, [], SERIAL_MAX + 1]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Abandon", 1, [5, "", 0, 1]]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Abandon", 1, [5, "x" * 257, 0, 1]]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Abandon", 1, [0, "x", 0, 1]]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Abandon", 1, [5, "x", -1, 1]]), "malformed"),
        (HEADER + msgspec.msgpack.encode(["Abandon", 1, [5, "x", 0, 0]]), "malformed"),
        (HEADER + b"\x91" * 100_000, "malformed"),  # nested deeper than any stack
        (HEADER + b"\xdd\xff\xff\xff\xff", "malformed"),  # an array of four billion, of which nothing follows
        (HEADER + b"\x93\xa7Abandon\x01\x94\x05\xa2\xff\xfe\x00\x01", "malformed"),  # no UTF-8
        (HEADER + bytes(m.FROM_CLIENT_SIZE_BYTES_MAX), "the limit is"),
    ],
)
def test_garbage_is_refused_in_words(frame, words):
    with pytest.raises(ProtocolError, match=words) as caught:
        m.decode_from_client(frame)
    assert len(str(caught.value)) < 4096  # it must fit into a Refused


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    for frame in (data, HEADER + data):
        for decode in (m.decode_from_client, m.decode_from_hub):
            try:
                decode(frame)
            except ProtocolError:
                continue
            assert frame[:3] == HEADER


# --- the hub against messages that decode but make no sense ---

sessions = st.sampled_from([bytes([65 + i]) * 16 for i in range(4)])
numbers = st.one_of(st.integers(0, 4), st.sampled_from([1 << 47, 1 << 48]))
layouts = st.sampled_from([CHECKPOINT, "runtime:f", "x"])
shards = st.integers(0, 2)
counts = st.integers(1, 3)
roots = st.sampled_from([bytes([i]) * 16 for i in range(3)])
seconds = st.sampled_from([0.0, 0.5, 100.0, 31_536_000.0])
positive = numbers.map(lambda n: max(1, n))
serials = st.sampled_from([0, 1, 2, SERIAL_MAX])
keys = st.builds(ShardKey, positive, layouts, shards, counts)
origins = st.sampled_from(["published", "replicated"])
holdings = st.builds(m.Holding, keys, roots, numbers, st.booleans(), origins)
held = st.builds(
    m.HeldLease, numbers, positive, layouts, st.dictionaries(st.integers(0, 3), sessions, max_size=3), seconds
)


def several(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


steps = st.integers(0, 3) | st.just(STEPS_PER_ATTEMPT - 1)
words = st.sampled_from(["", "w", "boot pid:[1] 1 1"])
marks = st.sampled_from([b"", b"M", b"N" * 16])
attempts = st.builds(Attempt, st.integers(0, 2) | st.just(ATTEMPTS_MAX - 1), steps, marks)
directives = st.builds(Directive, serials, numbers, several(positive), several(attempts))

strange_messages = st.one_of(
    st.builds(
        m.Hello,
        st.sampled_from(["r", "r2"]),
        st.just("actor"),
        st.sampled_from(["a", "b"]),
        shards,
        counts,
        st.builds(Location, host=st.sampled_from(["h", ""])),
        st.just({"tcp": "x"}),
        several(holdings),
        several(held),
        several(keys),
        st.none() | numbers,
        numbers,
        several(numbers),
        directive=directives,
        process=words,
        mark=marks,
    ),
    st.builds(
        m.Heartbeat,
        sessions,
        numbers,
        several(numbers),
        st.dictionaries(numbers, numbers, max_size=3),
        numbers,
        numbers,
    ),
    st.builds(m.Bye),
    st.builds(m.Publish, numbers, holdings),
    st.builds(m.Unpublish, numbers, several(keys), seconds),
    st.builds(
        m.Acquire,
        numbers,
        numbers,
        numbers,
        st.lists(layouts, min_size=1, max_size=3).map(tuple),
        seconds,
        st.booleans(),
        several(shards),
        layouts | st.just(""),
        st.integers(0, 3),
        several(sessions),
        several(sessions),
    ),
    st.builds(m.Release, numbers, st.none() | shards, st.booleans()),
    st.builds(m.Abandon, numbers, keys),
    st.builds(m.Wait, numbers, numbers, numbers, seconds),
    st.builds(m.Target, numbers, numbers, seconds, several(positive), serials, st.booleans()),
    st.builds(m.Pin, numbers, numbers, seconds),
    st.builds(m.Withdraw, numbers, positive, seconds),
    st.builds(m.Retain, numbers, st.integers(0, 3)),
    st.builds(m.Begin, numbers, steps, seconds, words, several(words), st.booleans()),
    st.builds(m.AskVersions, numbers),
    st.builds(m.AskStatus, numbers),
)


@pytest.mark.slow
@settings(max_examples=400, phases=[Phase.explicit, Phase.generate])  # shrinking thirty messages takes minutes
@given(st.lists(st.tuples(sessions, strange_messages | st.none(), st.sampled_from([0.0, 0.1, 4.0])), max_size=30))
def test_nothing_that_decodes_breaks_the_hub(conversation):
    """Sent by strangers, out of order, with numbers and shards that fit nothing."""
    hub = Hub(b"H" * 16, 0.0)
    now = hub.limits.grace_s - 1.0
    for session, message, wait in conversation:
        now += wait
        if message is None:
            effects = hub.handle(Tick(), now)
        else:
            effects = hub.handle(Received(session, m.decode_from_client(m.encode(message))), now)
        validate(hub.registry)
        for effect in effects:
            if hasattr(effect, "message"):
                m.decode_from_hub(m.encode(effect.message))  # a client can read all that it says
    report(hub.registry, now)


def test_a_large_table_is_decoded_like_a_small_one():
    """In steps, and all that follows from it at once."""

    def table() -> TensorTable:
        return TensorTable.of([spec("w" * 900 + f"{number:04}", 4) for number in range(5000)])

    encoded = bytes(table().encoded)
    gc.collect()
    found = TensorTable.decode(encoded)
    assert len(encoded) > LARGE_SIZE_BYTES and found == table()
    assert {"offsets", "_layout", "spans"} <= found.__dict__.keys()
    for bad in (encoded[:-1], encoded + b"x", b"\x91\x91\x91" * 2_000_000, b"\xdd\xff\xff\xff\xff" * 1_000_000):
        with pytest.raises((ProtocolError, *DECODE_ERRORS)):
            TensorTable.decode(bad)
