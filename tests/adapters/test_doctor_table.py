"""Lines of verl's and OpenRLHF's own examples: what the doctors say of them, beside what the frameworks do.

The table is command_lines.json; tests/support/command_lines.py makes it, and runs the frameworks' real commands.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import STARTS, asked, stand_in_for_vllm, table, words_of

TABLE = table()
ROWS = TABLE["rows"]
HERE = "openrlhf" if find_spec("openrlhf") else "verl"  # they cannot be installed together
# What the frameworks find out only after Ray was started: verl's trainers and loggers, batches that ranks do not
# divide, and files that are not there; what nothing is trained with, and what ends the first step.
LATER = ("verl: ", "not on this machine: ", "trainer.logger is ", "actor_rollout_ref.actor.ppo_mini_batch_size (32) ")
LATER += ("rollout.total_rollout_steps is 100, and fully_async trains on 128 ", "algorithm.adv_estimator is ")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: Path(row["script"]).stem)
def test_the_doctor_says_what_the_framework_does(row: dict[str, Any]) -> None:
    wrong, happens = row["wrong"], row["happens"]
    if row["framework"] == "openrlhf":  # run without our hook: what is ours is nobody's to refuse there
        assert any("OpenRLHF does not take" in sentence for sentence in wrong) == (happens != STARTS)
    elif happens == STARTS:
        assert all(sentence.startswith(LATER) for sentence in wrong)
    else:
        assert wrong or "We couldn't connect to 'https://huggingface.co'" in happens  # a critic that is not here


def test_the_table_is_of_many_lines_of_both_frameworks() -> None:
    count = Counter(row["framework"] for row in ROWS)
    assert count["verl"] >= 40 and count["openrlhf"] >= 10
    assert {row["script"] for row in ROWS} == {script for name in ("verl", "openrlhf") for script in TABLE[name]}
    runs = [row for row in ROWS if not row["wrong"]]
    assert len(runs) >= 15 and len(ROWS) - len(runs) >= 15


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine where the store and the framework are installed, and nothing else is."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tensorhub_plugins.verl")
    for name in ("VLLM_PLUGINS",):
        monkeypatch.delenv(name, raising=False)
    if HERE == "verl":
        (tmp_path / "vllm").mkdir()
        if made := stand_in_for_vllm(tmp_path / "vllm"):
            monkeypatch.syspath_prepend(made)
    else:
        doctor = import_module("tensorhub_plugins.openrlhf.doctor")
        monkeypatch.setattr(doctor, "metadata", SimpleNamespace(entry_points=lambda **_: ["tensorhub"]))
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    return tmp_path / "job"


@pytest.mark.heavy
@pytest.mark.skipif(find_spec(HERE) is None, reason="needs verl or OpenRLHF")
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["framework"] == HERE], ids=lambda row: Path(row["script"]).stem
)
def test_the_doctor_says_so_today(row: dict[str, Any], ready: Path) -> None:
    doctor = import_module(f"tensorhub_plugins.{HERE}.doctor")
    words = words_of(TABLE[HERE][row["script"]], row["added"], ready, doctor.PATHS)
    assert asked(doctor.look, words, ready) == row["wrong"]
