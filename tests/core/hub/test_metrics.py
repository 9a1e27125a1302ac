"""The hub's figures: each way in which a run stands still shows in one, and Prometheus reads them."""

from __future__ import annotations

import contextlib
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hub_scenarios import Scenario
from prometheus_client.parser import text_string_to_metric_families

from tensorhub_plugins.core import Client, HubLimits, UsageError, start_server
from tensorhub_plugins.core.hub import server as hub_server
from tensorhub_plugins.core.hub.exposition import SCRAPES_MAX, UP, served
from tensorhub_plugins.core.hub.hub import Received
from tensorhub_plugins.core.hub.metrics import MODELS_MAX, OF_MODELS, metrics
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.hub.state import READ_BYTES_MAX
from tensorhub_plugins.core.operations.status import status_text
from tensorhub_plugins.core.operations.top import frame
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.address import parse_address
from tensorhub_plugins.core.protocol.fields import COUNT_MAX
from tensorhub_plugins.core.transports import MODULES
from tensorhub_plugins.core.types import CHECKPOINT, TRANSPORTS, Location, ShardKey

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def figures(story: Scenario) -> dict[str, float]:
    """Return those of the one model, and of the hub."""
    found = metrics(story.hub.registry, story.now)
    return {each.name.removeprefix("tensorhub_"): value for each in found for _, value in each.values}


def follows(story: Scenario, name: str, installed: int, **more: object) -> None:
    story.say(name, m.Target, installed=installed, timeout_s=30.0, **more)


@pytest.fixture
def run() -> Scenario:
    """A trainer at version 9, and two rollouts that run it and ask for the next."""
    story = Scenario()
    story.join("trainer/0")
    for name in ("a/0", "b/0"):
        story.join(name)
    story.publish("trainer/0", 9)
    for name in ("a/0", "b/0"):
        follows(story, name, 9)
    return story


def test_a_run_that_goes_on_shows_nothing(run: Scenario) -> None:
    found = figures(run)
    assert (found["newest_step"], found["trainers"], found["workers"], found["followers"]) == (9, 1, 3, 2)
    assert found["newest_replicas"] == 1 and found["published_bytes"] == 100
    for name in ("followers_behind", "follower_lag_steps_max", "follower_install_age_seconds_max"):
        assert not found[name]
    for name in ("followers_refusing", "pinned", "silent_workers", "missing_copies", "corrupt_segments_total"):
        assert not found[name]


def test_replicas_that_are_stuck_show_in_the_lag(run: Scenario) -> None:
    """All of them, at 9, while the trainer publishes up to 16: nothing that is ready, or installed, says so."""
    before = figures(run)
    for version in range(10, 17):
        run.wait(10.0)
        run.publish("trainer/0", version)
    found = figures(run)
    assert (found["followers_behind"], found["follower_lag_steps_max"]) == (2, 7)
    assert found["follower_install_age_seconds_max"] == pytest.approx(70.0, abs=1.0)
    follows(run, "a/0", 16)
    found = figures(run)
    assert (found["followers_behind"], found["follower_lag_steps_max"]) == (1, 7)
    follows(run, "b/0", 16)
    assert figures(run)["followers_behind"] == before["followers_behind"] == 0


def test_replicas_that_a_pin_holds_are_not_stuck(run: Scenario) -> None:
    """They are behind, and that is what the pin is for. The control: one that does not run the pinned version is."""
    run.join("operator/0")
    run.say("operator/0", m.Pin, version=9, timeout_s=5.0)
    for version in (10, 11):
        run.wait(10.0)
        run.publish("trainer/0", version)
    found = figures(run)
    assert (found["pinned"], found["followers_behind"], found["follower_install_age_seconds_max"]) == (1, 2, 0)
    run.join("c/0")
    follows(run, "c/0", 0)
    run.wait(10.0)
    assert figures(run)["follower_install_age_seconds_max"] > 0


def test_a_loop_that_only_waits_shows_in_the_lag_too(run: Scenario) -> None:
    """As in docs/loop.md: it waits for a version newer than its own, reads it, and works with it."""
    run.join("loop/0")
    run.say("loop/0", m.Wait, version=0, newer_than=0, timeout_s=30.0)
    assert (figures(run)["followers"], figures(run)["follower_lag_steps_max"]) == (3, 9)
    read_whole(run, "loop/0", corrupt=(0,))
    assert figures(run)["follower_lag_steps_max"] == 9
    read_whole(run, "loop/0")
    assert figures(run)["follower_lag_steps_max"] == 0  # it has not asked again, and works with what it has read
    for version in range(10, 17):
        run.wait(10.0)
        run.publish("trainer/0", version)
    for name in ("a/0", "b/0"):
        follows(run, name, 16)
    assert (figures(run)["followers_behind"], figures(run)["follower_lag_steps_max"]) == (1, 7)
    assert figures(run)["follower_behind_seconds_max"] == pytest.approx(60.0, abs=1.0)
    run.say("loop/0", m.Wait, version=0, newer_than=9, timeout_s=30.0)
    assert figures(run)["follower_lag_steps_max"] == 7
    read_whole(run, "loop/0")
    assert figures(run)["followers_behind"] == 0


def test_who_only_looks_whether_there_is_a_version_follows_nothing(run: Scenario) -> None:
    run.join("looks/0")
    run.say("looks/0", m.Wait, version=9, newer_than=0, timeout_s=30.0)
    run.say("looks/0", m.Wait, version=0, newer_than=3, timeout_s=0.0)
    run.say("trainer/0", m.Wait, version=0, newer_than=9, timeout_s=30.0)  # when it may unpublish that
    assert figures(run)["followers"] == 2


def test_a_worker_of_an_engine_is_no_follower_once_it_has_started(run: Scenario) -> None:
    """It asks once, before it has a version; what the engine runs says its own follower."""
    run.join("engine/0")
    follows(run, "engine/0", 0)
    assert (figures(run)["followers"], figures(run)["followers_behind"]) == (3, 1)
    read_whole(run, "engine/0")
    assert (figures(run)["followers"], figures(run)["followers_behind"]) == (2, 0)
    run.publish("trainer/0", 10)
    follows(run, "a/0", 9)
    read_whole(run, "a/0")  # as an engine that installs later: it says when
    assert figures(run)["followers_behind"] == 2


def read_whole(run: Scenario, name: str, **ended: Any) -> None:
    request = run.acquire(name)
    run.tell(name, m.Release(request, 0, came=("same_host shm", 100, 0), **ended))


def test_a_refused_version_shows(run: Scenario) -> None:
    run.publish("trainer/0", 10)
    follows(run, "a/0", 9, refused=(10,), why="other shapes")
    assert (figures(run)["followers_refusing"], figures(run)["follower_lag_steps_max"]) == (1, 1)


def test_a_trainer_that_stands_still_shows_in_the_age_of_the_newest_version(run: Scenario) -> None:
    run.wait(100.0)
    assert figures(run)["newest_age_seconds"] == pytest.approx(100.0, abs=1.0)
    run.publish("trainer/0", 10)
    assert figures(run)["newest_age_seconds"] < 1.0


def test_a_frozen_worker_and_a_pin_show(run: Scenario) -> None:
    run.silent = ("b/0",)
    run.wait(6.0)
    run.say("trainer/0", m.Pin, version=9, timeout_s=1.0)
    found = figures(run)
    assert (found["silent_workers"], found["pinned"]) == (1, 1)


def test_a_source_that_nobody_reaches_shows(run: Scenario) -> None:
    session = run.sessions["trainer/0"]
    for reader in ("a/0", "b/0"):
        run.hub.registry.workers[run.sessions[reader]].unreached = {session: run.now}
    assert figures(run)["unreached_sources"] == 1


def test_a_version_that_only_its_trainer_has_shows(run: Scenario) -> None:
    """The second copy is a rollout's own layout."""
    run.publish("a/0", 9, "runtime:f")
    assert figures(run)["newest_replicas"] == 2


def test_an_engine_that_converts_is_no_trainer(run: Scenario) -> None:
    before = figures(run)
    run.publish("a/0", 9, "runtime:f")
    found = figures(run)
    assert (found["trainers"], found["published_bytes"]) == (before["trainers"], before["published_bytes"]) == (1, 100)
    run.publish("b/0", 9, CHECKPOINT)  # the control: a second trainer, of the same bytes
    assert (figures(run)["trainers"], figures(run)["published_bytes"]) == (2, 200)


def test_a_memory_that_gets_full_shows(run: Scenario) -> None:
    for name, room in (("trainer/0", 700), ("a/0", 50)):
        run.beat(name, room_bytes=room)
    assert figures(run)["room_bytes_min"] == 700  # the other one holds nothing
    run.beat("trainer/0")
    assert figures(run)["room_bytes_min"] == 0


def test_trainers_that_unpublish_nothing_show() -> None:
    story = Scenario(limits=HubLimits(published_bytes_max=150))
    story.join("trainer/0")
    story.publish("trainer/0", 1)
    assert not figures(story)["over_budget"]
    story.publish("trainer/0", 2)
    assert figures(story)["over_budget"] == 1


def test_what_engines_compile_pushes_no_model_out() -> None:
    story = Scenario()
    kinds = [f"actor.compiled-{number}" for number in range(MODELS_MAX)]
    for number, model in enumerate([*kinds, "actor", "critic"]):
        session = str(number).encode().ljust(16, b".")
        story.sessions[model] = session
        story._deliver(Received(session, m.Hello("run", model, "w", 0, 1, Location(), {"tcp": "w"}), "publisher"))
        holding = m.Holding(ShardKey(1, CHECKPOINT, 0, 1), bytes(16), 100)
        story._deliver(Received(session, m.Publish(request_id=1, holding=holding), "publisher"))
    (newest,) = [each for each in metrics(story.hub.registry, story.now) if each.name == "tensorhub_newest_step"]
    assert [dict(labels)["model"] for labels, _ in newest.values] == ["actor", "critic", *kinds[:-2]]


def reads(story: Scenario, beats: list[int]) -> int:
    """A read of b/0, whose heartbeats say these numbers of bytes, a second apart. Return its request."""
    request = story.acquire("b/0", 9)
    for count in beats:
        story.now += 1.0
        session = story.hub.session
        story.tell("b/0", m.Heartbeat(session, request, leases={request: 1}, progress={request: count}))
    return request


def test_the_names_of_ways_are_those_of_transports() -> None:
    assert set(TRANSPORTS) == set(MODULES)


def test_a_read_says_its_rate_while_bytes_come(run: Scenario) -> None:
    run.tell("b/0", m.Bye())
    run.join("b/0", location=Location(host="far"))
    reads(run, [10**6, 3 * 10**6])
    said = report(run.hub.registry, run.now)
    (lease,) = said["models"][0]["leases"]
    assert (lease["read_bytes"], lease["bytes_per_s"]) == (3 * 10**6, 2 * 10**6)
    assert "from trainer/0 at 2 MB/s, " in status_text(said)
    (row,) = [row for model in frame(said, []).models for row in model.rows if row[0] == "b/0"]
    assert "trainer/0 at 2 MB/s" in row
    run.now += 6.0  # none came, and no heartbeat
    assert report(run.hub.registry, run.now)["models"][0]["leases"][0]["bytes_per_s"] == 0


def test_the_first_count_that_a_hub_hears_is_no_rate(run: Scenario) -> None:
    """It may have been started in the middle of a read."""
    run.tell("b/0", m.Bye())
    run.join("b/0")
    reads(run, [10**12])
    assert report(run.hub.registry, run.now)["models"][0]["leases"][0]["bytes_per_s"] == 0


def test_bytes_count_once_by_their_way_when_the_read_ends(run: Scenario) -> None:
    run.tell("b/0", m.Bye())
    run.join("b/0")
    request = reads(run, [7])
    ended = m.Release(request, 0, came=("same_rack rdma", 100, 40))
    for message in (ended, ended, m.Release(77, 0, came=("same_rack rdma", 9, 9))):
        run.tell("b/0", message)
    reads(run, [7])
    run.tell("b/0", m.Release(run.requests["b/0"], 0, came=("same_host x", 5, 5)))  # no way that there is
    found = {each.name: each.values for each in metrics(run.hub.registry, run.now)}
    ((labels, size_bytes),) = found["tensorhub_read_bytes_total"]
    assert (dict(labels)["distance"], dict(labels)["transport"], size_bytes) == ("same_rack", "rdma", 100)
    assert figures(run)["wire_bytes_total"] == 40
    said = report(run.hub.registry, run.now)
    assert "read so far: same_rack rdma 0.0 MB; 0.0 MB on the wire" in status_text(said)


def test_what_peers_say_that_they_have_read_fits_an_answer(run: Scenario) -> None:
    """Numbers of 64 bits and more could not be sent, and the hub ended over it."""
    run.tell("b/0", m.Bye())
    for name in ("b/0", "c/0"):
        run.join(name, location=Location(host="far"))
    way, (history,) = "same_rack rdma", run.hub.registry.histories.values()
    history.read_bytes[way] = history.wire_bytes = READ_BYTES_MAX - COUNT_MAX - 1
    for _ in range(2):
        run.tell("c/0", m.Release(run.acquire("c/0", 9), 0, came=(way, COUNT_MAX, COUNT_MAX)))
    request = reads(run, [1])
    run.now += 1e-6
    run.tell("b/0", m.Heartbeat(run.hub.session, request, leases={request: 1}, progress={request: COUNT_MAX}))
    said = report(run.hub.registry, run.now)
    (model,) = said["models"]
    assert model["leases"][0]["bytes_per_s"] == COUNT_MAX and m.encode(m.Status(1, said))
    assert (model["read_bytes"], model["wire_bytes"]) == ({way: READ_BYTES_MAX}, READ_BYTES_MAX)
    refused = m.decode_from_hub(hub_server._frame(m.Status(7, {"sum": 1 << 64})))
    assert isinstance(refused, m.Refused) and refused.request_id == 7 and "cannot be sent" in refused.message


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_prometheus_reads_them() -> None:
    """Of a real hub with a real client, over HTTP, beside the process's own."""
    import torch

    with start_server(limits=HubLimits(grace_s=0.0)) as hub, served(hub, "127.0.0.1", 0) as url:
        assert scrape(url)["tensorhub_hub_models"] == 0
        with Client(hub.address, run="r", model="m", replica="trainer") as trainer:
            trainer.publish(3, {"w": torch.ones(4)})
            with Client(hub.address, run="r", model="m", replica="rollout") as rollout:
                read = rollout.fetch(3).report
            assert read.ways == {"same_host shm": 16} and read.transports == {"shm": 16}
            found = scrape(url)
            assert found["tensorhub_read_bytes_total"] == found["tensorhub_wire_bytes_total"] == 16
        assert (found["tensorhub_newest_step"], found["tensorhub_hub_answers"]) == (3, 1)
        assert found["tensorhub_corrupt_segments_total"] == 0 and found["process_resident_memory_bytes"] > 1e6
        assert found["tensorhub_hub_connections_left"] > 0


def test_a_hub_that_does_not_answer_says_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_server() as hub, served(hub, "127.0.0.1", 0) as url:
        monkeypatch.setattr(hub_server.Server, "_say_figures", lambda self, now: None)
        monkeypatch.setattr(hub_server.Server.figures, "__defaults__", (0.05,))
        found = scrape(url)
        assert found["tensorhub_hub_answers"] == 0 and "tensorhub_hub_up_seconds" not in found


def test_connections_that_ask_for_nothing_take_no_files_and_end() -> None:
    """All of the hub's files, once, which its workers need."""
    with (
        start_server() as hub,
        served(hub, "127.0.0.1", 0, request_s=1.0) as url,
        contextlib.ExitStack() as stack,
    ):
        at = parse_address(url.removesuffix("/metrics"), "http")
        idle = [stack.enter_context(socket.create_connection(at, timeout=60.0)) for _ in range(2 * SCRAPES_MAX)]
        assert all(each.recv(1) == b"" for each in idle[SCRAPES_MAX:])
        assert all(each.recv(1) == b"" for each in idle)
        assert scrape(url)["tensorhub_hub_answers"] == 1


def test_no_more_connections_are_served_than_at_a_time() -> None:
    with start_server() as hub, served(hub, "127.0.0.1", 0, request_s=120.0) as url, contextlib.ExitStack() as stack:
        at = parse_address(url.removesuffix("/metrics"), "http")
        idle = [stack.enter_context(socket.create_connection(at, timeout=30.0)) for _ in range(2 * SCRAPES_MAX)]
        assert all(each.recv(1) == b"" for each in idle[SCRAPES_MAX:])
        for each in idle[:SCRAPES_MAX]:  # it has the time that it was given
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def test_an_address_that_is_taken_is_refused() -> None:
    with (
        start_server() as hub,
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="in use; choose --metrics-port"),
        served(hub, *taken.getsockname()),
    ):
        pass


def test_the_page_has_all_of_them_and_no_other() -> None:
    names = ("up_seconds", "sessions", "models", "connections_left", "refused_hosts")
    hub = [f"tensorhub_hub_{name}" for name in names]
    page = PAGE.read_text().partition("\n## Of a `vllm serve`")[0]  # whose figures are the adapter's
    told = set(re.findall(r"^\| `(tensorhub_\w+)` \|", page, flags=re.MULTILINE))
    assert told == {*(f"tensorhub_{name}" for name, *_ in OF_MODELS), "tensorhub_read_bytes_total", *hub, UP[0]}
