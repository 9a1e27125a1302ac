"""What is done between pause and resume, while no request runs: the copy, and as little else as possible."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreRequestType
from vllm_cores import TIMEOUT_S, engine, ours, theirs
from vllm_toys import LAYOUT, Engines, conversion, engines, fetch, toy_checkpoint, update, value, wait_until

from tensorhub_plugins.core import CHECKPOINT, Slab, UsageError, run_log
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.vllm.engine.core import INSTALL
from tensorhub_plugins.vllm.engine.follower import Follower
from tensorhub_plugins.vllm.worker import addresses, checkpoint_contract, plan, weights

__all__ = ["conversion", "engine", "engines"]  # fixtures


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "the control"])
def test_from_pause_to_resume_an_update_enters_the_loop_twice(
    engine: Any, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was five times, and two threads woke each other for each while no request ran."""
    follower, entered = Follower(engine.core, lambda *_, **__: 0, worker="r/0", timeout_s=TIMEOUT_S), []
    if not at_once:
        monkeypatch.setattr(engine.core, "at_once", lambda steps: steps())
    put, rpc = engine.input_queue.put_nowait, engine.model_executor.collective_rpc

    def counted(item: Any) -> None:
        entered.append(item)
        put(item)

    def install(method: str, args: Any = ()) -> Any:
        put((EngineCoreRequestType.WAKEUP, lambda: engine.log.append("another client's")))
        return rpc(method, args)

    monkeypatch.setattr(engine.input_queue, "put_nowait", counted)
    engine.model_executor.collective_rpc = install
    asyncio.run(asyncio.wait_for(follower.install(1), TIMEOUT_S))
    after = ["resume", "another client's"] if at_once else ["another client's", "resume"]
    theirs(engine, lambda: None)  # all that was asked before is done
    assert engine.log == ["pause keep", INSTALL, *after] and follower.version == 1 and not engine.paused
    assert len(entered) == (3 if at_once else 5)  # one of them is the line above


def test_a_step_that_fails_ends_an_update_as_it_does_alone(engine: Any) -> None:
    follower = Follower(engine.core, lambda *_, **__: 0, worker="r/0", timeout_s=TIMEOUT_S)
    engine.resumes = False
    with pytest.raises(UsageError, match="broken"):
        asyncio.run(asyncio.wait_for(follower.install(1), TIMEOUT_S))
    assert (follower.version, follower.is_paused, follower.is_broken) == (1, True, False)

    class Else:
        def __await__(self) -> Iterator[None]:
            yield

    async def wait() -> None:
        await Else()

    with pytest.raises(AssertionError, match="waits for something else"):
        asyncio.run(engine.core.at_once(wait))
    engine.resumes = True
    ours(engine, "resume")
    assert engine.log == ["pause keep", INSTALL, "resume", "resume"] and not engine.paused


def test_a_pause_that_waits_for_a_step_forgets_in_the_loop_as_that_ends(engine: Any) -> None:
    """Its asker was woken up first, and asked for that."""
    stopping, forgot = Future[None](), []

    def pause(mode: str, clear_cache: bool) -> Future[None]:
        engine.core._queue(lambda: stopping.set_result(None))
        return stopping

    engine.core._pause, engine.reset_encoder_cache = pause, lambda: forgot.append(threading.current_thread())
    ours(engine, "pause")
    assert forgot == [engine.loop]


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "the control"])
@pytest.mark.parametrize("layout", [CHECKPOINT, LAYOUT])
def test_in_the_pause_nothing_is_done_but_the_copy(
    layout: str, prepared: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is found out of a version before the pause was found out in it again, twice, and logs were written."""
    monkeypatch.setenv("TENSORHUB_EVENTS", str(tmp_path))
    updater, peer, here, done = engines("first", serve_from="live"), engines("peer"), threading.get_ident(), []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                done.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    with engines.trainer() as trainer:
        for version in (1, 2):
            trainer.publish(version, toy_checkpoint(float(version)))
            if layout == LAYOUT:
                update(peer, version)
            assert fetch(updater, version) == "ready"
            if version == 1:
                assert updater.install(1, TIMEOUT_S)["installed"]
                wait_until(lambda: not updater.poll()["serving"])
        if prepared:
            updater.prepare_install(TIMEOUT_S)
        for owner, names in (
            (HubLink, ("ask",)),
            (Slab, ("allocate", "manifest", "digest")),
            (run_log, ("_write",)),
            (checkpoint_contract.Contract, ("rehearse",)),
            (plan, ("given_by",)),
            (weights, ("tensors",)),
            (addresses, ("check_copies", "_addresses")),
        ):
            for name in names:
                watch(owner, name)
        assert updater.install(2, TIMEOUT_S)["installed"]
    assert value(updater) == 2.0
    expected = ["check_copies", *(["given_by", "rehearse"] if layout == CHECKPOINT else [])]
    assert done == ([] if prepared else expected)
