"""What the journal says of the weights that an engine's workers hold."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the workers are vLLM's")

import torch  # noqa: E402

from tensorhub_plugins.vllm.worker import digests  # noqa: E402


def test_the_digests_of_several_shards_are_named_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one name are of the same bytes, whichever worker reports them."""
    monkeypatch.setenv("TENSORHUB_EVENTS", str(tmp_path))
    installed: Any = SimpleNamespace(version=1, report=None)
    for shard, shards in ((0, 2), (1, 2), (0, 1)):
        assert digests.verify(f"first/{shard}", torch.nn.Linear(2, 2), "runtime:f", shard, shards, installed)
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert [name for line in lines for name in line["digests"]] == ["root of shard 0/2", "root of shard 1/2", "root"]
