"""kill -9 of a source in the middle of another engine's start: it starts from somebody else, or from disk, or says why.
Servers that join late, leave and are killed while others follow.

How a kill is known to hit in the middle: the weights are several segments, and the source stops itself (SIGSTOP) when
it has sent one and is about to send the next. Only then it is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import Engine, EngineError, checkpoint, wait_until

from tensorhub_plugins.core import CHECKPOINT, Client, Location, Server, start_server

pytestmark = pytest.mark.heavy

KIND = "qwen2-wide"
TIMEOUT_S = 60.0

State = tuple[dict[str, str], list[list[int]]]  # digests of every tensor, greedy answers


def client(hub: Server, name: str, **options: Any) -> Client:
    return Client(hub.address, run="default", model="actor", replica=name, **options)


def start(
    model: Path, hub: Server, replica: str, extension: str | None = None, *, own_core: bool = False, **extra: Any
) -> Engine:
    config = {"hub": hub.address, "model": "actor", "replica": replica, **extra}
    options = {"load_format": "tensorhub", "model_loader_extra_config": config}
    return Engine(model, extension=extension, own_core=own_core, **options)


def state(engine: Engine) -> State:
    return engine.call("tensorhub_digests")["runtime"], engine.generate()


@pytest.fixture(scope="module")
def truth(models: Any) -> Callable[[int], State]:
    """Of an engine that has loaded the weights of this seed from disk."""
    known: dict[int, State] = {}

    def get(seed: int) -> State:
        if seed not in known:
            with start_server() as hub, start(models(KIND, seed), hub, "reference", disk="only") as engine:
                known[seed] = state(engine)
        return known[seed]

    return get


class Scene:
    """Version 1 is held by an engine that will stop while it is read, and until `leave` by the trainer."""

    def __init__(self, stack: ExitStack, hub: Server, models: Any, bare: Any) -> None:
        self.hub, self._bare, self._stack = hub, bare, stack
        self._threads = stack.enter_context(ThreadPoolExecutor(1))
        self.trainer = stack.enter_context(client(hub, "trainer", location=Location("far")))
        self.trainer.publish(1, checkpoint(models(KIND, 1)))
        faulty = {"extension": "vllm_faults.FaultyExtension", "transports": ["tcp"]}
        self.source = stack.enter_context(start(bare(KIND), hub, "source", **faulty))
        self.layout = self.source.call("tensorhub_poll")["layout"]
        self.size_bytes = self.source.call("tensorhub_poll")["report"]["size_bytes"]

    def start(self, model: Path | None = None, extension: str | None = None, **extra: Any) -> Future[Engine]:
        """An engine starts, and its source is killed when one segment has arrived."""
        self.source.call("tensorhub_test_stop_after", 1)
        starting = self._threads.submit(start, model or self._bare(KIND), self.hub, "late", extension, **extra)
        stat = Path(f"/proc/{self.source.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the source has stopped")
        assert not starting.done()
        self.source.kill()
        self._stack.callback(lambda: starting.exception() or starting.result().close())
        return starting


@pytest.fixture
def scene(hub: Server, models: Any, bare: Any) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, hub, models, bare)


@pytest.mark.parametrize("extension", [pytest.param(None, marks=pytest.mark.smoke), "vllm_faults.BlindExtension"])
def test_the_rest_comes_from_another_holder(extension: str | None, scene: Scene, truth: Any) -> None:
    """The negative control is an engine that takes the loss of its source for the end of its read."""
    with client(scene.hub, "holder", location=Location("far")) as holder:
        holder.fetch(1, (scene.layout,), timeout_s=TIMEOUT_S, serve=True)
        scene.trainer.close()
        late = scene.start(extension=extension).result(TIMEOUT_S)
        report = late.call("tensorhub_poll")["report"]
        assert report["layout"] == scene.layout and 0 < report["sources"]["source/0"] < scene.size_bytes
        if extension is None:
            assert report["sources"].keys() == {"source/0", "holder/0"} and "source/0" in report["losses"][0]
            assert state(late) == truth(1)
        else:
            digests, answers = state(late)
            assert answers != truth(1)[1]
            assert 0 < sum(digests[name] == of_truth for name, of_truth in truth(1)[0].items()) < len(digests)


@pytest.mark.long  # the hub gives a silent worker 15 s
def test_with_no_peer_left_it_converts_the_checkpoint(scene: Scene, truth: Any) -> None:
    late = scene.start().result(TIMEOUT_S)
    report = late.call("tensorhub_poll")["report"]
    assert report["layout"] == CHECKPOINT and report["sources"].keys() == {"trainer/0"}
    assert state(late) == truth(1)


@pytest.mark.long
def test_with_nothing_left_it_starts_from_disk_where_that_is_allowed(scene: Scene, models: Any, truth: Any) -> None:
    """Other weights lie on the disk, so that a byte of the store's would be seen."""
    scene.trainer.close()
    late = scene.start(models(KIND, 2), disk="fallback", disk_version=2).result(TIMEOUT_S)
    assert state(late) == truth(2) != truth(1)
    wait_until(lambda: late.call("tensorhub_poll")["served_version"] == 2, "it serves what it has")


@pytest.mark.long
def test_with_nothing_left_and_no_disk_it_waits_for_a_version_and_then_says_so(scene: Scene, models: Any) -> None:
    scene.trainer.close()
    began = time.monotonic()
    starting = scene.start(models(KIND, 2), start_timeout_s=25.0)
    with pytest.raises(EngineError, match="NotPublished: .* version 1 was lost on the way"):
        starting.result(TIMEOUT_S)
    assert time.monotonic() - began < 40


@pytest.mark.long
def test_with_nothing_left_it_takes_the_next_version(scene: Scene, models: Any, truth: Any) -> None:
    scene.trainer.close()
    starting = scene.start()
    with client(scene.hub, "trainer-2") as trainer:
        wait_until(lambda: not any(info.visible for info in trainer.versions()), "version 1 is lost", TIMEOUT_S)
        trainer.publish(2, checkpoint(models(KIND, 2)))
        assert state(starting.result(TIMEOUT_S)) == truth(2)


@pytest.mark.long  # five engines whose core is a process of its own, as in servers
@pytest.mark.timeout(300)
def test_servers_join_late_leave_and_are_killed_while_others_follow(
    hub: Server, models: Any, bare: Any, truth: Any
) -> None:
    with ExitStack() as stack:

        def serve(replica: str, **extra: Any) -> Engine:
            engine = start(bare(KIND), hub, replica, "vllm_faults.FaultyExtension", own_core=True, **extra)
            return stack.enter_context(engine)

        def version(engine: Engine) -> int:
            return int(engine.call("tensorhub_poll")["version"])

        trainer = stack.enter_context(client(hub, "trainer"))
        trainer.publish(1, checkpoint(models(KIND, 1)))
        first, doomed = serve("first", follow="now"), serve("doomed", follow="now")
        assert state(first) == state(doomed) == truth(1)
        trainer.publish(2, checkpoint(models(KIND, 2)))
        for engine in (first, doomed):
            wait_until(lambda engine=engine: version(engine) == 2, "it follows")
        assert state(first) == state(doomed) == truth(2)

        os.kill(doomed.call("tensorhub_test_pid"), signal.SIGKILL)
        doomed.kill()
        trainer.publish(3, checkpoint(models(KIND, 1)))
        wait_until(lambda: version(first) == 3, "the other one follows on")
        late = serve("late")
        assert (version(late), state(late)) == (3, truth(1)) and state(first) == truth(1)

        trainer.publish(4, checkpoint(models(KIND, 2)))
        wait_until(lambda: version(first) == 4, "it follows")
        assert version(late) == 3  # the negative control: this one was not told to
        trainer.close()
        first.close()
        last = serve("last")  # what is left is in one server's memory, which has no version 4
        assert last.call("tensorhub_poll")["report"]["sources"].keys() == {"late/0"}
        assert (version(last), state(last)) == (3, truth(1))
