"""The stopwatch: the same for verl's own path and for the store's, because both stop vLLM in the same way.

A vLLM general plug-in, switched on by VERL_STALL_PROBE, a folder. In the process that owns an engine it notes
  stop    the engine was told to pause           go     resume_generation returned
  tokens  the engine handed out new tokens
with time.monotonic(), one JSON line each, in <folder>/<pid>.jsonl.
"""

from __future__ import annotations

import functools
import json
import os
import time

VARIABLE = "VERL_STALL_PROBE"


def register() -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor

    if getattr(AsyncLLM, "verl_stall_probe", False):  # vLLM loads plug-ins more than once in a process
        return
    AsyncLLM.verl_stall_probe = True
    os.makedirs(folder, exist_ok=True)
    note = _Notes(os.path.join(folder, f"{os.getpid()}.jsonl"))
    pause, resume, process = (
        AsyncMPClient.pause_scheduler_async,
        AsyncLLM.resume_generation,
        OutputProcessor.process_outputs,
    )
    make = AsyncLLM.__init__
    engines = []  # one in a process

    @functools.wraps(make)
    def noted_make(self, *args, **kwargs):
        make(self, *args, **kwargs)
        engines.append(self)

    @functools.wraps(pause)
    async def noted_pause(self, *args, **kwargs):
        note("stop", requests=len(engines[-1].output_processor.request_states))
        return await pause(self, *args, **kwargs)

    @functools.wraps(resume)
    async def noted_resume(self, *args, **kwargs):
        result = await resume(self, *args, **kwargs)
        note("go")
        return result

    @functools.wraps(process)
    def noted_process(self, outputs, *args, **kwargs):
        if any(output.new_token_ids for output in outputs):
            note("tokens")
        return process(self, outputs, *args, **kwargs)

    AsyncLLM.__init__ = noted_make
    AsyncMPClient.pause_scheduler_async = noted_pause
    AsyncLLM.resume_generation = noted_resume
    OutputProcessor.process_outputs = noted_process


class _Notes:
    def __init__(self, path: str) -> None:
        self.path = path
        self.file = None

    def __call__(self, what: str, **fields: int) -> None:
        if self.file is None:  # opened by the process that owns an engine, not by every process of vLLM
            self.file = open(self.path, "a", buffering=1)  # noqa: SIM115  open as long as the process
        self.file.write(json.dumps({"at": time.monotonic(), "what": what, **fields}) + "\n")
