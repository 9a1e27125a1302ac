"""What the tests of several transports share: a served slab, forged requests, waits."""

import contextlib
import time

import msgspec
import torch
from transport_suite import SimpleShelf
from transport_suite.material import read_equal

from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.transports.stream import messages
from tensorhub_plugins.core.transports.stream.messages import (
    CONTROL,
    HEADER,
    HELLO,
    MAGIC,
    PROTOCOL,
    StreamOpen,
    StreamRead,
)
from tensorhub_plugins.core.types import ShardKey

KEY = ShardKey(1, "checkpoint")


def frame(message, kind=CONTROL, length=None):
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(kind, 0, 0, len(body) if length is None else length) + body


GREETING = HELLO.pack(MAGIC, PROTOCOL, 0, b"")
# Messages of a peer that knows the protocol's beginning. Each must cost the source next to nothing.
FORGED = (
    HELLO.pack(MAGIC, PROTOCOL + 1, 0, b""),  # another version
    GREETING + HEADER.pack(CONTROL, 0, 0, 1 << 63) + b"x",  # a huge length
    GREETING + HEADER.pack(CONTROL, 0, 0, messages.REQUEST_SIZE_BYTES_MAX + 1) + b"x",
    GREETING + HEADER.pack(77, 0, 0, 0),  # a kind that is none
    GREETING + frame(["Shutdown", 1]),  # a type that is none
    GREETING + frame(["StreamOpen", "a", "b"]),  # wrong types of fields
    GREETING + HEADER.pack(CONTROL, 0, 0, 5) + b"\xdd\xff\xff\xff\xff",  # an array of four billion elements
    GREETING + frame(StreamRead([(0, 1)], 1.0)),  # reading before anything is open
    GREETING + frame(StreamOpen(KEY, 1)) + frame(StreamRead([(0, 1 << 40)], 1.0)),  # segments that are not there
    GREETING + frame(StreamOpen(KEY, 1)) + frame(StreamRead([(3, 3)], 1.0)),
)


@contextlib.contextmanager
def served(transport, tensors=None, *, segment_size_bytes=1000, kind="allocated"):
    tensors = {"a": torch.arange(8000, dtype=torch.int16)} if tensors is None else tensors
    if kind == "allocated":
        slab = Slab.allocate(spec_of(name, tensor) for name, tensor in tensors.items())
        for name, tensor in tensors.items():
            slab.write(name, tensor)
    else:
        slab = Slab.adopt(tensors)
    offer = Offer(KEY, slab.manifest(segment_size_bytes), slab)
    offer.mark_all_ready()
    with slab, contextlib.ExitStack() as ends:
        ends.callback(offer.withdraw)
        ends.enter_context(contextlib.closing(transport))
        yield offer, transport.serve(SimpleShelf(offer))


def soon(seconds=60.0):
    return time.monotonic() + seconds


def read_all(reader, endpoint):
    """Read through a link of its own; return the tensor "a" as it was read."""
    link = reader.connect(endpoint, deadline=soon())
    manifest = link.open(KEY, 1, deadline=soon())
    target = Slab.allocate(manifest.tensors)
    segments = range(manifest.segment_count)
    for segment in read_equal(link, segments, target, deadline=soon()):
        assert link.digest(segment) == manifest.digest(segment)
    link.close()
    return target.tensors()["a"]


def until(condition):
    patience = soon()
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.001)
