"""A run of a framework on three hosts whose rollouts take deltas from each other, and a keeper of what it publishes.

The hosts are network namespaces: what one reads from another goes over tcp. Of the three nodes the first has the
trainer and a rollout, and is in the east; the others are in the west, where one rollout reads from the east and the
other from it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from recipes.bench import network
from recipes.demo import elastic
from recipes.demo.report import replica_of
from tensorhub_plugins.core import Client, Location, Server
from tensorhub_plugins.core.errors import TensorHubError

RUN, MODEL = "mine", "actor"
PORT = 21001
SAVE_EVERY = 4  # steps
NODES = ("east", "west", "west")
MBIT = 100.0  # of each host's link: so slow that deltas are worth it, however busy the machine is
TIMEOUT_S = 60.0
CUT_S_MAX = 200.0


class Hub:
    """A hub outside of the run's processes, always at the same address."""

    def __init__(self, host: str) -> None:
        self._server = Server(f"tcp://{host}:{PORT}", insecure=True)  # in a network of its own

    def close(self) -> None:
        self._server.close()


class Keeper:
    """Another reader, in the north, which follows the run and keeps every version; and one that takes no deltas."""

    def __init__(self, hub: str, address: str) -> None:
        self.read: list[dict[str, Any]] = []
        self._clients = {
            delta: Client(
                hub, run=RUN, model=MODEL, replica=f"keeper-{delta}", location=Location("north", "", f"keeper-{delta}"),
                advertise_host=address, transports=("tcp",), delta=delta,
            )
            for delta in ("auto", "off")
        }  # fmt: skip
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        newest = 0
        while not self._ended.is_set():
            with suppress(TensorHubError):  # none yet, or its last holder has just left
                version = self._clients["auto"].target(newest, timeout_s=1.0)
                for delta, client in self._clients.items():
                    fetched = client.fetch(version, serve=delta == "auto", timeout_s=TIMEOUT_S)
                    report = fetched.report
                    self.read.append(
                        {
                            "delta": delta,
                            "version": version,
                            "bytes": sum(report.sources.values()),
                            "wire": report.wire_size_bytes,
                            "by_delta": report.delta_size_bytes,
                            "sources": list(report.sources),
                            "root": report.roots[0],
                        }
                    )
                    if delta == "off":
                        fetched.release()
                newest = version

    def log(self) -> list[dict[str, Any]]:
        return list(self.read)

    def close(self) -> None:
        self._ended.set()
        for client in self._clients.values():
            client.close()


class Stage:
    """The hosts, the hub and the keeper, which outlive a run."""

    def __init__(self, folder: Path, framework: str) -> None:
        self.folder, self.framework = folder, framework
        self.wires = network.Network()

    def __enter__(self) -> Stage:
        self.wires.__enter__()
        for site in ("east", "west"):
            self.wires.site(site)
        self.wires.join("east", "west", 1000)
        self.nodes = [self.wires.host(site, MBIT) for site in NODES]
        self._hub, self.keeper = self.wires.host("east", None), self.wires.host("west", MBIT)
        self.hub = f"tcp://{self._hub.address}:{PORT}"
        self._hub.start(partial(Hub, self._hub.address))
        self.keeper.start(partial(Keeper, self.hub, self.keeper.address))
        return self

    def __exit__(self, *_: object) -> None:
        for host in (self.keeper, self._hub):
            host.stop()
        self.wires.__exit__()

    def cut_off(self, node: network.Host) -> None:
        """Keep a node's word from the hub; Ray, which would give up the node in a minute, goes on."""
        self.wires.part(node, self._hub)

    def reunite(self, node: network.Host) -> None:
        """End `cut_off`."""
        self.wires.reunite(node, self._hub)

    def restart_hub(self) -> None:
        """Kill the hub, and start another one."""
        self._hub.process.kill()
        self._hub.process.join()
        self._hub.start(partial(Hub, self._hub.address))

    def kept(self) -> list[int]:
        """Return the versions that the keeper has read so far."""
        return [read["version"] for read in self.keeper.call("log")]

    @contextmanager
    def life(self, name: str, *, resumes: bool = False, delta: str = "auto") -> Iterator[Life]:
        """Start the run, or start it again from its last checkpoint; end it at the end."""
        life = Life(self, self.folder / name, resumes, delta)
        try:
            yield life
        finally:
            life.run.close()


class Life:
    """One life of the run."""

    def __init__(self, stage: Stage, folder: Path, resumes: bool, delta: str) -> None:
        self.stage, self.folder = stage, folder
        where = [f"{site}:{host.name}:{host.address}" for site, host in zip(NODES, stage.nodes, strict=True)]
        environment = {
            "SITES": " ".join(where),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OUT": os.environ.get("OUT", str(stage.folder / "out")),
        }
        options = {"hub": stage.hub, "run": RUN, "delta": delta}
        checkpoints = stage.folder / "checkpoints"
        arguments: list[str]
        if stage.framework == "verl":
            store = elastic.STORE
            arguments = [f"+{store}.{name}={value}" for name, value in options.items()]
            arguments += ["actor_rollout_ref.actor.optim.lr=1e-6", f"trainer.default_local_dir={checkpoints}"]
            arguments += [f"trainer.save_freq={SAVE_EVERY}", "trainer.resume_mode=auto"]
        else:
            given = "&".join(f"{name}={value}" for name, value in {**options, "verify": 1}.items() if name != "hub")
            environment["HUB"] = f"tensorhub{stage.hub.removeprefix('tcp')}?{given}"
            arguments = ["--actor.adam.lr", "1e-6", "--ckpt.path", str(checkpoints)]
            arguments += ["--ckpt.save_steps", str(SAVE_EVERY), *(["--ckpt.load_enable"] if resumes else [])]
            arguments += ["--rollout.max_new_tokens", "16"]  # short: it is about versions
        self.run = elastic.Run(
            folder,
            "tiny",
            stage.framework,
            nodes="2 1 1",
            inside=("ip", "netns", "exec", stage.nodes[0].name),
            arguments=arguments,
            **environment,
        )

    def begin(self) -> None:
        """Wait for the first rollout, and have two more join, each on a host of its own."""
        self.run.begin()
        (self.folder / "join").touch()
        self.run.until("nodes", lambda: len(self.run.cluster()["nodes"]) == len(NODES))
        self.run.act("target 3", 3, lambda: self.run.fleet("target", "3"))

    def everywhere(self, more: int) -> None:
        """Wait until all rollouts run a version that is so many further than the newest of now."""
        watched = self.newest() + more
        self.run.until(f"version {watched} everywhere", lambda: elastic.everywhere(self.run, watched))

    def newest(self) -> int:
        return max((e["version"] for e in self.run.events() if e["event"] == "publish"), default=0)

    def saved(self) -> int:
        """Return the step that the framework resumes from."""
        said = self.stage.folder / "checkpoints"
        said = said / ("latest_checkpointed_iteration.txt" if self.stage.framework == "verl" else "_actor/latest")
        text = said.read_text().strip().removeprefix("global_step") if said.exists() else ""
        return int(text) if text.isdigit() else 0

    def joined(self) -> list[str]:
        """Return the rollouts in the west."""
        members = [e for e in self.run.events() if e["event"] == "member" and e["kind"] == "joined"]
        return sorted({replica_of(e["worker"]) for e in members if e["state"] == "ready"})

    def of(self, name: str, event: str) -> list[dict[str, Any]]:
        return [e for e in self.run.events() if e["event"] == event and replica_of(e["worker"]) == name]

    def ran(self, name: str) -> int:
        return max((e["version"] for e in self.of(name, "resume")), default=0)

    def host_of(self, name: str) -> network.Host:
        """Return the host of a rollout."""
        pid = self.run.pid("install", name)
        inode = os.stat(f"/proc/{pid}/ns/net").st_ino
        return next(host for host in self.stage.nodes if os.stat(f"/var/run/netns/{host.name}").st_ino == inode)

    def misses(self, name: str, others: Sequence[str], count: int) -> tuple[int, int]:
        """Cut a rollout's host off from the hub until `count` more versions were published that it misses; then have it
        read the next one, while the trainer is stopped, so that there is no newer one. Return what it had, and that."""
        host, had = self.host_of(name), self.ran(name)
        self.stage.cut_off(host)
        self.run.until(
            f"{count} versions without {name}", lambda: self.newest() > had + count and had == self.ran(name), CUT_S_MAX
        )
        trainer = self.run.pid("publish", "trainer")
        self.run.until("the others", lambda: all(self.ran(each) >= self.newest() for each in others))
        os.kill(trainer, signal.SIGSTOP)
        try:
            newest = self.newest()
            self.stage.reunite(host)
            self.run.until(f"{name} is back", lambda: self.ran(name) >= newest, 120)
        finally:
            os.kill(trainer, signal.SIGCONT)
        return had, newest
