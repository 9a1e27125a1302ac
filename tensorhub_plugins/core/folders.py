"""Version folders that travel through the store, for frameworks that hand weights over as files: slime and miles.

    trainer   --update-weight-disk-dir DIR --custom-update-weight-post-write-path tensorhub_plugins.core.folders.publish
    engines   --sglang-custom-pull-weights-pre-read-hook tensorhub_plugins.core.folders.fetch
    both      TENSORHUB_HUB=tcp://hub:7070, TENSORHUB_RUN=NAME

DIR is then a folder of each host's own disk. The trainer's ranks offer the files that they have written, as they lie
there; each rollout host reads a folder from the nearest host that has it, and offers it to the next. A file is a tensor
of bytes: what is in it, a whole checkpoint or slime's own delta of one, is the framework's affair. A folder appears
under its name when all of it is there. Of a delta the folders that it builds on come, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch

from tensorhub_plugins.core.client.client import Client
from tensorhub_plugins.core.client.parts import of_all_ranks
from tensorhub_plugins.core.client.reports import Fetched
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import DeadlineExceeded, NotPublished, UsageError, VersionGone, VersionRefused
from tensorhub_plugins.core.memory.tensors import same_bytes
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey, attempt_of, step_of, version_of

FOLDER = re.compile(r"weight_v(\d+)")  # by both frameworks
OURS = ".tensorhub"  # in each folder
LISTED = f"{OURS}/files-"  # and the id of the run: lists the files of all ranks, {name: size in bytes}
BROUGHT = f"{OURS}/brought"  # this host did not write it
NOTHING = f"{OURS}/nothing-"  # and the rank, which has written no file
INDEX = "model.safetensors.index.json"
TIMEOUT_S = 600.0  # for one publish, and for a version to come: it is read as long as it advances
LOCK = ".tensorhub.lock"
LOCK_POLL_S = 0.05
LOOK_S = 60.0  # for a version, by a process that the lock, or what it has read before, has kept for TIMEOUT_S
AGAIN_S = 1.0  # after so long a host that waits for a version looks whether another attempt has begun
DELTAS_MAX = 8_000  # that a trainer offers, of which the hub takes HOLDINGS_MAX; args.tensorhub_deltas_max overrides it
KEPT = 2  # whole versions on a reading host's disk, and all versions that it offers to others: the newest ones

_joined: dict[str, tuple[int, Client]] = {}  # by role, of this process
_run: dict[str, int | str] = {}  # of a trainer: the id of its run, and the attempt that it has begun


def publish(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Offer a folder, on every rank at once (the frameworks' post-write hook). Its files must stay as they are until it
    is deleted, or a newer checkpoint is there; a delta is offered until a whole one, or DELTAS_MAX of them, follow.

    Raise UsageError without TENSORHUB_HUB, or for another trainer of this run that is alive; OSError for a file."""
    folder = Path(version_dir)
    if (number := _number(folder)) is None:  # a run begins, with an empty folder
        return
    _check(args)
    everything = of_all_ranks({"run": uuid.uuid4().hex, "files": _written(folder), "base": _base(folder)})
    is_whole = all(each["base"] is None for each in everything)  # one of the nodes may have the index
    ranks = len(everything)
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    client = _client("trainer", "trainer", rank, ranks)
    if not _run:
        run = str(everything[0]["run"])
        _run.update(run=run, attempt=client.begin(number - 1, launch_id=run, timeout_s=TIMEOUT_S))
    sizes = {name: size for each in everything for name, size in each["files"].items()}
    if odd := [name for name in sizes if name.encode(errors="ignore").decode() != name]:
        raise UsageError(f"{folder} has a file {odd[0]!r}, whose name is not UTF-8: rename it, or leave it out")
    tensors = {name: _mapped(folder / name, sizes[name]) for name in _mine(everything, rank) if sizes[name]}
    listed, content = f"{LISTED}{_run['run']}", json.dumps(sizes).encode()
    if rank == 0:
        tensors[listed] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    tensors = tensors or {f"{NOTHING}{rank}": torch.zeros(1, dtype=torch.uint8)}
    version = version_of(int(_run["attempt"]), number)
    offer = client.find(ShardKey(version, CHECKPOINT, rank, ranks))
    here = everything[rank]["files"]
    if offer is not None and (_differs(folder, here, offer.slab.tensors(), sizes) or client.recheck(version)):
        raise UsageError(f"{folder} is on offer, and has changed: what is new takes a new number", version=version)
    _list(folder, listed, content)
    if offer is None:  # else it was asked for once more
        client.publish(version, tensors, copy=False, timeout_s=TIMEOUT_S)
    over = number - (KEPT if is_whole else int(getattr(args, "tensorhub_deltas_max", DELTAS_MAX)))
    for offered in {key.version for key in client.serving()} - {version}:
        former = folder.with_name(f"weight_v{step_of(offered):06d}")
        if not former.is_dir() or step_of(offered) <= over:  # the last whole one may still be read
            client.unpublish(offered)
            if not getattr(args, "update_weight_disk_keep_files", True):  # slime deletes those of one node
                shutil.rmtree(former, ignore_errors=True)


def fetch(source_dir: str, target_version: int) -> None:
    """Bring the folder of a version, and those it builds on, to this host (SGLang's hook before it reads one). Any
    process of the host may call it; the first one reads.

    Raise UsageError without TENSORHUB_HUB; NotPublished when no worker has the version within ten minutes; VersionGone
    when it, or one that it builds on, is over; VersionRefused for a folder that is not whole; DeadlineExceeded when
    another process of this host that reads stands still for ten minutes; OSError, of a full disk.
    """
    source, patience = Path(source_dir), Deadline.after(TIMEOUT_S)
    source.mkdir(parents=True, exist_ok=True)
    with _alone(source):
        for left in source.glob(".weight_v*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        listed, newest, whole = "", 0, int(target_version)
        number: int | None = whole
        while number:
            folder = source / f"weight_v{number:06d}"
            if not listed or not _is_here(folder, listed):
                version, listed = _bring(folder, number, patience)
                newest = max(newest, version)
                for offered in {key.version for key in _reader().serving()}:  # now: a late host reads very many deltas
                    if offered <= newest - KEPT:
                        _reader().unpublish(offered)
            whole, number = number, _base(folder)
        for folder in source.glob("weight_v*"):
            if (folder / BROUGHT).is_file() and (_number(folder) or 0) <= whole - KEPT:
                shutil.rmtree(folder, ignore_errors=True)


def _bring(folder: Path, number: int, patience: Deadline) -> tuple[int, str]:
    """Bring one folder here, unless it is; return its version, and what lists its files. patience: until when to wait
    for it to appear. A process that the lock has kept waiting for longer looks once more, and not as long as others."""
    client = _reader()
    version = _visible(client, number, max(patience, Deadline.after(LOOK_S)))
    deadline = Deadline.after(TIMEOUT_S)
    known = client.fetch(version, (CHECKPOINT,), wanted=(), timeout_s=deadline.remaining())
    lists = [s.name for each in known.manifests.values() for s in each.tensors if s.name.startswith(LISTED)]
    if len(lists) != 1:
        raise VersionRefused("it is no folder: something else was published", version=version)
    if not _is_here(folder, lists[0]):
        fetched = client.fetch(version, (CHECKPOINT,), serve=True, timeout_s=deadline.remaining(), grows=True)
        try:
            _write(fetched, folder, lists[0])
        finally:
            fetched.release()
    return version, lists[0]


def _visible(client: Client, number: int, deadline: Deadline) -> int:
    """Return the newest attempt's version of this step, when it is there."""
    while True:
        found = [each for each in client.versions(timeout_s=deadline.remaining()) if each.visible]
        newest = max((attempt_of(each.version) for each in found), default=client.attempt)
        version = version_of(newest, number)
        try:
            return client.wait(version, timeout_s=min(AGAIN_S, deadline.remaining()))
        except (NotPublished, VersionGone) as error:
            if any(each.version > version for each in found):
                text = f"{error.message}. A newer one builds on it: have the trainer write a whole checkpoint"
                raise error.within(text, version=version) from error
            if isinstance(error, VersionGone) and client.attempt > newest:  # which makes it anew
                client.wait(newer_than=version, timeout_s=deadline.remaining())
            elif isinstance(error, VersionGone) or deadline.expired:
                raise


def _write(fetched: Fetched, folder: Path, listed: str) -> None:
    """Write the files, and then give the folder its name."""
    tensors = {name: tensor.numpy() for name, tensor in fetched.tensors().items()}
    sizes: dict[str, int] = json.loads(tensors[listed].tobytes())
    wrong = [name for name, size in sizes.items() if size != (tensors[name].nbytes if name in tensors else 0)]
    if wrong:
        raise VersionRefused(f"{wrong[0]!r} is not as it was listed", version=fetched.version)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        for name in (*sizes, BROUGHT, listed):  # which is the newest, see `_written`
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise VersionRefused(f"{name!r} is no file of a folder", version=fetched.version)
            target = Path(made, "files", path)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.write_bytes(tensors[name].data if name in tensors else b"")
            except OSError as error:  # of a full disk: it names no file
                error.filename = error.filename or str(target)
                raise
        if folder.is_dir():
            os.replace(folder, Path(made, "former"))
        os.replace(Path(made, "files"), folder)


# --- folders ---


def _number(folder: Path) -> int | None:
    found = FOLDER.fullmatch(folder.name)
    return None if found is None else int(found[1])


def _files(folder: Path) -> dict[str, int]:
    """Return the sizes of its files in bytes, and of those that links lead to. OSError for one that leads nowhere."""
    paths = [Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return {name: sizes[name] for name in sorted(sizes) if not name.startswith(f"{OURS}/")}


def _written(folder: Path) -> dict[str, int]:
    """Return the sizes of this run's files. Those that a former run has left between them, on a disk that was not
    cleared, are older than its list."""
    listed = set(folder.glob(f"{LISTED}*")) - {folder / f"{LISTED}{_run.get('run')}"}
    since = max((path.stat().st_ctime_ns for path in listed), default=0)
    files = _files(folder)
    return {name: files[name] for name in files if (folder / name).stat().st_ctime_ns > since} or files


def _base(folder: Path) -> int | None:
    """Return the number of the version that this one is a delta to; None: it is a whole checkpoint."""
    try:
        described = json.loads((folder / INDEX).read_bytes()).get("metadata", {})
        base = int(described["base_version"]) if "delta_encoding" in described else None
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / INDEX} is no index of a checkpoint or a delta: {error!r}") from error
    if base is not None and not 0 <= base < (_number(folder) or 0):
        raise UsageError(f"{folder / INDEX}: a delta to version {base}, which is not an earlier one")
    return base


def _list(folder: Path, listed: str, content: bytes) -> None:
    """Write into a folder which files it has when it is whole: each rank does, with the same bytes."""
    (folder / OURS).mkdir(parents=True, exist_ok=True)  # no rank of this node may have written a file
    made = folder / OURS / uuid.uuid4().hex
    made.write_bytes(content)
    os.replace(made, folder / listed)


def _is_here(folder: Path, listed: str) -> bool:
    """Return whether a folder is of this run, and whole: of a trainer's nodes each may have a part of it."""
    try:
        return bool(json.loads((folder / listed).read_bytes()) == _files(folder))
    except (FileNotFoundError, ValueError):  # the latter: a host that lost its power may have left no bytes of it
        return False


@contextmanager
def _alone(source: Path) -> Iterator[None]:
    """Keep the other processes of this host out. One that works touches the lock, for as long as it does.

    Raise DeadlineExceeded when the one that has the lock has not touched it for TIMEOUT_S: it was stopped. That is
    counted in looks at it: a job that is suspended stops all of its processes."""
    with open(source / LOCK, "ab") as file:
        touched, looks = 0, 0
        while not _locked(file):
            looks += 1
            if touched != (now := os.fstat(file.fileno()).st_mtime_ns):
                touched, looks = now, 0
            if looks * LOCK_POLL_S >= TIMEOUT_S:
                text = f"the process that has locked {file.name} stands still: `fuser` names it. Continue it, or end it"
                raise DeadlineExceeded(text, phase="lock", timeout_s=TIMEOUT_S)
            time.sleep(LOCK_POLL_S)
        over = threading.Event()
        os.utime(file.fileno())
        toucher = Thread(target=_touch, args=(file, over), name="tensorhub-folder")
        try:
            toucher.start()
            yield
        finally:
            over.set()
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too


def _locked(file: BinaryIO) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _touch(file: BinaryIO, over: threading.Event) -> None:
    while not over.wait(TIMEOUT_S / 10):
        with suppress(OSError, ValueError):  # the latter: it was closed meanwhile
            os.utime(file.fileno())


def _differs(folder: Path, here: dict[str, int], offered: dict[str, torch.Tensor], sizes: dict[str, int]) -> bool:
    """Return whether files have changed, of which this rank offers these. here: the sizes on this node, which come
    first: of a file that was cut off the rest cannot be read. There may be more than were written: an engine's."""
    files = {name: tensor for name, tensor in offered.items() if not name.startswith(f"{OURS}/")}
    lists = [json.loads(offered[name].numpy().tobytes()) for name in offered if name.startswith(LISTED)]
    if lists not in ([], [sizes]) or any(here.get(name) != tensor.nbytes for name, tensor in files.items()):
        return True
    return not all(same_bytes(tensor, _mapped(folder / name, here[name])) for name, tensor in files.items())


def _mapped(path: Path, size: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


# --- ranks and clients ---


def _check(args: Any) -> None:
    """Raise UsageError for options of slime's with which no engine would read what is offered."""
    if getattr(args, "release_train", False):
        raise UsageError("--release-train ends the ranks that offer the folder before it is read: leave it out")
    if getattr(args, "update_weight_local_checkpoint_dir", "none") is None:
        raise UsageError("set --update-weight-local-checkpoint-dir: without it engines read a shared disk, by no hook")


def _reader() -> Client:
    unlike = uuid.uuid4().hex[:8]  # containers on one host may have its name, and processes with the same numbers
    return _client("rollout", f"{socket.gethostname()}-{os.getpid()}-{unlike}", 0, 1)


def _mine(everything: Sequence[dict[str, Any]], rank: int) -> list[str]:
    """Return the files that this rank offers: each is offered by one of the ranks that see it, in turns."""
    seen: dict[str, list[int]] = {}
    for each, given in enumerate(everything):
        for name in given["files"]:
            seen.setdefault(name, []).append(each)
    return [name for turn, (name, ranks) in enumerate(sorted(seen.items())) if ranks[turn % len(ranks)] == rank]


def _client(role: str, replica: str, shard: int, shards: int) -> Client:
    """Return this process's client, which stays until it ends."""
    pid, client = _joined.get(role, (0, None))
    if client is not None and pid == os.getpid():
        return client
    hub = os.environ.get("TENSORHUB_HUB")
    if not hub:
        raise UsageError("set TENSORHUB_HUB to the address of `tensorhub server`, for trainers and engines")
    run = os.environ.get("TENSORHUB_RUN", "default")
    client = Client(hub, run=run, model="actor", replica=replica, shard=shard, shard_count=shards)
    _joined[role] = os.getpid(), client
    return client
