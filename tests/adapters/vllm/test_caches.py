"""What an engine core has computed changes with its weights, or the engine stands still: with a core made of lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.engine.caches import Caches, StaleCaches
from tensorhub_plugins.vllm.engine.core_follower import attach

HELD = "1 requests (a) wait for KV of another engine: abort them, or wait until they end"


def request(status: str, *, computed: int = 0, resumable: bool = False, name: str = "a") -> Any:
    return SimpleNamespace(
        request_id=name, status=SimpleNamespace(name=status), num_computed_tokens=computed, resumable=resumable
    )


class EngineCore:
    """As vLLM's, as far as weights, caches and pauses go."""

    input_queue: Any = None  # it has one, in a process of its own

    def __init__(self) -> None:
        self.log: list[str] = []
        self.version: int | None = 3  # of the workers
        self.changes = 0
        self.breaks = False  # what fails does so half way
        self.broken: str | None = None
        self.label = "3"
        self.paused = False
        self.fails: set[str] = set()
        self.model_executor = SimpleNamespace(collective_rpc=self._workers)
        self.scheduler = SimpleNamespace(
            requests={},
            _update_request_as_session=self._go_on,
            _free_request_blocks=lambda request: self.log.append(f"free {request.request_id}"),
            encoder_cache_manager=SimpleNamespace(free=lambda request: None),
        )

    def _go_on(self, session: Any, tokens: int) -> None:
        self.log.append(f"keeps {session.num_computed_tokens}")
        session.status.name = "WAITING"

    def _workers(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method == "tensorhub_weights":
            return [(self.version, self.changes)]
        if method == "tensorhub_health":
            return [None, self.broken]
        self.log.append(method)
        if method in self.fails:
            self.broken = "half way" if self.breaks else None
            raise RuntimeError(f"{method} failed")
        self.broken = None
        if method in ("reload_weights", "reset_weights", "_reset_weights", print):
            self.version, self.changes = 0, self.changes + 1
        if method == "update_weights":
            self.version = 4
        return [None]

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return self._workers(method, *args)

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self.log.append("forget")
        if any(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in self.scheduler.requests.values()):
            raise RuntimeError("This is likely due to remote KV transfer")
        return True

    def reset_encoder_cache(self) -> None: ...

    def abort_requests(self, names: list[str]) -> None: ...

    def shutdown(self) -> None: ...

    def set_weight_version(self, version: str) -> None:
        self.label = version

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.log.append("pause")
        self.paused = True

    def resume_scheduler(self) -> None:
        self.paused = False

    def is_scheduler_paused(self) -> bool:
        return self.paused


@pytest.fixture
def core() -> EngineCore:
    made = EngineCore()
    attach(made, SimpleNamespace(load_config=SimpleNamespace(load_format="auto")))
    return made


@pytest.mark.parametrize("method", ["update_weights", "reload_weights"])
def test_what_cannot_be_forgotten_keeps_the_weights(core: Any, method: str) -> None:
    core.scheduler.requests["a"] = request("WAITING_FOR_REMOTE_KVS")
    with pytest.raises(StaleCaches, match="wait for KV") as raised:
        core.collective_rpc(method)
    assert raised.value.message == HELD and core.version == 3 and core.label == "3" and not core.paused
    core.collective_rpc("finish_weight_update")
    core.resume_scheduler()


@pytest.mark.parametrize("method", ["update_weights", "reload_weights"])
def test_weights_do_not_change_under_a_step_that_makes_prompt_logprobs(core: Any, method: str) -> None:
    """vLLM dropped what came of it, and the request ended without them."""
    asked = core.scheduler.requests["a"] = request("RUNNING", computed=20)
    asked.sampling_params, asked.num_output_tokens = SimpleNamespace(prompt_logprobs=0), 0
    core.batch_queue = ["a step"]
    with pytest.raises(UsageError, match="made for a: pause the engine first"):
        core.collective_rpc(method)
    assert core.log == [] and core.label == "3" and not core.paused
    for change in ("they have come", "none is wanted", "not begun", "no step is under way"):  # controls
        asked.num_output_tokens = int(change == "they have come")
        asked.sampling_params = None if change == "none is wanted" else SimpleNamespace(prompt_logprobs=0)
        asked.num_computed_tokens = 20 * (change != "not begun")
        core.batch_queue = [] if change == "no step is under way" else ["a step"]
        core.collective_rpc(method)
    assert core.log.count(method) == 4


def test_new_weights_with_old_caches_answer_nothing(core: Any) -> None:
    """The update had failed, and finish and resume succeeded: cached prompts were answered wrongly for good."""

    def update(method: str, *args: Any) -> list[Any]:
        answers = workers(method, *args)
        if method == "update_weights":
            core.scheduler.requests["a"] = request("WAITING_FOR_REMOTE_KVS")
        return answers

    workers, core._workers = core._workers, update
    with pytest.raises(StaleCaches, match="the weights have changed"):
        core.collective_rpc("update_weights")
    assert (core.version, core.label, core.paused) == (4, "4", True)
    with pytest.raises(StaleCaches, match="wait for KV of another engine"):
        core.collective_rpc("finish_weight_update")
    with pytest.raises(StaleCaches, match="wait for KV of another engine"):
        core.resume_scheduler()
    assert core.paused and HELD in core.collective_rpc("tensorhub_health")[-1]
    del core.scheduler.requests["a"]
    core.collective_rpc("finish_weight_update")
    core.resume_scheduler()
    assert not core.paused and core.collective_rpc("tensorhub_health")[-1] is None


def test_an_update_that_fails_forgets_as_well(core: Any) -> None:
    core.fails.add("update_weights")
    with pytest.raises(RuntimeError, match="update_weights failed"):
        core.collective_rpc("update_weights")
    assert core.log[-3:] == ["forget", "update_weights", "forget"] and core.label == "3"


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights", "reload_weights"])
def test_what_fails_half_way_leaves_the_engine_standing(core: Any, method: str) -> None:
    """Nobody had paused it: its next step ended it, and its label was that of the version before."""
    core.fails.add(method)
    with pytest.raises(RuntimeError, match=f"{method} failed"):  # the control: nothing was changed
        core.collective_rpc(method)
    assert (core.paused, core.label) == (False, "3")
    core.breaks = True
    with pytest.raises(RuntimeError, match=f"{method} failed"):
        core.collective_rpc(method)
    assert (core.paused, core.label) == (True, "none")
    core.fails.clear()
    core.collective_rpc(method)
    assert core.label == ("4" if method == "update_weights" else "none" if method == "reload_weights" else "3")


def test_an_engine_in_the_process_of_its_caller_says_why_it_answers_nothing(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still, and `LLM.generate` made empty steps for ever: who could resume it waited for that."""
    core.fails.add("reload_weights")
    core.breaks = True
    monkeypatch.delattr(EngineCore, "input_queue")
    with pytest.raises(RuntimeError, match="reload_weights failed"):
        core.collective_rpc("reload_weights")
    assert (core.paused, core.label, core.log[-1]) == (False, "none", "forget")


@pytest.mark.parametrize("method", [print, "_reset_weights", "start_weight_update"])
def test_of_weights_of_no_version_that_are_lost_nothing_runs_on(core: Any, method: Any) -> None:
    """Their version stays the same, none. What was running did so when another client then paused the engine until it
    had ended, and that step ended the engine."""
    core.version = 0
    core.fails.add(method)
    with pytest.raises(RuntimeError):  # the control: nothing was changed
        core.collective_rpc(method)
    assert (core.paused, core.log) == (False, [method])
    core.breaks = True
    with pytest.raises(RuntimeError):
        core.collective_rpc(method)
    assert (core.paused, core.log[1:]) == (True, [method, "forget", "pause"])


@pytest.mark.parametrize("method", ["reset_weights", "_reset_weights", print, "apply_model", "profile"])
def test_a_call_that_turns_out_to_change_weights_forgets(core: Any, method: Any) -> None:
    """Whatever it is asked by: a name that nobody knows, a private one, a function."""
    forgets = method not in ("apply_model", "profile")
    core.collective_rpc(method)
    assert core.log == [method, *["forget"] * forgets] and core.label == ("none" if forgets else "3")
    core.collective_rpc(method)  # of no version by now, and changed once more: what was cached since stayed
    assert core.log == [method, *["forget"] * forgets] * 2


def test_weights_of_no_version_have_no_label(core: Any) -> None:
    core.collective_rpc("reload_weights")
    assert core.label == "none" and core.log == ["forget", "reload_weights", "forget"]
    core.set_weight_version("my own")
    core.collective_rpc("start_weight_update")
    assert core.label == "none"  # another back end's, of workers without a version
    core.version = 4
    core.set_weight_version("my own")
    core.collective_rpc("update_weights")
    assert core.label == "my own"  # control: it had this version before


def test_a_session_is_let_go_of_and_keeps_its_tokens() -> None:
    core = EngineCore()
    caches = Caches(core)
    waiting = request("WAITING_FOR_STREAMING_REQ", computed=9, resumable=True)
    ready = request("WAITING", computed=5, resumable=True, name="b")  # its input has come, and no step since
    running = request("RUNNING", computed=7, resumable=True, name="c")
    core.scheduler.requests = {"a": waiting, "b": ready, "c": running}
    caches.forget()
    caches.forget()
    assert core.log == ["free a", "free b", "forget", "forget"]
    assert [one.num_computed_tokens for one in (waiting, ready, running)] == [0, 0, 7]
    core.scheduler._update_request_as_session(waiting, 1)
    core.scheduler._update_request_as_session(running, 1)  # control: of this one all is there
    assert core.log[-2:] == ["keeps 9", "keeps 7"] and waiting.num_computed_tokens == 0
    caches.forget()
    assert core.log[-1] == "forget" and "free" not in core.log[-1]


def test_sessions_of_a_vllm_that_is_not_known_are_named() -> None:
    core = EngineCore()
    del core.scheduler._update_request_as_session
    core.scheduler.requests = {
        name: request("WAITING_FOR_STREAMING_REQ", computed=9, resumable=True) for name in "abcd"
    }
    said = Caches(core).held_by()
    assert said == "4 requests (a, b, c, ...) are open streaming-input sessions: abort them, or wait until they end"
