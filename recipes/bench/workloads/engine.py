"""One rollout engine on a host of its own: vLLM in this process, which generates all the time.

A thread owns the engine and steps it; whatever is asked of the engine runs there, between two steps. The stopwatch is
there, too: a pause begins when the last step has ended and ends when the next one may begin, whatever asked for it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from recipes.bench.network import now
from recipes.bench.workloads.collective import Collective
from tensorhub_plugins.core import Client, Location
from tensorhub_plugins.vllm.engine.follower import Follower

PROMPT = [5, 6, 7, 8]
ANSWER_LENGTH = 192  # tokens
TIMEOUT_S = 120.0
PORTS = ("tcp",)  # namespaces of one machine share memory; hosts do not
Notes = list[dict[str, Any]]


class Engine:
    """The interface that the benchmark calls. The process waits, with everything imported, until `start`."""

    def __init__(self, name: str, address: str, data_center: str, sequences: int) -> None:
        self.name, self.address, self.data_center = name, address, data_center
        self.sequences = sequences  # that it generates at a time
        self.version = 0
        self._notes: Notes = []
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of version and notes
        self._llm: Any = None
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._is_paused = False
        self._collective: Collective | None = None
        os.environ["VLLM_HOST_IP"] = address
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- its start ---

    def start(
        self, folder: Path, load_format: str, extra: Mapping[str, Any], generate: bool = True
    ) -> dict[str, float]:
        """Make the engine; generate: it has weights that may answer. Returns the seconds for its weights, and when it
        was ready."""
        self._is_paused = not generate
        load_s = self._ask(partial(self._make, folder, load_format, extra))
        if not generate:
            self._ask(self._warm_up)
        return {"load_s": load_s, "ready": now()}

    def read_the_trainer(self) -> None:
        """Make a plain star: this engine reads the trainer alone and serves nothing. Call it before `start`.

        The store itself does so with models whose raw copies are insufficient."""
        from tensorhub_plugins.vllm.worker.conversion import Conversion

        Conversion.hidden = property(lambda self: ("it is a star",), lambda self, value: None)

    def _make(self, folder: Path, load_format: str, extra: Mapping[str, Any]) -> float:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor
        from vllm.v1.worker.gpu_worker import Worker

        took = []
        original = Worker.load_model

        def load_model(worker: Any, **kwargs: Any) -> None:
            began = now()
            original(worker, **kwargs)
            took.append(now() - began)

        Worker.load_model = load_model
        self._llm = LLM(
            str(folder),
            load_format=load_format,
            model_loader_extra_config=dict(extra),
            # Not only for the store: vLLM's CPU build otherwise packs its weights, and cannot load others.
            worker_extension_cls="tensorhub_plugins.vllm.TensorHubWorkerExtension",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=self.sequences,
            kv_cache_memory_bytes=64 << 20,
            distributed_executor_backend=UniProcExecutor,
            disable_log_stats=True,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        return took[0]

    def _warm_up(self) -> None:
        """Answer one token, as a fleet's spare does."""
        from vllm import SamplingParams

        self._llm.generate([{"prompt_token_ids": [0]}], SamplingParams(max_tokens=1, temperature=0, detokenize=False))

    # --- the store: it follows by itself ---

    def connect(self, extra: Mapping[str, Any]) -> None:
        """Join the store with an engine that has started without it, as a fleet's spare."""
        self._ask(partial(self._rpc, "tensorhub_connect", dict(extra)))

    def follow(self, hub: str) -> None:
        """Begin to."""
        location = Location(self.data_center, "", self.name)
        names = {"run": "bench", "model": "actor", "replica": f"{self.name}-follow"}
        client = Client(hub, **names, location=location, transports=PORTS, advertise_host=self.address)
        follower = Follower(self, client.target, worker=self.name, timeout_s=TIMEOUT_S)
        follower.version = self.version = self._ask(lambda: self._rpc("tensorhub_poll")[0]["version"] or 0)
        threading.Thread(target=lambda: asyncio.run(follower.follow()), name="follow", daemon=True).start()

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._soon(partial(self._rpc, method, *args))
        if method == "tensorhub_install" and all(answer["installed"] for answer in answers):
            self.version = args[0]
        return answers

    async def pause(self) -> None:
        await self._soon(self._pause)

    async def forget(self) -> None:
        """The pause has."""

    async def resume(self) -> None:
        await self._soon(self._resume)

    async def at_once(self, steps: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Do as `vllm/engine/core.py`: these steps in the engine's thread, without a break."""

        def run() -> Any:
            try:
                steps().send(None)
            except StopIteration as ended:
                return ended.value
            raise AssertionError("a step waits for something else than this engine")

        return await self._soon(run)

    def running(self) -> list[str]:
        return list(self._running)

    def departed(self) -> list[str]:
        return []

    # --- stock: it is told ---

    def join(self, rank: int, world_size: int, master: tuple[str, int]) -> None:
        """Join the group with the trainer; return when all have joined."""
        if self._collective is None:
            self._collective = Collective()
        self._collective.join(rank, world_size, master)

    def stop(self) -> None:
        self._ask(self._pause)

    def load(self, version: int) -> None:
        """Take part in a broadcast, straight into the model. (verl hands the tensors to vLLM's process.)"""
        self._ask(self._load)
        self.version = version

    def go(self) -> None:
        self._ask(self._resume)

    # --- what it tells ---

    def wait_version(self, version: int) -> float:
        """Return when it resumed with this version."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.version >= version and not self._is_paused, TIMEOUT_S):
                raise TimeoutError(f"{self.name} has version {self.version}, not {version}")
        return next(note["at"] for note in reversed(self._notes) if note["what"] == "go")

    def wait_token(self, after: float) -> float:
        """Return when the first step after that instant had returned tokens."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._token_after(after) is not None, TIMEOUT_S):
                raise TimeoutError(f"{self.name} gives no tokens")
        found = self._token_after(after)
        assert found is not None
        return found

    def _token_after(self, after: float) -> float | None:
        tokens = (note["at"] for note in reversed(self._notes) if note["what"] == "tokens")
        later = list(itertools.takewhile(lambda at: at > after, tokens))
        return later[-1] if later else None

    def who(self) -> dict[str, str]:
        return {"name": self.name, "data_center": self.data_center}

    def notes(self) -> Notes:
        return list(self._notes)

    def digests(self) -> dict[str, str]:
        """Return the digests of the live weights, by Hugging Face name."""
        from tensorhub_plugins.vllm.worker.digests import of_live

        worker = self._core.model_executor.driver_worker.worker
        found: dict[str, str] = self._ask(lambda: of_live(worker.get_model(), worker.vllm_config)["checkpoint"])
        return found

    def close(self) -> None:
        """Do nothing: the process ends now."""

    # --- in the engine's thread ---

    def _run(self) -> None:
        while True:
            while not self._actions.empty():
                self._actions.get()()
            if self._llm is None or self._is_paused:
                self._actions.get()()
            else:
                self._step()

    def _step(self) -> None:
        from vllm import SamplingParams

        while len(self._running) < self.sequences:
            request = str(next(self._numbers))
            params = SamplingParams(temperature=0, max_tokens=ANSWER_LENGTH, ignore_eos=True, detokenize=False)
            self._llm.llm_engine.add_request(request, {"prompt_token_ids": PROMPT}, params)
            self._running.add(request)
        outputs = self._llm.llm_engine.step()
        self._running -= {output.request_id for output in outputs if output.finished}
        if outputs:
            self._note("tokens", count=len(outputs))

    def _pause(self) -> None:
        """Pause as a server does: requests are kept, and computed anew from their tokens."""
        self._note("stop")
        self._core.pause_scheduler(mode="keep", clear_cache=True)
        self._is_paused = True

    def _resume(self) -> None:
        self._core.resume_scheduler()
        with self._changed:
            self._is_paused = False
            self._note("go")

    def _load(self) -> None:
        """Load as verl's vLLM worker does for an unquantized model."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        assert self._collective is not None
        worker = self._core.model_executor.driver_worker.worker
        model = worker.get_model()
        model.load_weights(self._collective.receive())
        process_weights_after_loading(model, worker.model_config, worker.device)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._core.model_executor.collective_rpc(method, args=args))

    def _note(self, what: str, **fields: int) -> None:
        with self._changed:
            self._notes.append({"what": what, "at": now(), **fields})
            self._changed.notify_all()

    # --- from other threads ---

    def _submit(self, action: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        self._actions.put(run)
        return done

    def _ask(self, action: Callable[[], Any]) -> Any:
        return self._submit(action).result(TIMEOUT_S)

    async def _soon(self, action: Callable[[], Any]) -> Any:
        if threading.current_thread() is self._thread:
            return action()
        return await asyncio.wait_for(asyncio.wrap_future(self._submit(action)), TIMEOUT_S)
