"""The trainer's side of vLLM's weight transfer: what it published outlives it, if anybody wants it."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.weight_transfer import ModuleSource

from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.vllm.weight_transfer import FollowingEngines, TensorHubTrainerEngine, TensorHubTrainerInitInfo


def trainer(hub: Server, linger_s: float) -> TensorHubTrainerEngine:
    info = TensorHubTrainerInitInfo(hub=hub.address, model="actor", rank=0, linger_s=linger_s)
    source = ModuleSource(torch.nn.Linear(4, 4))
    return TensorHubTrainerEngine.trainer_init(info, client=FollowingEngines(), source=source)


def test_a_trainer_stays_until_somebody_else_holds_its_last_version(hub: Server) -> None:
    engine = trainer(hub, linger_s=60.0)
    engine.send_weights()
    engine.send_weights()
    leaving = threading.Thread(target=engine.shutdown)
    leaving.start()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        fetched = reader.fetch(2, serve=True)
        leaving.join(60.0)
        assert not leaving.is_alive()
        assert fetched.report.sources.keys() == {"trainer/0"}
        assert reader.versions()[-1].layouts == {"checkpoint": ("reader/0",)}


def test_a_trainer_whom_nobody_reads_leaves_all_the_same(hub: Server, caplog: pytest.LogCaptureFixture) -> None:
    engine = trainer(hub, linger_s=0.3)
    engine.send_weights()
    began = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - began >= 0.3
    assert "version 1 is lost with the trainer" in caplog.text
    with Client(hub.address, run="default", model="actor", replica="late") as late:
        assert not any(info.visible for info in late.versions())


def test_a_trainer_without_a_version_or_a_hub_leaves_at_once(hub: Server) -> None:
    trainer(hub, linger_s=600.0).shutdown()
    engine = trainer(hub, linger_s=600.0)
    engine.send_weights()
    hub.close()
    engine.shutdown()


def test_a_trainer_whose_model_has_changed_is_refused(hub: Server) -> None:
    engine = trainer(hub, linger_s=0.0)
    engine.send_weights()
    engine.source = ModuleSource(torch.nn.Linear(4, 5, bias=False))
    words = r"1 missing: 'bias'; 1 changed: 'weight' \(expected float32\[4, 4\], given float32\[5, 4\]\)"
    with pytest.raises(UsageError, match=words):
        engine.send_weights()
    engine.source = ModuleSource(torch.nn.Linear(4, 4))  # the control: the version itself is as good as before
    engine.send_weights(2)
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert reader.wait(timeout_s=10.0) == 2
    engine.shutdown()


def test_a_version_that_could_not_be_published_does_not_count(hub: Server) -> None:
    engine = trainer(hub, linger_s=0.0)
    engine.send_weights()
    good = engine.source
    engine.source = ModuleSource(torch.nn.Linear(4, 5, bias=False))
    with pytest.raises(UsageError, match="1 missing: 'bias'"):
        engine.send_weights()
    engine.source = good
    engine.send_weights()
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert reader.wait(timeout_s=10.0) == 2
        assert [info.version for info in reader.versions() if info.visible] == [2]
    engine.shutdown()


def test_a_version_that_the_engines_did_not_take_is_taken_back_with_the_next(hub: Server) -> None:
    engine = trainer(hub, linger_s=0.0)
    engine.send_weights()
    following = engine.client

    class Refuses(FollowingEngines):
        def update_weights(self, update_info: object) -> None:
            raise RuntimeError("injected")

    engine.client = Refuses()
    with pytest.raises(RuntimeError, match="injected"):
        engine.send_weights()
    engine.client = following
    with Client(hub.address, run="default", model="actor", replica="reader") as reader:
        assert [info.version for info in reader.versions() if info.visible] == [1, 2]  # the engines have 1 still
        engine.send_weights()
        assert [info.version for info in reader.versions() if info.visible] == [3]
    engine.shutdown()
