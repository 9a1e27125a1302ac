"""One run of one workload on one path: hosts, a trainer, engines, and the stopwatches' results."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from recipes.bench.network import Host, Network, now
from recipes.bench.workers import HubWorker, bare_stream
from recipes.bench.workloads.engine import PORTS, Engine
from recipes.bench.workloads.report import CHANGED_PERCENT, JOINER, WARM_UP, Pause, pauses
from recipes.bench.workloads.trainer import Receiver, Trainer

# What an engine needs; vLLM imports some of it only when an engine is made.
IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "tensorhub_plugins.vllm.load_format",
)
# From one version to the next, and from asking for an engine to the end: the same on all paths, or tokens could not be
# compared. The next version waits until all have the last one: over the thin link that takes longer.
PERIOD_S = {"standalone": 3.0, "elastic": 1.0, "cross": 1.0}
JOIN_S = 10.0


@dataclass(frozen=True)
class Setting:
    """The sizes of everything."""

    model: Path  # with weights
    bare: Path  # without: what engines are made from
    versions: int  # that count
    sequences: int  # that an engine generates at a time
    mbit: float  # of every host's link, each way
    wan_mbit: float
    rtt_ms: float


ROLLOUTS = {  # where they are; the trainer is in the east
    "standalone": ("east", "east", "east"),
    "elastic": ("east", "east", "east"),  # and one that joins
    "cross": ("east", "west", "west"),
}


def import_all() -> None:
    """Import once, before the processes of the hosts are forked from this one."""
    for name in IMPORTS:
        importlib.import_module(name)


def play(workload: str, path: str, setting: Setting, imports_s: float | None = None) -> dict[str, Any]:
    """Run it, and return what happened, for report.py. imports_s: as measured on another path of this round."""
    with stage(workload, setting) as (wires, hub, trainer, engines):
        fleet = make_fleet(path, trainer, setting, hub)
        limits = _limits(trainer, engines[-1])
        joiner = engines.pop() if workload == "elastic" else None
        fleet.begin(engines)
        if isinstance(fleet, Spare) and joiner is not None:
            fleet.start_spare(joiner)
        updates: list[dict[str, Any]] = []
        for version in range(2, 2 + WARM_UP + (0 if joiner else setting.versions)):
            before = trainer.call("digests")
            trainer.call("train", version, CHANGED_PERCENT if path == "deltas" else None)
            sleep_until(updates[-1]["began"] + PERIOD_S[workload] if updates else 0.0)
            if len(updates) <= WARM_UP:
                sent = sent_bytes(wires, trainer)
            updates.append({"version": version, **fleet.update(version, engines)})
        join = None
        if joiner is not None:
            imports_s = imports_take_s() if imports_s is None else imports_s
            sent = sent_bytes(wires, trainer)
            join = {"imports_s": imports_s, **fleet.join(joiner, engines)}
            engines.append(joiner)
        sleep_until(join["asked"] + JOIN_S if join else updates[-1]["began"] + PERIOD_S[workload])
        ended = now()
        for engine in engines:
            engine.call("wait_token", ended)
        digests = trainer.call("digests"), before
        return {
            "workload": workload,
            "path": path,
            "limits": limits,
            "sent_bytes": sent_bytes(wires, trainer) - sent,
            "updates": updates,
            "join": join,
            "ended": ended,
            "engines": [_told(engine, *digests, join) for engine in engines],
            "load": os.getloadavg()[0],
        }


@contextmanager
def stage(workload: str, setting: Setting) -> Iterator[tuple[Network, Host, Host, list[Host]]]:
    """Yield the network, and hosts with a process each: the hub's, the trainer's, the engines', one that joins."""
    places = list(ROLLOUTS[workload]) + (["east"] if workload == "elastic" else [])
    with ExitStack() as stack:
        wires = stack.enter_context(Network())
        wires.site("east")
        if "west" in places:
            wires.site("west")
            wires.join("east", "west", setting.wan_mbit, setting.rtt_ms)
        hosts = [wires.host(site, setting.mbit) for site in ("east", "east", *places)]
        hub, trainer, *engines = hosts
        for host in hosts:
            stack.callback(host.stop)
        hub.start(partial(HubWorker, hub.address))
        trainer.start(partial(Trainer, setting.model, trainer.address, "east"))
        for number, (host, site) in enumerate(zip(engines, places, strict=True)):
            name = JOINER if workload == "elastic" and number == len(engines) - 1 else f"rollout-{number}"
            host.start(partial(Engine, name, host.address, site, setting.sequences))
        yield wires, hub, trainer, engines


def sent_bytes(wires: Network, host: Host) -> int:
    return wires.traffic_bytes(host)[1]


def imports_take_s() -> float:
    """Return the seconds of imports that an engine would need in addition, measured while the others generate."""
    began = now()
    subprocess.run([sys.executable, "-c", "import " + ", ".join(IMPORTS)], check=True, stderr=subprocess.DEVNULL)
    return now() - began


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - now()))


def _limits(trainer: Host, engine: Host) -> dict[str, float]:
    """Measure two limits before anything generates: a copy of the weights, and one connection to the last engine's
    host."""
    size_bytes = trainer.call("size_bytes")
    receiver = Host(engine.name, engine.address, engine.port, engine.mbit)
    receiver.start(partial(Receiver, size_bytes))
    try:
        stream_s = bare_stream(trainer, receiver)
    finally:
        receiver.stop()
    return {"size_bytes": size_bytes, "memcpy_s": trainer.call("memcpy_s"), "stream_s": stream_s}


def _told(engine: Host, newest: dict[str, str], before: dict[str, str], join: dict[str, Any] | None) -> dict[str, Any]:
    notes, digests = engine.call("notes"), engine.call("digests")
    found = pauses(notes)
    if join and join["restarted"]:  # the engine that stood still is gone
        went_on = next(note["at"] for note in notes if note["what"] == "tokens")
        found.append(Pause(join["asked"], join["restarted"], went_on - join["asked"]))
    return {
        **engine.call("who"),
        "pauses": [asdict(pause) for pause in found],
        "tokens": [(note["at"], note["count"]) for note in notes if note["what"] == "tokens"],
        "equal": digests == newest and not set(digests.items()) & set(before.items()),
    }


def all_at_once(hosts: Sequence[Host], method: str, *arguments: Any) -> list[Any]:
    for host in hosts:
        host.tell(method, *arguments)
    return [host.answer() for host in hosts]


class Store:
    """The store, whose engines follow by themselves. star: they read the trainer alone."""

    def __init__(self, trainer: Host, setting: Setting, hub: Host, *, star: bool) -> None:
        self.trainer, self.setting, self.star = trainer, setting, star
        self.hub: str = hub.call("address")

    def begin(self, engines: Sequence[Host]) -> None:
        self.trainer.call("connect", self.hub)
        self.trainer.call("publish", 1)
        for engine in engines:
            self._tell_start(engine)
        for engine in engines:
            engine.answer()
            engine.call("follow", self.hub)

    def _tell_start(self, engine: Host) -> None:
        if self.star:
            engine.call("read_the_trainer")
        engine.tell("start", self.setting.bare, "tensorhub", self._joining(engine))

    def _joining(self, engine: Host) -> dict[str, Any]:
        who = engine.call("who")
        return {
            "hub": self.hub,
            "run": "bench",
            "model": "actor",
            "replica": who["name"],
            "location": {"data_center": who["data_center"], "host": who["name"]},
            "transports": list(PORTS),
            "advertise_host": engine.address,
            "install": "staged",
            "serve_from": "live" if self.star else "host",  # a star's engine serves nothing anyway
        }

    def update(self, version: int, engines: Sequence[Host]) -> dict[str, Any]:
        began, ended = self.trainer.call("publish", version)
        done = all_at_once(engines, "wait_version", version)
        return {"began": began, "trainer_s": ended - began, "done": max(done)}

    def join(self, joiner: Host, engines: Sequence[Host]) -> dict[str, Any]:
        asked = now()
        self._tell_start(joiner)
        made = joiner.answer()
        token = joiner.call("wait_token", asked)
        joiner.call("follow", self.hub)
        return {"asked": asked, "token": token, "weights_s": made["load_s"], "trainer_s": 0.0, "restarted": None}


class Spare(Store):
    """The store, and the engine that is asked for has started before, with dummy weights and without requests."""

    def start_spare(self, engine: Host) -> None:
        engine.call("start", self.setting.bare, "dummy", {}, False)

    def join(self, joiner: Host, engines: Sequence[Host]) -> dict[str, Any]:
        joining, asked = self._joining(joiner), now()
        joiner.call("connect", joining)
        joiner.call("follow", self.hub)
        installed = joiner.call("wait_version", 1 + WARM_UP)
        token = joiner.call("wait_token", asked)
        return {
            "asked": asked,
            "token": token,
            "weights_s": installed - asked,
            "trainer_s": 0.0,
            "restarted": None,
            "imports_s": 0.0,  # done before
        }


class Stock:
    """The path of verl 0.9.1: all engines pause, the trainer broadcasts, all load, all resume."""

    def __init__(self, trainer: Host, setting: Setting) -> None:
        self.trainer, self.setting = trainer, setting

    def begin(self, engines: Sequence[Host]) -> None:
        all_at_once(engines, "start", self.setting.bare, "dummy", {}, False)
        self.master = self.trainer.call("lead")
        self.update(1, engines)

    def update(self, version: int, engines: Sequence[Host]) -> dict[str, Any]:
        began = now()
        all_at_once(engines, "stop")
        self._meet(engines)
        self.trainer.tell("broadcast")
        all_at_once(engines, "load", version)
        self.trainer.answer()
        all_at_once(engines, "go")
        ended = now()
        return {"began": began, "trainer_s": ended - began, "done": ended}

    def _meet(self, engines: Sequence[Host]) -> None:
        """Form the group, which is kept while its members are the same."""
        size = 1 + len(engines)
        self.trainer.tell("join", size)
        for rank, engine in enumerate(engines, 1):
            engine.tell("join", rank, size, self.master)
        for host in (self.trainer, *engines):
            host.answer()

    def join(self, joiner: Host, engines: Sequence[Host]) -> dict[str, Any]:
        """Add an engine. A group cannot be joined: the others go on until it is there, then a larger group is made."""
        asked = now()
        made = joiner.call("start", self.setting.bare, "dummy", {}, False)
        update = self.update(1 + WARM_UP, [*engines, joiner])
        token = joiner.call("wait_token", update["done"])
        return {
            "asked": asked,
            "token": token,
            "weights_s": made["load_s"] + update["trainer_s"],
            "trainer_s": update["trainer_s"],
            "restarted": None,
        }


class Restart(Stock):
    """The path of Stock, but for another engine the whole job starts again, from a checkpoint. At its best: new
    processes wait with everything imported, and there is neither Ray nor an optimizer."""

    def join(self, joiner: Host, engines: Sequence[Host]) -> dict[str, Any]:
        asked = now()
        saved = self.trainer.call("save")
        whose = [engine.call("who") for engine in engines]
        for host in (self.trainer, *engines):
            host.stop()
        self.trainer.start(partial(Trainer, saved, self.trainer.address, "east"))
        for engine, who in zip(engines, whose, strict=True):
            make = partial(Engine, who["name"], engine.address, who["data_center"], self.setting.sequences)
            engine.start(make)
        made = all_at_once([joiner, *engines], "start", self.setting.bare, "dummy", {}, False)
        self.master = self.trainer.call("lead")
        update = self.update(1 + WARM_UP, [*engines, joiner])
        token = joiner.call("wait_token", update["done"])
        return {
            "asked": asked,
            "token": token,
            "weights_s": made[0]["load_s"] + update["trainer_s"],
            "trainer_s": update["done"] - asked,
            "restarted": update["done"],
        }


def make_fleet(path: str, trainer: Host, setting: Setting, hub: Host) -> Store | Stock:
    match path:
        case "stock":
            return Stock(trainer, setting)
        case "restart":
            return Restart(trainer, setting)
        case "spare":
            return Spare(trainer, setting, hub, star=False)
        case _:
            return Store(trainer, setting, hub, star=path == "star")
