"""The states of a worker's update, without a worker: every event in every state that can be reached."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tensorhub_plugins.core import TensorHubError, UsageError, VersionRefused
from tensorhub_plugins.core.client.reports import ReplicateReport
from tensorhub_plugins.vllm.worker.update_state import (
    Broken,
    BrokenWeights,
    BytesRead,
    Discard,
    Drop,
    Effect,
    Event,
    FallAsleep,
    Fetch,
    Fetched,
    FetchFailed,
    Fetching,
    Idle,
    Installed,
    InstallFailed,
    Installing,
    ReadInPlace,
    Ready,
    Refused,
    Serve,
    ServeAgain,
    ServeCurrentAs,
    Served,
    Staged,
    StartFetch,
    StartInstall,
    Unpublish,
    Unversioned,
    UpdateState,
    WakeUp,
    Withdrawn,
)

ERROR = TensorHubError("lost on the way")


@dataclass(frozen=True, eq=False)
class Bytes:
    """Stands in for what a client has fetched: equal to nothing but itself."""


def in_memory(version: int) -> Staged:
    return Staged(version, Bytes())  # type: ignore[arg-type]


def after(*events: Event, serves_live: bool = False) -> UpdateState:
    state = UpdateState(serves_live=serves_live)
    for event in events:
        state.handle(event)
    return state


ONE, TWO = in_memory(1), in_memory(2)
FETCHING = (StartFetch(1),)
READY = (*FETCHING, Fetched(ONE))
INSTALLING = (*READY, StartInstall(1))
WHOLE = Staged(1, ONE.fetched)  # more of the same version
INSTALLED = (*INSTALLING, Installed(), Served(1))
BROKEN = (*INSTALLING, InstallFailed("injected"))
READY_AGAIN = (*INSTALLED, Withdrawn(), StartFetch(2), Fetched(TWO))


def test_one_update_from_end_to_end() -> None:
    state = UpdateState(serves_live=False)
    assert state.handle(StartFetch(1, 7.0, True)) == [Fetch(1, 7.0, True)]
    assert state.status()["state"] == "fetching" and state.status()["next_version"] == 1
    assert state.handle(Fetched(ONE)) == []
    assert state.status()["state"] == "ready" and state.ready_for(1) is ONE
    assert state.handle(StartInstall(1)) == []
    with pytest.raises(BrokenWeights, match="version 1 is being installed; install a version before resuming"):
        state.guard()
    assert state.handle(Installed()) == [Serve(ONE)]
    state.guard()
    assert state.handle(Served(1)) == []
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
    state = after(*INSTALLED, StartFetch(2), Fetched(TWO), StartInstall(2), Installed())
    assert state.handle(Served(2)) == [Unpublish(1)]
    assert state.handle(Served(2)) == []  # it returned to what it has never ceased to serve


def test_the_report_of_the_last_read_stays_until_the_next_fetch() -> None:
    made = {0: "xxh3_128"}
    report = ReplicateReport(1, "checkpoint", 8, {"read": 0.1}, {"a/0": 8}, {"tcp": 8}, ("b/0",), {0: "ab"}, made)
    state = after(*FETCHING, BytesRead(report))
    assert state.report is not None and state.report["losses"] == ["b/0"] and state.report["roots"] == {"0": "ab"}
    state.handle(Fetched(ONE))
    assert state.status()["report"] == state.report
    state.handle(StartFetch(2))
    assert state.status()["report"] is None


@pytest.mark.parametrize(
    ("before", "event", "effects", "status"),
    [
        (FETCHING, FetchFailed(1, ERROR), [], ("failed", "lost on the way", "TensorHubError")),
        (FETCHING, FetchFailed(1, ERROR, ONE), [Drop(ONE)], ("failed", "lost on the way", "TensorHubError")),
        (READY, Refused(VersionRefused("no")), [Drop(ONE)], ("failed", "no", "VersionRefused")),
        (READY, Discard(), [Drop(ONE)], ("idle", None, None)),
        (READY, StartFetch(2), [Drop(ONE), Fetch(2, 0.0, False)], ("fetching", None, None)),
        ((*FETCHING, FetchFailed(1, ERROR)), Discard(), [], ("idle", None, None)),
        (INSTALLING, InstallFailed("injected"), [Drop(ONE)], ("broken", None, None)),
        (INSTALLING, ReadInPlace(WHOLE), [Drop(ONE)], ("ready", None, None)),
    ],
    ids=str,
)
def test_what_is_given_up_is_dropped(before: Any, event: Event, effects: list[Effect], status: Any) -> None:
    state = after(*before)
    assert state.handle(event) == effects
    assert tuple(state.status()[key] for key in ("state", "error", "error_kind")) == status


@pytest.mark.parametrize(
    ("event", "says"),
    [(Discard(), []), (Refused(VersionRefused("no")), []), (StartFetch(3), [Fetch(3, 0.0, False)])],
    ids=str,
)
def test_live_weights_are_served_again_when_the_change_they_were_withdrawn_for_does_not_come(
    event: Event, says: list[Effect]
) -> None:
    again: list[Effect] = [] if says else [ServeAgain()]
    state = after(*READY_AGAIN, serves_live=True)
    assert state.handle(event) == [Drop(TWO), *says, *again]
    assert after(*READY_AGAIN).handle(event) == [Drop(TWO), *says]  # a copy is served all the time
    if says:
        assert state.handle(FetchFailed(3, ERROR)) == [ServeAgain()]
    assert state.to_serve_again() == 1
    state.handle(StartFetch(2))
    state.handle(Fetched(in_memory(2)))
    assert state.to_serve_again() is None  # it was too late: they may be written any moment


def test_what_sleeps_is_not_served_and_woken_up_it_is_again() -> None:
    state = after(*INSTALLED, serves_live=True)
    assert state.to_withdraw() == 1
    state.handle(Withdrawn())
    state.handle(FallAsleep())
    assert state.to_serve_again() is None and state.to_withdraw() is None
    assert state.handle(WakeUp()) == [ServeAgain()]
    assert state.handle(WakeUp()) == []  # it was awake
    state.handle(Broken("lost"))
    state.handle(FallAsleep())
    assert state.handle(WakeUp()) == []  # weights that were lost do not come back


def test_weights_from_elsewhere() -> None:
    assert after(*BROKEN).handle(ServeCurrentAs(7)) == [Serve(Staged(7))]
    state = after(*INSTALLED, Unversioned())
    assert state.version == 0 and state.broken is None
    state = after(*BROKEN, Unversioned())
    assert state.broken is not None
    state.handle(Unversioned(mended=True))
    assert state.broken is None and state.status()["state"] == "idle"


BUSY = "version 1 is being installed: wait until that has ended"


@pytest.mark.parametrize(
    ("before", "event", "says"),
    [
        (FETCHING, StartFetch(2), "version 1 is still being fetched: poll until it is ready"),
        (INSTALLED, StartFetch(1), "version 1 is installed already"),
        (INSTALLING, StartFetch(2), BUSY),
        ((FallAsleep(),), StartFetch(1), "the engine sleeps and its weights are not there: wake it up first"),
        ((*READY, FallAsleep()), StartInstall(1), "wake it up first"),
        ((), StartInstall(1), "nothing is ready: fetch version 1 first"),
        (FETCHING, StartInstall(1), "nothing is ready: fetch version 1 first"),
        (READY, StartInstall(2), "version 1 is ready: fetch version 2 first"),
        (INSTALLING, StartInstall(1), BUSY),
        ((), Fetched(ONE), "version 1 is not being fetched"),
        (FETCHING, Fetched(TWO), "version 2 is not being fetched"),
        (READY, FetchFailed(1, ERROR), "version 1 is not being fetched"),
        ((), Refused(ERROR), "nothing is ready that could be refused"),
        (INSTALLING, Refused(ERROR), "nothing is ready that could be refused"),
        (INSTALLING, Discard(), BUSY),
        (INSTALLING, FallAsleep(), BUSY),
        (INSTALLING, ServeCurrentAs(3), BUSY),
        (INSTALLING, Unversioned(), BUSY),
        ((), ReadInPlace(ONE), "no install is under way"),
        ((), Installed(), "no install is under way"),
        (READY, InstallFailed("x"), "no install is under way"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_changes_nothing(before: tuple[Event, ...], event: Event, says: str) -> None:
    state = after(*before)
    was = vars(state).copy()
    with pytest.raises(UsageError, match=says):
        state.handle(event)
    assert vars(state) == was


def test_why_a_fetch_failed_is_why_nothing_can_be_installed() -> None:
    with pytest.raises(TensorHubError, match="lost on the way"):
        after(*FETCHING, FetchFailed(1, ERROR)).ready_for(1)


# --- every event in every state that can be reached ---


@dataclass
class World:
    """The state, and what its shell would have in its hands."""

    state: UpdateState
    held: list[Staged]  # what has entered the state and was neither dropped nor served
    installs: int = 0  # under way

    def copy(self) -> World:
        return World(copy.copy(self.state), list(self.held), self.installs)

    def key(self) -> Any:
        state = self.state
        phase = state.phase
        inner = getattr(phase, "staged", None)
        about = (inner.version, inner.fetched is None) if inner else (getattr(phase, "version", 0),)
        failed = isinstance(phase, Idle) and phase.error is not None
        return type(phase), about, failed, state.version, state.served, state.broken is None, state.is_asleep

    def handle(self, event: Event) -> bool:
        """Whether it was possible. Fails if a rule of the state is broken."""
        before = vars(self.state).copy()
        try:
            effects = self.state.handle(event)
        except UsageError as error:
            assert vars(self.state) == before and len(error.message) > 10
            return False
        except TensorHubError as error:  # StartInstall after a failed fetch says why
            assert isinstance(event, StartInstall) and error is ERROR and vars(self.state) == before
            return False
        match event:
            case Fetched(staged) | FetchFailed(_, _, Staged() as staged):
                self.held.append(staged)
            case ReadInPlace(staged):
                self.held = [*(one for one in self.held if one.fetched is not None), staged]
            case StartInstall():
                assert self.installs == 0  # never two at once
                self.installs += 1
            case Installed() | InstallFailed():
                self.installs -= 1
            case _:
                pass
        for effect in effects:
            if isinstance(effect, Drop) or (isinstance(effect, Serve) and not isinstance(event, ServeCurrentAs)):
                assert any(effect.staged is one for one in self.held)  # once, and nothing else
                self.held = [one for one in self.held if one is not effect.staged]
            if isinstance(effect, Fetch):
                assert self.installs == 0
        staged = self.state.staged
        assert [id(one) for one in self.held] == ([id(staged)] if staged else [])
        assert self.installs == isinstance(self.state.phase, Installing)
        assert self.installs == 0 or self.state.broken is not None  # nothing is computed meanwhile
        if isinstance(event, (FetchFailed, Refused, InstallFailed, Discard)):
            assert isinstance(self.state.phase, (Idle, Fetching))
        return True


def alphabet() -> Iterator[Event]:
    for version in (1, 2):
        yield from (StartFetch(version), Fetched(in_memory(version)), Fetched(Staged(version)))
        yield from (FetchFailed(version, ERROR), FetchFailed(version, ERROR, in_memory(version)))
        yield from (StartInstall(version), ReadInPlace(in_memory(version)), Served(version), ServeCurrentAs(version))
    yield from (Refused(ERROR), Discard(), Installed(), InstallFailed("x"), Withdrawn(), Broken("lost"))
    yield from (Unversioned(), Unversioned(mended=True), FallAsleep(), WakeUp())


def reachable(serves_live: bool) -> Iterator[World]:
    first = World(UpdateState(serves_live=serves_live), [])
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
        if isinstance(world.state.phase, Installing):  # its shell ends it, one way or the other
            assert world.handle(InstallFailed("x"))
        if isinstance(world.state.phase, Fetching):
            assert world.handle(FetchFailed(world.state.phase.version, ERROR))
        if world.state.is_asleep:
            assert not world.handle(StartFetch(version))
            assert world.handle(WakeUp())
        assert world.handle(StartFetch(version))
        assert world.handle(Fetched(in_memory(version)))
        assert isinstance(world.state.phase, Ready)
        assert world.handle(StartInstall(version))
        assert world.handle(Installed())
        world.state.guard()
        assert world.state.version == version and not world.held
    assert count > 300


def test_a_state_that_forgets_to_drop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    handle = UpdateState.handle

    def forgetful(state: UpdateState, event: Event) -> list[Effect]:
        return [effect for effect in handle(state, event) if not isinstance(effect, Drop)]

    monkeypatch.setattr(UpdateState, "handle", forgetful)
    with pytest.raises(AssertionError):
        list(reachable(serves_live=False))
