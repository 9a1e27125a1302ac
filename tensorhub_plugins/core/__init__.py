"""The reference-oriented store: publish a version of a model's weights, replicate it from whoever holds it.

`Client` is a worker's way in, `start_server` or `tensorhub server` the hub. Importing this needs ZeroMQ and no
framework; torch comes with the first name that needs it, so that the hub, which never sees a tensor, does without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from tensorhub_plugins.core.transports import DEFAULT_TRANSPORTS
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    LATEST,
    Location,
    ShardKey,
    VersionInfo,
)

if TYPE_CHECKING:
    from tensorhub_plugins.core.client.client import (
        Client,
        Fetched,
        PublishReport,
        ReplicateReport,
        UnpublishReport,
        here,
    )
    from tensorhub_plugins.core.memory.slab import Slab
    from tensorhub_plugins.core.memory.tensors import spec_of

_WITH_TORCH = {
    **dict.fromkeys(("Client", "Fetched", "PublishReport", "ReplicateReport"), "client.client"),
    **dict.fromkeys(("UnpublishReport", "here"), "client.client"),
    "Slab": "memory.slab",
    "spec_of": "memory.tensors",
}

__all__ = [
    "CHECKPOINT",
    "DEFAULT_TRANSPORTS",
    "LATEST",
    "Client",
    "CorruptBytes",
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
    "ReplicateReport",
    "Server",
    "ShardKey",
    "Slab",
    "SourceLost",
    "TensorHubError",
    "TensorSpec",
    "TensorTable",
    "UnpublishReport",
    "UsageError",
    "VersionGone",
    "VersionInfo",
    "VersionRefused",
    "here",
    "spec_of",
    "start_server",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
