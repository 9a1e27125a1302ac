"""Two sites, a thin link with a delay between them, real followers and updaters: what crosses, a cut, a seed's death.

The sites are network namespaces; needs root, `ip`, `tc`, a C compiler and /dev/net/tun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from two_sites import NUMBERS, Engine, Trainer

from recipes.bench import network
from recipes.bench.workers import HubWorker

WAN_MBIT, LAN_MBIT, RTT_MS = 100, 400, 50
SIZE_BYTES = 4 * NUMBERS
COPIES_MAX = 1.2  # headers, acknowledgements and heartbeats included
STALENESS_S = 4.0
HEARTBEATS_S = 2.0  # the hub may have been heard so long before the cut
TIMEOUT_S = 60.0
BACK_S_MAX = 10.0  # from the link's return to the newest version; TCP alone may take as long as the cut
WEST = 3

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(network.missing()), reason=network.missing() or ""),
    pytest.mark.skipif(bool(network.cannot_delay()), reason=network.cannot_delay() or ""),
]


class Sites:
    def __init__(self, wires: network.Network, trainer: network.Host, east: network.Host, west: list[network.Host]):
        self.wires, self.trainer, self.east, self.west = wires, trainer, east, west

    def crossed(self) -> float:
        """Copies of the weights that have come into the west."""
        return self.wires.crossed_bytes("west") / SIZE_BYTES

    def ask(self, what: str) -> list[Any]:
        return [host.call("status")[what] for host in self.west]


@contextmanager
def two_sites() -> Iterator[Sites]:
    with network.Network() as wires:
        wires.site("east")
        wires.site("west")
        wires.join("east", "west", WAN_MBIT, RTT_MS)
        hub, trainer, east = (wires.host("east", LAN_MBIT) for _ in range(3))
        west = [wires.host("west", LAN_MBIT) for _ in range(WEST)]
        with network.stopping(trainer, east, *west, hub):
            hub.start(partial(HubWorker, hub.address))
            address = hub.call("address")
            trainer.start(partial(Trainer, address, trainer.address))
            east.start(partial(Engine, address, "east-0", east.address, "east", STALENESS_S))
            for number, host in enumerate(west):
                host.start(partial(Engine, address, f"west-{number}", host.address, "west", STALENESS_S))
            yield Sites(wires, trainer, east, west)


def until(condition: Callable[[], Any], what: str) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < TIMEOUT_S, what
        time.sleep(0.02)
    return time.monotonic() - began


def check_one_seed(updates: list[dict[str, Any]]) -> None:
    """Every byte came into this site once, and from then on went around in it; all of it beside generation."""
    crossed = sum(n for update in updates for worker, n in update["sources"].items() if not worker.startswith("west"))
    assert crossed == SIZE_BYTES, updates
    for update in updates:
        assert update["steps"] > 0 and update["pause_s"] < update["fetch_s"] / 4, update


def test_the_check_sees_a_star_and_an_engine_that_waits() -> None:
    good = {"sources": {"trainer/0": SIZE_BYTES}, "steps": 9, "pause_s": 0.01, "fetch_s": 1.0}
    check_one_seed([good])
    for bad in ([good, good], [{**good, "steps": 0}], [{**good, "pause_s": 1.0}]):
        with pytest.raises(AssertionError):
            check_one_seed(bad)


@pytest.mark.parametrize("cut_s", [8.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_a_site_pulls_once_and_survives_a_cut_and_its_seeds_death(cut_s: float) -> None:
    with two_sites() as sites:
        before = sites.crossed()
        sites.trainer.call("publish", 1)
        until(lambda: sites.ask("version") == [1] * WEST, "version 1 in the west")
        assert sites.crossed() - before < COPIES_MAX
        check_one_seed([log[-1] for log in sites.ask("log")])

        sites.wires.cut("west")
        cut_at, steps = time.monotonic(), sites.ask("steps")
        for version in (2, 3, 4):
            truth = sites.trainer.call("publish", version)
            until(lambda v=version: sites.east.call("status")["version"] == v, "the east goes on")
        until(lambda: all(sites.ask("is_cut_off")), "they notice")
        assert time.monotonic() - cut_at > STALENESS_S - HEARTBEATS_S
        assert not sites.east.call("status")["is_cut_off"]
        time.sleep(max(0.0, cut_at + cut_s - time.monotonic()))  # what is tested is a cut of so long
        assert all(now > then for now, then in zip(sites.ask("steps"), steps, strict=True))  # they end what they have

        before = sites.crossed()
        sites.wires.mend("west")
        back_s = until(lambda: sites.ask("version") == [4] * WEST, "the newest version after the cut")
        assert back_s < BACK_S_MAX
        until(lambda: not any(sites.ask("is_cut_off")), "they take work again")
        assert sites.crossed() - before < COPIES_MAX
        logs = sites.ask("log")
        check_one_seed([log[-1] for log in logs])
        installed = [[update["version"] for update in log if update.get("installed")] for log in logs]
        assert installed == [[1, 4]] * WEST  # 2 and 3 nobody needs, and they have not crossed
        assert [host.call("first_numbers") for host in sites.west] == [truth] * WEST
        for notes in sites.ask("notes"):
            assert sum("no more work is taken" in note for note in notes) == 1
            assert sum("hears the hub again" in note for note in notes) == 1

        before = sites.crossed()
        truth = sites.trainer.call("publish", 5)
        until(lambda: sites.trainer.call("seeds", "west"), "a seed reads")
        seed = sites.trainer.call("seeds", "west")[0]
        killed = sites.west.pop(int(seed.split("/")[0].removeprefix("west-")))
        killed.process.kill()
        until(lambda: sites.ask("version") == [5] * (WEST - 1), "the others have another seed")
        assert sites.crossed() - before < 1 + COPIES_MAX
        assert [host.call("first_numbers") for host in sites.west] == [truth] * (WEST - 1)
