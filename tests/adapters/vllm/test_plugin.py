"""What vLLM loads in every process, also for those who never ask for the store."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensorhub_plugins.core import UsageError, gate
from tensorhub_plugins.vllm import names, plugin

ROOT = Path(__file__).resolve().parents[3]


def run(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_registering_imports_nothing_and_may_be_repeated() -> None:
    program = """
import sys
from tensorhub_plugins.vllm.plugin import register
before = set(sys.modules)
register(); register()
print(sorted(m for m in sys.modules if m.split(".")[0] in ("vllm", "torch", "zmq", "msgspec")), len(sys.meta_path))
register()
print(len(set(sys.modules) - before), len(sys.meta_path))
"""
    first, second = run(program).splitlines()
    assert first.startswith("[] ")
    assert second == f"0 {first.split()[-1]}"


def test_a_vllm_that_is_not_as_expected_starts_all_the_same(tmp_path: Path) -> None:
    for name in ("model_executor", "distributed", "distributed/weight_transfer", "v1", "v1/engine"):
        (tmp_path / "vllm" / name).mkdir(parents=True, exist_ok=True)
    for folder in [tmp_path / "vllm", *(tmp_path / "vllm").rglob("*")]:
        if folder.is_dir():
            (folder / "__init__.py").touch()
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.23.1'\n")
    (tmp_path / "vllm/model_executor/model_loader.py").write_text("_LOAD_FORMAT_TO_MODEL_LOADER = {}\n")
    (tmp_path / "vllm/distributed/weight_transfer/factory.py").write_text("nothing = 1\n")
    (tmp_path / "vllm/v1/engine/core.py").write_text("class EngineCore: pass\n")
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from tensorhub_plugins.vllm.plugin import register
register()
import vllm.distributed.weight_transfer.factory, vllm.v1.engine.core, vllm.model_executor.model_loader as loaders
register()
print(list(loaders._LOAD_FORMAT_TO_MODEL_LOADER), vllm.distributed.weight_transfer.factory.nothing)
try:
    loaders._LOAD_FORMAT_TO_MODEL_LOADER["tensorhub"](None)
except Exception as refusal:
    print(refusal)
"""
    first, refusal = run(program).splitlines()
    assert first == "['tensorhub'] 1"
    assert refusal.startswith(
        "vLLM 0.23.1 is outside the supported range 0.24 to 0.33 of tensorhub: install a version in that range"
    )


def test_a_start_that_fails_keeps_no_other_engine_of_its_process_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("tensorhub_plugins.vllm.engine.compiled.shared", lambda core, vllm_config: nullcontext())

    class EngineCore:
        def _initialize_kv_caches(self, vllm_config: object) -> None:
            raise ValueError("no memory for the cache")

    plugin._add_to_engine_core(SimpleNamespace(EngineCore=EngineCore))
    gate.close()  # as the loader does, until the warm-up has ended
    try:
        with pytest.raises(ValueError, match="no memory"):
            EngineCore()._initialize_kv_caches(SimpleNamespace(load_config=SimpleNamespace(load_format="tensorhub")))
        assert not gate.closed
    finally:
        gate.open()


@pytest.mark.smoke
@pytest.mark.heavy  # imports all of vLLM
def test_vllm_knows_our_names() -> None:
    pytest.importorskip("vllm")
    program = """
import vllm.plugins
vllm.plugins.load_general_plugins()
import vllm.model_executor.model_loader as loaders
from vllm.distributed.weight_transfer import factory
from vllm.v1.engine.core import EngineCore
print("tensorhub" in loaders._LOAD_FORMAT_TO_MODEL_LOADER, EngineCore._initialize_kv_caches.tensorhub)
for name in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory"):
    try:
        print(getattr(factory, name)._registry["tensorhub"]().__name__)
    except Exception as refusal:
        print(refusal)
"""
    *_, known, engine, trainer = run(program).splitlines()
    assert known == "True True"
    installed = str(names.installed_version())
    try:
        names.check_version(installed, first=names.WEIGHT_TRANSFER_FIRST)
    except UsageError:
        assert engine.startswith(f"vLLM {installed} is outside the supported range {names.WEIGHT_TRANSFER_FIRST} to ")
    else:
        assert (engine, trainer) == ("TensorHubWeightTransferEngine", "TensorHubTrainerEngine")
