"""The flag, the driver's decision, the gate and the follower: no framework is needed."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensorhub_plugins.core import NotPublished, UsageError, VersionGone, VersionRefused
from tensorhub_plugins.openrlhf import autoload, config, install
from tensorhub_plugins.openrlhf.follower import Follower, Gate, UpdateFailed

ROOT = Path(__file__).resolve().parents[2]

# --- the flag ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "ours"),
    [("tensorhub", True), ("tensorhub://h:1", True), ("tensorhub:?keep=3", True), ("tensorhub?keep=3", True)]
    + [("nccl", False), ("gloo", False), ("", False), ("tensorhubs", False)],
)
def test_whose_flag_it_is(backend: str, ours: bool) -> None:
    assert config.is_ours(backend) is ours


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("tensorhub", config.Options()),
        ("tensorhub://10.0.0.1:7070", config.Options(hub="tcp://10.0.0.1:7070")),
        ("tensorhub://[::1]:7070", config.Options(hub="tcp://[::1]:7070")),
        ("tensorhub:?keep=3&verify=1", config.Options(keep=3, verify=True)),
        ("tensorhub://h:1?install=direct&run=r", config.Options(hub="tcp://h:1", install="direct", run="r")),
    ],
)
def test_options(backend: str, expected: config.Options) -> None:
    assert config.parse(backend) == expected
    assert config.parse(config.to_flag(expected)) == expected


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("tensorhub://host", "lacks a host or a port"),
        ("tensorhub://:7070", "lacks a host or a port"),
        ("tensorhub://host:port", "write --vllm.sync_backend tensorhub://10.0.0.1:7070"),
        ("tensorhub:host:7070", "is not understood"),
        ("tensorhub://h:1/path", "is not understood"),
        ("tensorhub://h:1?kep=3", "did you mean 'keep'"),
        ("tensorhub://h:1?hub=x", "has no option 'hub'"),
        ("tensorhub://h:1?keep=none", "option keep"),
        ("tensorhub://h:1?keep=0", "choose a number from 1 to 64"),
        ("tensorhub://h:1?install=stagd", "option install is 'stagd': choose one of staged, direct"),
        ("tensorhub://h:1?serve_from=disk", "option serve_from is 'disk': choose one of host, live"),
        ("tensorhub://h:1?run=", "option run is empty"),
    ],
)
def test_wrong_flags_are_refused_in_one_sentence(backend: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        config.parse(backend)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_untested_versions_are_refused_unless_allowed() -> None:
    tested = {"openrlhf": "0.11.2", "vllm": "0.29.0"}
    config.check_versions(config.Options(), **tested)
    for package, version in (("openrlhf", "0.11.3"), ("openrlhf", "0.11.20"), ("vllm", "0.30.0"), ("vllm", "0.2.9")):
        with pytest.raises(UsageError, match=f"{package} {version} was not tested"):
            config.check_versions(config.Options(), **{**tested, package: version})
        config.check_versions(config.Options(allow_untested=True), **{**tested, package: version})


def arguments(**changes: object) -> SimpleNamespace:
    """As OpenRLHF parses them."""
    flat = {
        "vllm.num_engines": 2,
        "train.colocate_all": False,
        "train.async_enable": False,
        "ds.lora.rank": 0,
        "ds.load_in_4bit": False,
        "ds.param_dtype": "bf16",
        "ds.tensor_parallel_size": 1,
        "data.max_images_per_prompt": 0,
        **changes,
    }
    root = SimpleNamespace()
    for name, value in flat.items():
        *groups, last = name.split(".")
        node = root
        for group in groups:
            node.__dict__.setdefault(group, SimpleNamespace())
            node = getattr(node, group)
        setattr(node, last, value)
    return root


def test_combinations_that_work_pass() -> None:
    config.check_arguments(arguments())
    config.check_arguments(arguments(**{"train.colocate_all": True, "train.async_enable": True}))


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("vllm.num_engines", 0, "--vllm.num_engines"),
        ("vllm.num_engines", None, "--vllm.num_engines"),
        ("train.colocate_all", True, "--train.colocate_all in full"),
        ("ds.lora.rank", 8, "--ds.lora.rank 0"),
        ("ds.load_in_4bit", True, "--ds.load_in_4bit"),
        ("ds.param_dtype", "fp16", "use bf16"),
        ("ds.tensor_parallel_size", 2, "--ds.tensor_parallel_size 1"),
        ("data.max_images_per_prompt", 1, "--data.max_images_per_prompt"),
    ],
)
def test_combinations_that_cannot_work_are_refused(flag: str, value: object, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        config.check_arguments(arguments(**{flag: value}))
    assert sentence in str(refused.value)


# --- the driver's decision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        (["x", "--vllm.sync_backend", "tensorhub"], "tensorhub"),
        (["x", "--vllm.sync_backend=tensorhub"], "tensorhub"),
        (["x", "--vllm.sync_backend", "tensorhub", "--vllm.sync_backend", "nccl"], "nccl"),
        (["x", "--vllm.sync_b", "tensorhub"], "tensorhub"),  # argparse takes it
        (["x", "--vllm.sync_back=tensorhub"], "tensorhub"),
        (["x", "--vllm.sync_with_ray", "--vllm.sync_", "tensorhub"], ""),  # argparse refuses it
        (["x", "--vllm.sync_backend"], ""),
        (["x"], ""),
    ],
)
def test_the_last_back_end_counts(line: list[str], backend: str) -> None:
    assert install.backend_of(line) == backend


@pytest.fixture
def tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "installed_versions", lambda: {"openrlhf": "0.11.2", "vllm": "0.29.0"})


def test_stock_back_ends_are_left_alone() -> None:
    line = ["x", "--vllm.sync_backend", "gloo", "--train.colocate_all"]
    assert install.options_from_argv(line) is None
    assert line == ["x", "--vllm.sync_backend", "gloo", "--train.colocate_all"]


@pytest.mark.usefixtures("tested_versions")
def test_colocated_engines_keep_their_own_path_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["x", "--vllm.sync_backend", "tensorhub", "--train.colocate_all"]
    assert install.options_from_argv(line) is None
    assert install.backend_of(line) == "nccl"
    assert "the store is not used" in capsys.readouterr().err
    line = ["x", "--vllm.sync_backend", "tensorhub", "--train.colocate_all", "--train.async_enable"]
    assert install.options_from_argv(line) == config.Options()


@pytest.mark.parametrize(
    ("backend", "meant"),
    [
        ("tensorhubb", "tensorhub"),
        ("tensorhubs", "tensorhub"),
        ("tensor-hub", "tensorhub"),
        ("TensorHub", "tensorhub"),
        ("tensorub://10.0.0.1:7070?keep=3", "tensorhub://10.0.0.1:7070?keep=3"),
        (" tensorhub", "tensorhub"),
    ],
)
def test_a_misspelt_back_end_is_not_taken_for_one_of_torch(backend: str, meant: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"did you mean {meant}?")):
        install.options_from_argv(["x", "--vllm.sync_backend", backend])


@pytest.mark.parametrize("backend", ["nccl", "gloo", "mpi", "ucc", "xccl", "hccl", "rccl", "cpu:gloo,cuda:nccl", ""])
def test_back_ends_of_torch_are_not_taken_for_misspelt(backend: str) -> None:
    assert install.options_from_argv(["x", "--vllm.sync_backend", backend]) is None


RAY_SAYS = """ray::PolicyModelActor.init_model_from_pretrained() (pid=7)
  File "client.py", line 3, in __init__
tensorhub_plugins.core.errors.HubUnreachable: no hub answers at tcp://h:1: start one [peer=tcp://h:1]
"""


def test_the_sentence_is_found_in_what_ray_makes_of_an_error() -> None:
    assert install.sentence_in(RAY_SAYS) == "no hub answers at tcp://h:1: start one [peer=tcp://h:1]"
    assert install.sentence_in("ValueError: something else") == ""


# --- the hook in torch ------------------------------------------------------------------------------------------------


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", found)
    return found


DRIVER = ["python", "-m", "openrlhf.cli.train_ppo_ray", "--vllm.sync_backend", "tensorhub"]


@pytest.mark.parametrize(
    ("command", "variable", "waits"),
    [
        (DRIVER, None, True),
        (DRIVER, "0", False),  # switched off
        ([*DRIVER[:3], "--vllm.sync_back=tensorhub"], None, True),  # as argparse has it
        (DRIVER[:3], None, False),  # without the flag
        (["python", "other.py", *DRIVER[3:]], None, False),  # somebody else's flag
        (["python", "-m", "tensorhub_plugins.openrlhf.train_ppo_ray", *DRIVER[3:]], None, False),  # does it itself
        (["python", "/site-packages/openrlhf/cli/train_ppo_ray.py", *DRIVER[3:]], None, True),
    ],
)
def test_the_hook_waits_only_where_it_is_wanted(
    command: list[str], variable: str | None, waits: bool, finders: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(finders)
    monkeypatch.setattr(sys, "argv", command[1:])
    monkeypatch.setattr(sys, "orig_argv", command)
    if variable is not None:
        monkeypatch.setenv(autoload.SWITCH, variable)
    autoload.install()
    assert len(finders) == before + waits


def test_the_hook_never_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", DRIVER)
    monkeypatch.setattr(autoload, "_install", lambda: 1 / 0)
    autoload.install()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_hook_loads_nothing_but_itself() -> None:
    program = (
        "import sys; before = set(sys.modules); from tensorhub_plugins.openrlhf import autoload; autoload.install();"
        "print(*sorted(set(sys.modules) - before - {'__future__'}))"
    )
    ended = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    package = "tensorhub_plugins"
    assert ended.stdout.split() == [package, f"{package}.openrlhf", f"{package}.openrlhf.autoload"], ended.stderr


# --- gate and follower ------------------------------------------------------------------------------------------------


class FakeEngine:
    """Two vLLM workers that take every version, unless told otherwise."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails: dict[str, str] = {}  # method -> error
        self.breaks = self.refuses = False

    async def rpc(self, method: str, *args: object) -> list[dict[str, object]]:
        name = method.removeprefix("tensorhub_")
        self.log.append(name)
        if name == "poll":
            error = self.fails.get("fetch")
            kind = "VersionRefused" if self.refuses else "SourceLost"
            return [{"state": "failed" if error else "ready", "error": error, "error_kind": kind}] * 2
        if name == "install":
            error = self.fails.get("install")
            return [{"installed": error is None, "error": error, "broken": "mixed" if self.breaks else None}] * 2
        return [{}] * 2

    async def pause(self) -> None:
        self.log.append("pause")

    async def forget(self) -> None:
        self.log.append("forget")

    async def resume(self) -> None:
        self.log.append("resume")

    def running(self) -> dict[str, int]:
        return {}

    def departed(self) -> list[str]:
        return []

    def switch(self, version: int, running: object) -> None:
        assert self.log[-1] == "install"


class FakeHub:
    """As the hub answers `Client.target`."""

    def __init__(self, newest: int = 0, pinned: int = 0) -> None:
        self.newest, self.pinned = newest, pinned
        self.withdrawn: set[int] = set()

    def target(self, installed: int, *, refused: Sequence[int] = (), pins: bool = True, timeout_s: float) -> int:
        version = self.pinned if self.pinned and pins else self.newest
        back = (self.pinned and pins) or installed in self.withdrawn
        if version in (0, installed) or (version < installed and not back):
            error = VersionGone if installed in self.withdrawn and not version else NotPublished
            raise error("nothing else")
        return version


def follower(
    engine: FakeEngine,
    *,
    gate: Gate | None = None,
    until: int | None = None,
    newest: int = 0,
    hub: FakeHub | None = None,
    pins: bool = True,
) -> Follower:
    hub = hub or FakeHub(newest)

    async def no_sleep(_: float) -> None:
        await asyncio.sleep(0)

    target = hub.target
    return Follower(engine, target, worker="w/0", timeout_s=0.2, gate=gate, until=until, sleep=no_sleep, pins=pins)


UPDATE = ["start_fetch", "poll", "prepare_install", "pause", "install", "forget", "resume"]


def test_an_update_stops_the_engine_only_for_the_installation() -> None:
    async def story() -> None:
        engine = FakeEngine()
        one = follower(engine)
        await one.update(3)
        assert engine.log == UPDATE
        assert one.version == 3

    asyncio.run(story())


def test_without_partial_rollout_an_update_waits_for_the_prompts_inside_and_new_ones_wait_for_it() -> None:
    async def story() -> None:
        engine, gate = FakeEngine(), Gate()
        one = follower(engine, gate=gate)
        await gate.__aenter__()
        update = asyncio.create_task(one.update(1))
        while not gate.is_closed:
            await asyncio.sleep(0)
        seen = []

        async def prompt() -> None:
            async with gate:
                seen.append(one.version)

        waiting = asyncio.create_task(prompt())
        for _ in range(20):
            await asyncio.sleep(0)
        assert "pause" not in engine.log and not seen
        await gate.__aexit__()
        await asyncio.gather(update, waiting)
        assert seen == [1]

    asyncio.run(story())


def test_with_partial_rollout_nothing_waits() -> None:
    async def story() -> None:
        one = follower(FakeEngine())
        await one.update(1)  # with any number of prompts in flight: there is no gate
        await one.need(1)

    asyncio.run(story())


def test_a_version_that_fails_to_arrive_leaves_the_engine_running() -> None:
    async def story() -> None:
        engine = FakeEngine()
        one = follower(engine)
        await one.update(1)
        engine.fails["fetch"] = "no source"
        with pytest.raises(UpdateFailed, match="no source"):
            await one.update(2)
        assert one.version == 1 and engine.log.count("pause") == 1
        with pytest.raises(UpdateFailed, match="has version 1"):
            await one.need(2)

    asyncio.run(story())


def test_half_an_installation_never_answers_until_it_is_repaired() -> None:
    async def story() -> None:
        engine, gate = FakeEngine(), Gate()
        one = follower(engine, gate=gate, newest=2)
        await one.update(1)
        engine.fails["install"], engine.breaks = "half way", True
        with pytest.raises(UpdateFailed):
            await one.update(2)
        assert engine.log[-1] == "install"  # not resumed
        with pytest.raises(UpdateFailed):
            await one.need(1)
        engine.fails.clear()
        engine.breaks = False
        assert await one.next_version() == 2
        await one.update(2)
        assert engine.log[-1] == "resume"
        await one.need(2)

    asyncio.run(story())


def test_an_engine_that_is_held_stays_with_its_version() -> None:
    async def story() -> None:
        engine = FakeEngine()
        one = follower(engine, newest=5, until=9)
        assert await one.hold(2) == 2
        following = asyncio.create_task(one.follow())
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert one.version == 2
        await one.release()
        await asyncio.wait_for(one.need(5), 5)
        following.cancel()

    asyncio.run(story())


def test_pulling_can_be_switched_off_after_a_version() -> None:
    async def story() -> None:
        one = follower(FakeEngine(), newest=5, until=3)
        assert await one.next_version() is None
        await one.update(3)
        await one.need(5)  # nobody waits for what will not come
        assert await one.hold(5) == 3

    asyncio.run(story())


def test_a_prompt_hears_at_once_that_its_version_is_refused() -> None:
    async def story() -> None:
        engine = FakeEngine()
        one = follower(engine, newest=5)
        one.timeout_s = 60.0
        await one.update(4)
        engine.refuses, engine.fails["fetch"] = True, "tensor 'x' is unknown"
        waiting = asyncio.create_task(one.need(5))
        while not one._changed._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        following = asyncio.create_task(one.follow())
        with pytest.raises(VersionRefused, match="tensor 'x' is unknown") as refused:
            await asyncio.wait_for(waiting, 4.0)  # before it would ask the hub again
        assert refused.value.version == 5 and one.version == 4
        await one.need(4)  # the control: it has this one
        following.cancel()

    asyncio.run(story())


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub_plugins.openrlhf.follower.ASK_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("quick_looks")
def test_prompts_do_not_wait_for_a_version_that_operators_do_not_want_to_be_run() -> None:
    async def story() -> None:
        hub = FakeHub(newest=4)
        one = follower(FakeEngine(), hub=hub)
        await one.update(4)
        hub.newest = 5
        waiting = asyncio.create_task(one.need(5))
        while hub.newest and not one._changed._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        assert not waiting.done()  # the control: it waits for what is still to come
        hub.pinned = 4
        await waiting
        hub.pinned, hub.newest = 0, 4
        hub.withdrawn.add(5)
        await one.need(5)
        hub.newest = 0
        hub.withdrawn.add(4)
        await one.need(5)  # there is nothing to be run: from whatever it has
        hub.newest = 6
        with pytest.raises(UpdateFailed, match="has version 4"):
            await one.need(6)

    asyncio.run(story())


@pytest.mark.usefixtures("quick_looks")
def test_pins_do_not_apply_to_an_engine_of_sync_training() -> None:
    async def story() -> None:
        hub = FakeHub(newest=5, pinned=4)
        one, free = follower(FakeEngine(), hub=hub, pins=False), follower(FakeEngine(), hub=hub)
        assert await one.next_version() == 5 and await free.next_version() == 4
        await one.update(4)
        await free.update(4)
        await free.need(5)
        with pytest.raises(UpdateFailed, match="has version 4"):
            await one.need(5)

    asyncio.run(story())


def test_an_engine_goes_back_and_a_held_one_does_so_afterwards() -> None:
    async def story() -> None:
        hub = FakeHub(newest=5)
        one = follower(FakeEngine(), hub=hub)
        following = asyncio.create_task(one.follow())
        await one.need(5)
        assert await one.hold() == 5
        hub.pinned = 3
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert one.version == 5
        assert await one.hold(3) == 3  # an evaluation of the pinned version
        await one.release()
        hub.pinned = 2
        while one.version != 2:
            await asyncio.sleep(0.001)
        following.cancel()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_an_answer_that_was_overtaken_by_an_evaluation_is_not_taken() -> None:
    """The hub said 5, and before that was installed an evaluation has brought the engine to 6."""

    async def story() -> None:
        engine = FakeEngine()
        one = follower(engine, newest=5)
        version = await one.next_version()
        assert version == 5
        await one.hold(6)
        taking = asyncio.create_task(one.take(version))
        await one.release()
        await taking
        assert one.version == 6
        one._asked_with = 6
        await one.take(5)  # the control: an answer to the engine as it is
        assert one.version == 5

    asyncio.run(story())
