"""`tensorhub doctor check-sync --model PATH`: do weights that come through the store equal weights from disk?

For this model, on this machine, with this vLLM. Two engines, and nothing else that runs on them:
    reference   loads the model from disk
    patient     is made with zeros, and starts from the checkpoint that the doctor publishes
What must hold
    started     the patient equals the reference: every digest of every tensor, every greedy answer
    control     zeroed parameters give other digests and other answers; what did not notice would prove nothing
    converted   the next version, from the checkpoint, mends them
    copied      the reference, with everything zeroed, is mended by a raw copy from the patient
Answers are computed one prompt at a time: vLLM's batches may change the last bit.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tensorhub_plugins.core.client import Client
from tensorhub_plugins.core.errors import TensorHubError, UsageError
from tensorhub_plugins.core.server import start_server
from tensorhub_plugins.vllm import runtime
from tensorhub_plugins.vllm.worker import TensorHubWorkerExtension

RUN, MODEL = "doctor", "patient"
EXTENSION = "tensorhub_plugins.vllm.doctor.Patient"
PROMPTS, PROMPT_LENGTH_MAX, TOKENS = 4, 24, 16
NAMES_SHOWN_MAX = 5
START_DEADLINE_S = 1800.0  # of an engine, which may be large
CALL_DEADLINE_S = 600.0


class Patient(TensorHubWorkerExtension):
    def tensorhub_zero(self, everything: bool) -> None:
        """Zero the parameters and what is derived from them; if everything, also buffers, which no checkpoint holds."""
        model = self.model_runner.get_model()
        buffers = set() if everything else {buffer.data_ptr() for _, buffer in model.named_buffers()}
        for tensor in runtime.tensors(model).values():
            if tensor.data_ptr() not in buffers:
                tensor.zero_()

    def tensorhub_update(self, version: int, deadline_s: float) -> dict[str, Any]:
        from tensorhub_plugins.vllm.worker import attached

        updater = attached(self)
        assert updater is not None
        return updater.update(version, deadline_s)


class Engine(Protocol):
    def rpc(self, method: str, *args: Any) -> list[Any]: ...
    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]: ...
    def close(self) -> None: ...


Start = Callable[[Path, dict[str, Any]], Engine]  # a model's folder and more options of vllm.LLM


@dataclass(frozen=True)
class Finding:
    """One line of the report; wrong is empty when all is well."""

    what: str
    wrong: str = ""


def check_sync(model: Path, start: Start) -> Iterator[Finding]:
    """Yield findings as they are made; the first that is wrong is the last. UsageError: this model is refused."""
    with ExitStack() as stack:
        hub = stack.enter_context(start_server())
        trainer = stack.enter_context(Client(hub.address, run=RUN, model=MODEL, replica="doctor"))
        joining = {"hub": hub.address, "run": RUN, "model": MODEL, "serve_from": "live"}
        weights = read_checkpoint(model)
        trainer.publish(1, weights)

        reference = start(model, {"disk": "only"})
        stack.callback(reference.close)
        reference.rpc("tensorhub_connect", {**joining, "replica": "reference"})
        prompts = _prompts(model)
        healthy = _state(reference, prompts)

        bare = stack.enter_context(tempfile.TemporaryDirectory())
        patient = start(_without_weights(model, Path(bare)), {**joining, "replica": "patient"})
        stack.callback(patient.close)
        yield _same("started from the checkpoint", healthy, _state(patient, prompts))

        patient.rpc("tensorhub_zero", False)
        yield _different("negative control: zeroed parameters are noticed", healthy, _state(patient, prompts))
        trainer.publish(2, weights)
        _update(patient, 2)
        yield _same("converted from the checkpoint", healthy, _state(patient, prompts))

        reference.rpc("tensorhub_zero", True)
        yield _different("negative control: zeroed tensors are noticed", healthy, _state(reference, prompts))
        reports = _update(reference, 2)
        if {source.split("/")[0] for report in reports for source in report["sources"]} != {"patient"}:
            yield Finding("copied from a peer", f"it was not copied from the peer: {reports}")
        yield _same("copied from a peer", healthy, _state(reference, prompts))


def read_checkpoint(model: Path) -> dict[str, torch.Tensor]:
    """All tensors by their Hugging Face names."""
    from safetensors.torch import load_file

    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{model} holds no *.safetensors: give the folder of a Hugging Face model")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _without_weights(model: Path, folder: Path) -> Path:
    for file in model.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf"):
            shutil.copy(file, folder)
    return folder


def _prompts(model: Path) -> list[list[int]]:
    import json

    config = json.loads((model / "config.json").read_text())
    vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 1000)
    chance = random.Random(0)
    lengths = [chance.randint(2, PROMPT_LENGTH_MAX) for _ in range(PROMPTS)]
    return [[chance.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class _State:
    layouts: list[str]
    digests: list[dict[str, str]]  # of every worker
    answers: list[list[int]]


def _state(engine: Engine, prompts: list[list[int]]) -> _State:
    told = engine.rpc("tensorhub_digests")
    answers = [engine.generate([prompt], TOKENS)[0] for prompt in prompts]
    return _State([worker["layout"] for worker in told], [worker["runtime"] for worker in told], answers)


def _update(engine: Engine, version: int) -> list[dict[str, Any]]:
    results = engine.rpc("tensorhub_update", version, CALL_DEADLINE_S)
    for result in results:
        if not result["installed"]:
            raise TensorHubError(str(result["error"]), version=version)
    return [result["report"] for result in results]


def _same(what: str, healthy: _State, now: _State) -> Finding:
    if healthy.layouts != now.layouts:
        return Finding(what, "the engines' layouts differ, so they could not copy from each other")
    wrong = [
        name
        for ours, theirs in zip(healthy.digests, now.digests, strict=True)
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if wrong:
        return Finding(what, f"{len(wrong)} tensors differ, first {', '.join(wrong[:NAMES_SHOWN_MAX])}")
    if healthy.answers != now.answers:
        return Finding(what, "all tensors are equal, and the answers are not: something that is not synced has changed")
    count = sum(len(worker) for worker in now.digests)
    return Finding(f"{what}: {count} tensors and {len(now.answers)} answers are equal")


def _different(what: str, healthy: _State, now: _State) -> Finding:
    if healthy.digests == now.digests:
        return Finding(what, "the digests are those from before")
    if healthy.answers == now.answers:
        return Finding(what, "the answers are those from before: this engine does not compute with these tensors")
    return Finding(what)


# --- engines in processes of their own, for the command line ---


def run(model: Path, *, tensor_parallel: int = 1, options: Mapping[str, Any] | None = None) -> int:
    """Print the findings; 0: all is well, 1: the sync is wrong, 2: the model is refused or cannot be run."""
    settings = {"tensor_parallel_size": tensor_parallel, **(options or {})}
    try:
        for finding in check_sync(model, lambda folder, extra: Process(folder, extra, settings)):
            print(
                f"{'WRONG' if finding.wrong else 'ok   '} {finding.what}{': ' if finding.wrong else ''}{finding.wrong}"
            )
            if finding.wrong:
                return 1
    except TensorHubError as error:
        print(f"REFUSED {error}")
        return 2
    return 0


class Process:
    """A vllm.LLM in a process of its own."""

    def __init__(self, model: Path, extra: dict[str, Any], settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(model), extra, settings))
        self._process.start()
        theirs.close()
        self._receive(START_DEADLINE_S)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._ask("rpc", method, args))

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return list(self._ask("generate", prompts, tokens))

    def close(self) -> None:
        self._pipe.close()  # it leaves by itself then
        self._process.join(timeout=20)
        self._process.kill()
        self._process.join()

    def _ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._receive(CALL_DEADLINE_S)

    def _receive(self, deadline_s: float) -> Any:
        try:
            if not self._pipe.poll(deadline_s):
                raise TensorHubError("the engine does not answer", deadline_s=deadline_s)
            succeeded, value = self._pipe.recv()
        except EOFError:
            raise TensorHubError("the engine's process has ended; what it printed says why") from None
        if not succeeded:
            raise TensorHubError(value)
        return value


def _serve(pipe: Any, model: str, extra: dict[str, Any], settings: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that errors arrive here, and not only in a log
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    def start() -> None:
        from vllm import LLM

        nonlocal engine
        engine = LLM(model, **{**engine_options(extra), **settings})

    engine: Any = None
    _reply(pipe, start)
    while engine is not None:
        try:
            command, *args = pipe.recv()
        except EOFError:
            return
        action = {"rpc": _rpc, "generate": _generate}[command]
        _reply(pipe, lambda action=action, args=args: action(engine, *args))


def engine_options(extra: dict[str, Any]) -> dict[str, Any]:
    """Of vllm.LLM, for an engine that the doctor looks at."""
    return {
        "load_format": "tensorhub",
        "model_loader_extra_config": extra,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


def _rpc(engine: Any, method: str, args: tuple[Any, ...]) -> Any:
    return engine.collective_rpc(method, args=args)


def _generate(engine: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _reply(pipe: Any, action: Callable[[], Any]) -> None:
    try:
        answer = (True, action())
    except TensorHubError as error:
        answer = (False, str(error))
    except Exception:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
