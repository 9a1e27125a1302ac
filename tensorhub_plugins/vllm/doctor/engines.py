"""Engines for the doctor, each in a process of its own, and the questions that the doctor asks them.

The processes are forked from a server that has imported vLLM once, so an engine of a tiny model starts in seconds. One
that dies or hangs costs its owner an error and nothing else.

Questions are the engine's own: every engine of a model makes the same ones by itself, so that both are asked alike.
    generating models    prompts of random tokens, and two with an image or a sound if the model takes them; the answer
                         is greedy tokens with their log-probabilities, and those of the prompt
    pooling models       the same prompts; the answer is a vector, or one per token
They are asked one at a time: vLLM's batches may change the last bit.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tensorhub_plugins.core import TensorHubError

EXTENSION = "tensorhub_plugins.vllm.doctor.check_sync.Patient"
PRELOAD = ("vllm.entrypoints.llm", "vllm.v1.executor.uniproc_executor", "tensorhub_plugins.vllm.doctor.check_sync")
PROMPTS, PROMPT_LENGTH_MAX, TOKENS = 4, 24, 12
LOGPROBS, PROMPT_LOGPROBS = 3, 2  # of how many tokens, at every position
NOT_A_NUMBER = "nan"
WITH_ITEM = 2  # prompts with an image or a sound
IMAGE_SIZE = (56, 56)  # pixels
SOUND_RATE = 16_000  # per second; a second of it
TASKS = ("embed", "classify", "token_embed", "token_classify")  # of pooling models, in the words of vLLM
START_TIMEOUT_S = 1800.0  # of an engine, which may be large
CALL_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.005
EXIT_TIMEOUT_S = 1.0  # for a process that was asked to end, before it is killed
EXIT_WITH_WORKERS_TIMEOUT_S = 20.0  # it ends its workers first
LOG_LINES_SHOWN = 12
LINE_LENGTH_MAX = 300


class EngineFailed(TensorHubError):
    """vLLM's own error, or the engine's process is gone or unresponsive: not a refusal of ours."""


class NotANumber(EngineFailed):
    """The model itself answers with NaN, from disk and before anything was published: nothing can be compared."""


def engine_options(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the options of vllm.LLM for an engine that the doctor checks."""
    return {
        "load_format": "tensorhub",
        "model_loader_extra_config": extra,
        "worker_extension_cls": EXTENSION,
        **plain_options(),
    }


def plain_options() -> dict[str, Any]:
    """Return the same for an engine without anything of ours."""
    return {
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


class Apart:
    """A function in a process of its own that gets a pipe, and sends (ok, value) first and after every command."""

    def __init__(
        self,
        function: Callable[..., None],
        args: tuple[Any, ...],
        *,
        deadline: float = math.inf,
        log: Path | None = None,
        patience_s: float = EXIT_TIMEOUT_S,
    ) -> None:
        """Start the process. deadline: for everything, an instant. log: a file for what the process prints."""
        self._deadline, self._log, self._patience_s = deadline, log, patience_s
        self._pipe, theirs = _context().Pipe()
        self._process = _context().Process(target=_begin, args=(theirs, log, function, args))
        self._process.start()
        theirs.close()
        try:
            self.first = self._receive(START_TIMEOUT_S)
        except TensorHubError:
            self.close()
            raise

    def ask(self, *command: Any) -> Any:
        """Send a command, return its result. Raises its TensorHubError as it was, other errors as EngineFailed."""
        try:
            self._pipe.send(command)
        except OSError:
            raise EngineFailed(self._last_words()) from None
        return self._receive(CALL_TIMEOUT_S)

    def close(self) -> None:
        self._pipe.close()  # it ends by itself then
        self._process.join(timeout=self._patience_s)
        self._process.kill()
        self._process.join()

    def _receive(self, timeout_s: float) -> Any:
        timeout_s = max(0.0, min(timeout_s, self._deadline - time.monotonic()))
        try:
            if not self._pipe.poll(timeout_s):
                raise EngineFailed(f"no answer from the engine's process within {timeout_s:.0f} s")
            outcome, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise EngineFailed(self._last_words()) from None
        if outcome == "refused":
            raise TensorHubError(value)
        if outcome == "failed":
            raise EngineFailed(value)
        return value

    def _last_words(self) -> str:
        self._process.join(timeout=5)
        words = f"the engine's process has ended with {self._process.exitcode}"
        if self._log is None or not self._log.exists():
            return f"{words}; what it printed says why"
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return "\n".join([f"{words}; the end of what it printed:", *lines[-LOG_LINES_SHOWN:]])


class Process(Apart):
    """A vllm.LLM in a process of its own."""

    def __init__(
        self, model: Path, options: dict[str, Any], *, deadline: float = math.inf, log: Path | None = None
    ) -> None:
        options = {"skip_tokenizer_init": not any(model.glob("tokenizer*")), **options}
        workers = options.get("tensor_parallel_size", 1) > 1
        patience_s = EXIT_WITH_WORKERS_TIMEOUT_S if workers else EXIT_TIMEOUT_S
        super().__init__(_serve, (str(model), options), deadline=deadline, log=log, patience_s=patience_s)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Return the answer of every worker."""
        return list(self.ask("rpc", method, args))

    def update(self, version: int) -> list[dict[str, Any]]:
        """Return what `tensorhub_install` returned on every worker, or would have returned had it been reached."""
        return list(self.ask("update", version))

    def answers(self, questions: int | None = None) -> list[Any]:
        """Return the answers to the first so many questions, or all."""
        return list(self.ask("answers", questions))


def call_apart(function: Callable[..., Any], *args: Any, deadline: float, log: Path | None = None) -> Any:
    """Return the result of the function, called in a process of its own."""
    apart = Apart(_call, (function, args), deadline=deadline, log=log)
    apart.close()
    return apart.first


def short(error: object) -> str:
    """Return the end of a traceback, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"^([\w.]*(Error|Exception)|Value error)\b", line)]
    return (telling or lines or ["?"])[-1][:LINE_LENGTH_MAX]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    context.set_forkserver_preload(list(PRELOAD))
    return context


# --- in the process ---


def _begin(pipe: Any, log: Path | None, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that errors arrive here, and not only in a log
    function(pipe, *args)


def _call(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _reply(pipe, lambda: function(*args))


def _serve(pipe: Any, model: str, options: dict[str, Any]) -> None:
    engine: Any = None

    def start() -> None:
        from vllm import LLM

        nonlocal engine
        engine = LLM(model, **options)

    _reply(pipe, start)
    while engine is not None:
        try:
            command, *args = pipe.recv()
        except EOFError:
            return
        actions: dict[str, Callable[..., Any]] = {"rpc": _rpc, "update": _update, "answers": answers}
        _reply(pipe, partial(actions[command], engine, *args))


def _reply(pipe: Any, action: Callable[[], Any]) -> None:
    try:
        answer = ("done", action())
    except TensorHubError as error:
        answer = ("refused", str(error))
    except Exception:
        answer = ("failed", traceback.format_exc())
    pipe.send(answer)
    sys.stdout.flush()


def _rpc(engine: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    workers = engine.collective_rpc("tensorhub_try", args=(method, args))
    refused = [refusal for _, refusal in workers if refusal]
    if refused:
        raise TensorHubError(refused[0])
    return [answer for answer, _ in workers]


def _update(engine: Any, version: int) -> list[Any]:
    """Update as followers do: fetch alongside the engine, prepare, and only then pause and install."""
    ask = partial(_rpc, engine)
    ask("tensorhub_start_fetch", (version, CALL_TIMEOUT_S))
    polled = ask("tensorhub_poll", ())
    while any(worker["state"] == "fetching" for worker in polled):
        time.sleep(POLL_INTERVAL_S)
        polled = ask("tensorhub_poll", ())
    if any(worker["state"] != "ready" for worker in polled):
        return [{**worker, "installed": False} for worker in polled]
    try:
        ask("tensorhub_prepare_install", (CALL_TIMEOUT_S,))
    except TensorHubError as error:
        return [{**worker, "installed": False, "error": str(error)} for worker in ask("tensorhub_poll", ())]
    core = engine.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep", False)
    core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    core.reset_encoder_cache()
    results = ask("tensorhub_install", (version, CALL_TIMEOUT_S))
    if not any(worker["broken"] for worker in results):
        core.resume_scheduler()
    return results


# --- questions and answers ---


def answers(engine: Any, questions: int | None = None) -> list[Any]:
    """Return plain lists of numbers; NOT_A_NUMBER for NaN, because NaN equals nothing."""
    ask = _vectors if engine.model_config.runner_type == "pooling" else _tokens
    return [_plain(ask(engine, prompt)) for prompt in _prompts(engine)[:questions]]


def check_numbers(given: Any) -> None:
    """Raise NotANumber if some are NaN: they could be compared, and would prove nothing."""
    if isinstance(given, (list, tuple)):
        for item in given:
            check_numbers(item)
    elif given == NOT_A_NUMBER:
        raise NotANumber("the model answers with NaN: give one whose weights are trained")


def _plain(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return [_plain(item) for item in given]
    return NOT_A_NUMBER if isinstance(given, float) and math.isnan(given) else given


def _tokens(engine: Any, prompt: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=LOGPROBS,
        prompt_logprobs=PROMPT_LOGPROBS,
    )
    [output] = engine.generate([prompt], params, use_tqdm=False)
    completion = output.outputs[0]
    return [
        list(completion.token_ids),
        [_places(place) for place in completion.logprobs or ()],
        [_places(place) for place in output.prompt_logprobs or ()],
    ]


def _places(place: Any) -> list[tuple[int, float]]:
    return [(int(token), float(entry.logprob)) for token, entry in sorted((place or {}).items())]


def _vectors(engine: Any, prompt: Any) -> Any:
    known = [task for task in TASKS if task in engine.supported_tasks]
    task = getattr(engine, "pooling_task", None) or known[0]  # vLLM answers only one task of an engine
    [output] = engine.encode([prompt], pooling_task=task, use_tqdm=False)
    return [task, output.outputs.data.flatten().tolist()]


def _prompts(engine: Any) -> list[Any]:
    chance = random.Random(0)
    lengths = [chance.randint(2, PROMPT_LENGTH_MAX) for _ in range(PROMPTS)]
    vocabulary = engine.model_config.get_vocab_size()
    prompts: list[Any] = [{"prompt_token_ids": [chance.randrange(3, vocabulary) for _ in range(n)]} for n in lengths]
    if not engine.model_config.is_multimodal_model:
        return prompts
    processor = engine.llm_engine.renderer.get_mm_processor()
    modality = next((name for name in ("image", "audio") if name in processor.info.supported_mm_limits), None)
    if modality is None:
        return prompts
    placeholder = processor.dummy_inputs.get_dummy_text({modality: 1})
    items = [_picture(seed) if modality == "image" else _sound(seed) for seed in range(WITH_ITEM)]
    if engine.model_config.is_encoder_decoder:
        return [_heard(item, prompts[0]) for item in items]
    tokenizer = engine.get_tokenizer()
    seen = [tokenizer.encode(placeholder, add_special_tokens=False) + prompts[0]["prompt_token_ids"] for _ in items]
    return [
        {"prompt_token_ids": p, "multi_modal_data": {modality: i}} for p, i in zip(seen, items, strict=True)
    ] + prompts


def _heard(item: Any, prompt: Any) -> Any:
    """Return an input for an encoder of sound with a decoder of text."""
    return {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": item}}, "decoder_prompt": prompt}


def _picture(seed: int) -> Any:
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (*IMAGE_SIZE, 3), dtype=numpy.uint8))


def _sound(seed: int) -> Any:
    import numpy

    return numpy.random.default_rng(seed).standard_normal(SOUND_RATE).astype(numpy.float32), SOUND_RATE
