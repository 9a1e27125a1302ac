"""What the source says of its memory, after StreamOpened; the end of a pipe follows that only the source keeps open."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensorhub_plugins.core.transports.cuda_ipc.driver import Allocation
from tensorhub_plugins.core.transports.stream.messages import Text

ALLOCATIONS_MAX = 1 << 16  # torch makes one of 20 MB for small tensors, and one for each large one
EXTENT_WORDS = 3  # which allocation, offset there, size; 8 bytes each


class SourceMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where the source's stream lies."""

    process: Text
    runs: Annotated[bytes, msgspec.Meta(max_length=16)]  # the same while it lies where it lies, and then of no other
    device_id: Text
    allocations: Annotated[list[Allocation], msgspec.Meta(max_length=ALLOCATIONS_MAX)]
    extents: bytes  # uint64[n, 3], in the stream's order


# Made here and not by decode(type=...): two threads that do so for the first time at once crash msgspec 0.21.
memory_decoder = msgspec.msgpack.Decoder[SourceMemory](SourceMemory)
