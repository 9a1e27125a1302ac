"""PURE: the states of a worker's update. Events in, effects out; updater.py carries them out.

    phase        from there
    Idle         nothing under way; `error` says why the last version was abandoned, None if none was
                     StartFetch > Fetching
    Fetching     a version is on its way into host memory (for a direct install: awaited)
                     Fetched > Ready        FetchFailed > Idle
    Ready        it has arrived and is verified, and no peer reads the live weights any more
                     StartInstall > Installing    Refused, Discard > Idle
                     StartFetch > Fetching, unless it is of what is in host memory here
    Installing   the live weights are being written; every worker of the engine has agreed to it
                     Installed, InstallFailed > Idle

Apart from the phase
    broken       why nothing may be computed with the weights: they are mixed or lost. Only Installed repairs them;
                 a broken worker can fetch, so the next good install can always repair it.
    repairs      the install under way repairs such weights: undamaged parts of them need not be read again
    is_asleep    the live weights are not in their memory: neither StartFetch nor StartInstall.
    version      installed; 0: no version of the store, as the weights that the engine was started with
    served       the version that this worker offers to peers in its runtime layout

Rules
    1. At most one fetch and at most one install at any time, never both.
    2. What was staged leaves the state once: by Drop, or by Serve after its install.
    3. Every failure ends in Idle, from where a fetch may start.
    4. An event that is not possible now raises UsageError and changes nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import assert_never

from tensorhub_plugins.core import TensorHubError, UsageError

if TYPE_CHECKING:
    from tensorhub_plugins.core import Fetched as FetchedShards
    from tensorhub_plugins.core import ReplicateReport

ASLEEP = "the engine sleeps and its weights are not there: wake it up first"


class BrokenWeights(TensorHubError):
    """An install failed half way and these weights are mixed: install a version before generating."""


@dataclass(frozen=True)
class Staged:
    """The bytes that an install will install, or has installed.

    fetched None: nothing is in host memory. It is read into the live weights during the install, or (with a report) has
    been."""

    version: int
    fetched: FetchedShards | None = None
    report: ReplicateReport | None = None  # of the read of the bytes


# --- phases ---


@dataclass(frozen=True)
class Idle:
    error: TensorHubError | None = None


@dataclass(frozen=True)
class Fetching:
    version: int


@dataclass(frozen=True)
class Ready:
    staged: Staged


@dataclass(frozen=True)
class Installing:
    staged: Staged


# --- events ---


@dataclass(frozen=True)
class StartFetch:
    """A request to fetch. in_place: for an install that reads into the live weights, if a peer has this layout."""

    version: int
    deadline: float = 0.0  # passed on
    in_place: bool = False  # passed on
    grows: bool = False  # passed on


@dataclass(frozen=True)
class BytesRead:
    """The end of a read, of a fetch or of an install that reads in place."""

    report: ReplicateReport


@dataclass(frozen=True)
class Fetched:
    staged: Staged


@dataclass(frozen=True)
class FetchFailed:
    """A failed fetch. staged: what had arrived nevertheless."""

    version: int
    error: TensorHubError
    staged: Staged | None = None


@dataclass(frozen=True)
class Refused:
    """The ready version is not this model's (VersionRefused), and never will be."""

    error: TensorHubError


@dataclass(frozen=True)
class Discard:
    """A request to drop what is ready."""


@dataclass(frozen=True)
class StartInstall:
    version: int


@dataclass(frozen=True)
class ReadInPlace:
    """The install has now read this, because nothing, or not enough, was in host memory."""

    staged: Staged


@dataclass(frozen=True)
class Installed:
    pass


@dataclass(frozen=True)
class InstallFailed:
    reason: str


@dataclass(frozen=True)
class Served:
    """This worker now offers the version to peers."""

    version: int | None  # None: it offers none, because it has no readers


@dataclass(frozen=True)
class Withdrawn:
    """No peer reads the live weights any more, and none may."""


@dataclass(frozen=True)
class Broken:
    """The weights were changed or lost outside of an install."""

    reason: str


@dataclass(frozen=True)
class Unversioned:
    """The weights were replaced, whole, from elsewhere. mended: by this worker, after an install that failed."""

    mended: bool = False


@dataclass(frozen=True)
class Unchanged:
    """The weights were to be replaced from elsewhere, and were not."""


@dataclass(frozen=True)
class ServeCurrentAs:
    """The live weights came from elsewhere and are this version."""

    version: int


@dataclass(frozen=True)
class FallAsleep:
    pass


@dataclass(frozen=True)
class WakeUp:
    pass


Event = (
    StartFetch
    | BytesRead
    | Fetched
    | FetchFailed
    | Refused
    | Discard
    | StartInstall
    | ReadInPlace
    | Installed
    | InstallFailed
    | Served
    | Withdrawn
    | Broken
    | Unversioned
    | Unchanged
    | ServeCurrentAs
    | FallAsleep
    | WakeUp
)


# --- effects ---


@dataclass(frozen=True)
class Fetch:
    version: int
    deadline: float
    in_place: bool
    grows: bool = False


@dataclass(frozen=True)
class Drop:
    """Free bytes that will not be installed."""

    staged: Staged


@dataclass(frozen=True)
class Serve:
    """Offer the version that the live weights now are; then free what it was installed from."""

    staged: Staged


@dataclass(frozen=True)
class ServeAgain:
    """Offer the live weights again: they were withdrawn for a change that did not happen. See `to_serve_again`."""


@dataclass(frozen=True)
class Unpublish:
    """Stop offering the version that was served before."""

    version: int


Effect = Fetch | Drop | Serve | ServeAgain | Unpublish


class UpdateState:
    def __init__(self, *, serves_live: bool) -> None:
        """Begin idle. serves_live: peers read the live weights in place, so these are withdrawn before every change."""
        self.serves_live = serves_live
        self.phase: Idle | Fetching | Ready | Installing = Idle()
        self.version = 0
        self.served: int | None = None
        self.broken: str | None = None
        self.repairs = False
        self.is_asleep = False
        self.report: dict[str, Any] | None = None

    # --- questions ---

    def status(self) -> dict[str, Any]:
        """Return what operators and the engine's owner see, as plain types.

        state: "idle", "fetching", "ready" (also during its install), "failed" (Idle with an error), or "broken" (with
        nothing fetched yet that could repair it)."""
        phase, error, next_version = self.phase, None, None
        match phase:
            case Idle():
                error = phase.error
                state = "broken" if self.broken is not None else "idle" if error is None else "failed"
            case Fetching():
                state, next_version = "fetching", phase.version
            case Ready() | Installing():
                state, next_version = "ready", phase.staged.version
        return {
            "state": state,
            "version": self.version,
            "next_version": next_version,
            "served_version": self.served,
            "broken": self.broken,
            "error": None if error is None else str(error),
            "error_kind": None if error is None else type(error).__name__,
            "report": self.report,
        }

    def guard(self) -> None:
        """Raise BrokenWeights if nothing may be computed with these weights."""
        if self.broken is not None:
            raise BrokenWeights(f"{self.broken}; install a version before resuming", version=self.version or None)

    @property
    def staged(self) -> Staged | None:
        """Return what is ready or being installed."""
        return self.phase.staged if isinstance(self.phase, (Ready, Installing)) else None

    def ready_for(self, version: int) -> Staged:
        """Return what an install of this version would install; raise if it cannot start."""
        if self.is_asleep:
            raise UsageError(ASLEEP, version=version)
        phase = self.phase
        if isinstance(phase, Installing):
            raise self._busy(phase)
        if isinstance(phase, Idle) and phase.error is not None:
            raise phase.error
        if not isinstance(phase, Ready) or phase.staged.version != version:
            has = f"version {phase.staged.version}" if isinstance(phase, Ready) else "nothing"
            raise UsageError(f"{has} is ready: fetch version {version} first", version=version)
        return phase.staged

    def to_withdraw(self) -> int | None:
        """Return the version whose readers must be gone before the live weights may change."""
        return self.served if self.serves_live else None

    def to_serve_again(self) -> int | None:
        """Return the version of the live weights, if nothing prevents offering them; else None."""
        wants = self.serves_live and self.served is None and self.staged is None
        return self.version if wants and self.version and self.broken is None and not self.is_asleep else None

    # --- the one mutator ---

    def handle(self, event: Event) -> list[Effect]:
        """Return the effects of an event, in order. Raise UsageError, with nothing changed, if it is impossible now."""
        phase = self.phase
        match event:
            case StartFetch():
                return self._start_fetch(event)
            case BytesRead(report):
                self.report = _plain(report)
            case Fetched(staged):
                self._must_be_fetching(staged.version)
                self.phase = Ready(staged)
            case FetchFailed(version, error, staged_at_last):
                self._must_be_fetching(version)
                self.phase = Idle(error)
                return [*([] if staged_at_last is None else [Drop(staged_at_last)]), *self._serve_again()]
            case Refused(error):
                if not isinstance(phase, Ready):
                    raise UsageError("nothing is ready that could be refused")
                self.phase = Idle(error)
                return [Drop(phase.staged), *self._serve_again()]
            case Discard():
                self._must_not_install()
                if isinstance(phase, Ready):
                    self.phase = Idle()
                    return [Drop(phase.staged), *self._serve_again()]
                if isinstance(phase, Idle):
                    self.phase = Idle()
            case StartInstall(version):
                self.phase = Installing(self.ready_for(version))
                self.repairs, self.broken = self.broken is not None, f"version {version} is being installed"
            case ReadInPlace(staged):
                replaced = self._must_install().staged
                self.phase = Installing(staged)
                return [] if replaced.fetched is None else [Drop(replaced)]
            case Installed():
                staged = self._must_install().staged
                self.phase, self.version, self.broken = Idle(), staged.version, None
                return [Serve(staged)]
            case InstallFailed(reason):
                staged = self._must_install().staged
                self.phase = Idle()
                self.broken = f"version {staged.version} was not installed completely: {reason}"
                return [Drop(staged)]
            case Served(version):
                previous, self.served = self.served, version
                # It may return to a version that it never stopped serving.
                return [Unpublish(previous)] if previous not in (None, version) else []
            case Withdrawn():
                self.served = None
            case Broken(reason):
                self.broken = reason
            case Unversioned(mended):
                self._must_not_install()
                self.version = 0
                if mended:
                    self.broken = self.report = None
                    self.phase = Idle() if isinstance(phase, Idle) else phase
            case Unchanged():
                return self._serve_again()
            case ServeCurrentAs(version):
                self._must_not_install()
                self.version, self.broken = version, None
                return [Serve(Staged(version))]
            case FallAsleep():
                self._must_not_install()
                self.is_asleep = True
            case WakeUp():
                was_asleep, self.is_asleep = self.is_asleep, False
                return self._serve_again() if was_asleep else []
            case _:
                assert_never(event)
        return []

    def _start_fetch(self, event: StartFetch) -> list[Effect]:
        version = event.version
        if self.is_asleep:
            raise UsageError(ASLEEP, version=version)
        self._must_not_install()
        if isinstance(self.phase, Fetching):
            raise UsageError(f"version {self.phase.version} is still being fetched: poll until it is ready")
        if version == self.version and self.broken is None:
            raise UsageError(f"version {version} is installed already")
        if isinstance(self.phase, Ready) and self.phase.staged.version == version and self.phase.staged.fetched:
            return []  # an install of it could not start
        dropped: list[Effect] = [Drop(self.phase.staged)] if isinstance(self.phase, Ready) else []
        self.phase, self.report = Fetching(version), None
        return [*dropped, Fetch(version, event.deadline, event.in_place, event.grows)]

    def _serve_again(self) -> list[Effect]:
        return [] if self.to_serve_again() is None else [ServeAgain()]

    def _must_be_fetching(self, version: int) -> None:
        if self.phase != Fetching(version):
            raise UsageError(f"version {version} is not being fetched", version=version)

    def _must_not_install(self) -> None:
        if isinstance(self.phase, Installing):
            raise self._busy(self.phase)

    def _must_install(self) -> Installing:
        if not isinstance(self.phase, Installing):
            raise UsageError("no install is under way")
        return self.phase

    def _busy(self, phase: Installing) -> UsageError:
        version = phase.staged.version
        return UsageError(f"version {version} is being installed: wait until that has ended", version=version)


def _plain(report: ReplicateReport) -> dict[str, Any]:
    """Convert a report to types that JSON supports."""
    fields = asdict(report)
    fields["losses"] = list(fields["losses"])
    fields["roots"] = {str(shard): root for shard, root in fields["roots"].items()}
    return fields
