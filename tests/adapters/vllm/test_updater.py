"""The worker's side of an update, with the real store and a toy model: no engine, so every order of events is cheap."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from client_processes import hold_back, let_go
from vllm_toys import (
    LAYOUT,
    TIMEOUT_S,
    Engines,
    Party,
    Toy,
    conversion,
    engines,
    fetch,
    toy_checkpoint,
    update,
    value,
    wait_until,
)

from tensorhub_plugins.core import CHECKPOINT, DeadlineExceeded, ShardKey, Slab, UsageError, VersionRefused
from tensorhub_plugins.core.memory.adoption import Adoption
from tensorhub_plugins.vllm.worker import checkpoint_contract, extension, reload, weights
from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension, compare_unnamed, external_change, hook
from tensorhub_plugins.vllm.worker.update_state import BrokenWeights
from tensorhub_plugins.vllm.worker.updater import Updater

__all__ = ["conversion", "engines"]  # fixtures
pytestmark = pytest.mark.usefixtures("conversion")


@pytest.mark.parametrize("options", [{}, {"serve_from": "live"}, {"install": "direct"}], ids=str)
def test_versions_follow_one_another_and_peers_serve_them(options: dict[str, Any], engines: Engines) -> None:
    first, second = engines("first", **options), engines("second", **options)
    with engines.trainer() as trainer:
        for version in (1, 2, 3):
            trainer.publish(version, toy_checkpoint(float(version)))
            assert update(first, version)["layout"] == CHECKPOINT
            result = update(second, version)
            assert (value(first), value(second)) == (version, version)
            assert result["layout"] == LAYOUT
            assert list(result["report"]["sources"]) == ["first/0"]
            held = {info.version: info.layouts.get(LAYOUT, ()) for info in trainer.versions()}
            assert set(held.pop(version)) == {"first/0", "second/0"}
            assert not any(held.values())  # nobody keeps an old version


@pytest.mark.parametrize("options", [{}, {"serve_from": "live"}, {"install": "direct"}], ids=str)
def test_what_is_served_is_never_what_is_written(options: dict[str, Any], engines: Engines) -> None:
    updater = engines("first", **options)
    with engines.trainer() as trainer, engines.trainer("reader") as reader:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        assert reader.fetch(1, (LAYOUT,)).tensors()["fused"].unique().tolist() == [1.0]
        trainer.publish(2, toy_checkpoint(2.0))
        assert fetch(updater, 2) == "ready"
        # Live weights are withdrawn by now; a copy is served until its successor is.
        serves_old = LAYOUT in {key.layout for key in updater._client.serving() if key.version == 1}
        assert serves_old == (updater.config.source == "host")
        assert updater.install(2, TIMEOUT_S)["installed"]
        wait_until(lambda: not updater.poll()["serving"])
        assert {key.version for key in updater._client.serving()} == {2}


@pytest.mark.parametrize("how", ["discarded", "refused"])
@pytest.mark.parametrize("serve_from", ["live", "host"])
def test_a_version_that_is_given_up_leaves_the_old_one_served(
    how: str, serve_from: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = engines("first", serve_from=serve_from)
    with engines.trainer() as trainer, engines.trainer("reader") as reader:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        trainer.publish(2, toy_checkpoint(2.0))
        if how == "refused":

            def refuse(model: Any, vllm_config: Any, tensors: Any) -> None:
                raise VersionRefused("not this model's")

            # as if 2 were the first checkpoint it reads
            updater._contract = updater._intake.contract = checkpoint_contract.Contract(updater.model, None)
            monkeypatch.setattr(checkpoint_contract, "rehearse", refuse)
        assert fetch(updater, 2) == "ready"
        if how == "refused":
            with pytest.raises(VersionRefused, match="not this model's .version=2."):
                updater.prepare_install(TIMEOUT_S)
            assert updater.poll()["error_kind"] == "VersionRefused"
        else:
            updater.discard()
        assert not updater.install(2, TIMEOUT_S)["installed"]
        wait_until(lambda: {key.version for key in updater._client.serving()} == {1})
        assert reader.fetch(1, (LAYOUT,)).tensors()["fused"].unique().tolist() == [1.0]
        monkeypatch.undo()


def test_a_version_unlike_the_first_is_refused_before_it_is_ready(engines: Engines) -> None:
    updater = engines("first")
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        trainer.publish(2, {"a": torch.zeros(2, 1000)})
        assert fetch(updater, 2) == "failed"
        assert updater.poll()["error_kind"] == "VersionRefused" and updater.poll()["broken"] is None
        assert "1 tensors are missing: b float32[4, 1000]" in updater.poll()["error"]
        trainer.publish(3, toy_checkpoint(3.0))
        update(updater, 3)
        assert value(updater) == 3.0


def test_what_kernels_keep_for_themselves_is_never_copied_raw(engines: Engines) -> None:
    """Such an engine always reads the checkpoint, and offers nothing that a peer could copy."""
    updater, peer = engines("first"), engines("second")
    updater.model.kernel = {"scale": torch.zeros(6)}  # see `conversion`
    with engines.trainer() as trainer:
        for version in (1, 2, 3):
            trainer.publish(version, toy_checkpoint(float(version)))
            for one in (updater, peer) if version == 1 else (peer, updater):
                assert fetch(one, version) == "ready"
                assert one.install(version, TIMEOUT_S)["layout"] == CHECKPOINT
                wait_until(lambda one=one: not one.poll()["serving"])
                assert value(one) == version
            assert not updater._client.serving() and peer._client.serving()
        assert updater._conversion.hidden == ("kernel.scale",) and not peer._conversion.hidden


def test_nothing_is_installed_that_is_not_ready(engines: Engines) -> None:
    updater = engines("first")
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        for version in (1, 2):
            result = updater.install(version, TIMEOUT_S)
            assert not result["installed"] and result["broken"] is None
        assert fetch(updater, 1) == "ready"
        result = updater.install(2, TIMEOUT_S)
        assert not result["installed"] and "version 1 is ready: fetch version 2 first" in result["error"]
        assert value(updater) == 0.0
        updater.guard()
        assert updater.install(1, TIMEOUT_S)["installed"]
        with pytest.raises(UsageError, match="version 1 is installed already"):
            updater.start_fetch(1, TIMEOUT_S)


def test_a_fetch_that_fails_changes_nothing(engines: Engines) -> None:
    updater = engines("first")
    with pytest.raises(UsageError, match="timeout_s=None: pass a number"):
        updater.start_fetch(1, None)  # type: ignore[arg-type]
    assert updater.poll()["state"] == "idle"
    updater.start_fetch(1, 0.3)  # nobody publishes it
    with pytest.raises(UsageError, match="version 1 is still being fetched"):
        updater.start_fetch(2, TIMEOUT_S)
    wait_until(lambda: updater.poll()["state"] == "failed")
    assert updater.poll()["error_kind"] in ("NotPublished", "DeadlineExceeded")
    assert updater.poll()["broken"] is None
    with engines.trainer() as trainer:
        trainer.publish(2, toy_checkpoint(2.0))
        update(updater, 2)
    assert updater.poll()["state"] == "idle" and updater.poll()["error"] is None


def test_a_converter_that_gives_up_leaves_the_work_to_another(engines: Engines) -> None:
    first, second = engines("first"), engines("second")
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        assert fetch(first, 1) == "ready"
        second.start_fetch(1, TIMEOUT_S)
        time.sleep(0.2)
        assert second.poll()["state"] == "fetching"  # waits for the first one's conversion
        first.discard()
        wait_until(lambda: second.poll()["state"] == "ready")
        assert second.install(1, TIMEOUT_S)["layout"] == CHECKPOINT


@pytest.mark.parametrize("options", [{}, {"serve_from": "live"}, {"install": "direct"}], ids=str)
def test_an_install_that_fails_breaks_the_worker_until_one_succeeds(
    options: dict[str, Any], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = engines("first", **options)
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        trainer.publish(2, toy_checkpoint(2.0))

        def half(model: Toy, vllm_config: Any, weights: Any) -> None:
            with torch.no_grad():
                model.fused[:2] = dict(weights)["a"]
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(reload, "reload_checkpoint", half)
            assert fetch(updater, 2) == "ready"
            result = updater.install(2, TIMEOUT_S)
        assert not result["installed"] and "injected" in result["error"] and result["version"] == 1
        assert updater.model.fused.unique().tolist() == [1.0, 2.0]
        assert updater.poll()["state"] == "broken"
        with pytest.raises(BrokenWeights, match="install a version before resuming"):
            updater.guard()
        # Nobody reads what is mixed: neither from this worker's weights nor as if it had converted version 2.
        wait_until(lambda: all(key.version == 1 for key in updater._client.serving()))
        update(updater, 2)
        updater.guard()
        assert value(updater) == 2.0 and updater.poll()["broken"] is None


@pytest.mark.parametrize("install", ["direct", "staged"])
def test_an_install_that_failed_reads_only_what_is_damaged(
    install: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slab.manifest, "__defaults__", (1000,))  # 24 segments
    first, second = engines("first", install=install), engines("second", install=install)
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        for engine in (first, second):
            update(engine, 1)
        trainer.publish(2, toy_checkpoint(2.0))
        update(first, 2)
        wait_until(lambda: any(key.version == 2 and key.layout != CHECKPOINT for key in first._client.serving()))
        fetch(second, 2)

        def half(model: Toy, **_: Any) -> None:
            with torch.no_grad():
                model.fused[0, 0] = 7.0
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(weights, "refresh_derived", half)  # after all was read
            assert not second.install(2, TIMEOUT_S)["installed"]
        with pytest.raises(BrokenWeights):
            second.guard()
        wait_until(lambda: all(key.version != 2 for key in second._client.serving()))
        report = update(second, 2)["report"]
        assert report["sources"] == {"first/0": 1000} and value(second) == 2.0
        wait_until(lambda: any(key.version == 2 for key in second._client.serving()))
        trainer.publish(3, toy_checkpoint(3.0))
        update(first, 3)
        wait_until(lambda: any(key.version == 3 and key.layout != CHECKPOINT for key in first._client.serving()))
        assert update(second, 3)["report"]["sources"] == {"first/0": 24000}  # the control: nothing was broken


def test_a_direct_install_whose_peer_is_gone_converts(engines: Engines) -> None:
    first, second = engines("first", install="direct"), engines("second", install="direct")
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(first, 1)
        assert fetch(second, 1) == "ready" and second.poll()["report"] is None
        first.close()
        result = second.install(1, 10 * TIMEOUT_S)
        assert result["installed"] and result["layout"] == CHECKPOINT
        assert result["seconds"] < TIMEOUT_S  # it asks for what is there, and does not wait for what was
        assert value(second) == 1.0
        wait_until(lambda: not second.poll()["serving"])
        assert second.poll()["served_version"] == 1


def install_all(updaters: list[Updater], versions: list[int]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = [{}] * len(updaters)

    def run(rank: int) -> None:
        results[rank] = updaters[rank].install(versions[rank], TIMEOUT_S)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(updaters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("options", [{}, {"install": "direct"}], ids=str)
def test_workers_of_one_engine_install_all_or_none(
    options: dict[str, Any], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    party, other = Party(2), Party(2)
    workers = [engines("e", shard=k, shards=2, gather=party.of(k), **options) for k in range(2)]
    peers = [engines("p", shard=k, shards=2, gather=other.of(k), **options) for k in range(2)]
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        for replica in (workers, peers):  # one after the other, so that it is the first that converts
            for worker in replica:
                worker.start_fetch(1, TIMEOUT_S)
            if replica is workers:
                wait_until(lambda: all(w.poll()["state"] == "ready" for w in workers))
        workers[1].discard()
        results = install_all(workers, [1, 1])
        assert [r["installed"] for r in results] == [False, False]
        assert [r["broken"] for r in results] == [None, None]
        assert "another worker of this engine was not ready" in results[0]["error"]
        assert [value(w) for w in workers] == [0.0, 0.0]

        assert fetch(workers[1], 1) == "ready"
        assert [r["installed"] for r in install_all(workers, [1, 1])] == [True, True]
        wait_until(lambda: all(p.poll()["state"] == "ready" for p in peers))
        assert [r["layout"] for r in install_all(peers, [1, 1])] == [LAYOUT, LAYOUT]
        assert [value(w) for w in workers + peers] == [1.0] * 4

        # Half way: one fails after both began. Both are broken, and neither goes on offering what it wrote.
        trainer.publish(2, toy_checkpoint(2.0))
        for worker in workers:
            worker.start_fetch(2, TIMEOUT_S)
        wait_until(lambda: all(w.poll()["state"] == "ready" for w in workers))
        assert [r["installed"] for r in install_all(workers, [2, 2])] == [True, True]
        wait_until(lambda: not any(w.poll()["serving"] for w in workers))
        assert [fetch(peer, 2) for peer in peers] == ["ready", "ready"]
        monkeypatch.setattr(peers[1], "_change", lambda *args: 1 / 0)
        results = install_all(peers, [2, 2])
        assert [r["installed"] for r in results] == [False, False] and all(r["broken"] for r in results)
        wait_until(lambda: all(key.version == 1 for p in peers for key in p._client.serving()))
        monkeypatch.undo()


def test_a_replica_reads_one_version_or_none(engines: Engines) -> None:
    party = Party(2)
    workers = [engines("e", shard=k, shards=2, gather=party.of(k)) for k in range(2)]
    with engines.trainer() as trainer:
        for version in (1, 2):
            trainer.publish(version, toy_checkpoint(float(version)))
        assert [fetch(worker, version) for worker, version in zip(workers, (1, 2), strict=True)] == ["ready"] * 2
        results = install_all(workers, [1, 2])
        assert [r["installed"] for r in results] == [False, False]
        assert [value(worker) for worker in workers] == [0.0, 0.0]


def test_an_install_does_not_wait_for_ever_for_a_snapshot(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = engines("first")
    gate = threading.Event()
    publish = updater._client.publish

    def slow(*args: Any, **kwargs: Any) -> Any:
        gate.wait(TIMEOUT_S)
        return publish(*args, **kwargs)

    monkeypatch.setattr(updater._client, "publish", slow)
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        assert fetch(updater, 1) == "ready"
        assert updater.install(1, TIMEOUT_S)["installed"]
        with pytest.raises(DeadlineExceeded, match="still being copied for peers"):
            updater.prepare_install(0.05)
        assert updater.poll()["served_version"] is None
        gate.set()
        updater.prepare_install(TIMEOUT_S)
        assert updater.poll()["served_version"] == 1


@pytest.mark.parametrize("options", [{}, {"serve_from": "live"}], ids=str)
def test_an_update_at_once_reads_in_place_and_is_served(options: dict[str, Any], engines: Engines) -> None:
    """As an engine that starts does: nothing generates meanwhile."""
    first, second = engines("first", **options), engines("second", **options)
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        assert first.resolve(TIMEOUT_S) == 1
        assert first.update(1, TIMEOUT_S, in_place=True)["layout"] == CHECKPOINT
        result = second.update(1, TIMEOUT_S, in_place=True)
        assert (result["layout"], value(second)) == (LAYOUT, 1.0)
        assert list(result["report"]["sources"]) == ["first/0"]
        for updater in (first, second):
            wait_until(lambda updater=updater: not updater.poll()["serving"])
        held = trainer.versions()[-1].layouts[LAYOUT]
        assert set(held) == {"first/0", "second/0"}
        failed = second.update(9, 0.2)
        assert not failed["installed"] and failed["broken"] is None
        assert failed["error"].startswith("NotPublished")  # why it could not, not only that it could not


def test_what_came_from_elsewhere_is_served_as_a_version(engines: Engines) -> None:
    first, second = engines("first", serve_from="live"), engines("second")
    with torch.no_grad():
        first.model.fused.fill_(5.0)
    first.serve_current_as(3)
    wait_until(lambda: not first.poll()["serving"])
    assert first.poll()["version"] == 3
    assert update(second, 3)["layout"] == LAYOUT and value(second) == 5.0


def test_an_engine_falls_asleep_when_nobody_reads_it_any_more(engines: Engines) -> None:
    sleeper = engines("sleeper", serve_from="live")
    live = {"w": torch.zeros(3)}  # that stay the same tensors
    with engines.trainer() as trainer, engines.trainer("reader") as reader, ThreadPoolExecutor(2) as threads:
        trainer.publish(1, toy_checkpoint(1.0))
        update(sleeper, 1)
        hold_back(sleeper._client, 1, 0, LAYOUT)
        reading = threads.submit(reader.fetch, 1, (LAYOUT,), timeout_s=TIMEOUT_S)
        wait_until(lambda: sleeper._client.find(ShardKey(1, LAYOUT)).active_readers)
        sleeping = threads.submit(sleeper.fall_asleep)
        with pytest.raises(FutureTimeout):
            sleeping.result(0.5)
        assert not reading.done()
        let_go(sleeper._client, 1, LAYOUT)
        Slab.adopt(live)
        assert Adoption._kept  # by which a network card's registration lives on
        sleeping.result(TIMEOUT_S)
        assert not Adoption._kept
        assert reading.result(TIMEOUT_S).tensors()["fused"].unique().tolist() == [1.0]


def test_a_sleeping_engine_has_nothing_to_read(engines: Engines) -> None:
    sleeper, other = engines("sleeper", serve_from="live"), engines("other", serve_from="live")
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(sleeper, 1)
        update(other, 1)

        def held() -> set[str]:
            return set(trainer.versions()[-1].layouts[LAYOUT])

        assert held() == {"sleeper/0", "other/0"}
        sleeper.fall_asleep()
        assert held() == {"other/0"}
        with pytest.raises(UsageError, match="wake it up first"):
            sleeper.start_fetch(1, TIMEOUT_S)
        assert "wake it up first" in sleeper.install(1, TIMEOUT_S)["error"]
        sleeper.wake_up()
        wait_until(lambda: not sleeper.poll()["serving"])
        assert held() == {"sleeper/0", "other/0"} and value(sleeper) == 1.0
        # Weights that were lost do not come back.
        sleeper.fall_asleep()
        sleeper.mark_broken("lost")
        sleeper.wake_up()
        assert held() == {"other/0"}
        assert update(sleeper, 1)["installed"] and held() == {"sleeper/0", "other/0"}


@pytest.mark.parametrize("leaves", [True, False])
def test_what_is_broken_off_by_leaving_has_not_failed(
    leaves: bool, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORHUB_EVENTS", str(tmp_path))
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        updater = engines("rollout-0")
        updater.start_fetch(2, TIMEOUT_S if leaves else 0.2)  # nobody has published it
        if leaves:
            wait_until(lambda: updater._fetching is not None and updater._fetching.running())
            updater.close()
        wait_until(lambda: updater._fetching is not None and updater._fetching.done())
    events = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert any('"update_failed"' in line for line in events) != leaves


@pytest.mark.parametrize("how", ["refused", "half way", "done"])
def test_what_others_do_to_the_weights_leaves_them_served_or_of_no_version(how: str, engines: Engines) -> None:
    """A route of vLLM's own that failed withdrew the version from peers until the next one."""
    updater = engines("first", serve_from="live")
    alone = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    with engines.trainer() as trainer, engines.trainer("reader") as reader:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        with suppress(RuntimeError), external_change(updater, "reload_weights", alone):
            assert not updater._client.serving()
            if how != "refused":
                with torch.no_grad():
                    updater.model.fused[:1] = 7.0
            if how != "done":
                raise RuntimeError("no such checkpoint")
        wait_until(lambda: not updater.poll()["serving"])
        status, served = updater.poll(), [key.version for key in updater._client.serving()]
        assert (status["version"], served) == {"refused": (1, [1]), "half way": (1, []), "done": (0, [])}[how]
        assert bool(status["broken"]) == (how == "half way")
        if how == "refused":
            assert reader.fetch(1, (LAYOUT,)).tensors()["fused"].unique().tolist() == [1.0]
        if how == "half way":
            with pytest.raises(BrokenWeights, match="reload_weights failed half way: RuntimeError: no such checkpoint"):
                updater.guard()


class Zeroing:
    """What no list of names knows."""

    def _zero(self: Any) -> None:
        with torch.no_grad():
            self.model_runner.get_model().fused.zero_()


@pytest.mark.parametrize(
    "asked", ["_zero", Zeroing._zero, partial(Zeroing._zero), cloudpickle.dumps(lambda each: each._zero())]
)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_function_that_somebody_runs_in_a_worker_is_told_by_the_bytes(
    asked: Any, is_wrapped: bool, engines: Engines
) -> None:
    """vLLM takes one where it takes a method's name; the weights were zeroed and went on under their number."""
    pytest.importorskip("vllm")

    class Worker(Zeroing, TensorHubWorkerExtension):
        def __new__(cls) -> Any:
            return object.__new__(cls)

        def load_model(self) -> None:
            raise AssertionError("another model")

    updater = engines("first", serve_from="live")
    hook(Worker)
    worker = Worker()
    vars(updater.model)["tensorhub_updater"] = updater
    worker.model_runner = SimpleNamespace(model=updater.model, get_model=lambda: updater.model)
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    from vllm.v1.serial_utils import run_method

    core = SimpleNamespace(
        collective_rpc=lambda method, args=(), kwargs=None: [run_method(worker, method, args, kwargs or {})]
    )
    if is_wrapped:
        compare_unnamed(core)
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        assert core.collective_rpc(lambda each: each.model_runner.get_model().fused.unique().tolist()) == [[1.0]]
        assert updater.poll()["version"] == 1
        with pytest.raises(UsageError, match="load_model: this engine's weights are in the store"):
            core.collective_rpc("load_model")
        core.collective_rpc(asked)
        assert updater.poll()["version"] == (0 if is_wrapped else 1)  # the control: as vLLM calls it


@pytest.mark.parametrize("method", ["load_again", "reload_weights", "start_weight_update"])
@pytest.mark.parametrize("follows", [True, False])
def test_the_weights_under_adapters_of_the_store_are_not_replaced(method: str, follows: bool) -> None:
    """Other weights answered under the adapter's version; another model had no adapter of the store's any more."""
    done = []
    worker, model = SimpleNamespace(), torch.nn.Module()
    worker.model_runner = SimpleNamespace(model=model, get_model=lambda: model)
    replace = partial(extension._external_change, method)
    replace = extension._load_again if method == "load_again" else replace
    if follows:
        vars(model)["tensorhub_adapters"] = {"actor.lora": object()}
        with pytest.raises(UsageError, match=r"this engine"):
            replace(lambda: done.append(method), worker)
    else:
        replace(lambda: done.append(method), worker)
    assert done == [method] * (not follows)


@pytest.mark.parametrize("method", ["zero", "read", "peek", "get_model"])
def test_a_method_of_a_worker_that_nobody_knows_is_told_by_the_bytes(method: str, engines: Engines) -> None:
    """vLLM 0.32's `/weight_checker` zeroed the weights of a version, which went on under its number. `peek` is declared
    to read only, and get_model is known to: they are not looked at."""

    class Worker(TensorHubWorkerExtension):
        tensorhub_leave_weights = ("peek",)

        def __new__(cls) -> Any:
            return object.__new__(cls)

        def zero(self) -> None:
            with torch.no_grad():
                self.model_runner.get_model().fused.zero_()

        def read(self) -> list[int]:
            return served()

        peek = get_model = read

    def served() -> list[int]:
        return [key.version for key in updater._client.serving()]

    updater = engines("first", serve_from="live")
    hook(Worker)
    worker = Worker()
    vars(updater.model)["tensorhub_updater"] = updater
    worker.model_runner = SimpleNamespace(model=updater.model, get_model=lambda: updater.model)
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        wait_until(lambda: served() == [1])
        assert getattr(worker, method)() == {"zero": None, "read": []}.get(method, [1])
        assert updater.poll()["version"] == (0 if method == "zero" else 1)
        wait_until(lambda: served() == ([] if method == "zero" else [1]))


def test_what_is_ready_is_not_fetched_again(engines: Engines) -> None:
    """An engine that cannot be paused asks for it again and again."""
    updater = engines("first")
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        assert fetch(updater, 1) == "ready"
        staged = updater._state.staged
        updater.start_fetch(1, TIMEOUT_S)
        assert updater.poll()["state"] == "ready" and updater._state.staged is staged
        assert updater.install(1, TIMEOUT_S)["installed"] and value(updater) == 1.0
