"""The messages in which the two ends exchange their queue pairs and their memory, after StreamOpened."""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from tensorhub_plugins.core.transports.rdma.rails import RAILS_MAX, Region
from tensorhub_plugins.core.transports.rdma.verbs import Endpoint

RING_SLOTS = 4  # one is filled while others are on the wire
DIAL_SIZE_BYTES_MAX = 1 << 16
SLOT = struct.Struct("<B")


class Rails(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The data that a reader needs to connect: the ports of the source, and the memory to read."""

    link_layers: Annotated[list[str], msgspec.Meta(max_length=64)]  # of the source's ports
    memory: Annotated[list[Region], msgspec.Meta(max_length=1 << 21)]
    is_ring: bool = False  # memory is a ring of RING_SLOTS segments for the stream, not the stream itself


class Dial(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The reader's ends of its queue pairs."""

    rails: Annotated[list[tuple[int, Endpoint]], msgspec.Meta(max_length=RAILS_MAX)]  # (the source's port, our end)


class Dialed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The source's ends of them, in the same order. problem: why there are none."""

    rails: Annotated[list[Endpoint], msgspec.Meta(max_length=RAILS_MAX)]
    problem: str = ""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A report that the reader has copied this slot of the ring."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=RING_SLOTS)]  # may be filled again


# Made here and not by decode(type=...): two threads that do so for the first time at once crash msgspec 0.21.
rails_decoder = msgspec.msgpack.Decoder[Rails](Rails)
dial_decoder = msgspec.msgpack.Decoder[Dial](Dial)
dialed_decoder = msgspec.msgpack.Decoder[Dialed](Dialed)
taken_decoder = msgspec.msgpack.Decoder[Taken](Taken)
