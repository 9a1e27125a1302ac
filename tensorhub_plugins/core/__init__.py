"""The reference-oriented store: publish a version of a model's weights, replicate it from whoever holds it.

`Client` is a worker's way in, `start_server` or `tensorhub server` the hub. Importing this needs torch and ZeroMQ,
and no framework.
"""

from tensorhub_plugins.core.client import (
    Client,
    Fetched,
    PublishReport,
    ReplicateReport,
    UnpublishReport,
    here,
)
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
)
from tensorhub_plugins.core.server import Server, start_server
from tensorhub_plugins.core.slab import Slab, spec_of
from tensorhub_plugins.core.transports import DEFAULT_TRANSPORTS
from tensorhub_plugins.core.values import (
    CHECKPOINT,
    LATEST,
    Location,
    Manifest,
    Part,
    ShardKey,
    TensorSpec,
    VersionInfo,
)

__all__ = [
    "CHECKPOINT",
    "DEFAULT_TRANSPORTS",
    "LATEST",
    "Client",
    "CorruptBytes",
    "DeadlineExceeded",
    "Fetched",
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
    "UnpublishReport",
    "UsageError",
    "VersionGone",
    "VersionInfo",
    "here",
    "spec_of",
    "start_server",
]
