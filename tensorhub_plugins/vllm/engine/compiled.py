"""What an engine compiles travels with its weights: the caches of torch.compile, Triton, FlashInfer and DeepGEMM.

The first engine of a kind publishes the files that its start has added to vLLM's cache folders; each later one, on any
host, reads them before its warm-up, and offers them on. They are a history of their own at the hub,
"MODEL.compiled-KIND". Which of them fit is decided by what made them: all compilers keep their files under digests of
code, configuration and versions. A kind keeps apart what those digests leave out, above all the machine (`kind_of`).

These files are code. So they travel only in a run that has a secret (option compile_cache="on": in any), under digests
that cannot be forged; the holder of a reader's key takes them and gives none. A file that is there is never replaced.

Nothing of this keeps an engine from its start: what fails is said, and the engine compiles as ever. Not for engines
without compilation (enforce_eager), nor on the further hosts of an engine that has several.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias, cast

import msgspec
import torch

from tensorhub_plugins.core import Client, Deadline, UsageError, VersionRefused, keys_from_environment
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.core.options import COMPILED, gigabytes
from tensorhub_plugins.vllm.config import WorkerConfig, parse
from tensorhub_plugins.vllm.engine.core import before_shutdown
from tensorhub_plugins.vllm.names import NAME

logger = get_logger(__name__)

VARIABLE = "TENSORHUB_COMPILE_CACHE"  # set by an engine's owner, for its core: what `tensorhub_connect` will take
TIMEOUT_S = 60.0  # for a publish, and for all that a start waits for: an engine compiles for a minute or more
SIZE_BYTES_MAX = 2 << 30
FILES = "files"  # the tensor, uint8: a tar archive, because that keeps names, times and modes
UNFINISHED = (".lock", ".tmp")
SHARE_WORTH_IT = 0.1  # of the files that an engine was given: what it must add for a version of its own
KIND_DIGITS = 16
OURS = ".tensorhub"  # files that are no compiled ones, and folders of files that are being written
LEFT_S = 3600.0  # a folder of such files that is older was left by a process that was killed

Folders: TypeAlias = Mapping[str, Path]  # by the first part of the files' names in an archive


@contextmanager
def shared(engine_core: Any, vllm_config: Any) -> Iterator[None]:
    """Read what others have compiled before the warm-up of an engine, and offer afterwards what it has."""
    if vllm_config.model_config.enforce_eager:
        yield
        return
    engine_core.tensorhub_compiled = made = Compiled(partial(kind_of, vllm_config), folders())
    try:
        joining = made.bring(lambda: store_of(vllm_config))
        yield
        made.offer(joining)
    except BaseException:
        made.close()
        raise
    before_shutdown(engine_core, made.close)


@contextmanager
def announced(joining: Mapping[str, Any] | None) -> Iterator[None]:
    """Tell the engine that this process starts here, and no later one, where the store is that it will join."""
    os.environ.pop(VARIABLE, None)
    if joining is not None:
        os.environ[VARIABLE] = json.dumps(joining)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def store_of(vllm_config: Any) -> WorkerConfig | None:
    """Return how this engine joins the store; None: its owner says that later, or it does not."""
    if vllm_config.load_config.load_format == NAME:
        return parse(vllm_config.load_config.model_loader_extra_config, vllm_config)[1]
    said = os.environ.get(VARIABLE)
    return WorkerConfig.parse(json.loads(said)) if said else None


def may(joining: WorkerConfig) -> tuple[bool, bool]:
    """Return whether an engine takes what others have compiled, and whether it gives what it has."""
    keys = keys_from_environment()
    if joining.compile_cache == "off" or (keys is None and joining.compile_cache != "on"):
        return False, False
    if os.environ.get("VLLM_DISABLE_COMPILE_CACHE", "0") != "0":  # its user wants everything to be compiled
        return False, False
    role = "publisher" if keys is None else keys.role
    return role != "observer", role == "publisher"


class Compiled:
    """The caches of one engine. kind: called once, returns the name of what can use each other's. It raises nothing."""

    def __init__(self, kind: Callable[[], str], folders: Folders) -> None:
        self._kind, self._folders = kind, folders
        self._before: set[str] | None = None  # files that were there; None: nothing is to be offered
        self._brought, self._version = set[str](), 0
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = self._has_offered = False

    def bring(self, store: Callable[[], WorkerConfig | None]) -> WorkerConfig | None:
        """Write the files that engines of this kind have published, where they are missing; remember what there is.
        Return what `store` does, or None: it is not known yet."""
        joining = None
        with self._said("are not taken from the store"):
            joining = store()
            takes, gives = (False, True) if joining is None else may(joining)
            try:
                if joining is not None and takes:
                    self._bring(joining, Deadline.after(TIMEOUT_S))
            finally:
                self._before = files_in(self._folders) if gives else None
        return joining

    def offer(self, joining: WorkerConfig | None) -> None:
        """Publish what has been compiled since, with what was brought; in the background, and once."""
        if joining is None or self._before is None or self._has_offered:
            return
        with self._said("are not offered"):
            if may(joining)[1]:
                self._has_offered = True
                threading.Thread(target=self._offer, args=(joining,), name="tensorhub-compiled", daemon=True).start()

    def close(self) -> None:
        """Leave the store. Never waits for a hub: what is connecting to one leaves when it is done."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                with self._said("are still offered"):
                    if self._client is not None:
                        self._client.close()
            finally:
                self._lock.release()

    def _bring(self, joining: WorkerConfig, deadline: Deadline) -> None:
        client = self._joined(joining)
        known = client.versions(timeout_s=min(joining.connect_timeout_s, deadline.remaining()))
        newest = max((each.version for each in known if each.visible), default=0)
        if not newest:
            return
        described = client.fetch(newest, wanted=(), timeout_s=deadline.remaining())  # no bytes, of any size, yet
        size_bytes = sum(manifest.size_bytes for manifest in described.manifests.values())
        described.release()
        if size_bytes > SIZE_BYTES_MAX:
            raise VersionRefused(f"version {newest} takes {gigabytes(size_bytes)}: at most {gigabytes(SIZE_BYTES_MAX)}")
        fetched = client.fetch(newest, serve=True, timeout_s=deadline.remaining())
        try:
            content = fetched.tensors()[FILES].numpy().tobytes()
        finally:
            fetched.release()
        self._version = newest
        self._brought, new = unpack(content, self._folders)
        size = gigabytes(len(content))
        logger.info("compiled by others: %d files, %s; %d of them were not here", len(self._brought), size, new)

    def _offer(self, joining: WorkerConfig) -> None:
        with self._said("are not offered"):
            made = files_in(self._folders) - (self._before or set())
            if self._version and not self._brought:  # what is missing here would be missing in a version of ours
                return
            if len(made) <= len(self._brought) * SHARE_WORTH_IT:  # some compilers write a file at every start
                return
            content = pack(sorted(made | self._brought), self._folders)
            client = self._joined(joining)
            version = 1 + max((each.version for each in client.versions()), default=0)
            tensors = {FILES: torch.frombuffer(content, dtype=torch.uint8)}
            client.publish(version, tensors, copy=False, timeout_s=TIMEOUT_S)
            if self._version:
                client.unpublish(self._version)
            logger.info("compiled here, and offered to others: %d files, %s", len(made), gigabytes(len(content)))

    def _joined(self, joining: WorkerConfig) -> Client:
        with self._lock:
            if self._client is None and not self._closed:
                own = msgspec.structs.replace(
                    joining,
                    model=f"{joining.model}{COMPILED}{self._kind()}",
                    digest="blake3",
                    connect_timeout_s=min(joining.connect_timeout_s, TIMEOUT_S),
                )
                self._client = own.connect(replica=f"{joining.replica}-compiled")
            client = self._client
        if self._closed or client is None:
            self.close()
            raise UsageError("this engine has ended")
        return client

    @contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an engine that compiles all by itself is one, too
            logger.warning("compiled files %s: %s", what, error)


# --- files ---


def folders() -> dict[str, Path]:
    """Return the folders in which vLLM, and what it uses, keep what they compile on this host."""
    from vllm import envs

    home, root = Path(os.path.expanduser("~")), Path(envs.VLLM_CACHE_ROOT)
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home))
    return {
        "compile": root / "torch_compile_cache",
        "deep_gemm": Path(os.environ.get("DG_JIT_CACHE_DIR", root / "deep_gemm")),
        "autotune": root / "flashinfer_autotune_cache",
        "flashinfer": base / ".cache" / "flashinfer",
        "triton": Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")),
    }


def files_in(folders: Folders) -> set[str]:
    """Return the names in an archive of all files there that are finished. Looks at no file: there may be many."""
    return {
        f"{part}/{name}" if folder == "." else f"{part}/{folder}/{name}"
        for part, root in folders.items()
        for folder, names in ((os.path.relpath(path, root), names) for path, _, names in os.walk(root))
        for name in names
        if not name.endswith(UNFINISHED) and OURS not in f"{folder}/{name}"
    }


def pack(names: Iterable[str], folders: Folders) -> memoryview:
    """Return an archive of these files, writable; those that are gone are left out. Raise UsageError for too many."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            part, _, rest = name.partition("/")
            path = folders[part] / rest
            if path.is_symlink() or not path.is_file():
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                member, content = archive.gettarinfo(arcname=name, fileobj=file), file.read()
                if buffer.tell() + len(content) > SIZE_BYTES_MAX:
                    raise UsageError(f"they take more than {gigabytes(SIZE_BYTES_MAX)}")
                member.size, member.uid, member.gid, member.uname, member.gname = len(content), 0, 0, "", ""
                archive.addfile(member, io.BytesIO(content))
    return buffer.getbuffer()


def unpack(content: bytes, folders: Folders) -> tuple[set[str], int]:
    """Write the files of an archive that are missing, each at once; return the names of all, and how many were missing.

    Raise VersionRefused for an archive that `pack` does not make; nothing is written then. OSError, of a full disk or a
    folder that cannot be written, after the other folders."""
    names: set[str] = set()
    failed: dict[str, OSError] = {}
    written = 0
    try:
        with ExitStack() as stack, tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            members = archive.getmembers()
            for member in members:
                part, _, rest = member.name.partition("/")
                if (
                    part not in folders
                    or not member.isreg()
                    or member.issparse()
                    or not rest
                    or rest.startswith("/")
                    or ".." in PurePosixPath(rest).parts
                ):
                    raise VersionRefused(f"{member.name!r:.200} is no file of a cache of compiled code")
            made: dict[str, Path] = {}
            for member in members:
                names.add(member.name)
                part, _, rest = member.name.partition("/")
                target = folders[part] / rest
                if part in failed or os.path.lexists(target):
                    continue
                try:
                    if part not in made:
                        made[part] = Path(stack.enter_context(_temporary(folders[part])))
                    file = made[part] / "file"
                    file.write_bytes(cast("IO[bytes]", archive.extractfile(member)).read())
                    file.chmod(member.mode & 0o755 | 0o600)
                    os.utime(file, (member.mtime, member.mtime))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, target)
                except OSError as error:
                    failed[part] = error
                else:
                    written += 1
    except tarfile.TarError as error:
        raise VersionRefused(f"it is no archive of compiled code: {error}") from error
    for problem in failed.values():
        raise problem
    return names, written


def _temporary(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder in this one, on the same file system, for files that are being written; remove what was left."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{OURS}-*"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > LEFT_S:
                shutil.rmtree(left)  # a link stays
    return tempfile.TemporaryDirectory(prefix=f"{OURS}-", dir=folder)


# --- kinds ---


def kind_of(vllm_config: Any) -> str:
    """Return a name that engines share which can use what one of them has compiled."""
    import vllm
    from vllm.platforms import current_platform

    device = (current_platform.get_device_name(), str(current_platform.get_device_capability()))
    versions = (
        vllm.__version__,
        torch.__version__,
        str(torch.version.cuda),
        sys.version,
        platform.machine(),
        platform.libc_ver(),
    )
    known = (1, *device, *versions, _cpu_features(), vllm_config.compute_hash(), vllm_config.parallel_config.world_size)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:KIND_DIGITS]


def _cpu_features() -> str:
    """Return what this CPU can do: code for one that can more ends a process here."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return platform.processor()
