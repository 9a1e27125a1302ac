"""Settings for every test: the same inputs every time, and no verdict that depends on how busy the machine is."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from running import Budget, SlowTests

COROUTINE_S_MAX = 60.0  # of a test
HERE = Path(__file__).resolve().parent

# Processes that tests start find what the tests find, whatever was collected before them.
_given = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE / "support"), *([_given] if _given else [])])
# Ray's workers as everything else: at its 15 a run stands still while other work has the machine.
os.environ.setdefault("RAY_worker_niceness", "0")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in a shell's background; tests and children have it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-s", type=float, default=60.0, help="seconds of faults in tests/chaos")
    parser.addoption("--chaos-seed", type=int, default=1, help="which faults")
    parser.addoption("--begin-within", type=float, default=float("inf"), help="seconds after which no file is begun")
    parser.addoption("--turn", type=int, default=0, help="which file comes first, when not all may be begun")
    parser.addoption(
        "--slow-ones-alone", action="store_true", help="of the last run's long ones, fail by those still so"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowTests(config, alone=config.getoption("--slow-ones-alone")))
    config.pluginmanager.register(Budget(config.getoption("--begin-within"), config.getoption("--turn")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("smoke") and not item.get_closest_marker("heavy"):
            raise pytest.UsageError(f"{item.nodeid}: `smoke` chooses among the `heavy` tests, mark it so")
    if "PYTEST_XDIST_WORKER" in os.environ:  # the slow ones first, or the other processes wait for them at the end
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _endpoints_are_new() -> None:
    """A port is given out again within the minutes for which a process remembers how fast it was, and for which bad."""
    if ways := sys.modules.get("tensorhub_plugins.core.transports.ways"):
        vars(ways.WAYS).update(vars(ways.Ways()))


@pytest.fixture(scope="module", autouse=True)
def _variables_are_as_before() -> Iterator[None]:
    """A process of Ray's keeps in its environment what it learns, as the secret of a run: later hubs asked for it,
    and engines that an older fork server started did not know it."""
    before = _of_the_store()
    yield
    for name in _of_the_store():
        del os.environ[name]
    os.environ.update(before)


def _of_the_store() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TENSORHUB_")}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: it ends by itself, or at a deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**fixtures), COROUTINE_S_MAX))
    return True


@atexit.register  # before Ray is imported, so that what it does at the end is done before
def _leave_before_native_destructors() -> None:
    """Ray's gRPC threads go on after ray.shutdown(), and one of them may crash while the C++ libraries of an ended
    process are torn down: what the tests have said would be lost."""
    if "ray" in sys.modules and _finished:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_finished[-1].exitstatus)


_finished: list[pytest.Session] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    _finished.append(session)
