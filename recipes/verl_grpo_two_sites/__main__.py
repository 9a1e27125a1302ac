"""A real GRPO run at two sites, joined by one thin link with a delay, in network namespaces of this machine.

    python -m recipes.verl_grpo_two_sites [--framework verl|openrlhf] [--size tiny|small] [--out FOLDER]

It needs root, `ip`, `tc` and `cc`.

The trainer and one replica are in the east. A Ray node of the west joins, labelled with its site, and two replicas
start on it. Then the link is cut and comes back, and the engine that reads from the east is killed. Ends with what was
claimed, checked; leaves report.json and the logs in FOLDER. Returns 0 if every claim holds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from recipes.bench import network
from recipes.demo import elastic
from recipes.demo.__main__ import ROOT
from recipes.demo.report import Claim, read_events
from recipes.demo.watch import end_cleanly_when_told
from recipes.verl_grpo_two_sites import report as reports

WAN_MBIT, LAN_MBIT, RTT_MS = 100, 1000, 50
STALENESS_S, CUT_S = 8.0, 30.0
WEST = 2  # replicas
VERSIONS = 3  # that are watched on their way, and so many after the cut


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.verl_grpo_two_sites", description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("verl", "openrlhf"), default="verl")
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny", help="of the model")
    parser.add_argument("--out", type=Path, help="default: out/two-sites, or two-sites-openrlhf")
    parser.add_argument("--report-only", action="store_true", help="of the run that FOLDER already holds")
    arguments = parser.parse_args()
    name = "two-sites" + ("" if arguments.framework == "verl" else f"-{arguments.framework}")
    folder = (arguments.out or Path(os.environ.get("OUT", ROOT / "out")) / name).resolve()
    if not arguments.report_only:
        end_cleanly_when_told()
        network.require()
        if reason := network.cannot_delay():
            sys.exit(f"not run: {reason}")
        try:
            play(folder, arguments.size, arguments.framework)
        except elastic.Failed as error:
            print(f"two sites: {error}", file=sys.stderr)
            return 1
    claims = reports.claims_of(read_events(folder / "events"), staleness_s=STALENESS_S)
    return show(folder, claims)


def play(folder: Path, size: str, framework: str) -> None:
    with network.Network() as wires:
        for site in ("east", "west"):
            wires.site(site)
        wires.join("east", "west", WAN_MBIT, RTT_MS)
        hosts = {site: wires.host(site, LAN_MBIT) for site in ("east", "west")}
        inside = ("ip", "netns", "exec", hosts["east"].name)
        environment = {
            "SITES": " ".join(f"{site}:{host.name}:{host.address}" for site, host in hosts.items()),
            "STALENESS_S": f"{STALENESS_S:g}",
            "HUB": f"tensorhub:?verify=1&staleness_s={STALENESS_S:g}",  # OpenRLHF's
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        recipe = f"{framework}_grpo_two_sites"
        run = elastic.Run(folder, size, framework, recipe=recipe, nodes=f"2 {WEST}", inside=inside, **environment)
        try:
            tell(run, wires)
        finally:
            run.close()


def tell(run: elastic.Run, wires: network.Network) -> None:
    """Run the story."""
    run.begin()
    run.say(f"one replica serves in the east; the west joins over {WAN_MBIT} Mbit/s and {RTT_MS} ms")
    (run.folder / "join").touch()
    run.until("node in the west", lambda: len(run.cluster()["nodes"]) == 2)
    everybody = 1 + WEST
    run.act(f"tensorhub fleet target {everybody}", everybody, lambda: run.fleet("target", str(everybody)))
    watched = newest(run) + VERSIONS
    run.until(f"version {watched} everywhere", lambda: elastic.everywhere(run, watched))
    run.fleet("list")
    run.say(f"the link is cut for {CUT_S:.0f} s")
    mark(run, "cut")
    wires.cut("west")
    time.sleep(CUT_S)  # what is shown is a cut of so long
    wires.mend("west")
    mark(run, "mend")
    run.say("it is back")
    run.until("all replicas after the cut", lambda: run.ready() == everybody)
    watched = newest(run) + VERSIONS
    run.until(f"version {watched} everywhere", lambda: elastic.everywhere(run, watched))
    run.fleet("list")
    seed = reports.seed_of(run.events())
    mark(run, "kill", f"{seed}/0")
    run.act(
        f"SIGKILL of the engine of {seed}, the seed", everybody, lambda: elastic.kill_engine(run, seed), leaves=seed
    )
    watched = newest(run) + VERSIONS
    run.until(f"version {watched} everywhere", lambda: elastic.everywhere(run, watched))
    run.fleet("list")


def newest(run: elastic.Run) -> int:
    return max(e["version"] for e in run.events() if e["event"] == "publish")


def mark(run: elastic.Run, what: str, worker: str = "") -> None:
    with open(run.folder / "events" / "story.jsonl", "a") as story:
        story.write(json.dumps({"t": time.time(), "event": what, "worker": worker}) + "\n")


def show(folder: Path, claims: Sequence[Claim]) -> int:
    holds = all(claim.holds for claim in claims)
    content = {"holds": holds, "claims": [asdict(claim) for claim in claims]}
    (folder / "report.json").write_text(json.dumps(content, indent=1))
    print("\n" + "\n".join(f"{'ok  ' if c.holds else 'FAIL'}  {c.claim}\n        {c.detail}" for c in claims))
    print(f"\n{folder / 'report.json'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
