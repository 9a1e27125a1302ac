"""Cases of the conformance suite: how links, transports and other processes end, and untrusted peers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import partial

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.types import ShardKey
from transport_suite.bench import Bench
from transport_suite.material import (
    GARBAGE,
    GROWTH_SIZE_BYTES_MAX,
    MIDDLE_S,
    NEAR_S,
    POISON,
    SEGMENT_SIZE_BYTES,
    ConformanceError,
    blank_like,
    far,
    forget_frames,
    log_lines,
    longer_than,
    make_tensor,
    raises,
    raw,
    read_equal,
    require,
    require_equal,
    traced_memory,
)
from transport_suite.peers import Address, Remote, SimpleShelf, address_of, impostor, open_at

# --- the end ---


def check_nobody_there(bench: Bench) -> None:
    """Connecting to a source that is closed, or never was."""
    with bench.source() as source:
        endpoint = source.endpoint
    with contextlib.closing(bench.make()) as reader:
        deadline = time.monotonic() + NEAR_S
        bench.lost_by(deadline, lambda: reader.connect(endpoint, deadline=deadline), "connect to nobody")


def check_close_twice(bench: Bench) -> None:
    """Closing a link or a transport twice is fine."""
    tensors = {"a": make_tensor("uint8", (3 * SEGMENT_SIZE_BYTES,), seed=20)}
    with bench.source() as source:
        offer = source.offer(tensors)
        reader = bench.make()
        link = reader.connect(source.endpoint, deadline=far())
        bench.open(link, offer.key)
        for _ in range(2):
            link.close()
        bench.no_readers(offer, "a closed link")
        slab = bench.adopt(blank_like(tensors))
        for what, use in (
            ("open", lambda: link.open(offer.key, 1, deadline=far())),
            ("read", lambda: list(read_equal(link, [0], slab, deadline=far()))),
        ):
            bench.lost_soon(use, f"{what}() on a closed link")
        require(not link.check(deadline=far()), "check() on a closed link must be False")
        for _ in range(2):
            reader.close()
        with raises(UsageError, "connect() of a closed transport"):
            reader.connect(source.endpoint, deadline=far())
        source.transport.close()  # and again when `source` ends
        with raises(UsageError, "serve() of a closed transport"):
            source.transport.serve(SimpleShelf())


def check_close_while_reading(bench: Bench) -> None:
    """Closing the link from another thread, the reader's transport, or the source's, ends a read that waits."""
    tensors = {"a": make_tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=21)}
    for who in ("link", "reader", "source"):
        with bench.source() as source, contextlib.closing(bench.make()) as reader:
            offer = source.offer(tensors, ready=False)
            offer.mark_ready(0)
            link = reader.connect(source.endpoint, deadline=far())
            bench.open(link, offer.key)
            reading = read_equal(link, range(4), bench.adopt(blank_like(tensors)), deadline=far())
            next(reading)
            close = {"link": link.close, "reader": reader.close, "source": source.transport.close}[who]
            timer = threading.Timer(0.05, close)  # most likely while the next line waits; right in any order
            timer.start()
            bench.lost_soon(partial(list, reading), f"wait after {who}.close()")
            timer.join()
            link.close()
            bench.no_readers(offer, "a closed link")


def check_nothing_leaks(bench: Bench) -> None:
    """Check that no threads, descriptors or memory are left behind by many connections, however these ended."""
    tensors = {"a": make_tensor("uint8", (4 * SEGMENT_SIZE_BYTES,), seed=22)}

    def live_once() -> None:
        with bench.source() as source:
            offer = source.offer(tensors)
            with bench.link(source) as link:
                manifest = bench.open(link, offer.key)
                slab = bench.adopt(blank_like(tensors))
                bench.read_all(link, manifest, slab)
                link.check(deadline=far())
            with bench.link(source) as link:
                bench.open(link, offer.key)
                next(read_equal(link, range(4), slab, deadline=far()))
                offer.withdraw()
            offer.slab.close()

    live_once()  # whatever is made once and kept
    before = bench.resources()
    for _ in range(5):
        live_once()
    bench.is_given_back(before)


def check_nothing_is_written_after_the_end(bench: Bench) -> None:
    """Check that a read that has ended, at its deadline, dropped or cut off, no longer writes into its target, even
    though its source goes on."""
    tensors = {"a": make_tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=27)}
    for how in ("deadline", "dropped", "closed"):
        with bench.source() as source:
            offer = source.offer(tensors, ready=False)
            offer.mark_ready(0)
            with bench.link(source) as link:
                manifest = bench.open(link, offer.key)
                target = blank_like(tensors)
                deadline = time.monotonic() + NEAR_S if how == "deadline" else far()
                reading = read_equal(link, range(8), bench.adopt(target), deadline=deadline)
                with contextlib.suppress(SourceLost):  # this machine is so busy that the deadline came first
                    next(reading)
                if how == "closed":
                    link.close()
                if how == "dropped":
                    getattr(reading, "close")()  # noqa: B009  # it is a generator, or has the like
                else:
                    bench.lost_soon(partial(list, reading), f"end a read that was {how}")
                with bench.link(source) as other:
                    bench.open(other, offer.key)
                    target["a"].fill_(POISON)
                    offer.mark_all_ready()
                    bench.read_all(other, manifest, bench.adopt(blank_like(tensors)))  # the source does go on
                bench.no_readers(offer, f"a read that was {how}")
            require(set(raw(target["a"])) == {POISON}, f"a read that was {how} wrote into what it had left")


# --- other processes (started as few times as possible: the frozen are thawed and used again) ---


def check_frozen_source(bench: Bench) -> None:
    """SIGSTOP when half was read: the deadline holds for reading, for opening and for connecting."""
    with (
        contextlib.closing(bench.make()) as reader,
        Remote(bench.process(), bench.make_source, bench.slabs, bench.adopt_in_peers) as remote,
    ):
        other = reader.connect(remote.endpoint, deadline=far())
        for seconds in MIDDLE_S:
            link, manifest, tensors = remote.open(reader)
            deadline = time.monotonic() + seconds
            target = blank_like(tensors)
            reading = read_equal(link, range(manifest.segment_count), bench.adopt(target), deadline=deadline)
            half: list[int] = []
            with contextlib.suppress(SourceLost):
                half += (next(reading) for _ in range(manifest.segment_count // 2))
                break
            link.close()  # this machine is so busy that the deadline came first
        remote.peer.freeze()
        try:
            require(len(half) == manifest.segment_count // 2, f"half the segments were ready, {half} were yielded")
            bench.lost_by(deadline, lambda: list(reading), "read from a frozen source")
            require(all(link.digest(s) == manifest.digest(s) for s in half), "bytes yielded before are wrong")
            near = time.monotonic() + NEAR_S
            bench.lost_by(near, partial(other.open, remote.key, 1, deadline=near), "open at a frozen source")
            near = time.monotonic() + NEAR_S
            bench.lost_by(
                near, partial(open_at, reader, remote.endpoint, remote.key, near), "connect to a frozen source"
            )
        finally:
            target["a"].fill_(POISON)  # as who uses its memory for something else
            remote.peer.thaw()
        link.close()
        other.close()
        with contextlib.closing(reader.connect(remote.endpoint, deadline=far())) as again:
            require(bench.open(again, remote.key) == manifest, "a source that thawed serves as before")
        require(set(raw(target["a"])) == {POISON}, "what a source sent when it thawed was written where nobody waits")


def check_frozen_reader(bench: Bench) -> None:
    """SIGSTOP of a reader with more on its way than buffers hold: withdraw() does not wait for it."""
    tensors = {"a": make_tensor("uint8", (64 << 20,), seed=24)}
    with bench.source() as source:
        offer = source.offer(tensors, segment_size_bytes=32 << 20)  # the second alone is more than buffers hold
        peer = bench.process()
        got = peer.ask("read", bench.make, source.endpoint, offer.key, 1)
        require(len(got) == 1, f"the reader got {got}")
        peer.freeze()
        try:
            bench.soon(offer.withdraw, "return from withdraw() although a reader is frozen")
            require(offer.active_readers == 0, "withdraw() returned while a reader was attached")
        finally:
            peer.thaw()


def check_killed_source(bench: Bench) -> None:
    """SIGKILL when half was read and the other half is awaited."""
    with Remote(bench.process(), bench.make_source, bench.slabs, bench.adopt_in_peers) as remote:
        with contextlib.closing(bench.make()) as reader:  # whatever is made once and kept
            link, manifest, tensors = remote.open(reader)
            target = bench.adopt(blank_like(tensors))
            next(read_equal(link, range(manifest.segment_count // 2), target, deadline=far()))
            link.close()
        before = bench.resources()
        reader = bench.make()
        link, _, _ = remote.open(reader)
        reading = read_equal(link, range(manifest.segment_count), target, deadline=far())
        half = [next(reading) for _ in range(manifest.segment_count // 2)]
        remote.peer.kill()
        rest: list[int] = []
        error = bench.lost_soon(partial(rest.extend, reading), "wait for a source that was killed")
        require(sorted(half) == list(range(len(half))), f"the first half was ready, {half} were yielded")
        require(not rest, f"segments {rest} were yielded, which the source never had")
        require(error.peer is not None and error.phase is not None, f"SourceLost must name peer and phase: {error}")
        require(all(link.digest(s) == manifest.digest(s) for s in half), "bytes yielded before the kill are wrong")
        link.close()
        reader.close()
        del reading
        forget_frames(error)  # in which is what was read from; a log that is captured keeps the error
        bench.is_given_back(before)


def check_killed_reader(bench: Bench) -> None:
    """SIGKILL of a reader that waits for more: the source is free of it at once."""
    tensors = {"a": make_tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=23)}
    with bench.source() as source:
        offer = source.offer(tensors, ready=False)
        for segment in range(4):
            offer.mark_ready(segment)
        peer = bench.process()
        peer.ask("read", bench.make, source.endpoint, offer.key, 4)
        peer.ask("end")  # whatever is made once and kept
        bench.no_readers(offer, "a reader that has ended")
        before = bench.resources()
        got = peer.ask("read", bench.make, source.endpoint, offer.key, 4)
        require(sorted(got) == [0, 1, 2, 3], f"the reader got {got}")
        require(offer.active_readers >= 1, f"one process reads the offer, it counts {offer.active_readers}")
        peer.kill()
        bench.no_readers(offer, "a killed reader")
        bench.is_given_back(before)


# --- strangers ---


def check_garbage(bench: Bench) -> None:
    """Check that strangers are disconnected, cost little, leave a line in the log, and disturb no reader."""
    tensors = {"a": make_tensor("uint8", (6 * SEGMENT_SIZE_BYTES,), seed=25)}
    with bench.source() as source, log_lines() as lines:
        offer = source.offer(tensors, ready=False)
        offer.mark_ready(0)
        address = address_of(source.endpoint)
        with bench.link(source) as link:
            bench.open(link, offer.key)
            target = blank_like(tensors)
            reading = read_equal(link, range(6), bench.adopt(target), deadline=far())
            next(reading)
            for garbage in bench.garbage:
                seen = len(lines)
                with traced_memory() as growth_size_bytes:
                    _hung_up_on(bench, address, garbage)
                require(
                    growth_size_bytes() < GROWTH_SIZE_BYTES_MAX,
                    f"{garbage[:32]!r}... made the source allocate {growth_size_bytes()} bytes",
                )
                if len(garbage) > 8:
                    bench.until(partial(longer_than, lines, seen), lambda: "garbage left no line in the log")
            offer.mark_all_ready()
            require(sorted(reading) == [1, 2, 3, 4, 5], "a reader was disturbed by strangers")
            require_equal(target, tensors)


def check_impostor(bench: Bench) -> None:
    """Check an impostor at the endpoint: it sends nonsense or nothing, or hangs up."""
    with bench.source() as source:
        address = address_of(source.endpoint)
    for greeting in (*(g for g in GARBAGE if len(g) > 16), None, b""):
        with socket.socket(address.family, socket.SOCK_STREAM) as listener:
            listener.bind(address.fresh)
            listener.listen()
            listener.settimeout(bench.patience_s)
            endpoint = address.endpoint(listener.getsockname())
            with impostor(listener, greeting), contextlib.closing(bench.make()) as reader:
                deadline = time.monotonic() + NEAR_S
                bench.lost_by(
                    deadline,
                    partial(open_at, reader, endpoint, ShardKey(1, "checkpoint"), deadline),
                    f"talk to an impostor that says {greeting!r}",
                    (SourceLost, ProtocolError),
                )


def _hung_up_on(bench: Bench, address: Address, garbage: bytes) -> None:
    with socket.socket(address.family, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(bench.patience_s)
        stranger.connect(address.name)
        with contextlib.suppress(ConnectionError):  # hung up on before all was said
            stranger.sendall(garbage)
            if len(garbage) <= 8:
                stranger.shutdown(socket.SHUT_WR)  # what may be the beginning of something right
            try:
                while stranger.recv(4096):
                    pass
            except TimeoutError:
                raise ConformanceError(f"a stranger who sent {garbage[:32]!r} was not hung up on") from None
