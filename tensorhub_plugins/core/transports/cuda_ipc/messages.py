"""The source's description of its memory, sent after StreamOpened and followed by its liveness pipe's end."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensorhub_plugins.core.transports.cuda_ipc.driver import Allocation
from tensorhub_plugins.core.transports.stream.messages import Text

ALLOCATIONS_MAX = 1 << 16  # torch makes one of 20 MB for small tensors, and one for each large one
EXTENT_WORDS = 3  # number of the allocation, offset in it, size; 8 bytes each


class SourceMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The location of the source's stream."""

    process: Text
    runs: Annotated[bytes, msgspec.Meta(max_length=16)]  # names this memory while it stays there; never reused
    device_id: Text
    allocations: Annotated[list[Allocation], msgspec.Meta(max_length=ALLOCATIONS_MAX)]
    extents: bytes  # uint64[n, 3], in the stream's order


# Made here and not by decode(type=...): two threads that do so for the first time at once crash msgspec 0.21.
memory_decoder = msgspec.msgpack.Decoder[SourceMemory](SourceMemory)
