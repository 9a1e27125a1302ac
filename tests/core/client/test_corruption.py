"""Bytes that are not what was published: who sent them is told, and finds out whether it is true."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from client_processes import SEGMENT, SEGMENTS, SIZE, same_bytes, tensors_of, zeros_like
from client_stage import FAR, RUNTIME, SOON_S, Stage, holders, until

from tensorhub_plugins.core import CHECKPOINT, Client, CorruptBytes, ShardKey, UsageError, VersionGone
from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.core.client.serving import SAMPLED_SEGMENTS, sample
from tensorhub_plugins.core.transports.stream import messages as wire
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.tcp import TcpLink

KEY = ShardKey(1, CHECKPOINT)
TRANSPORTS = ["tcp", "shm"]


def report_of(stage: Stage) -> dict[str, Any]:
    return next(model for model in fetch_status(stage.address)["models"] if model["run"] == stage.run)


def damage(live: dict[str, torch.Tensor]) -> None:
    live["rest"].view(torch.uint8)[SEGMENT] += 1


# --- a source whose memory was written to ---


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_damaged_source_hears_of_it_and_offers_the_version_no_more(stage, caplog, transport):
    trainer, rollout = (stage.client(name, transports=(transport,)) for name in ("trainer", "rollout"))
    other = stage.client("other", transports=(transport,), location=FAR)
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    other.fetch(serve=True)
    damage(live)
    mine = zeros_like(live)
    report = rollout.replicate(mine)
    assert same_bytes(mine, tensors_of(1)) and report.sources["other/0"] >= SEGMENT
    assert all("trainer/0: segment" in loss and "(of 'rest')" in loss for loss in report.losses) and report.losses
    until(lambda: trainer.serving() == [])
    assert until(lambda: holders(rollout, 1) == ("other/0", "rollout/0"))
    assert caplog.text.count("written to while it was published") == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_only_source_is_damaged(stage, caplog, transport):
    trainer, rollout = (stage.client(name, transports=(transport,)) for name in ("trainer", "rollout"))
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    damage(live)
    began = time.monotonic()
    with pytest.raises(CorruptBytes, match=r"of 'rest'.; no source is left") as caught:
        rollout.replicate(zeros_like(live))
    assert time.monotonic() - began < SOON_S
    assert (caught.value.version, caught.value.peer, caught.value.tensors) == (1, "trainer/0", ("rest",))
    until(lambda: trainer.serving() == [])  # it has looked, and agrees
    assert until(lambda: holders(rollout, 1) == ())
    (line,) = [r.getMessage() for r in caplog.records if "written to while it was published" in r.getMessage()]
    assert "trainer/0" in line and "'rest'" in line
    (worker,) = [w for w in report_of(stage)["workers"] if w["worker"] == "trainer/0"]
    assert worker["corrupt_segments"] == report_of(stage)["corrupt_segments"] >= 1
    assert "corrupt segments from it" in status_text(fetch_status(stage.address))
    assert trainer.unpublish(1).damaged == ()  # it is not there any more

    live["rest"].copy_(tensors_of(1)["rest"])  # mended, and offered again with the very same bytes
    trainer.publish(1, live, copy=False)
    mine = zeros_like(live)
    assert rollout.replicate(mine).losses == () and same_bytes(mine, tensors_of(1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blake3_from_publish_to_fetch(stage, transport):
    """Passed on from reader to reader, read by who asks for nothing, and as damaged as with any digest."""
    options = {"transports": (transport,), "digest": "blake3"}
    trainer, strict = (stage.client(name, **options) for name in ("trainer", "strict"))
    rollout = stage.client("rollout", location=FAR, **options)
    live = tensors_of(1)
    published = trainer.publish(1, live, copy=False)
    assert published.manifest.digest_algorithm == "blake3"
    rollout.fetch(serve=True)
    damage(live)
    mine = zeros_like(live)
    report = strict.replicate(mine)
    assert same_bytes(mine, tensors_of(1)) and report.algorithms == {0: "blake3"}
    until(lambda: trainer.serving() == [])
    easy = stage.client("easy", transports=(transport,)).fetch()
    assert same_bytes(easy.tensors(), tensors_of(1)) and easy.report.roots == {0: published.manifest.root().hex()}


def test_who_believes_blake3_only_reads_nothing_else(stage):
    trainer, strict = stage.client("trainer"), stage.client("strict", digest="blake3")
    trainer.publish(1, tensors_of(1))
    began = time.monotonic()
    with pytest.raises(UsageError, match="digests by xxh3_128, and this reader believes blake3 only"):
        strict.fetch()
    assert time.monotonic() - began < SOON_S
    assert stage.client("easy").fetch().report.losses == ()  # the control: it is the digests, not the bytes


def test_a_liar_withdraws_nobodys_copy(stage, caplog, monkeypatch):
    """Or one that sits behind a broken wire."""
    trainer = stage.client("trainer", transports=("tcp",))
    liar, honest = (stage.client(name, transports=("tcp",)) for name in ("liar", "honest"))
    trainer.publish(1, tensors_of(1))
    rechecked = until_rechecked(trainer, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(TcpLink, "digest", lambda self, segment: bytes(16))
        began = time.monotonic()
        with pytest.raises(CorruptBytes, match="segment 0 arrived corrupt"):
            liar.fetch()
        assert time.monotonic() - began < SOON_S
    until(lambda: rechecked)
    assert rechecked[0] == (KEY, (0,)) and trainer.serving() == [KEY]
    assert "they are right here" in caplog.text and "written to" not in caplog.text
    fetched = honest.fetch()
    assert fetched.report.losses == () and same_bytes(fetched.tensors(), tensors_of(1))


def until_rechecked(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[tuple[ShardKey, tuple[int, ...]]]:
    done: list[tuple[ShardKey, tuple[int, ...]]] = []
    look = client._serving._look_into

    def look_and_say(key: ShardKey, segments: tuple[int, ...]) -> None:
        look(key, segments)
        done.append((key, segments))

    monkeypatch.setattr(client._serving, "_look_into", look_and_say)
    return done


def test_words_about_what_is_not_there_are_no_harm(stage):
    trainer = stage.client("trainer")
    trainer.publish(1, tensors_of(1))
    for key, segments in ((ShardKey(9, CHECKPOINT), (0,)), (KEY, (SEGMENTS + 7,)), (KEY, ()), (KEY, (1 << 40,))):
        trainer._serving._look_into(key, segments)
    assert trainer.serving() == [KEY]


def test_a_damaged_engine_is_left_for_the_checkpoint(stage):
    trainer, engine, rollout = (stage.client(name) for name in ("trainer", "engine", "rollout"))
    trainer.publish(1, tensors_of(1))
    live = tensors_of(2)
    engine.publish(1, live, RUNTIME, copy=False)
    damage(live)
    fetched = rollout.fetch(1, (RUNTIME, CHECKPOINT))
    assert fetched.layout == CHECKPOINT and same_bytes(fetched.tensors(), tensors_of(1))


# --- a publisher learns of it itself ---


def test_a_sample_is_spread_over_all_segments_and_another_for_the_next_version():
    assert sample(0, 5) == [] and sample(3, 5) == [0, 1, 2] and len(sample(1000, 5)) == SAMPLED_SEGMENTS
    assert {k for version in range(2000) for k in sample(100, version)} == set(range(100))
    gaps = sample(1000, 1)
    assert max(b - a for a, b in zip(gaps, gaps[1:], strict=False)) <= 250


@pytest.mark.parametrize("damaged", [True, False], ids=["written to", "left alone"])
def test_who_writes_into_what_is_published_hears_of_it_at_unpublish(stage, caplog, damaged):
    trainer = stage.client("trainer")
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    if damaged:
        live["rest"].view(torch.uint8).add_(1)  # a training step that began too early
    report = trainer.unpublish(1)
    assert report.damaged == (("rest",) if damaged else ()) and report.kept is not damaged
    assert ("was written to while it was published" in caplog.text) is damaged
    assert trainer.serving() == ([] if damaged else [KEY])  # as the last copy of a retained version


def test_all_of_it_is_compared_on_request(stage):
    trainer = stage.client("trainer")
    live, copied = tensors_of(1), tensors_of(2)
    trainer.publish(1, live, copy=False)
    trainer.publish(2, copied)
    assert trainer.recheck(1) == () == trainer.recheck(2) and trainer.recheck(77) == ()
    copied["rest"].zero_()  # the caller's, not ours
    live["embed"].view(torch.uint8).view(-1)[-1] ^= 1
    assert trainer.recheck(2) == ()
    found = trainer.recheck(1)
    assert "embed" in found and set(found) <= {"embed", "mask"}  # one segment: whose of the two it is, no digest says
    assert trainer.serving() == [ShardKey(2, CHECKPOINT)] and until(lambda: holders(trainer, 1) == ())


def test_memory_that_was_taken_away_is_not_read(stage):
    """As FSDP does with what it has gathered."""
    trainer = stage.client("trainer")
    live = {"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)}
    trainer.publish(1, live, copy=False)
    live["b"].untyped_storage().resize_(0)
    assert trainer.recheck(1) == ("b",) and trainer.serving() == []


TRAINER = """
import os, sys, torch
from tensorhub_plugins.core import Client, Location
_, address, run, way, layout, ends, *paths = sys.argv
files = [torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8) for path in paths]
if ends == "freed":
    files = [file.clone() for file in files]
where = dict(transports=(way,), location=Location("dc", "rack", "here"))
with Client(address, run=run, model="actor", replica="trainer", **where) as trainer:
    for version, file in enumerate(files, 1):
        trainer.publish(version, {"a": file}, layout, copy=False)
    if ends == "freed":
        files[0].untyped_storage().resize_(0)
    else:
        os.truncate(paths[0], 4096)
    trainer.changes.wanted()
    made = trainer.changes.make_ahead(1, layout)
    print(made, flush=True)
    input()
    print(made, [key.version for key in trainer.serving()])
"""


@pytest.mark.slow  # a process for each
@pytest.mark.parametrize(("way", "layout"), [("tcp", CHECKPOINT), ("shm", RUNTIME)], ids=["tcp", "a shared copy"])
@pytest.mark.parametrize("count", [1, 2], ids=["read", "a base of deltas"])
@pytest.mark.parametrize("ends", ["cut off", "freed"])
def test_memory_that_is_gone_under_a_version_ends_no_trainer(stage, tmp_path, way, layout, count, ends):
    """To read the rest of a file's mapping is a SIGBUS, and what FSDP has freed a SIGSEGV; of the system a source that
    sends it hears it in vain, and is asked again until the deadline."""
    paths = [tmp_path / str(n) for n in range(count)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]) * (4 << 20))
    command = [sys.executable, "-c", TRAINER, stage.address, stage.run, way, layout, ends, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline().strip() == "0"
        with pytest.raises(VersionGone):
            stage.client("rollout", transports=(way,)).fetch(1, (layout,), borrow=True, timeout_s=SOON_S)
        assert trainer.communicate("\n", timeout=SOON_S)[0].strip() == f"0 {[2][: count - 1]}"


def test_without_digests_nothing_is_said(stage):
    trainer = stage.client("trainer", verify=False)
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    damage(live)
    assert trainer.recheck(1) == () and trainer.unpublish(1).damaged == ()


# --- strangers at the other end ---


def control(body: bytes) -> bytes:
    return wire.HEADER.pack(wire.CONTROL, 0, 0, len(body)) + body


def opened(manifest: bytes) -> bytes:
    return control(msgspec.msgpack.encode(wire.StreamOpened(0, msgspec.Raw(manifest))))


def refused(message: bytes) -> bytes:
    body = msgspec.msgpack.encode(wire.StreamRefused("gone", "x" * len(message)))
    return control(body.replace(b"x" * len(message), message))


def spec(**changes: Any) -> bytes:
    fields = {"name": "w", "dtype": "uint8", "shape": [4], "size_bytes": 4, "stride": None, "part": None, **changes}
    outline = {"tensors": [list(fields.values())], "digests": bytes(16), "segment_size_bytes": 4}
    return msgspec.msgpack.encode({**outline, "digest_algorithm": "xxh3_128"})


GARBAGE = {
    "a manifest that is no UTF-8": opened(spec(name="wwww").replace(b"wwww", b"\xff\xfe\xff\xfe")),
    "a refusal that is no UTF-8": refused(b"\xff\xfe\xff\xfe"),
    "arrays in arrays": control(b"\x91" * 100_000),
    "a manifest of arrays in arrays": opened(b"\x91" * 100_000),
    "bytes for no elements": opened(spec(shape=[0])),
    "strides of another shape": opened(spec(stride=[1, 1])),
    "a part of another shape": opened(spec(part=[[8, 8], [0]])),
    "a part outside": opened(spec(part=[[4], [1]])),
    "half an element": opened(spec(shape=[3])),
    "nothing": b"",
    "a segment": wire.HEADER.pack(2, 0, 0, 4) + b"four",
    "an empty message": control(b""),
}


def answer_with(client: Client, garbage: bytes) -> None:
    """Whoever connects is greeted as by a source, and gets this whatever it says."""

    def serve(channel: Channel) -> None:
        try:
            greeting = bytearray(wire.HELLO.size)
            channel.fill([memoryview(greeting)], time.monotonic() + SOON_S)
            channel.send([wire.HELLO.pack(wire.MAGIC, wire.PROTOCOL, 0, b""), garbage], time.monotonic() + SOON_S)
            channel.receive_header(time.monotonic() + SOON_S)
        finally:
            channel.close()
            with server._guard:
                del server._connections[channel]

    server: Any = client._transports["tcp"]._server
    server._serve = serve


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_source_that_answers_garbage_is_a_lost_source(stage, garbage):
    near, far, rollout = stage.client("near"), stage.client("far", location=FAR), stage.client("rollout")
    for source in (near, far):
        source.publish(1, tensors_of(1))
    answer_with(near, GARBAGE[garbage])
    fetched = rollout.fetch()
    assert fetched.report.sources == {"far/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(1))
    assert len(fetched.report.losses) == 1 and "near/0" in fetched.report.losses[0]


BAD_REQUESTS: dict[str, Callable[[], bytes]] = {
    "no UTF-8": lambda: control(
        msgspec.msgpack.encode(["StreamOpen", [1, "xxxx", 0, 1], 0]).replace(b"xxxx", b"\xff" * 4)
    ),
    "arrays in arrays": lambda: control(b"\x91" * 60_000),
    "no number of seconds": lambda: control(msgspec.msgpack.encode(["StreamRead", [[0, 1]], float("nan")])),
}


@pytest.mark.parametrize("request_", BAD_REQUESTS)
def test_a_source_says_in_one_line_what_a_stranger_asked(stage, caplog, request_):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    endpoint = trainer._transports["tcp"]._server._listeners[0].getsockname()
    with socket.create_connection(endpoint, timeout=SOON_S) as stranger:
        stranger.sendall(wire.HELLO.pack(wire.MAGIC, wire.PROTOCOL, 0, b"") + BAD_REQUESTS[request_]())
        while stranger.recv(1 << 16):
            pass
    until(lambda: "closed the connection" in caplog.text)
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is None
    assert same_bytes(rollout.fetch().tensors(), tensors_of(1))
