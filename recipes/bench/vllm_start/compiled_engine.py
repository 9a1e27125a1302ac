"""An engine that compiles, for compiled.py. Prints its seconds to the first tokens, and these; ends with its input."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    began = time.monotonic()
    from vllm import LLM, SamplingParams

    model, store = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(
        model=model,
        max_model_len=64,
        kv_cache_memory_bytes=64 << 20,
        load_format="tensorhub",
        model_loader_extra_config=store,
    )
    sampling = SamplingParams(max_tokens=8, temperature=0)
    (answer,) = engine.generate({"prompt_token_ids": [5, 6, 7]}, sampling, use_tqdm=False)
    took_s = time.monotonic() - began
    print(json.dumps({"tokens": list(answer.outputs[0].token_ids), "started_s": took_s}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
