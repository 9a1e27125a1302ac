"""The stopwatch: in the engine's own loop, the same for verl's own path and for the store's, which pauses from within.

A vLLM general plug-in, switched on by VERL_STALL_PROBE, a folder. In the process that runs an engine's steps it notes
  stop    the engine is told to pause, and has requests      go     the engine has resumed
  tokens  a step has handed out new tokens
with time.monotonic(), one JSON line each, in <folder>/<pid>.jsonl. All three are noted between two steps, so that the
step that is under way when a pause is asked for is not part of it.
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
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if getattr(EngineCore, "verl_stall_probe", False):  # vLLM loads plug-ins more than once in a process
        return
    EngineCore.verl_stall_probe = True
    os.makedirs(folder, exist_ok=True)
    note = _Notes(os.path.join(folder, f"{os.getpid()}.jsonl"))
    resume, update = EngineCore.resume_scheduler, Scheduler.update_from_output

    def noted_pause(pause):
        @functools.wraps(pause)
        def paused(self, *args, **kwargs):
            note("stop", requests=self.scheduler.get_num_unfinished_requests())
            return pause(self, *args, **kwargs)

        return paused

    @functools.wraps(resume)
    def noted_resume(self):
        resume(self)
        note("go")

    @functools.wraps(update)
    def noted_update(self, *args, **kwargs):
        by_client = update(self, *args, **kwargs)
        if any(output.new_token_ids for outputs in by_client.values() for output in outputs.outputs):
            note("tokens")
        return by_client

    for kind in (EngineCore, EngineCoreProc):  # each has its own
        kind.pause_scheduler = noted_pause(kind.pause_scheduler)
    EngineCore.resume_scheduler = noted_resume
    Scheduler.update_from_output = noted_update


class _Notes:
    def __init__(self, path: str) -> None:
        self.path = path
        self.file = None

    def __call__(self, what: str, **fields: int) -> None:
        if self.file is None:  # opened by the process that runs an engine, not by every process of vLLM
            self.file = open(self.path, "a", buffering=1)  # noqa: SIM115  open as long as the process
        self.file.write(json.dumps({"at": time.monotonic(), "what": what, **fields}) + "\n")
