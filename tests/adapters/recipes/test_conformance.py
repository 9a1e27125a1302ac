"""The table of recipes/conformance: what is wrong stands first, and nothing is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.conformance.__main__ import main


def family(name: str, result: str, why: str = "", refusals: str = "") -> dict[str, Any]:
    return {"architecture": name, "result": result, "why": why, "refusals": refusals, "seconds": 9.6}


def test_two_runs_have_a_column_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [family("A", "ok", refusals="all"), family("B", "not run", "no | kernel"), family("C", "WRONG", "x differs")]
    two = [
        family("A", "ok", refusals="1 x it was installed"),
        family("D", "REFUSED", "a bias"),
        family("E", "not made"),
    ]
    for name, rows, tp in (("0.1", one, 1), ("0.2", two, 2)):
        engine = {"tensor_parallel_size": tp}
        (tmp_path / name).write_text(json.dumps({"vllm": name, "engine": engine, "families": rows}))
    assert main([str(tmp_path / "0.1"), str(tmp_path / "0.2")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| result | vLLM 0.1, TP 1 | vLLM 0.2, TP 2 |",
        "| --- | --- | --- |",
        "| WRONG | 1 | 0 |",
        "| REFUSED | 0 | 1 |",
        "| ok | 1 | 1 |",
        "| not run | 1 | 0 |",
        "| not made | 0 | 1 |",
        "",
        "| architecture | vLLM 0.1, TP 1 | vLLM 0.2, TP 2 |",
        "| --- | --- | --- |",
        "| C | WRONG: x differs |  |",
        "| D |  | REFUSED: a bias |",
        "| A | ok, 10 s | ok, 10 s; malformed versions: 1 x it was installed |",
        "",
        "| not run | vLLM 0.1, TP 1 | vLLM 0.2, TP 2 |",
        "| --- | --- | --- |",
        "| B | no \\| kernel |  |",
    ]


def test_without_results_it_says_how_to_make_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--make [--only" in capsys.readouterr().err
