"""What has raised has no effect later: a hub that was stopped finds in its buffers what was given up meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from client_processes import Process, tensors_of
from client_stage import SOON_S, Stage

from tensorhub_plugins.core import Client, HubUnreachable, cli
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import session

Call = Callable[[Client], Any]


def visible(client: Client) -> list[int]:
    return [info.version for info in client.versions() if info.visible]


# name: the call, what is asked afterwards, and the answers where it had no effect, and where it came late.
CALLS: dict[str, tuple[Call, Call, Any, Any]] = {
    "publish": (
        lambda client: client.publish(3, tensors_of(3), timeout_s=0.1),
        lambda client: 3 in [info.version for info in client.versions()],
        False,
        True,
    ),
    "pin": (
        lambda client: client.pin(1, timeout_s=0.1),
        lambda client: (client.versions(), client.pinned)[1],
        None,
        1,
    ),
    "withdraw": (lambda client: client.withdraw(2, timeout_s=0.1), visible, [1, 2], [1]),
    "begin": (
        lambda client: client.begin(1, timeout_s=0.1),
        lambda client: (client.versions(), len(client._hub.directive.attempts))[1],
        0,
        1,
    ),
    "retain": (
        lambda client: client.retain(2, timeout_s=0.1),
        lambda client: client.unpublish(1).kept,
        False,
        True,
    ),
}


@pytest.fixture
def hub(stage: Stage) -> Process:
    hub = stage.hub("tcp://127.0.0.1:0", grace_s=0.0)
    stage.address = hub.call("address")
    return hub


def trainers(stage: Stage) -> dict[str, Client]:
    """One for each call, with versions 1 and 2, in a model of its own."""
    clients = {}
    for name in CALLS:
        stage.run = f"run-{name}"
        clients[name] = stage.client("trainer")
        for version in (1, 2):
            clients[name].publish(version, tensors_of(version))
    return clients


@pytest.mark.parametrize("is_dated", [True, False], ids=["", "control"])
def test_what_has_raised_while_the_hub_was_stopped_has_no_effect_later(
    stage: Stage, hub: Process, is_dated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control says only how many seconds are left, as workers did before."""
    if not is_dated:
        monkeypatch.setattr(session.Session, "_until", lambda *_: None)
    clients = trainers(stage)
    hub.freeze()
    calls = {name: stage.begin(CALLS[name][0], client) for name, client in clients.items()}
    for call in calls.values():
        with pytest.raises(HubUnreachable, match="it may have been carried out before, and will not be from now on"):
            call.result(SOON_S)
    hub.thaw()
    for name, client in clients.items():
        _, ask, never, late = CALLS[name]
        assert ask(client) == (never if is_dated else late), name
    if is_dated:
        clients["publish"].publish(3, tensors_of(4))  # its number is not burnt
        assert visible(clients["publish"]) == [1, 2, 3]


def test_what_is_kept_because_the_hub_is_stopped_is_not_given_up_later(stage: Stage, hub: Process) -> None:
    trainer = stage.client("trainer")
    trainer.publish(1, tensors_of(1))
    hub.freeze()
    assert trainer.unpublish(1, timeout_s=0.1).kept
    hub.thaw()
    assert visible(trainer) == [1]


def test_a_command_that_has_failed_has_no_effect_later(
    stage: Stage, hub: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = stage.client("trainer")
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    connect = cli.HubLink.__init__

    def connect_and_freeze(self: Any, *arguments: Any, **options: Any) -> None:
        connect(self, *arguments, **options)
        hub.freeze()

    monkeypatch.setattr(cli.HubLink, "__init__", connect_and_freeze)
    where = ["--hub", stage.address, "--run", stage.run, "--model", "actor", "--timeout", "1"]
    assert cli.main(["withdraw", "2", *where]) == 1
    assert "`tensorhub status` says which versions are withdrawn" in capsys.readouterr().err
    hub.thaw()
    (model,) = fetch_status(stage.address)["models"]
    assert model["withdrawn"] == [] and model["newest"] == 2


def test_what_was_never_sent_has_changed_nothing_and_says_so(stage: Stage, hub: Process) -> None:
    trainer = stage.client("trainer")
    trainer.publish(1, tensors_of(1))
    hub.kill()
    with trainer._hub._lock:
        trainer._hub._machine._welcomed = False  # as when a hub has said that it does not know us
    with pytest.raises(HubUnreachable, match="nothing was changed, as it was not even sent"):
        trainer.pin(1, timeout_s=0.1)
