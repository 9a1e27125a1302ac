"""The types of the fields of messages, each with its bound: msgspec checks them while it decodes. PURE."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensorhub_plugins.core.types import DOMAINS_MAX, PRINTABLE, SHARDS_MAX

COUNT_MAX = 1 << 48  # of bytes, of versions
SERIAL_MAX = 1 << 32  # of directives: far more than a run ever gets
SECONDS_MAX = 31_536_000.0  # a year: no request needs to wait longer
TEXT_LENGTH_MAX = 4096  # characters

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=PRINTABLE)]
Word = Annotated[str, msgspec.Meta(max_length=256, pattern=PRINTABLE)]  # may be empty
Text = Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH_MAX)]
WorkerName = Annotated[str, msgspec.Meta(min_length=1, max_length=256 + 6, pattern=PRINTABLE)]  # replica/shard
LeaseName = Annotated[str, msgspec.Meta(max_length=64, pattern=PRINTABLE)]  # a source passes on what readers show it
Session = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # an incarnation of a worker, by its public name
HubLife = Annotated[bytes, msgspec.Meta(max_length=16)]  # an incarnation of the hub; b"": none is known
Root = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Shards = Annotated[tuple[Count, ...], msgspec.Meta(max_length=SHARDS_MAX)]
Layouts = Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=8)]
Sessions = Annotated[tuple[Session, ...], msgspec.Meta(max_length=1024)]
Requests = Annotated[tuple[Count, ...], msgspec.Meta(max_length=1024)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
Scheme = Annotated[str, msgspec.Meta(min_length=1, max_length=32, pattern=PRINTABLE)]
Endpoints = Annotated[dict[Scheme, Word], msgspec.Meta(max_length=8)]  # of one worker: one for each transport
Shard = Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]
ShardCount = Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]
Domains = Annotated[int, msgspec.Meta(ge=1, le=DOMAINS_MAX)]
Processes = Annotated[tuple[Word, ...], msgspec.Meta(max_length=1024)]
Number = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]  # of a version
Serial = Annotated[int, msgspec.Meta(ge=0, le=SERIAL_MAX)]
