"""One engine of `--real`: vLLM in a process of its own, and its workers in theirs."""

from __future__ import annotations

import os
import traceback
from typing import Any

EXTENSION = "tensorhub_plugins.vllm.TensorHubWorkerExtension"
PROMPTS = [[5, 6, 7, 8, 9], [100, 101], [300, 7, 21, 44]]


def serve(pipe: Any, folder: str, tp: int, host: str) -> None:
    """Answer each (method, arguments) from all workers, or "generate"."""
    os.environ.update(TENSORHUB_HOST=host, VLLM_CPU_OMP_THREADS_BIND="nobind")
    try:
        engine = start(folder, tp)
        pipe.send((True, None))
        while True:
            method, arguments = pipe.recv()
            if method == "generate":
                pipe.send((True, generate(engine)))
            else:
                pipe.send((True, engine.collective_rpc(method, args=arguments)))
    except EOFError:
        return
    except Exception:
        pipe.send((False, traceback.format_exc()))


def start(folder: str, tp: int) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        load_format="dummy",
        tensor_parallel_size=tp,
        distributed_executor_backend="mp",
        worker_extension_cls=EXTENSION,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        disable_log_stats=True,
    )


def generate(engine: Any) -> list[list[int]]:
    """Generate greedily."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)]
