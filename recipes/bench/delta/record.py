"""Record the versions of a real GRPO run, as a reader of its store: one .npy file of 16-bit elements each."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.bench.delta.material import Elements
from recipes.demo.__main__ import ROOT, STORE
from recipes.demo.watch import end_cleanly_when_told, end_group
from tensorhub_plugins.core import Client, start_server
from tensorhub_plugins.core.errors import NotPublished

START_S = 1200.0  # of the run: imports, mostly
RUN = "recorded"


def record(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run recipes/verl_grpo at this learning rate until so many versions were read; return what each is."""
    end_cleanly_when_told()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with start_server() as server, Client(server.address, run=RUN, model="actor", replica="recorder") as client:
        command = [
            str(ROOT / "recipes/verl_grpo/run.sh"),
            *("separate_async", "pull"),
            *("trainer.total_training_steps=1000", "trainer.total_epochs=1000"),
            f"actor_rollout_ref.actor.optim.lr={options.lr:g}",
            *(f"+{STORE}.hub={server.address}", f"+{STORE}.run={RUN}"),
        ]
        environment = {
            **os.environ,
            **{"PYTHON": sys.executable, "SIZE": options.size, "RUN": str(out / "run"), "OUT": str(out.parent)},
        }
        with open(out / "verl.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            return _versions(client, process, out, options.versions)
        finally:
            end_group(process)


def _versions(client: Client, process: subprocess.Popen[bytes], out: Path, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before: Elements | None = None
    while len(rows) < count:
        if process.poll() is not None:
            sys.exit(f"the run has ended: see {out / 'verl.log'}")
        newest = rows[-1]["version"] if rows else 0
        try:
            version = client.wait(newer_than=newest, timeout_s=10.0)
        except NotPublished:
            continue
        elements = _elements(client, version)
        np.save(out / f"{version:08}.npy", elements)
        changed = 1.0 if before is None else float((elements != before).mean())
        rows.append({"version": version, "changed": changed})
        print(f"version {version}: {elements.nbytes / 1e6:.1f} MB, {changed:.3%} of it others", flush=True)
        before = elements
    return rows


def _elements(client: Client, version: int) -> Elements:
    fetched = client.fetch(version, timeout_s=60.0)
    tensors = fetched.tensors()
    parts = [tensors[name].reshape(-1).view(torch.int16).numpy() for name in sorted(tensors)]
    elements = np.concatenate(parts).view(np.uint16)
    fetched.release()
    return elements
