"""The requirements of a transport, as checks that any author can run against their own.

    def test_my_transport():
        check_transport(MyTransport)                    # a class or a function without arguments, importable by name

or, one test for each case::

    @pytest.fixture(scope="module")
    def suite():
        with TransportSuite(MyTransport) as suite:
            yield suite

    @pytest.mark.parametrize("case", TransportSuite.CASES)
    def test_my_transport(suite, case):
        if reason := suite.skip_reason(case):
            pytest.skip(reason)
        suite.run(case)

A case that fails raises ConformanceError, an AssertionError that says what was promised. Nothing here sleeps to be
right: a state is awaited up to `patience_s`, and what must not happen is provoked, not hoped for. Peers that are killed
or frozen are real processes, stopped when it is known that they are in the middle of a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.memory.slab import Slab
from transport_suite import cases_ends, cases_reading
from transport_suite.bench import Bench
from transport_suite.material import GARBAGE
from transport_suite.peers import Adopt, MakeTransport, Peer

_CASES: dict[str, Callable[[Bench], None]] = {
    name.removeprefix("check_"): check
    for module in (cases_reading, cases_ends)
    for name, check in vars(module).items()
    if name.startswith("check_")
}
_NEEDS_PROCESSES = frozenset({"killed_source", "frozen_source", "killed_reader", "frozen_reader"})


@dataclass(frozen=True)
class Report:
    """The result of check_transport. skipped: case -> reason."""

    passed: tuple[str, ...]
    skipped: dict[str, str]


def check_transport(make_transport: MakeTransport, **options: Any) -> Report:
    """Run every case; raise the first ConformanceError. `options` are those of TransportSuite."""
    passed = []
    skipped = {}
    with TransportSuite(make_transport, **options) as suite:
        for case in suite.CASES:
            reason = suite.skip_reason(case)
            if reason is not None:
                skipped[case] = reason
            else:
                suite.run(case)
                passed.append(case)
    return Report(tuple(passed), skipped)


class TransportSuite:
    """The cases for one transport.

    make_transport: called for every source and every reader; must be importable, as peers are other processes.
    make_source: another factory for the sources, to test one release's readers against another's sources.
    processes: False for a transport that does not leave its process; cases that need another one are skipped.
    garbage: what strangers send, in addition to what they send everywhere: bytes that look like this transport's own.
    slabs: what sources offer, "allocated" slabs or "adopted" tensors.
    patience_s: how long to wait for what must happen, and for what must be over.
    adopt: how tensors of this process become slabs, of sources and of readers: on a device, for example, as
    `simulated.Simulation.adopt_in_place` does. adopt_in_peers: the same of sources in other processes, a function that
    can be imported by name.
    held: counts what this process has of the system by this transport, beside threads, descriptors and shared memory.
    make_peer: makes the other process that cases ask for, where it is not to be spawned.
    """

    CASES: ClassVar[tuple[str, ...]] = tuple(_CASES)

    def __init__(
        self,
        make_transport: MakeTransport,
        *,
        make_source: MakeTransport | None = None,
        processes: bool = True,
        garbage: Sequence[bytes] = (),
        slabs: str = "allocated",
        patience_s: float = 20.0,
        make_peer: Callable[[], Peer] = Peer,
        adopt: Adopt = Slab.adopt,
        adopt_in_peers: Adopt = Slab.adopt,
        held: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self._processes = processes
        self._bench = Bench(
            make_transport,
            make_source or make_transport,
            garbage=(*GARBAGE, *garbage),
            slabs=slabs,
            patience_s=patience_s,
            make_peer=make_peer,
            adopt=adopt,
            adopt_in_peers=adopt_in_peers,
            held=held,
        )

    def __enter__(self) -> TransportSuite:
        return self

    def __exit__(self, *_: object) -> None:
        self._bench.close()

    def skip_reason(self, case: str) -> str | None:
        """Return why a case cannot run for this transport; None: it can."""
        if case in _NEEDS_PROCESSES and not self._processes:
            return "this transport does not leave its process"
        return None

    def run(self, case: str) -> None:
        """Run one case of CASES."""
        if case not in self.CASES:
            raise UsageError(f"there is no case {case!r}")
        _CASES[case](self._bench)
