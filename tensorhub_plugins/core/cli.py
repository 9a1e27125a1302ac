"""`tensorhub server` starts a hub, `status` and `top` show its state, `doctor` tries an engine, `fleet` changes a run.

`tensorhub keygen` makes a secret. `tensorhub pin`, `unpin` and `withdraw` determine which version of a model the
followers run, see `Client.pin`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, get_args

from tensorhub_plugins.core import files, log, resources, run_log
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import TensorHubError, UsageError
from tensorhub_plugins.core.hub.limits import LIMITS, HubLimits
from tensorhub_plugins.core.hub.server import Server, collect_rarely
from tensorhub_plugins.core.operations import completion, critical_path, machine, problems, timeline, top
from tensorhub_plugins.core.operations.status import directive_text, fetch_status, status_text
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import new_session, of_all_interfaces, parse_address
from tensorhub_plugins.core.protocol.advertised import addresses_of
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.security import secret
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.types import Location, Role, check_name, parse_version

HUB_ENVIRONMENT = "TENSORHUB_HUB"
PORT, LOOPBACK = 7070, "tcp://127.0.0.1:7070"
ALIVE_CHECK_S = 1.0
PIECE = select.PIPE_BUF // 10  # characters, escaped of ten bytes at most: so many fit into a pipe that is ready
UNKNOWN = 2  # the exit status of `status` where no hub answers; argparse ends so, too
# `tensorhub doctor NAME ARGUMENTS...`: the module whose `main` takes the arguments.
DOCTORS = {"verl": "tensorhub_plugins.verl.doctor", "openrlhf": "tensorhub_plugins.openrlhf.doctor"}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status. arguments: without the program's name; None: this process's.

    Characters that its output cannot encode are escaped; an output that fails ends it, without a traceback, with 1, or
    as a signal would where the reader has closed the pipe."""
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _main(given)
        finally:
            if sys.stdout is not None:  # closed by the parent process
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OSError, RuntimeError, MemoryError) as error:
        refused = resources.refusal(error)
        if refused is None and not isinstance(error, OSError):
            raise
        _discard_output()
        _say(f"tensorhub: {refused or error}")
        return _failure(given)


def _say(text: str) -> None:
    """Print this on stderr, and ignore that it is closed."""
    if sys.stderr is not None:  # else `print` would take stdout
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


class _Log(logging.StreamHandler[TextIO]):
    """Writes lines without waiting for their reader: one that has stopped reading a pipe would stop the hub."""

    left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write it in pieces that a ready pipe takes whole, or leave it out."""
        left_out, self.left_out = self.left_out, 0
        before = f"({left_out} lines are left out: no process was reading)\n" if left_out else ""
        text = f"{before}{self.format(record)}\n"
        try:
            for start in range(0, len(text), PIECE):
                if not self._is_ready():
                    self.left_out = left_out + 1
                    return
                self.stream.write(text[start : start + PIECE])
                self.flush()
        except Exception:
            self.handleError(record)

    def _is_ready(self) -> bool:
        ready = select.poll()
        try:
            ready.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # no file
            return True
        return bool(ready.poll(0))


def _discard_output() -> None:
    """Discard what is still to be written to stdout, which has failed: Python would try again at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        """Print it, and raise OSError where that fails, which argparse's own does not."""
        print(self.format_help(), end="", file=file, flush=True)


def _main(arguments: list[str]) -> int:
    parser = _Parser(prog="tensorhub", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_server(commands.add_parser("server", help="start a hub (metadata only: it never sees a weight)"))
    keygen = commands.add_parser("keygen", help="write a new secret for a hub and its workers, readable by you only")
    keygen.add_argument("file", type=Path, help="where to; set it as TENSORHUB_SECRET_FILE on all nodes")
    keygen.add_argument(
        "--role", choices=get_args(Role), default="publisher", help="less than the secret: that role's key"
    )
    keygen.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="the secret that a role's key is made from"
    )
    _add_status(commands)
    for name, words in (
        ("pin", "all followers go to this version and stay there; newer ones wait"),
        ("unpin", "all followers go on to the newest version"),
        ("withdraw", "this version is bad: it is no longer served, and engines that run it return to another"),
    ):
        directive = commands.add_parser(name, help=words)
        if name != "unpin":
            directive.add_argument("version", help="as `tensorhub status` shows it: a step, or attempt/step")
        _add_hub(directive, timeout_s=10.0)
        directive.add_argument("--run", default="default", help="as the workers have it (default: %(default)s)")
        directive.add_argument("--model", required=True, help="as the workers have it, for example actor")
    _add_doctor(commands.add_parser("doctor", help="try whether this machine, engine and model work with the store"))
    _add_timeline(commands.add_parser("timeline", help="what each version waited for: in words, a page and a trace"))
    _add_measures(commands)
    fleet = commands.add_parser("fleet", help="rollouts of a running verl or OpenRLHF job: add some, drain some")
    _add_fleet(fleet.add_subparsers(dest="action", required=True))
    if arguments[:1] == ["doctor"] and arguments[1:] and arguments[1] in DOCTORS:
        return _framework_doctor(arguments[1], arguments[2:])
    try:
        return _run(parser, parser.parse_args(arguments))
    except TensorHubError as error:
        _say(f"tensorhub: {error}")
        return _failure(arguments)


def _failure(arguments: list[str]) -> int:
    """Return the exit status of a command that came to nothing: of one that says whether all is well not the 1."""
    return UNKNOWN if arguments[:1] in (["status"], ["top"]) else 1


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.command == "fleet":
        return int(_adapter("vllm.ray.fleet.commands", "fleet talks to a Ray cluster: install ray").run(options))
    if options.command == "completion":
        print(completion.script(parser))
        return 0
    if options.command == "bench":
        return bench(parser, options)
    if options.command == "timeline":
        print(write_timeline(options.files, options.out))
        return 0
    if options.command == "doctor" and options.check == "machine":
        return check_machine(options)
    if options.command == "doctor":
        settings = {"tensor_parallel_size": options.tp, **options.engine}
        return check_sync(options.model, settings)
    if options.command == "server":
        limits = HubLimits(**{name: getattr(options, name) for name in LIMITS})
        return serve(options, limits)
    if options.command == "keygen":
        return make_key(options.file, options.role, options.source)
    if not options.hub:
        where = "; `tensorhub fleet list` says where that of a run of verl or OpenRLHF is, and its secret"
        parser.error(f"{options.command} needs --hub tcp://host:port or {HUB_ENVIRONMENT}{where}")
    if options.command in ("status", "top"):
        return show_status(options)
    version = 0 if options.command == "unpin" else parse_version(options.version)
    keys, timeout_s = _keys(options), options.timeout
    print(direct(options.hub, options.run, options.model, options.command, version, timeout_s, keys))
    return 0


def show_status(options: argparse.Namespace) -> int:
    """Print the state of a hub, once or live in a terminal, and return 1 if something is wrong."""
    hub, keys = "" if options.hub == os.environ.get(HUB_ENVIRONMENT) else options.hub, _keys(options)

    def fetch() -> tuple[dict[str, Any], list[problems.Problem]]:
        report = fetch_status(options.hub, timeout_s=options.timeout, keys=keys)
        report["address"] = options.hub
        return report, problems.find(report, hub=hub, late_s=options.late)

    if options.command == "top" and sys.stdout is not None and sys.stdout.isatty() and top.can_draw():
        return top.watch(fetch, options.interval)
    report, found = fetch()
    if options.command == "top":
        print(top.plain(top.frame(report, found)))
    elif options.format == "json":
        print(json.dumps({**report, "problems": [each._asdict() for each in found]}, indent=2))
    else:
        print(status_text(report, found))
    return int(bool(found))


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    checks = doctor.add_subparsers(dest="check", required=True)
    sync = checks.add_parser("check-sync", help="do weights through the store equal weights from disk? (vLLM)")
    sync.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model with *.safetensors")
    sync.add_argument("--tp", type=int, default=1, metavar="N", help="workers of an engine; two engines are started")
    sync.add_argument("--engine", type=_settings, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    here = checks.add_parser("machine", help="what this host has and lacks: a line each, ok or one thing to do (DO)")
    _add_hub(here, timeout_s=10.0)
    here.add_argument("--with", dest="peer", metavar="HOST[:PORT]", help="is this host reached from there?")
    words = f"answer hosts that ask --with this one, at this port (default: {machine.PORT})"
    here.add_argument("--listen", nargs="?", type=int, const=machine.PORT, metavar="PORT", help=words)
    for name in DOCTORS:  # their arguments are the framework's own
        checks.add_parser(name, help=f"what a command line of {name} will do with the store, or what is wrong with it")


def _add_measures(commands: Any) -> None:
    commands.add_parser("completion", help='for bash: `eval "$(tensorhub completion)"` in ~/.bashrc')
    bench = commands.add_parser("bench", help="how fast the store reads from another host, beside one bare stream")
    where = bench.add_mutually_exclusive_group(required=True)
    where.add_argument("host", nargs="?", metavar="HOST[:PORT]", help="read from there, where --serve runs")
    words = f"be the host that others measure, until Ctrl-C, at this port (default: {machine.BENCH_PORT})"
    where.add_argument("--serve", nargs="?", type=int, const=machine.BENCH_PORT, metavar="PORT", help=words)
    bench.add_argument("--mb", type=int, default=256, metavar="N", help="to serve (default: %(default)s)")
    bench.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: %(default)s)")
    bench.add_argument("--timeout", type=_seconds, default=60.0, metavar="S", help="of all (default: %(default)g)")
    bench.add_argument("--insecure", action="store_true", help="serve whatever reaches the port, without a secret")
    _add_secret(bench)


def _add_hub(command: argparse.ArgumentParser, *, timeout_s: float) -> None:
    hub = os.environ.get(HUB_ENVIRONMENT)
    command.add_argument("--hub", default=hub, help=f"tcp://host:port (or {HUB_ENVIRONMENT})")
    command.add_argument("--timeout", type=_seconds, default=timeout_s, metavar="S", help="to wait for the hub")
    _add_secret(command)


def _add_status(commands: Any) -> None:
    ends = "Ends with 0 if nothing is wrong, 1 if something is, 2 if that is not known: the hub does not answer."
    status = commands.add_parser(
        "status", help="what is wrong; models, versions, workers, leases of a running hub", epilog=ends
    )
    live = commands.add_parser("top", help="the same live, a line for each worker; once, if it is piped", epilog=ends)
    live.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="(default: %(default)g)")
    words = "seconds after which a follower with a newer version to install is late (default: %(default)g)"
    for command in (status, live):
        _add_hub(command, timeout_s=5.0)
        command.add_argument("--late", type=_seconds, default=problems.LATE_S, metavar="S", help=words)
    status.add_argument("--format", choices=("text", "json"), default="text", help="(default: %(default)s)")
    status.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")


def _settings(text: str) -> dict[str, Any]:
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f'{text}: give an object, like {{"dtype": "float32"}}')
    return settings


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text}: give more than 0 seconds")
    return seconds


def _add_secret(command: argparse.ArgumentParser) -> None:
    words = f"the run's, as `tensorhub keygen` writes it (or {secret.FILE_VARIABLE}, {secret.SECRET_VARIABLE})"
    command.add_argument("--secret-file", type=Path, metavar="FILE", help=words)


def _keys(options: argparse.Namespace) -> Keys | None:
    return secret.read(options.secret_file) if options.secret_file else secret.from_environment()


def make_key(file: Path, role: Role, source: Path | None) -> int:
    """Write a secret, or a role's key made from one, to a new file."""
    if role != "publisher" and source is None:
        raise UsageError(f"a {role}'s key is made from the run's secret: name its file with --from")
    keys = secret.generate() if source is None else secret.read(source)
    secret.write(file, keys.limited(role))
    print(f"wrote {file}: {secret.FILE_VARIABLE}={file.absolute()}")
    return 0


def _add_fleet(actions: Any) -> None:
    list_ = actions.add_parser("list", help="every member: kind, state, version, requests, node")
    add = actions.add_parser(
        "add", help="start more replicas as soon as there is room, or take in a server by its address"
    )
    what = add.add_mutually_exclusive_group(required=True)
    what.add_argument("count", nargs="?", type=int, help="so many of the job's own kind")
    what.add_argument("--url", metavar="http://host:port", help="of a `vllm serve` that you have started")
    drain = actions.add_parser("drain", help="give no more requests to it, and end it when it has none left")
    whom = drain.add_mutually_exclusive_group(required=True)
    whom.add_argument("name", nargs="?", help="as `fleet list` shows it, e.g. rollout-3")
    whom.add_argument("--node", metavar="ADDRESS", help="all on this node; what ran there comes back elsewhere")
    drain.add_argument(
        "--now", action="store_true", help="also the last that is ready, so that requests wait (--node: always)"
    )
    undrain = actions.add_parser("undrain", help="start replicas on a drained node again")
    undrain.add_argument("node", metavar="ADDRESS", help="as it was given to `drain --node`")
    target = actions.add_parser("target", help="keep so many replicas of the job's own kind")
    target.add_argument("count", metavar="N|policy", help="policy: let option fleet_policy say how many")
    guard = actions.add_parser("guard", help="runs on a node: drains it at SIGTERM or SIGUSR1")
    for leaving, timeout_s in ((drain, 120.0), (guard, 25.0)):
        leaving.add_argument(
            "--timeout",
            type=float,
            default=timeout_s,
            metavar="S",
            help="for requests under way (default: %(default)s)",
        )
    for action in (list_, add, drain, undrain, target, guard):
        action.add_argument("--address", metavar="host:port", help="of the Ray cluster (default: this machine's)")
        action.add_argument(
            "--job", metavar="ID", help="Ray's id of the job, where several have a fleet (guard: all of them)"
        )


def _add_metrics(command: argparse.ArgumentParser) -> None:
    command.add_argument("--metrics-host", metavar="HOST", default="127.0.0.1", help="(default: %(default)s)")
    command.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve Prometheus' /metrics there; -1: nowhere (default: the hub's own port + 1, if it is free)",
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    for name, (_, _, words) in LIMITS.items():
        default = getattr(HubLimits(), name)
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, type=type(default), default=default, help=f"{words} (default: %(default)s)")


def serve(options: argparse.Namespace, limits: HubLimits) -> int:
    """Run a hub until SIGINT or SIGTERM."""
    shown = _Log(sys.stderr)
    shown.setFormatter(log.formatter())
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.INFO, handlers=[shown])
    run_log.use(options.events)
    keys = _keys(options)
    if keys is None:
        what = "whatever reaches it" if options.insecure else "this host only: `tensorhub keygen` makes a secret"
        _say(f"tensorhub: no secret, so this hub is for {what}")
    address = _listens_at(PORT, keys, insecure=options.insecure) if options.address is None else options.address
    if options.interface is not None:
        address = format_address("tcp", addresses_of(options.interface, "--interface")[0], PORT)
    stop = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in signals]
    try:
        with Server(address, limits=limits, keys=keys, insecure=options.insecure) as server, _metrics(server, options):
            try:
                print(f"tensorhub server at {server.address}", flush=True)
            except OSError as error:  # the hub's log has it, too
                _discard_output()
                _say(f"tensorhub: cannot write where the hub listens: {error}")
            collect_rarely()
            while server.is_alive() and not stop.wait(ALIVE_CHECK_S):
                pass
            if not server.is_alive():
                _say("tensorhub: the hub has failed, its log says why")
                return 1
        return 0
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _metrics(server: Server, options: argparse.Namespace) -> Iterator[None]:
    """Serve the hub's figures within the block. A port that was not chosen may be taken: the hub runs all the same."""
    port = options.metrics_port
    if port == -1:
        yield
        return
    exposition = import_module("tensorhub_plugins.core.hub.exposition")  # an HTTP server, which no other command needs
    with contextlib.ExitStack() as stack:
        try:
            own = parse_address(server.address, "tcp")[1] + 1
            url = stack.enter_context(exposition.served(server, options.metrics_host, own if port is None else port))
            logging.getLogger("tensorhub.hub").info("metrics at %s", url)
        except UsageError as error:
            if port is not None:
                raise
            _say(f"tensorhub: {error.message}")
        yield


def _add_server(server: argparse.ArgumentParser) -> None:
    where = server.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        help=f"where to listen; port 0 takes a free one (default: {PORT} everywhere; without a secret {LOOPBACK})",
    )
    where.add_argument("--interface", metavar="NAME", help="listen on this network interface only, port 7070")
    server.add_argument(
        "--insecure",
        action="store_true",
        help="without a secret, let whatever reaches the address read and write",
    )
    _add_secret(server)
    server.add_argument("--verbose", action="store_true", help="log every decision")
    words = f"record its warnings in this folder, for `tensorhub timeline` (or {run_log.VARIABLE})"
    server.add_argument("--events", metavar="FOLDER", help=words)
    _add_metrics(server)
    _add_limits(server)


def _add_timeline(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="or a folder: as TENSORHUB_EVENTS names it"
    )
    words = "the page is FILE.html, the trace for Perfetto FILE.json (default: %(default)s)"
    command.add_argument("--out", type=Path, default=Path("timeline"), metavar="FILE", help=words)


def bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Measure reads from a host, or be that host, see operations/bench.py."""
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    keys = _keys(options)
    measuring = import_module("tensorhub_plugins.core.operations.bench")  # of torch, which no other command needs
    if options.serve is None:
        measured = measuring.measure(options.host, keys, rounds=options.rounds, timeout_s=options.timeout)
        print(measuring.text(measured, options.host))
        return 0
    address = _listens_at(options.serve, keys, insecure=options.insecure)
    with (
        contextlib.suppress(KeyboardInterrupt),
        measuring.served(address, keys, options.mb, insecure=options.insecure) as at,
    ):
        print(f"waiting for `tensorhub bench THIS-HOST:{parse_address(at, 'tcp')[1]}`", flush=True)
        threading.Event().wait()
    return 0


def _listens_at(port: int, keys: Keys | None, *, insecure: bool) -> str:
    """Return where a hub listens by default: without a secret on this host only."""
    everywhere = keys is not None or insecure
    return of_all_interfaces(port) if everywhere else format_address("tcp", "127.0.0.1", port)


def write_timeline(journals: list[Path], out: Path) -> str:
    """Write a page and a trace of these journals; return what each version waited for, as text for users."""
    found = [
        each
        for file in journals
        for each in (sorted(filter(Path.is_file, file.iterdir())) if file.is_dir() else [file])
    ]
    events, left_out = timeline.newest(event for file in found for event in _events_of(file))
    out = out / "timeline" if out.is_dir() else out
    name = str(out.with_suffix("") if out.suffix in (".html", ".json") else out)
    paths = critical_path.paths(events)
    template = Path(timeline.__file__).with_suffix(".html").read_text(encoding="utf-8")
    files.write_text(Path(f"{name}.html"), timeline.page(template, events, paths))
    files.write_text(Path(f"{name}.json"), json.dumps(timeline.trace(events)))
    earlier = f", without {left_out} earlier ones" if left_out else ""
    files_text = f"{name}.html: {len(events)} events{earlier}; {name}.json: the same for https://ui.perfetto.dev"
    return f"{critical_path.text(paths)}\n{files_text}"


def _events_of(file: Path) -> Iterator[timeline.Event]:
    with files.opened(file) as lines:
        yield from timeline.parse(iter(lambda: lines.readline(timeline.LINE_BYTES_MAX), b""), str(file))


def check_machine(options: argparse.Namespace) -> int:
    """Say what this host has and lacks, or answer others that ask whether they are reached from here."""

    def say(line: str) -> None:
        print(line, flush=True)

    if options.listen is not None:
        with contextlib.suppress(KeyboardInterrupt):
            machine.listen(options.listen, say)
        return 0
    names = _adapter("vllm.names", "this package is not whole")
    checks = [machine.software(names.VERSIONS, names.installed_version()), machine.limits(), machine.devices()]
    checks.append(machine.asked(options.hub, partial(_keys, options), options.peer, options.timeout))
    return machine.show(chain.from_iterable(checks), say)


def check_sync(model: Path, settings: dict[str, Any]) -> int:
    """Run the check of an engine, see vllm/doctor/check_sync.py."""
    doctor = _adapter("vllm.doctor.check_sync", "check-sync starts vLLM engines: install vLLM")
    if not (model / "config.json").is_file():
        raise UsageError(f"{model} holds no config.json: give the folder of a Hugging Face model")
    return int(doctor.run(model, settings))


def _adapter(module: str, lacking: str) -> Any:
    """Import an adapter: besides DOCTORS the only place where the core names one, and only on request."""
    try:
        return import_module(f"tensorhub_plugins.{module}")
    except ImportError as error:
        raise UsageError(f"{lacking} ({error})") from error


def _framework_doctor(name: str, arguments: list[str]) -> int:
    logging.raiseExceptions = False  # vLLM logs to stdout, which may take no more: no traceback for each line
    try:
        doctor = import_module(DOCTORS[name])
    except (ImportError, UsageError) as error:
        _say(f"tensorhub: doctor {name} reads the command line with {name}: {error}")
        return 1
    return int(doctor.main(arguments))


def direct(
    address: str, run: str, model: str, command: str, version: int, timeout_s: float, keys: Keys | None = None
) -> str:
    """Carry out pin, unpin (version 0) or withdraw; return the new state. The same as Client's, without torch."""
    deadline = Deadline.after(timeout_s)
    identity = messages.Hello(
        run=check_name("run", run),
        model=check_name("model", model),
        replica=f"operator-{new_session().hex()[:8]}",
        shard=0,
        shard_count=1,
        location=Location(),
        endpoints={},
    )
    kind = messages.Withdraw if command == "withdraw" else messages.Pin
    link = HubLink(
        address,
        identity,
        connect_timeout_s=deadline.remaining(),
        on_source_gone=lambda session: None,
        on_may_release=lambda effect: None,
        keys=secret.given(keys),
    )
    try:
        link.ask(lambda number: kind(number, version, deadline.remaining()), deadline).result()
        return directive_text(run, model, link.directive.pin, link.directive.withdrawn)
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(main())
