"""The states of a worker's update, without a worker: every event in every state that can be reached."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tensorhub_plugins.core import TensorHubError, UsageError, VersionRefused
from tensorhub_plugins.core.transfer.report import ReplicateReport
from tensorhub_plugins.vllm.worker import update_state as m

ERROR = TensorHubError("lost on the way")


@dataclass(frozen=True, eq=False)
class Bytes:
    """Stands in for what a client has fetched: equal to nothing but itself."""


def in_memory(version: int) -> m.Staged:
    return m.Staged(version, Bytes())  # type: ignore[arg-type]


def after(*events: m.Event, serves_live: bool = False) -> m.UpdateState:
    state = m.UpdateState(serves_live=serves_live)
    for event in events:
        state.handle(event)
    return state


ONE, TWO = in_memory(1), in_memory(2)
FETCHING = (m.StartFetch(1),)
READY = (*FETCHING, m.Fetched(ONE))
INSTALLING = (*READY, m.StartInstall(1))
WHOLE = m.Staged(1, ONE.fetched)  # more of the same version
INSTALLED = (*INSTALLING, m.Installed(), m.Served(1))
BROKEN = (*INSTALLING, m.InstallFailed("injected"))
READY_AGAIN = (*INSTALLED, m.Withdrawn(), m.StartFetch(2), m.Fetched(TWO))


def test_one_update_from_end_to_end() -> None:
    state = m.UpdateState(serves_live=False)
    assert state.handle(m.StartFetch(1, 7.0, True, True)) == [m.Fetch(1, 7.0, True, True)]
    assert state.status()["state"] == "fetching" and state.status()["next_version"] == 1
    assert state.handle(m.Fetched(ONE)) == []
    assert state.status()["state"] == "ready" and state.ready_for(1) is ONE
    assert state.handle(m.StartInstall(1)) == []
    with pytest.raises(m.BrokenWeights, match="version 1 is being installed; install a version before resuming"):
        state.guard()
    assert state.handle(m.Installed()) == [m.Serve(ONE)]
    state.guard()
    assert state.handle(m.Served(1)) == []
    assert state.status() == {
        "state": "idle",
        "version": 1,
        "next_version": None,
        "served_version": 1,
        "broken": None,
        "error": None,
        "error_kind": None,
        "report": None,
    }


def test_the_version_before_is_unpublished_when_the_next_is_served() -> None:
    state = after(*INSTALLED, m.StartFetch(2), m.Fetched(TWO), m.StartInstall(2), m.Installed())
    assert state.handle(m.Served(2)) == [m.Unpublish(1)]
    assert state.handle(m.Served(2)) == []  # it returned to what it has never ceased to serve
    assert state.handle(m.Served(None)) == [m.Unpublish(2)] and state.served is None  # nobody reads the next one
    assert state.handle(m.Served(None)) == []


def test_the_report_of_the_last_read_stays_until_the_next_fetch() -> None:
    made = {0: "xxh3_128"}
    report = ReplicateReport(1, "checkpoint", 8, {"read": 0.1}, {"a/0": 8}, {"tcp": 8}, ("b/0",), {0: "ab"}, made)
    state = after(*FETCHING, m.BytesRead(report))
    assert state.report is not None and state.report["losses"] == ["b/0"] and state.report["roots"] == {"0": "ab"}
    state.handle(m.Fetched(ONE))
    assert state.status()["report"] == state.report
    state.handle(m.StartFetch(2))
    assert state.status()["report"] is None


@pytest.mark.parametrize(
    ("before", "event", "effects", "status"),
    [
        (FETCHING, m.FetchFailed(1, ERROR), [], ("failed", "lost on the way", "TensorHubError")),
        (FETCHING, m.FetchFailed(1, ERROR, ONE), [m.Drop(ONE)], ("failed", "lost on the way", "TensorHubError")),
        (READY, m.Refused(VersionRefused("no")), [m.Drop(ONE)], ("failed", "no", "VersionRefused")),
        (READY, m.Discard(), [m.Drop(ONE)], ("idle", None, None)),
        (READY, m.StartFetch(2), [m.Drop(ONE), m.Fetch(2, 0.0, False)], ("fetching", None, None)),
        ((*FETCHING, m.FetchFailed(1, ERROR)), m.Discard(), [], ("idle", None, None)),
        (INSTALLING, m.InstallFailed("injected"), [m.Drop(ONE)], ("broken", None, None)),
        (INSTALLING, m.ReadInPlace(WHOLE), [m.Drop(ONE)], ("ready", None, None)),
    ],
    ids=str,
)
def test_what_is_given_up_is_dropped(before: Any, event: m.Event, effects: list[m.Effect], status: Any) -> None:
    state = after(*before)
    assert state.handle(event) == effects
    assert tuple(state.status()[key] for key in ("state", "error", "error_kind")) == status


@pytest.mark.parametrize(
    ("event", "says"),
    [(m.Discard(), []), (m.Refused(VersionRefused("no")), []), (m.StartFetch(3), [m.Fetch(3, 0.0, False)])],
    ids=str,
)
def test_live_weights_are_served_again_when_the_change_they_were_withdrawn_for_does_not_come(
    event: m.Event, says: list[m.Effect]
) -> None:
    again: list[m.Effect] = [] if says else [m.ServeAgain()]
    state = after(*READY_AGAIN, serves_live=True)
    assert state.handle(event) == [m.Drop(TWO), *says, *again]
    assert after(*READY_AGAIN).handle(event) == [m.Drop(TWO), *says]  # a copy is served all the time
    if says:
        assert state.handle(m.FetchFailed(3, ERROR)) == [m.ServeAgain()]
    assert state.to_serve_again() == 1
    state.handle(m.StartFetch(2))
    state.handle(m.Fetched(in_memory(2)))
    assert state.to_serve_again() is None  # it was too late: they may be written any moment


def test_what_sleeps_is_not_served_and_woken_up_it_is_again() -> None:
    state = after(*INSTALLED, serves_live=True)
    assert state.to_withdraw() == 1
    state.handle(m.Withdrawn())
    state.handle(m.FallAsleep())
    assert state.to_serve_again() is None and state.to_withdraw() is None
    assert state.handle(m.WakeUp()) == [m.ServeAgain()]
    assert state.handle(m.WakeUp()) == []  # it was awake
    state.handle(m.Broken("lost"))
    state.handle(m.FallAsleep())
    assert state.handle(m.WakeUp()) == []  # weights that were lost do not come back


def test_weights_from_elsewhere() -> None:
    assert after(*BROKEN).handle(m.ServeCurrentAs(7)) == [m.Serve(m.Staged(7))]
    state = after(*INSTALLED, m.Unversioned())
    assert state.version == 0 and state.broken is None
    state = after(*BROKEN, m.Unversioned())
    assert state.broken is not None
    state.handle(m.Unversioned(mended=True))
    assert state.broken is None and state.status()["state"] == "idle"


BUSY = "version 1 is being installed: wait until that has ended"


@pytest.mark.parametrize(
    ("before", "event", "says"),
    [
        (FETCHING, m.StartFetch(2), "version 1 is still being fetched: poll until it is ready"),
        (INSTALLED, m.StartFetch(1), "version 1 is installed already"),
        (INSTALLING, m.StartFetch(2), BUSY),
        ((m.FallAsleep(),), m.StartFetch(1), "the engine sleeps and its weights are not there: wake it up first"),
        ((*READY, m.FallAsleep()), m.StartInstall(1), "wake it up first"),
        ((), m.StartInstall(1), "nothing is ready: fetch version 1 first"),
        (FETCHING, m.StartInstall(1), "nothing is ready: fetch version 1 first"),
        (READY, m.StartInstall(2), "version 1 is ready: fetch version 2 first"),
        (INSTALLING, m.StartInstall(1), BUSY),
        ((), m.Fetched(ONE), "version 1 is not being fetched"),
        (FETCHING, m.Fetched(TWO), "version 2 is not being fetched"),
        (READY, m.FetchFailed(1, ERROR), "version 1 is not being fetched"),
        ((), m.Refused(ERROR), "nothing is ready that could be refused"),
        (INSTALLING, m.Refused(ERROR), "nothing is ready that could be refused"),
        (INSTALLING, m.Discard(), BUSY),
        (INSTALLING, m.FallAsleep(), BUSY),
        (INSTALLING, m.ServeCurrentAs(3), BUSY),
        (INSTALLING, m.Unversioned(), BUSY),
        ((), m.ReadInPlace(ONE), "no install is under way"),
        ((), m.Installed(), "no install is under way"),
        (READY, m.InstallFailed("x"), "no install is under way"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_changes_nothing(before: tuple[m.Event, ...], event: m.Event, says: str) -> None:
    state = after(*before)
    was = vars(state).copy()
    with pytest.raises(UsageError, match=says):
        state.handle(event)
    assert vars(state) == was


def test_why_a_fetch_failed_is_why_nothing_can_be_installed() -> None:
    with pytest.raises(TensorHubError, match="lost on the way"):
        after(*FETCHING, m.FetchFailed(1, ERROR)).ready_for(1)


# --- every event in every state that can be reached ---


@dataclass
class World:
    """The state, and what its shell would have in its hands."""

    state: m.UpdateState
    held: list[m.Staged]  # what has entered the state and was neither dropped nor served
    installs: int = 0  # under way

    def copy(self) -> World:
        return World(copy.copy(self.state), list(self.held), self.installs)

    def key(self) -> Any:
        state = self.state
        phase = state.phase
        inner = getattr(phase, "staged", None)
        about = (inner.version, inner.fetched is None) if inner else (getattr(phase, "version", 0),)
        failed = isinstance(phase, m.Idle) and phase.error is not None
        return type(phase), about, failed, state.version, state.served, state.broken is None, state.is_asleep

    def handle(self, event: m.Event) -> bool:
        """Whether it was possible. Fails if a rule of the state is broken."""
        before = vars(self.state).copy()
        try:
            effects = self.state.handle(event)
        except UsageError as error:
            assert vars(self.state) == before and len(error.message) > 10
            return False
        except TensorHubError as error:  # StartInstall after a failed fetch says why
            assert isinstance(event, m.StartInstall) and error is ERROR and vars(self.state) == before
            return False
        match event:
            case m.Fetched(staged) | m.FetchFailed(_, _, m.Staged() as staged):
                self.held.append(staged)
            case m.ReadInPlace(staged):
                self.held = [*(one for one in self.held if one.fetched is not None), staged]
            case m.StartInstall():
                assert self.installs == 0  # never two at once
                self.installs += 1
            case m.Installed() | m.InstallFailed():
                self.installs -= 1
            case _:
                pass
        for effect in effects:
            if isinstance(effect, m.Drop) or (isinstance(effect, m.Serve) and not isinstance(event, m.ServeCurrentAs)):
                assert any(effect.staged is one for one in self.held)  # once, and nothing else
                self.held = [one for one in self.held if one is not effect.staged]
            if isinstance(effect, m.Fetch):
                assert self.installs == 0
        staged = self.state.staged
        assert [id(one) for one in self.held] == ([id(staged)] if staged else [])
        assert self.installs == isinstance(self.state.phase, m.Installing)
        assert self.installs == 0 or self.state.broken is not None  # nothing is computed meanwhile
        if isinstance(event, (m.FetchFailed, m.Refused, m.InstallFailed, m.Discard)):
            assert isinstance(self.state.phase, (m.Idle, m.Fetching))
        return True


def alphabet() -> Iterator[m.Event]:
    for version in (1, 2):
        yield from (m.StartFetch(version), m.Fetched(in_memory(version)), m.Fetched(m.Staged(version)))
        yield from (m.FetchFailed(version, ERROR), m.FetchFailed(version, ERROR, in_memory(version)))
        yield from (
            m.StartInstall(version),
            m.ReadInPlace(in_memory(version)),
            m.Served(version),
            m.ServeCurrentAs(version),
        )
    yield from (m.Refused(ERROR), m.Discard(), m.Installed(), m.InstallFailed("x"), m.Withdrawn(), m.Broken("lost"))
    yield from (m.Unversioned(), m.Unversioned(mended=True), m.FallAsleep(), m.WakeUp())


def reachable(serves_live: bool) -> Iterator[World]:
    first = World(m.UpdateState(serves_live=serves_live), [])
    seen, waiting = {first.key()}, deque([first])
    while waiting:
        world = waiting.popleft()
        yield world.copy()
        for event in alphabet():
            following = world.copy()
            if following.handle(event) and following.key() not in seen:
                seen.add(following.key())
                waiting.append(following)


@pytest.mark.parametrize("serves_live", [False, True])
def test_from_every_state_the_next_good_install_mends_the_engine(serves_live: bool) -> None:
    count = 0
    for world in reachable(serves_live):
        count += 1
        version = 3
        if isinstance(world.state.phase, m.Installing):  # its shell ends it, one way or the other
            assert world.handle(m.InstallFailed("x"))
        if isinstance(world.state.phase, m.Fetching):
            assert world.handle(m.FetchFailed(world.state.phase.version, ERROR))
        if world.state.is_asleep:
            assert not world.handle(m.StartFetch(version))
            assert world.handle(m.WakeUp())
        assert world.handle(m.StartFetch(version))
        assert world.handle(m.Fetched(in_memory(version)))
        assert isinstance(world.state.phase, m.Ready)
        assert world.handle(m.StartInstall(version))
        assert world.handle(m.Installed())
        world.state.guard()
        assert world.state.version == version and not world.held
    assert count > 300


def test_a_state_that_forgets_to_drop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    handle = m.UpdateState.handle

    def forgetful(state: m.UpdateState, event: m.Event) -> list[m.Effect]:
        return [effect for effect in handle(state, event) if not isinstance(effect, m.Drop)]

    monkeypatch.setattr(m.UpdateState, "handle", forgetful)
    with pytest.raises(AssertionError):
        list(reachable(serves_live=False))
