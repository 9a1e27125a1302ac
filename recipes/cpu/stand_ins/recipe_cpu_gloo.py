"""verl's nccl checkpoint engine, on gloo: what "the stock path" means on a machine without a GPU.

verl 0.9.1 ships nccl, nixl, mooncake, kimi and hccl engines; none can be imported without cupy or a device library.
This one does what the nccl engine does, in the same order: trainer rank 0 fills a bucket while the one before is
broadcast to all rollout workers, two buckets a side, every worker in lock-step, the group kept from one update to
the next. verl's own manager and everything behind receive_weights are unchanged.

    rollout.checkpoint_engine.backend=gloo rollout.checkpoint_engine.custom_backend_module=recipe_cpu_gloo
"""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, TensorMeta
from verl.checkpoint_engine.base import merge_weight_chunks, split_weight_chunks

TIMEOUT = timedelta(seconds=300)
HEADER_SIZE_BYTES = 64 << 10  # names and shapes of one bucket as JSON: several hundred tensors


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.group: ProcessGroupGloo | None = None
        self.rank, self.world_size = -1, 0
        self.store, self.host = None, None  # a host: this worker is trainer rank 0
        if is_master:
            self.host = ray.util.get_node_ip_address().strip("[]")
            self.store = TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

    def prepare(self):
        self.buckets = [torch.empty(self.bucket_size, dtype=torch.uint8) for _ in range(2)]
        return (self.host, self.store.port) if self.host is not None else None

    @classmethod
    def build_topology(cls, trainer_count: int, rollout_count: int, metadata: list):
        world_size = 1 + rollout_count
        trainer = {
            "rank": [0] + [-1] * (trainer_count - 1),
            "world_size": [world_size] * trainer_count,
            "master": [metadata[0]] * trainer_count,
        }
        rollout = {
            "rank": list(range(1, world_size)),
            "world_size": [world_size] * rollout_count,
            "master": [metadata[0]] * rollout_count,
        }
        return trainer, rollout

    def init_process_group(self, rank: int, world_size: int, master: tuple[str, int]) -> None:
        if rank < 0 or (self.group is not None and (rank, world_size) == (self.rank, self.world_size)):
            return
        if self.store is None:
            self.store = TCPStore(*master, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        self.rank, self.world_size = rank, world_size
        self.group = ProcessGroupGloo(PrefixStore(f"recipe/{world_size}", self.store), rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        self.buckets = []

    async def send_weights(self, weights, global_steps=None):
        if self.rank < 0:
            for _ in weights:  # producing a weight is a collective of the trainer ranks
                pass
            return
        filling, metas, offset, sending = 0, [], 0, None
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            if offset + meta.chunk_size > self.bucket_size:
                if sending is not None:
                    await sending
                sending = self._in_thread(self._send, self.buckets[filling], metas, offset, False)
                filling, metas, offset = 1 - filling, [], 0
            self.buckets[filling][offset : offset + meta.chunk_size].copy_(chunk)
            meta.offset = offset
            metas.append(meta)
            offset += meta.chunk_size
        if sending is not None:
            await sending
        await self._in_thread(self._send, self.buckets[filling], metas, offset, True)

    async def receive_weights(self, global_steps=None):
        async for name, weight in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield name, weight

    async def _chunks(self):
        filled = 0
        metas, last = await self._in_thread(self._receive, self.buckets[filled])
        while True:
            coming = None if last else self._in_thread(self._receive, self.buckets[1 - filled])
            for meta in metas:
                yield meta, self.buckets[filled][meta.offset : meta.offset + meta.chunk_size]
            if coming is None:
                return
            filled = 1 - filled
            metas, last = await coming

    @staticmethod
    def _in_thread(function, *args):
        return asyncio.get_running_loop().run_in_executor(None, function, *args)

    def _send(self, bucket: torch.Tensor, metas: list[TensorMeta], length: int, last: bool) -> None:
        tensors = [
            (m.name, list(m.shape), str(m.dtype).removeprefix("torch."), m.chunk_offset, m.chunk_size, m.offset)
            for m in metas
        ]
        data = json.dumps({"length": length, "last": last, "tensors": tensors}).encode()
        if len(data) > HEADER_SIZE_BYTES:
            raise ValueError(f"the bucket's header of {len(data)} bytes is over {HEADER_SIZE_BYTES}")
        header = torch.full((HEADER_SIZE_BYTES,), ord(" "), dtype=torch.uint8)
        header[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.group.broadcast(header, root=0).wait()
        self.group.broadcast(bucket[:length], root=0).wait()

    def _receive(self, bucket: torch.Tensor) -> tuple[list[TensorMeta], bool]:
        header = torch.empty(HEADER_SIZE_BYTES, dtype=torch.uint8)
        self.group.broadcast(header, root=0).wait()
        fields = json.loads(header.numpy().tobytes())
        self.group.broadcast(bucket[: fields["length"]], root=0).wait()
        metas = [
            TensorMeta(
                name=name,
                shape=torch.Size(shape),
                dtype=getattr(torch, dtype),
                chunk_offset=chunk_offset,
                chunk_size=chunk_size,
                offset=offset,
            )
            for name, shape, dtype, chunk_offset, chunk_size, offset in fields["tensors"]
        ]
        return metas, fields["last"]
