"""The reference-oriented store: publish a version of a model's weights, replicate it from whoever holds it.

`Client` is a worker's way in, `start_server` or `tensorhub server` the hub. Importing this needs ZeroMQ and no
framework; torch comes with the first name that needs it, so that the hub, which never sees a tensor, does without.

Adapters and recipes import from here, and from `options`, `log` and `run_log`; all other modules may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import (
    CorruptBytes,
    DeadlineExceeded,
    HubUnreachable,
    NotPublished,
    ProtocolError,
    SourceLost,
    TensorHubError,
    UsageError,
    VersionGone,
    VersionRefused,
)
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.server import Server, start_server
from tensorhub_plugins.core.manifest import (
    Manifest,
    Part,
    TensorSpec,
    TensorTable,
)
from tensorhub_plugins.core.protocol.messages import REFUSED_MAX
from tensorhub_plugins.core.run_log import record
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transports import DEFAULT_TRANSPORTS, TransportLimits
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    LATEST,
    Location,
    ShardKey,
    VersionInfo,
)

if TYPE_CHECKING:
    from tensorhub_plugins.core.client.client import Client, here
    from tensorhub_plugins.core.client.publisher import Publisher
    from tensorhub_plugins.core.client.reports import Fetched, PublishReport, ReplicateReport, UnpublishReport
    from tensorhub_plugins.core.memory.slab import Slab
    from tensorhub_plugins.core.memory.tensors import (
        contiguous_spec,
        flat_bytes,
        in_memory_order,
        same_bytes,
        spec_of,
        without_aliases,
    )

_WITH_TORCH = {
    **dict.fromkeys(("Client", "here"), "client.client"),
    **dict.fromkeys(("Fetched", "PublishReport", "ReplicateReport", "UnpublishReport"), "client.reports"),
    "Slab": "memory.slab",
    "Publisher": "client.publisher",
    **dict.fromkeys(("contiguous_spec", "flat_bytes", "in_memory_order"), "memory.tensors"),
    **dict.fromkeys(("same_bytes", "spec_of", "without_aliases"), "memory.tensors"),
}

__all__ = [
    "CHECKPOINT",
    "DEFAULT_TRANSPORTS",
    "LATEST",
    "REFUSED_MAX",
    "Client",
    "CorruptBytes",
    "Deadline",
    "DeadlineExceeded",
    "Fetched",
    "HubLimits",
    "HubUnreachable",
    "Location",
    "Manifest",
    "NotPublished",
    "Part",
    "ProtocolError",
    "PublishReport",
    "Publisher",
    "ReplicateReport",
    "Server",
    "ShardKey",
    "Slab",
    "SourceLost",
    "TensorHubError",
    "TensorSpec",
    "TensorTable",
    "TransferLimits",
    "TransportLimits",
    "UnpublishReport",
    "UsageError",
    "VersionGone",
    "VersionInfo",
    "VersionRefused",
    "contiguous_spec",
    "flat_bytes",
    "here",
    "in_memory_order",
    "record",
    "same_bytes",
    "spec_of",
    "start_server",
    "without_aliases",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
