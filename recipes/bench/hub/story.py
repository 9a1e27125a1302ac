"""What the workers of this benchmark say, whether on the wire or in a simulation: the same messages as `Client`'s."""

from __future__ import annotations

from tensorhub_plugins.core import Location, ShardKey
from tensorhub_plugins.core.protocol import messages as m

LAYOUT = "runtime:bench"
VERSION = 1
SIZE_BYTES = 1 << 30
WORKERS_PER_HOST = 8
HOSTS_PER_RACK = 16
TRAINERS_HOST = 1 << 20  # beyond those of the readers


def hello(replica: str, shard: int, shards: int, host: int) -> m.Hello:
    location = Location("dc", f"rack-{host // HOSTS_PER_RACK}", f"host-{host}")
    address = f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"
    return m.Hello("run", "actor", replica, shard, shards, location, {"tcp": f"tcp://{address}:1"})


def holding(shard: int, shards: int, complete: bool, origin: m.Origin) -> m.Holding:
    root = b"%016d" % shard
    return m.Holding(ShardKey(VERSION, LAYOUT, shard, shards), root, SIZE_BYTES, complete, origin)


def heartbeat_of(hub: bytes, asked: int, pending: tuple[int, ...] = (), checksum: int = 0) -> m.Heartbeat:
    """Return the heartbeat of a worker that reads nothing. asked: its requests so far. checksum: of what it holds; 0:
    that is changing."""
    return m.Heartbeat(hub, asked, pending, {}, checksum)


def checksum_of(shard: int, shards: int) -> int:
    """Return the checksum of a worker that holds this shard, whole."""
    return m.holdings_checksum([(ShardKey(VERSION, LAYOUT, shard, shards), True)])


class Readers:
    """Readers that wait for the version, read it and serve it on. span: their numbers, of all of them."""

    def __init__(self, span: range, shards: int) -> None:
        self.span, self.shards = span, shards
        count = len(span)
        self.step = [""] * count  # what it waits for
        self.beat_s = [0.0] * count  # between its heartbeats, as the hub wants it; 0: not welcome yet
        self.hub = b""
        self._sums = [checksum_of(shard, shards) for shard in range(shards)]

    def begin(self, index: int) -> m.Hello:
        """Return its first message."""
        worker = self.span[index]
        return hello(f"rollout-{worker // self.shards}", worker % self.shards, self.shards, worker // WORKERS_PER_HOST)

    def hear(self, index: int, message: m.HubMessage) -> m.ClientMessage | None:
        """Return its answer to the hub's message; None: it waits. Raise RuntimeError for what should not come."""
        shard = self.span[index] % self.shards
        match message:
            case m.Welcome():
                self.hub, self.beat_s[index], self.step[index] = message.hub, message.heartbeat_s, "visible"
                return m.Wait(1, 0, 0, 3600.0)
            case m.Visible():
                self.step[index] = "granted"
                return m.Acquire(2, VERSION, 0, (LAYOUT,), 3600.0, serve=True)
            case m.Granted():
                self.step[index] = "arriving"
                return m.Publish(3, holding(shard, self.shards, False, "replicated"))
            case m.Done(3):
                self.step[index] = "complete"
                return m.Publish(4, holding(shard, self.shards, True, "replicated"))
            case m.Done(4):
                self.step[index] = "done"
                return m.Release(2, shard)
            case m.Alive():
                self.beat_s[index] = message.heartbeat_s or self.beat_s[index]
                return None
            case m.Unknown():
                raise RuntimeError("the hub says Unknown")
            case m.Refused():
                raise RuntimeError(f"refused: {message.message}")
            case _:
                return None

    def heartbeat(self, index: int) -> m.Heartbeat | None:
        """Return its heartbeat; None while what it holds is changing: an honest one would need all of Session here."""
        step = self.step[index]
        if step in ("arriving", "complete"):
            return None
        if step == "done":
            return heartbeat_of(self.hub, 4, checksum=self._sums[self.span[index] % self.shards])
        asked = {"visible": 1, "granted": 2}.get(step, 0)
        return heartbeat_of(self.hub, asked, (asked,) * bool(asked), m.holdings_checksum([]))
