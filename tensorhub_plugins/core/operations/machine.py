"""`tensorhub doctor machine`: what this host has and lacks for the store; each line is ok, or one thing to do.

With `--listen` it answers others that are started with `--with HOST:PORT`: these tell it the addresses that they would
advertise and a port, and it connects there, as a reader of their weights would.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tensorhub_plugins.core import machine, resources
from tensorhub_plugins.core.deadline import Deadline, aside
from tensorhub_plugins.core.errors import TensorHubError, UsageError
from tensorhub_plugins.core.operations.status import fetch_status
from tensorhub_plugins.core.process_lifetime import limits_of, raise_files_max
from tensorhub_plugins.core.protocol import advertised
from tensorhub_plugins.core.protocol.address import CONNECT_S_MIN, connected, host_and_port, parse_address, resolve
from tensorhub_plugins.core.protocol.advertised import Advertised
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.types import HOSTS_MAX, printable

PACKAGE = "tensorhub-plugins"
GB = 1e9
FILES_FEW, THREADS_FEW, SHM_FEW_BYTES, MEMORY_FEW_BYTES = 4096, 4096, 1 << 30, 1 << 30
MESSAGE_BYTES_MAX = 4096
CONNECT_S, ACCEPT_AGAIN_S = 5.0, 0.1
ANSWERS_WITHIN = 0.8  # of what is left to the host that asks, whose packets may be dropped: that is an answer, too
PORT, BENCH_PORT = 7075, 7076  # of --listen, and of `tensorhub bench --serve`
# Another process: what a peer that shares memory would read.
OF_A_CHILD = (
    "import ctypes,sys;b=ctypes.create_string_buffer(b'x');print(ctypes.addressof(b),flush=True);sys.stdin.read()"
)


class Check(NamedTuple):
    """What was looked at, and what is to be done about it; "": nothing."""

    name: str
    found: str
    to_do: str = ""


def text(check: Check) -> str:
    """Return a line: "ok" or "DO", what was found and what is to be done."""
    return f"{'DO' if check.to_do else 'ok':2}  {check.name}: {check.found}" + f"; {check.to_do}" * bool(check.to_do)


# --- software ---


def software(versions: Mapping[str, Mapping[str, str]], vllm: str | None) -> Iterator[Check]:
    """Yield Python, torch, and whether the frameworks are known to work together. versions: the table of vllm/names.py.
    vllm: the version that is installed."""
    fits = (3, 10) <= sys.version_info[:2] < (3, 13)
    yield Check("python", platform.python_version(), "" if fits else "install Python 3.10, 3.11 or 3.12")
    torch = _installed("torch")
    yield Check("torch", torch or "none", "" if torch else "`pip install torch`: workers need it, a hub does not")
    minor = ".".join((vllm or "").split("+")[0].split(".")[:2])
    yield _known("vllm", vllm, versions["vllm"], minor, "vllm")
    for name in ("verl", "openrlhf"):
        if (version := _installed(name)) is None:
            continue
        wanted = _required(name)
        if wanted and version != wanted:
            yield Check(name, version, f"`pip install {name}=={wanted}`: the adapter is written for that")
        else:
            yield _known(f"{name} {version} with vllm", vllm, versions[name], minor, name)


def _known(name: str, version: str | None, table: Mapping[str, str], minor: str, framework: str) -> Check:
    if version is None:
        return Check(name, "none", "" if framework == "vllm" else f"`pip install {PACKAGE}[{framework}]`")
    found = {"run": "known to work", "checked": "checked by its sources, not run"}.get(table.get(minor, ""))
    choice = ", ".join(each for each, how in table.items() if how == "run")
    return Check(name, f"{version}{f', {found}' if found else ''}", "" if found else f"install vLLM {choice}")


def _installed(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _required(name: str) -> str:
    """Return the one version of a framework that this package's extra asks for; "": any."""
    with suppress(metadata.PackageNotFoundError):
        found = (re.match(rf"{name}==([\w.]+)", each) for each in metadata.requires(PACKAGE) or ())
        return next((match[1] for match in found if match), "")
    return ""


# --- limits and permissions ---


def limits(root: Path = machine.ROOT, child: str = OF_A_CHILD) -> Iterator[Check]:
    """Yield memory, cores, files, threads, memory files, system calls and the right to read other processes. child: the
    program of the process that is read."""
    total, free = machine.total_bytes(root), machine.free_bytes(root)
    how_much = "an unknown part is" if free is None else f"{free / GB:.1f} GB"
    found = f"{how_much} free of {total / GB:.1f}, control groups counted; {machine.cores(root)} cores"
    has_few = free is not None and free <= MEMORY_FEW_BYTES
    yield Check("memory", found, "free some, or raise memory.max of the container" * has_few)
    files = raise_files_max()
    todo = "raise the hard limit (`ulimit -Hn`, LimitNOFILE=, --ulimit nofile=)" if files < FILES_FEW else ""
    yield Check("open files", f"{files}", todo)
    soft, _ = limits_of(resource.RLIMIT_NPROC)
    counts = [int(each) for each in (machine.pids_max(root),) if each.isdecimal()]
    counts += [] if soft == resource.RLIM_INFINITY else [soft]
    is_few = min(counts, default=THREADS_FEW) < THREADS_FEW
    todo = "raise `ulimit -u`, and pids.max of the container (--pids-limit)" if is_few else ""
    yield Check("threads", f"{min(counts)}" if counts else "unlimited", todo)
    yield _shared_memory(root)
    yield _memory_files()
    refused = resources.refused_call(resources.ALL_CALLS)
    todo = f"permit {refused[0]} (seccomp, RestrictAddressFamilies=)" if refused else ""
    yield Check("system calls", f"refused ({refused[1]})" if refused else "permitted", todo)
    yield _other_processes(child)


def _shared_memory(root: Path) -> Check:
    try:
        size = (it := os.statvfs(root / "dev/shm")).f_bavail * it.f_frsize
    except OSError:
        size = 0
    few = "Ray and vLLM need it, the store does not: `docker run --shm-size=16g`, or an emptyDir of medium Memory"
    return Check("/dev/shm", f"{size / GB:.1f} GB free", "" if size >= SHM_FEW_BYTES else few)


def _memory_files() -> Check:
    try:
        os.close(os.memfd_create("tensorhub-doctor"))
    except (AttributeError, OSError) as error:
        why = "permit memfd_create (seccomp): else memory is not shared within the host"
        return Check("memory files", f"none ({error})", why)
    return Check("memory files", "there are")


def _other_processes(program: str) -> Check:
    """Read a byte of a process of this user, as readers on this host read what is published in place."""
    name, libc, pipe = "reading other processes", ctypes.CDLL(None, use_errno=True), subprocess.PIPE
    try:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe)
    except OSError as error:  # EAGAIN: of processes as of threads
        refused = resources.refusal(error)
        return Check(name, "not tried", refused.message if refused else f"raise pids.max and `ulimit -u` ({error})")
    with process as child:
        assert child.stdin is not None and child.stdout is not None
        mine, line = ctypes.create_string_buffer(1), child.stdout.readline()
        here, there = ((ctypes.c_size_t * 2)(at, 1) for at in (ctypes.addressof(mine), int(line or b"0")))  # of iovec
        read = libc.process_vm_readv(child.pid, here, 1, there, 1, 0)
        child.stdin.close()
    if read == 1 and mine.raw == b"x":
        return Check(name, "permitted")
    why = "permit it (ptrace scope below 2, seccomp, SYS_PTRACE): else tensors that are published in place go over tcp"
    return Check(name, os.strerror(ctypes.get_errno()), why)


def devices() -> Iterator[Check]:
    """Yield network cards with RDMA, how much memory they may lock, and whether GPUs reach each other."""
    from tensorhub_plugins.core.transports.rdma import rails, verbs

    why = verbs.why_not()
    if why is not None:
        has_device = rails.SYSFS.is_dir() and any(rails.SYSFS.iterdir())
        todo = "install libibverbs (rdma-core) in this environment" if has_device else ""
        yield Check("rdma", why if has_device else "no card: tcp is used", todo)
    else:
        ports, problems = rails.find_ports()
        found = ", ".join(port.name for port in ports) or "no usable port"
        yield Check("rdma", found, "" if ports else "; ".join(problems)[:300] or "see `ibv_devinfo`")
        soft, _ = limits_of(resource.RLIMIT_MEMLOCK)
        is_free = soft == resource.RLIM_INFINITY
        todo = "" if is_free else "`ulimit -l unlimited` (LimitMEMLOCK=infinity, --ulimit memlock=-1)"
        yield Check("locked memory", "unlimited" if is_free else f"{soft} bytes", todo)
    if _installed("torch") is None:
        return
    from tensorhub_plugins.core.device import drivers

    count, apart = drivers.peers()
    pairs = ", ".join(f"{a} and {b}" for a, b in apart[:3])
    todo = f"GPUs {pairs} do not reach each other: see `nvidia-smi topo -p2p r`; copies go by the host" if apart else ""
    yield Check("gpus", f"{count}" if count else "none: everything is in host memory", todo)


# --- network ---


def asked(hub: str | None, read_keys: Callable[[], Keys | None], peer: str | None, timeout_s: float) -> Iterator[Check]:
    """Yield what `network` and `reached` find, within one time for both."""
    deadline = Deadline.after(timeout_s)
    yield from network(hub, read_keys, timeout_s if peer is None else timeout_s / 2)
    if peer is not None:
        yield from reached(peer, hub, deadline.remaining())


def network(hub: str | None, read_keys: Callable[[], Keys | None], timeout_s: float) -> Iterator[Check]:
    """Yield the addresses and ports that would be advertised, and whether the hub admits this key."""
    deadline = Deadline.after(timeout_s)
    try:
        here = advertised.choose(hub or "tcp://127.0.0.1:7070", deadline)
        alone = all(host == "::1" or host.startswith("127.") for host in here.host.split(","))
        todo = f"other hosts cannot connect there: set {advertised.HOST_VARIABLE}" if alone and hub else ""
        yield Check("advertised address", here.host, todo)
        yield _ports(here)
    except TensorHubError as error:
        yield Check("advertised address", "none", error.message)
    try:
        keys = read_keys()
    except TensorHubError as error:
        yield Check("secret", "not read", error.message)
        return
    yield Check("secret", f"a {keys.role}'s key" if keys else "none: for a hub on this host only")
    if not hub:
        yield Check("hub", "none is named (--hub, TENSORHUB_HUB), so none was asked")
        return
    try:
        report = fetch_status(hub, timeout_s=deadline.remaining(), keys=keys)
        yield Check("hub", f"{hub} answers, with {len(report['models'])} models")
    except TensorHubError as error:
        yield Check("hub", hub, error.message)


def _ports(here: Advertised) -> Check:
    if here.ports == advertised.ANY_PORT:
        return Check("ports", f"any that is free; behind a firewall set {advertised.PORTS_VARIABLE}=from-to")
    free = sum(_is_free(port) for port in here.ports)
    todo = f"widen {advertised.PORTS_VARIABLE}: each client takes one for each transport" if free < 2 else ""
    return Check("ports", f"{free} free of {here.ports[0]}-{here.ports[-1]}", todo)


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("", port)):
        return True
    return False


# --- with another host ---


def reached(peer: str, hub: str | None, timeout_s: float) -> Iterator[Check]:
    """Yield for each address that would be advertised whether a peer, which listens there, can connect to it."""
    host, port = host_and_port(peer, PORT)
    deadline, token, name = Deadline.after(timeout_s), secrets.token_hex(16), f"from {host}"
    try:
        resolve(host, deadline)
    except (OSError, ValueError) as error:
        yield Check(name, f"no answer: {error}", "correct the name, or see the resolver of this host")
        return
    try:
        here = advertised.choose(hub or format_address("tcp", host, port), deadline)
        server = server_at(here)
    except TensorHubError as error:
        yield Check(name, "not asked", error.message)
        return
    try:
        with server, connected(host, port, Deadline.after(min(CONNECT_S, deadline.remaining()))) as link:
            threading.Thread(target=_answer_all, args=(server, token), daemon=True).start()
            link.settimeout(CONNECT_S)
            within_s, its_port = ANSWERS_WITHIN * deadline.remaining(), server.getsockname()[1]
            asked = {"hosts": here.host.split(","), "port": its_port, "token": token, "within_s": within_s}
            link.sendall(json.dumps(asked).encode() + b"\n")
            answers = json.loads(line_of(link, deadline))
    except (OSError, ValueError, AttributeError, OverflowError) as error:
        why = "another program answers" if isinstance(error, (ValueError, AttributeError)) else error
        yield Check(
            name, f"no answer: {why}", f"start `tensorhub doctor machine --listen` there, and open its port {port}"
        )
        return
    for each in here.host.split(","):
        said = printable(str(answers.get(each, "not tried")))[:200]
        todo = "open the port towards it, or set TENSORHUB_ADVERTISE to another address" if said != "ok" else ""
        yield Check(name, f"{each} is reached" if said == "ok" else f"{each} is not reached: {said}", todo)


def server_at(here: Advertised, to_do: str = f"widen {advertised.PORTS_VARIABLE}") -> socket.socket:
    """Return a socket that listens on the first free port of those that are advertised, at all addresses. Raise
    UsageError with what is to be done where there is none."""
    problem = OSError("there is none")
    for port in here.ports:
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            problem = error
    if refused := resources.refusal(problem):
        raise refused from problem
    raise UsageError(f"no port of {here.ports[0]}-{here.ports[-1]} is free: {to_do} ({problem})") from problem


def _answer_all(server: socket.socket, token: str) -> None:
    with suppress(OSError):
        while True:
            link, _ = server.accept()
            with suppress(OSError), link:
                link.settimeout(CONNECT_S)
                link.sendall(token.encode() + b"\n")


def answer_peers(server: socket.socket, answer: Callable[[socket.socket, str, Any], None], *, timeout_s: float) -> None:
    """Call `answer` with the connection, host and question (a line of JSON) of one peer after the other, until the
    socket is shut down: OSError. A peer that asks something else, whatever it is, gets no answer; one for which there
    is no file left waits."""
    while True:
        try:
            link, peer = server.accept()
        except OSError as error:
            if resources.refusal(error) is None:
                raise
            time.sleep(ACCEPT_AGAIN_S)
            continue
        with suppress(OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError), link:
            link.settimeout(timeout_s)
            answer(link, str(peer[0]), json.loads(line_of(link, Deadline.after(timeout_s))))


def line_of(link: socket.socket, deadline: Deadline) -> bytes:
    """Return what comes before the end of a line, of bounded length. Raise OSError, at the deadline TimeoutError: also
    for a peer that sends a byte now and then."""
    got = b""
    while b"\n" not in got and len(got) < MESSAGE_BYTES_MAX:
        if deadline.expired:
            raise TimeoutError("timed out")
        link.settimeout(max(CONNECT_S_MIN, deadline.remaining()))
        if not (more := link.recv(MESSAGE_BYTES_MAX)):
            break
        got += more
    return got.partition(b"\n")[0]


def listen(port: int, say: Callable[[str], None]) -> None:
    """Answer hosts that ask whether they are reached from here, one after the other, until interrupted. It connects
    only to a port that sends the token that it was told, and says whether one did: no more."""

    def answer(link: socket.socket, peer: str, asked: Any) -> None:
        hosts = [str(each) for each in asked["hosts"][:HOSTS_MAX]]
        within_s = min(CONNECT_S, float(asked.get("within_s", CONNECT_S)))
        answers = _tried_all(hosts, int(asked["port"]), str(asked["token"]), within_s)
        link.settimeout(CONNECT_S)
        link.sendall(json.dumps(answers).encode() + b"\n")
        say(f"{peer} asked: " + ", ".join(f"{printable(host)} {said}" for host, said in answers.items()))

    parse_address(format_address("tcp", "0.0.0.0", port), "tcp")  # or there is no such port
    with server_at(Advertised("", range(port, port + 1)), "choose another one for --listen") as server:
        say(f"waiting for `tensorhub doctor machine --with THIS-HOST:{server.getsockname()[1]}`")
        answer_peers(server, answer, timeout_s=CONNECT_S)


def _tried_all(hosts: Iterable[str], port: int, token: str, within_s: float) -> dict[str, str]:
    """Try them all at once, as the peer waits no longer than for one."""
    trying = {host: aside(partial(_tried, host, port, token, within_s)) for host in hosts}
    return {host: each.result() for host, each in trying.items()}


def _tried(host: str, port: int, token: str, within_s: float) -> str:
    try:
        deadline = Deadline.after(within_s)
        with connected(host, port, deadline) as link:
            is_ours = secrets.compare_digest(line_of(link, deadline), token.encode())
            return "ok" if is_ours else "another program answers there"
    except (OSError, OverflowError, UnicodeError) as error:
        return f"{format_address('tcp', host, port)}: {error}"


def show(checks: Iterable[Check], say: Callable[[str], None]) -> int:
    """Say each as it is found. Return 1 if something is to be done."""
    status = 0
    for check in checks:
        say(text(check))
        status |= bool(check.to_do)
    return status
