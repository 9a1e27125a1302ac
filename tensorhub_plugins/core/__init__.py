"""The reference-oriented store: publish a version of a model's weights, replicate it from any worker that holds it.

`Client` is a worker's interface, `start_server` or `tensorhub server` the hub. Importing this needs ZeroMQ and no
framework; torch, and the hub, which does without, are imported with the first name that needs them.

Adapters and recipes import from here, and from `options`, `log`, `run_log` and `work`; all other modules may change.
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
    Superseded,
    TensorHubError,
    UsageError,
    VersionGone,
    VersionRefused,
)
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.manifest import Manifest, Part, TensorSpec, TensorTable, segment_size_for
from tensorhub_plugins.core.memory.moves import check_cover, common_box
from tensorhub_plugins.core.memory.slices import slices_of
from tensorhub_plugins.core.protocol.address import connected
from tensorhub_plugins.core.protocol.advertised import ports_of, with_faster
from tensorhub_plugins.core.protocol.messages import REFUSED_MAX
from tensorhub_plugins.core.run_log import record
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.security.secret import SECRET_VARIABLE
from tensorhub_plugins.core.security.secret import from_environment as keys_from_environment
from tensorhub_plugins.core.security.secret import generate as new_secret
from tensorhub_plugins.core.security.secret import write as write_secret
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transfer.report import ReplicateReport
from tensorhub_plugins.core.transports import DEFAULT_TRANSPORTS, TransportLimits
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    LATEST,
    Location,
    ShardKey,
    VersionInfo,
    attempt_of,
    parse_version,
    step_of,
    steps_behind,
    version_label,
    version_of,
    version_text,
)

if TYPE_CHECKING:
    from tensorhub_plugins.core.client.arguments import PREEMPTIBLE_VARIABLE, here
    from tensorhub_plugins.core.client.client import Client
    from tensorhub_plugins.core.client.fsdp1 import fsdp1_parts, fsdp1_problem, is_fsdp1
    from tensorhub_plugins.core.client.fsdp2 import fsdp2_parts, fsdp2_problem
    from tensorhub_plugins.core.client.parts import AllHeld, Held, Turns, held_run, held_split, of_all_ranks
    from tensorhub_plugins.core.client.publisher import Publisher
    from tensorhub_plugins.core.client.recovery import Recovery
    from tensorhub_plugins.core.client.reports import Fetched, PublishReport, UnpublishReport
    from tensorhub_plugins.core.device.devices import on_host, settle_host, synchronize
    from tensorhub_plugins.core.device.drivers import release_cached_memory
    from tensorhub_plugins.core.device.graph_capture import gate
    from tensorhub_plugins.core.hub.limits import HubLimits
    from tensorhub_plugins.core.hub.server import Server, start_server
    from tensorhub_plugins.core.memory.adoption import forget_live_memory
    from tensorhub_plugins.core.memory.slab import Slab
    from tensorhub_plugins.core.memory.staging import copy_all
    from tensorhub_plugins.core.memory.tensors import (
        contiguous_spec,
        flat_bytes,
        in_memory_order,
        same_bytes,
        spec_of,
        without_aliases,
    )

_LATER = {
    **dict.fromkeys(("HubLimits", "Server", "start_server"), "hub.server"),
    "Client": "client.client",
    **dict.fromkeys(("PREEMPTIBLE_VARIABLE", "here"), "client.arguments"),
    **dict.fromkeys(("Fetched", "PublishReport", "UnpublishReport"), "client.reports"),
    "Slab": "memory.slab",
    "forget_live_memory": "memory.adoption",
    **dict.fromkeys(("on_host", "settle_host", "synchronize"), "device.devices"),
    "copy_all": "memory.staging",
    "release_cached_memory": "device.drivers",
    "gate": "device.graph_capture",
    "Publisher": "client.publisher",
    "Recovery": "client.recovery",
    **dict.fromkeys(("AllHeld", "Held", "Turns", "held_run", "held_split", "of_all_ranks"), "client.parts"),
    **dict.fromkeys(("fsdp1_parts", "fsdp1_problem", "is_fsdp1"), "client.fsdp1"),
    **dict.fromkeys(("fsdp2_parts", "fsdp2_problem"), "client.fsdp2"),
    **dict.fromkeys(("contiguous_spec", "flat_bytes", "in_memory_order"), "memory.tensors"),
    **dict.fromkeys(("same_bytes", "spec_of", "without_aliases"), "memory.tensors"),
}

__all__ = [
    "CHECKPOINT",
    "DEFAULT_TRANSPORTS",
    "LATEST",
    "PREEMPTIBLE_VARIABLE",
    "REFUSED_MAX",
    "SECRET_VARIABLE",
    "AllHeld",
    "Client",
    "CorruptBytes",
    "Deadline",
    "DeadlineExceeded",
    "Fetched",
    "Held",
    "HubLimits",
    "HubUnreachable",
    "Keys",
    "Location",
    "Manifest",
    "NotPublished",
    "Part",
    "ProtocolError",
    "PublishReport",
    "Publisher",
    "Recovery",
    "ReplicateReport",
    "Server",
    "ShardKey",
    "Slab",
    "SourceLost",
    "Superseded",
    "TensorHubError",
    "TensorSpec",
    "TensorTable",
    "TransferLimits",
    "TransportLimits",
    "Turns",
    "UnpublishReport",
    "UsageError",
    "VersionGone",
    "VersionInfo",
    "VersionRefused",
    "attempt_of",
    "check_cover",
    "common_box",
    "connected",
    "contiguous_spec",
    "copy_all",
    "cores",
    "flat_bytes",
    "forget_live_memory",
    "fsdp1_parts",
    "fsdp1_problem",
    "fsdp2_parts",
    "fsdp2_problem",
    "gate",
    "held_run",
    "held_split",
    "here",
    "in_memory_order",
    "is_fsdp1",
    "keys_from_environment",
    "new_secret",
    "of_all_ranks",
    "on_host",
    "parse_version",
    "ports_of",
    "record",
    "release_cached_memory",
    "same_bytes",
    "segment_size_for",
    "settle_host",
    "slices_of",
    "spec_of",
    "start_server",
    "step_of",
    "steps_behind",
    "synchronize",
    "version_label",
    "version_of",
    "version_text",
    "with_faster",
    "without_aliases",
    "write_secret",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
