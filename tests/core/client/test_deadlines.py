"""No call lasts longer than its deadline and half a second, and its error names peer, phase and version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from client_processes import tensors_of, zeros_like
from client_stage import LATE_S, SOON_S

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    Deadline,
    DeadlineExceeded,
    HubUnreachable,
    NotPublished,
    TensorHubError,
    start_server,
)
from tensorhub_plugins.core.client import session
from tensorhub_plugins.core.deadline import STEPS, until
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory import block
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.types import Location

GRACE_S = 0.5  # what a call may last beyond its deadline


def test_a_request_ends_soon_after_its_deadline_whatever_the_hub_does():
    hello = m.Hello("r", "m", "a", 0, 1, Location(), {})
    machine = session.Session(hello, 0.0)
    machine.handle(session.Tick(), 0.0)
    machine.handle(session.Heard(m.Welcome(b"H" * 16, 100.0, 200.0, 1)), 0.0)
    machine.handle(session.Tick(), 0.0)
    machine.handle(session.Ask(m.Wait(7, 5, 0, 2.0), 2.0), 0.0)
    due = machine.next_deadline()
    assert 2.0 < due < 2.0 + GRACE_S
    assert session.Expired(7, True, was_sent=True) in machine.handle(session.Tick(), due)
    assert TransferLimits().hub_answer_s < GRACE_S and TransferLimits().hub_answer_s > session.ANSWER_MARGIN_S


CALLS: dict[str, tuple[Callable[[Client], Any], str, int | None]] = {
    "publish": (lambda c: c.publish(7, {"w": torch.ones(3)}, timeout_s=1), "publish", 7),
    "replicate": (lambda c: c.replicate(zeros_like(tensors_of(1)), 1, timeout_s=1), "find sources", 1),
    "fetch": (lambda c: c.fetch(timeout_s=1), "find sources", None),
    "wait": (lambda c: c.wait(9, timeout_s=1), "wait", 9),
    "target": (lambda c: c.target(timeout_s=1), "wait", None),
    "versions": (lambda c: c.versions(timeout_s=1), "versions", None),
    "retain": (lambda c: c.retain(timeout_s=1), "retain", None),
    "pin": (lambda c: c.pin(4, timeout_s=1), "pin", 4),
    "withdraw": (lambda c: c.withdraw(4, timeout_s=1), "withdraw", 4),
}


@pytest.mark.slow
def test_every_call_of_a_frozen_hub_ends_and_says_what_it_was_about(stage):
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    client = stage.client("a")
    client.publish(1, tensors_of(1))
    hub.freeze()

    def timed(call: Callable[[Client], Any]) -> tuple[float, TensorHubError | None]:
        began = time.monotonic()
        try:
            call(client)
        except TensorHubError as error:
            return time.monotonic() - began, error
        return time.monotonic() - began, None

    asked = {name: stage.begin(timed, call) for name, (call, _, _) in CALLS.items()}
    for name, (_, phase, version) in CALLS.items():
        seconds, error = asked[name].result(SOON_S)
        assert seconds < 1 + LATE_S, name
        assert isinstance(error, HubUnreachable), name
        assert (error.phase, error.version, error.peer) == (phase, version, stage.address), name
    assert client.unpublish(1, timeout_s=1).kept  # no error: it may be the last copy


def test_a_hub_answers_at_the_deadline_and_not_with_its_next_heartbeat():
    with (
        start_server(limits=HubLimits(heartbeat_s=20, session_timeout_s=60)) as hub,
        Client(hub.address, run="r", model="m", replica="a", transports=("tcp",)) as client,
    ):
        with pytest.raises(NotPublished) as caught:  # its own word; HubUnreachable would say that it had none
            client.wait(9, timeout_s=0.5)
        assert (caught.value.version, caught.value.phase, caught.value.peer) == (9, "wait", hub.address)


# --- while it prepares ---


def test_a_loop_over_what_a_peer_has_sent_ends_at_the_deadline():
    assert list(until(Deadline.after(SOON_S), range(3 * STEPS))) == list(range(3 * STEPS))
    with pytest.raises(DeadlineExceeded):
        next(until(time.monotonic(), range(3)))
    assert list(until(time.monotonic(), [])) == []


def test_memory_for_too_many_tensors_is_given_up_at_the_deadline(stage, monkeypatch):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {f"w{number:05}": torch.ones(1) for number in range(4 * STEPS)})
    made: list[str] = []
    tensor_at = block._tensor_at

    def slowly(*arguments: Any) -> torch.Tensor:
        made.append(arguments[1].name)
        time.sleep(0.008)  # STEPS of them are a second: what a million tensors take
        return tensor_at(*arguments)

    monkeypatch.setattr(block, "_tensor_at", slowly)
    with pytest.raises(DeadlineExceeded, match="1 shards not yet opened") as caught:
        rollout.fetch(timeout_s=0.5, serve=True)
    error = caught.value
    assert (error.version, error.peer, error.phase, error.timeout_s) == (1, "trainer/0", "prepare", 0.5)
    assert len(made) <= 2 * STEPS and rollout.serving() == []
    monkeypatch.setattr(block, "_tensor_at", tensor_at)
    assert len(rollout.fetch().tensors()) == 4 * STEPS  # the control


def test_a_reader_that_decodes_a_manifest_is_not_waited_for(stage, monkeypatch):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    goes_on, decode = threading.Event(), Manifest.decode

    def slowly(encoded: bytes) -> Manifest:
        goes_on.wait(SOON_S)
        return decode(encoded)

    monkeypatch.setattr(Manifest, "decode", slowly)
    try:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            rollout.fetch(timeout_s=0.5)
        assert time.monotonic() - began < 0.5 + LATE_S
        assert (caught.value.version, caught.value.peer) == (1, "trainer/0")
    finally:
        goes_on.set()
    assert list(rollout.fetch(layouts=(CHECKPOINT,)).report.sources) == ["trainer/0"]
