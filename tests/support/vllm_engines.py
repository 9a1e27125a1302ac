"""Real vLLM engines for tests, each in a process of its own, started in a second or two.

A fork server imports vLLM once; every engine is forked from it and runs scheduler and worker in that one process
(`UniProcExecutor`), so that a test can steer, kill and freeze an engine as a whole. Models have random weights made
here: nothing is downloaded.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

EXTENSION = "tensorhub_plugins.vllm.TensorHubWorkerExtension"
PROMPTS = [[5, 6, 7, 8, 9], [100, 101], [300, 7, 21, 44]]
TOKENS = 16
START_TIMEOUT_S = 100
CALL_TIMEOUT_S = 60
END_TIMEOUT_S = 20
WAIT_TIMEOUT_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def make_model(kind: str, path: Path, seed: int) -> Path:
    """Save a tiny model with random weights; kind is one of KINDS."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = {
        "vocab_size": 500,  # not a multiple of 64: vLLM pads it
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # head_dim 32, the least the CPU attention takes
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # large enough that other weights give other tokens
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    family, more = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**shape, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of ones and biases of zeros would hide a tensor that was not updated
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, **UNTIED}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # what its classes in transformers are called, and its own settings
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", UNTIED),
    "qwen2-wide": ("Qwen2", {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024}),  # many segments
    "llama": ("Llama", UNTIED),
    "qwen3": ("Qwen3", {"head_dim": 32, **UNTIED}),
    "phi3": ("Phi3", {"pad_token_id": 0, **UNTIED}),  # q, k and v are one tensor of the checkpoint, gate and up another
    "gemma": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED}),
    "mixtral-deep": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 5, **UNTIED},
    ),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 32, "decoder_sparse_step": 1, **EXPERTS}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 32, **UNTIED}),
    "deepseek-mla": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,  # with rope 64 the 576 that every MLA back end takes
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
            **EXPERTS,
        },
    ),
}


def why_not(kind: str) -> str | None:
    """Why the installed vLLM, as it is, starts with no model of this kind on this machine."""
    import torch

    from tensorhub_plugins.vllm.names import installed_version

    if not str(installed_version()).startswith("0.24."):
        return None
    if "kv_lora_rank" in KINDS[kind][1]:
        return "stock vLLM 0.24 has no latent attention (MLA) on CPUs"
    if "num_experts_per_tok" not in KINDS[kind][1] or torch.cpu._is_avx512_supported():
        return None
    return "stock vLLM 0.24 ends its first step with experts where the CPU has no AVX-512: no configuration is set"


def checkpoint(path: Path) -> dict[str, Any]:
    """Return the saved tensors by Hugging Face name."""
    from safetensors.torch import load_file

    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


class Engine:
    """A vllm.LLM in a process of its own."""

    def __init__(
        self,
        model: Path,
        *,
        extension: str | None = EXTENSION,
        workers: int = 1,
        env: dict[str, str] | None = None,
        own_core: bool = False,
        **options: Any,
    ) -> None:
        """Start the engine. extension None: vLLM as it is. workers: tensor parallel; vLLM starts processes for more
        than one.

        own_core: the engine core is a process of its own and steps by itself, as in a server. options: more of LLM's.
        """
        # In the engine's own environment: other tests may have started the fork server, which keeps what it had then.
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_core)), "VLLM_LOGGING_LEVEL": "WARNING", **(env or {})}
        self._own_core = own_core
        context = _context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve,
            args=(theirs, str(model), extension or "", workers, env, options),
            daemon=workers == 1 and not own_core,
        )
        self.process.start()
        theirs.close()
        try:
            self._receive(START_TIMEOUT_S)
        except BaseException:  # else this process waits for it when it ends
            self.process.terminate()
            self.process.join(END_TIMEOUT_S)
            self.kill()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Run collective_rpc on the engine's only worker."""
        return self.ask("rpc", method, args)[0]

    def generate(self, prompts: list[list[int]] | None = None, tokens: int = TOKENS) -> list[list[int]]:
        """Greedy continuations of the prompts."""
        return self.ask("generate", prompts or PROMPTS, tokens)

    def ask(self, command: str, *args: Any) -> Any:
        self._pipe.send((command, args))
        return self._receive(CALL_TIMEOUT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        if self._own_core and self.process.is_alive():
            with suppress(EngineError, TimeoutError, OSError, EOFError):
                self.ask("stop")
        self.kill()
        self._pipe.close()

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the engine did not answer within {timeout_s} s")
        succeeded, value = self._pipe.recv()
        if not succeeded:
            raise EngineError(value)
        return value

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineError(RuntimeError):
    """An error in the engine's process, as text."""


@contextmanager
def engines(*models: Path, **options: Any) -> Iterator[list[Engine]]:
    started: list[Engine] = []
    try:
        for model in models:
            started.append(Engine(model, **options))
        yield started
    finally:
        for engine in started:
            engine.close()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, by a fork server that starts here
    context.set_forkserver_preload(["vllm_preload"])
    return context


# --- in the engine's process ---


def _serve(pipe: Any, model: str, extension: str, workers: int, env: dict[str, str], options: dict[str, Any]) -> None:
    os.environ.update(env)
    host = _Host(pipe)
    host.reply(lambda: host.start(model, extension, workers, options))
    while True:
        if host.generating and not pipe.poll(0):
            host.step()
            continue
        try:
            command, args = pipe.recv()
        except EOFError:
            return
        host.reply(lambda command=command, args=args: getattr(host, command)(*args))


class _Host:
    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.paused = False
        self.outputs: dict[str, list[int]] = {}
        self.running: set[str] = set()
        self.numbers = itertools.count()

    @property
    def generating(self) -> bool:
        return bool(self.running) and not self.paused

    def reply(self, action: Callable[[], Any]) -> None:
        try:
            answer = (True, action())
        except Exception as error:  # what it says first: a log may not show the end of a long message
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        self.pipe.send(answer)

    def start(self, model: str, extension: str, workers: int, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "tensor_parallel_size": workers,
            "distributed_executor_backend": UniProcExecutor if workers == 1 else "mp",
            "worker_extension_cls": extension,
            "disable_log_stats": True,
        }
        self.llm = LLM(model, **{**settings, **options})

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def core(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the engine core in its own process, as the server does."""
        return self.llm.llm_engine.engine_core.call_utility(method, *args)

    def stand_still(self) -> None:
        """Pause the engine core and let it go on at once: nobody who waits for its outputs could do the second."""
        client = self.llm.llm_engine.engine_core
        for method, args in (("pause_scheduler", ("keep", False)), ("resume_scheduler", ())):
            if hasattr(client, "call_utility"):
                client.call_utility(method, *args)
            else:
                getattr(client.engine_core, method)(*args)

    def own(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of vllm.LLM itself."""
        return getattr(self.llm, method)(*args)

    def rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def reload_stock(self, path: str) -> list[Any]:
        """Run vLLM's own layerwise reload, as it is."""
        return self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": list(checkpoint(Path(path)).items())}
        )

    def packs(self) -> bool:
        """Return whether a layer computes with a copy of its weights: vLLM's CPU build does where oneDNN knows the
        dtype.

        For bfloat16 that takes AVX-512. Elsewhere `cpu_linear` is a plain function of the weight it is given.
        """

        def of(worker: Any) -> bool:
            linears = [getattr(module, "cpu_linear", None) for module in worker.get_model().modules()]
            return any(getattr(linear, "__closure__", None) for linear in linears)

        return any(self.llm.collective_rpc(of))

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        prefix = f"generate-{next(self.numbers)}-"
        self.submit(prefix, prompts, tokens)
        while self.running:
            self.step()
        return [self.outputs.pop(f"{prefix}{k}") for k in range(len(prompts))]

    def submit(self, prefix: str, prompts: list[list[int]], tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for k, prompt in enumerate(prompts):
            self.llm.llm_engine.add_request(f"{prefix}{k}", {"prompt_token_ids": prompt}, params)
            self.running.add(f"{prefix}{k}")
            self.outputs[f"{prefix}{k}"] = []

    def with_adapter(self, prompt: list[int], tokens: int, adapter: Any) -> tuple[list[int], list[float]]:
        """Return a greedy continuation and its log-probabilities. adapter: its name; None: none."""
        from vllm import SamplingParams

        from tensorhub_plugins.vllm.lora import lora_request

        request = None if adapter is None else lora_request(adapter)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        prompts = [{"prompt_token_ids": prompt}]
        answer = self.llm.generate(prompts, params, lora_request=request, use_tqdm=False)[0].outputs[0]
        chosen = [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        return list(answer.token_ids), chosen

    def gather(self, prompts: list[list[int]], task: str, steps: int, calls: list[tuple[str, Any]]) -> list[Any]:
        """Return the results of prompts over several steps, with these calls of workers after so many of them, as an
        update makes them. task: one of pooling, or "prompt", for the log-probabilities of its tokens."""
        from vllm import PoolingParams, SamplingParams

        prefix = f"gather-{next(self.numbers)}-"
        of_prompt = task == "prompt"
        params = SamplingParams(max_tokens=1, prompt_logprobs=0) if of_prompt else PoolingParams(task=task)
        for k, prompt in enumerate(prompts):
            self.llm.llm_engine.add_request(f"{prefix}{k}", {"prompt_token_ids": prompt}, params)
        found: dict[str, Any] = {}
        for number in itertools.count():
            if len(found) == len(prompts):
                return [found[f"{prefix}{k}"] for k in range(len(prompts))]
            if number == steps:
                self.pause()
                for method, args in calls:
                    self.rpc(method, args)
                self.resume()
            for output in self.llm.llm_engine.step():
                if not of_prompt:
                    found[output.request_id] = output.outputs.data.tolist()
                elif output.finished:
                    rows = output.prompt_logprobs
                    found[output.request_id] = [[each.logprob for each in row.values()] for row in rows if row]
        raise AssertionError

    def beams(self, prompt: list[int], tokens: int, steps: int, calls: list[tuple[str, Any]], wrapped: bool) -> Any:
        """The token ids of a beam search by `LLM`, with these calls of workers before so many of its steps, as an
        update makes them. wrapped: as the store has it; else as vLLM has."""
        from vllm.sampling_params import BeamSearchParams

        taken, run = itertools.count(), self.llm._render_and_run_requests

        def step(*args: Any, **options: Any) -> Any:
            if next(taken) == steps:
                self.pause()
                for method, given in calls:
                    self.rpc(method, given)
                self.resume()
            return run(*args, **options)

        self.llm._render_and_run_requests = step
        try:
            search = type(self.llm).beam_search
            found = (search if wrapped else search.__wrapped__)(
                self.llm, [{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=2, max_tokens=tokens)
            )
            return [beam.tokens for beam in found[0].sequences]
        finally:
            del self.llm._render_and_run_requests

    def step(self) -> None:
        try:
            outputs = self.llm.llm_engine.step()
        except Exception:
            self.running.clear()  # its owner is told; stepping again is for the owner to decide
            raise
        for output in outputs:
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self.running.discard(output.request_id)

    def step_without_tokens(self) -> bool:
        """Step as vLLM does to clear a request that was aborted while nothing else runs."""
        from vllm.v1.core.sched.output import SchedulerOutput

        core = self.llm.llm_engine.engine_core.engine_core
        core.model_executor.execute_model(SchedulerOutput.make_empty())
        return True

    def progress(self) -> dict[str, int]:
        return {request: len(tokens) for request, tokens in self.outputs.items()}

    def pause(self) -> None:
        """Pause as a server does: requests are kept, caches dropped."""
        self.llm.llm_engine.engine_core.engine_core.pause_scheduler(mode="keep", clear_cache=True)
        self.paused = True

    def resume(self) -> None:
        self.llm.llm_engine.engine_core.engine_core.resume_scheduler()
        self.paused = False
