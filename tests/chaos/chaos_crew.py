"""The processes of a chaos run: a hub, ranks of a trainer, rollouts, a liar and a stranger, each in a namespace.

Each writes every call that it makes into a file, one line before and one after: what a killed process had begun is
known as well. What is published under a step is a function of the step and of the trainer's life, so that every byte
that is handed over can be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from chaos_checks import Call

from recipes.bench import network
from tensorhub_plugins.core import Client, Location, Part, TensorHubError, start_server, step_of, version_of
from tensorhub_plugins.core.security.keys import Keys

RUN = {"run": "chaos", "model": "actor"}
RANKS = 2
LAYERS = 6  # of one rank
LAYER_SIZE_BYTES = 1 << 20
ROWS, COLUMNS = 1024, 1024  # of the tensor that the ranks hold in parts
KEPT = 2  # versions of every worker
PUBLISH_S, WAIT_S, READ_S, UNPUBLISH_S, ASK_S, CONNECT_S, BEGIN_S = 20.0, 3.0, 12.0, 4.0, 3.0, 10.0, 15.0
LATE_S = 1.5


@dataclass(frozen=True)
class Post:
    """Where one process works, and as whom."""

    who: str
    life: int
    seed: int
    namespace: str
    location: Location
    address: str  # of its host
    hub: str
    folder: str
    secret: str  # of the run; empty for a stranger
    verify: bool = True


def weights_of(life: int, step: int) -> dict[str, torch.Tensor]:
    """All that the trainer publishes there: about 13 MB."""
    rng = numpy.random.default_rng([life, step])
    named: dict[str, torch.Tensor] = {}
    for index in range(RANKS * LAYERS):
        noise = torch.from_numpy(rng.integers(0, 256, LAYER_SIZE_BYTES, dtype=numpy.uint8))
        named[f"layer{index:02}"] = noise.view(torch.bfloat16) if index % 2 else noise
    named["embed"] = torch.from_numpy(rng.integers(0, 256, ROWS * COLUMNS, dtype=numpy.uint8)).view(ROWS, COLUMNS)
    return named


def part_of(rank: int, whole: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
    """A rank's layers, and its rows of the tensor that all have a part of."""
    mine = {f"layer{index:02}": whole[f"layer{index:02}"] for index in range(rank * LAYERS, (rank + 1) * LAYERS)}
    start = rank * ROWS // RANKS
    mine["embed"] = whole["embed"][start : start + ROWS // RANKS].clone()
    return mine, {"embed": Part((ROWS, COLUMNS), (start, 0))}


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    digester = xxhash.xxh3_128()
    for name in sorted(tensors):
        digester.update(name.encode())
        digester.update(memoryview(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digester.hexdigest()


def waits_ns() -> dict[str, int]:
    """By thread of this process: how long it was ready to run while no core was free."""
    waits = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            waits[task] = int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return waits


def starved_s(before: dict[str, int]) -> float:
    """How long its threads have waited since, together; those that have ended meanwhile are not known."""
    return sum(max(0, wait - before.get(task, 0)) for task, wait in waits_ns().items()) / 1e9


class Diary:
    """Writes down what is called, in a file that survives the process."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._file = os.open(_diary(post.folder, post.who, post.life), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._calls = 0
        self._late_at = float("inf")  # the call that is being made
        threading.Thread(target=self._watch, daemon=True).start()

    def call(
        self,
        name: str,
        timeout_s: float,
        do: Callable[[], Any],
        *,
        asked: int = 0,
        attempt: int = 0,
        read: Callable[[Any], Any] | None = None,
    ) -> Any:
        """What `do` returns; None after one of the store's own errors. read: (version, digest) of what it returned.

        asked: the version that is to be published or begun. attempt: the newest that this process has heard of."""
        self._calls += 1
        number, waits = self._calls, waits_ns()
        post = self._post
        call = Call(post.who, post.life, name, time.monotonic(), timeout_s, asked=asked, attempt=attempt)
        self._write(number, asdict(call))
        answer, error = None, None
        self._late_at = call.began + timeout_s + LATE_S
        try:
            answer = do()
        except TensorHubError as failed:
            error = failed
        ended = time.monotonic()
        self._late_at = float("inf")
        after: dict[str, Any] = {"ended": ended, "starved_s": starved_s(waits)}
        if error is not None:
            after |= {"error": type(error).__name__, "text": str(error)[:300]}
        elif read is not None:
            after["version"], after["digest"] = read(answer)
        self._write(number, after)
        return answer

    def _watch(self) -> None:
        """Where each thread is when a call is late, into the log."""
        while True:
            time.sleep(0.2)
            if time.monotonic() > self._late_at:
                self._late_at = float("inf")
                for thread, frame in sys._current_frames().items():
                    print(f"LATE, thread {thread}:\n", *traceback.format_stack(frame)[-5:], flush=True)

    def _write(self, number: int, fields: dict[str, Any]) -> None:
        os.write(self._file, json.dumps([number, fields]).encode() + b"\n")


def read_diaries(folder: str) -> list[Call]:
    """All calls of all processes, in the order in which each made them."""
    calls = []
    for path in sorted(Path(folder).glob("*.diary")):
        merged: dict[int, dict[str, Any]] = {}
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the last line of one that was killed while it wrote
                number, fields = json.loads(line)
                merged.setdefault(number, {}).update(fields)
        calls += [Call(**fields) for fields in merged.values() if "who" in fields]
    return calls


def _diary(folder: str, who: str, life: int) -> str:
    return str(Path(folder) / f"{who.replace('/', '.')}-{life}.diary")


def serve(pipe: Connection, kind: type, post: Post) -> None:
    """A process: `kind(post)`, whose methods the pipe calls one after the other. What it prints goes to a file."""
    log = os.open(str(Path(post.folder) / f"{post.who.replace('/', '.')}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    network.enter(post.namespace)
    torch.set_num_threads(1)
    subject = kind(post)
    pipe.send(None)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(getattr(subject, method)(*arguments))
        except Exception:
            sys.excepthook(*sys.exc_info())  # a traceback in the log
            pipe.send(None)


def _client(diary: Diary, post: Post) -> Client | None:
    replica, _, shard = post.who.partition("/")
    where = {"location": post.location, "advertise_host": post.address, "connect_timeout_s": CONNECT_S}
    given = {**RUN, **where, "replica": replica, "verify": post.verify}
    given |= {"keys": Keys.parse(post.secret), "job": "chaos"}  # one that is started again has its name at once
    if shard:
        given |= {"shard": int(shard), "shard_count": RANKS}
    client: Client | None = diary.call("connect", CONNECT_S, lambda: Client(post.hub, **given))
    return client


class Hub:
    def __init__(self, post: Post) -> None:
        self._server = start_server(post.hub, keys=Keys.parse(post.secret))

    def memory_bytes(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Rank:
    """A trainer's. It overwrites what it had published as soon as it may, as the next step of an optimizer does."""

    def __init__(self, post: Post) -> None:
        self._post, self._rng, self._diary = post, random.Random(post.seed), Diary(post)
        self._rank = int(post.who.partition("/")[2])
        self._published: deque[tuple[int, dict[str, torch.Tensor], bool]] = deque()
        self._client: Client | None = None
        self._newest = 0

    def begin(self, step: int, word: str) -> int:
        """The attempt that both ranks begin, with this word; -1: it could not be begun."""
        client = self._connected()
        if client is None:
            return -1
        attempt = self._diary.call(
            "begin",
            BEGIN_S,
            lambda: client.begin(step, launch_id=word, timeout_s=BEGIN_S),
            asked=step,
            read=lambda attempt: (version_of(attempt, step), ""),
        )
        return -1 if attempt is None else int(attempt)

    def publish(self, version: int) -> int:
        """The version that it is called; 0: it could not be published."""
        self._newest = version
        client = self._connected()
        if client is None:
            return 0
        if len(self._published) == 0:
            self._diary.call("retain", ASK_S, lambda: client.retain(KEPT, timeout_s=ASK_S))
        while len(self._published) >= KEPT:
            self._take_back(client)
        mine, parts = part_of(self._rank, weights_of(self._post.life, step_of(version)))
        adopts = self._rng.random() < 0.5
        report = self._diary.call(
            "publish",
            PUBLISH_S,
            lambda: client.publish(version, mine, copy=not adopts, parts=parts, timeout_s=PUBLISH_S),
            asked=version,
            read=lambda report: (report.version, digest_of(mine)),
        )
        if report is None:
            return 0
        self._published.append((report.version, mine, adopts))
        return int(report.version)

    def go_on(self) -> int:
        """Publish the next step, as one that does not know that another life has begun."""
        return self.publish(self._newest + 1) if self._newest else 0  # it had begun nothing

    def _connected(self) -> Client | None:
        self._client = self._client or _client(self._diary, self._post)
        return self._client

    def flip(self) -> None:
        """A bit of the newest version's memory, where it is ours."""
        if self._published and self._published[-1][2]:
            _flip(self._rng, self._published[-1][1])

    def _take_back(self, client: Client) -> None:
        version, tensors, _ = self._published.popleft()
        report = self._diary.call("unpublish", UNPUBLISH_S, lambda: client.unpublish(version, timeout_s=UNPUBLISH_S))
        if report is not None:
            _trash(tensors)


class Rollout:
    """Follows the newest version for ever, in one of two ways, and serves what it has."""

    def __init__(self, post: Post) -> None:
        self._post, self._rng, self._diary = post, random.Random(post.seed), Diary(post)
        self._lock = threading.Lock()
        self._held: deque[tuple[int, dict[str, torch.Tensor], Any]] = deque()  # ours to read as long as we serve it
        self._buffers = [{name: torch.zeros_like(t) for name, t in weights_of(0, 0).items()} for _ in range(KEPT + 1)]
        self._version = 0
        self._finish = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def version(self) -> int:
        return self._version

    def flip(self) -> None:
        with self._lock:
            if self._held:
                _flip(self._rng, self._held[-1][1])

    def _follow(self) -> None:
        client = None
        while (client := _client(self._diary, self._post)) is None:
            pass
        while True:
            self._step(client)

    def _step(self, client: Client) -> None:
        known = self._version
        found = self._diary.call(
            "wait",
            WAIT_S,
            lambda: client.wait(newer_than=known, timeout_s=WAIT_S),
            attempt=client.attempt,
            read=lambda version: (version, ""),
        )
        if found is None:
            return
        while len(self._held) >= KEPT:
            self._let_go(client)
        if self._rng.random() < 0.6:
            self._read_in_place(client)
        else:
            self._read_aside(client)
        if self._rng.random() < 0.1:
            self._diary.call("versions", ASK_S, lambda: client.versions(timeout_s=ASK_S))

    def _read_in_place(self, client: Client) -> None:
        buffer = self._buffers.pop()
        report = self._diary.call(
            "replicate",
            READ_S,
            lambda: client.replicate(buffer, timeout_s=READ_S),
            attempt=client.attempt,
            read=lambda report: (report.version, digest_of(buffer)),
        )
        if report is None:
            self._buffers.append(buffer)
        else:
            self._have(report.version, buffer, None)

    def _read_aside(self, client: Client) -> None:
        fetched = self._diary.call(
            "fetch",
            READ_S,
            lambda: client.fetch(serve=True, timeout_s=READ_S),
            attempt=client.attempt,
            read=lambda fetched: (fetched.version, digest_of(fetched.tensors())),
        )
        if fetched is not None:
            self._have(fetched.version, fetched.tensors(), fetched)

    def _have(self, version: int, tensors: dict[str, torch.Tensor], fetched: Any) -> None:
        with self._lock:
            self._held.append((version, tensors, fetched))
        self._version = max(self._version, version)

    def _let_go(self, client: Client) -> None:
        with self._lock:
            version, tensors, fetched = self._held.popleft()
            again = any(other == version for other, _, _ in self._held)
        if not again:  # the same version may have been read twice
            self._diary.call("unpublish", UNPUBLISH_S, lambda: client.unpublish(version, timeout_s=UNPUBLISH_S))
        if fetched is not None:
            fetched.release()
        else:
            _trash(tensors)
            self._buffers.append(tensors)


def _flip(rng: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    flat = tensors[rng.choice(sorted(tensors))].reshape(-1).view(torch.uint8)
    flat[rng.randrange(len(flat))] ^= 1 << rng.randrange(8)


def _trash(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8).fill_(0xEE)
