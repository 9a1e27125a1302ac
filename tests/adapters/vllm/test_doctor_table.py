"""`python -m recipes.conformance --make`: one row for every family, and a fault in one is seen in its row."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from safetensors import safe_open

from recipes.conformance import examine as doctor_table
from recipes.conformance.__main__ import main
from recipes.conformance.families import FAMILIES, family
from recipes.conformance.make import Family, make
from recipes.conformance.naming import checkpoint_shapes
from tensorhub_plugins.core.errors import TensorHubError, UsageError
from tensorhub_plugins.vllm.doctor import check_sync, engines
from tensorhub_plugins.vllm.doctor.engines import EngineFailed, NotANumber, call_apart, short

FAULTS = "vllm_faults."


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_families_have_a_row_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder, a model that answers with vectors, one made by hand, and one that nothing makes."""
    names = ["LlamaForCausalLM", "BertForTokenClassification", "InternLM2ForCausalLM", "Terratorch"]
    report = tmp_path / "table.json"
    arguments = ["--make", "--only", ",".join(names), "--json", str(report)]
    assert main(arguments) == 0, capsys.readouterr().out
    rows = json.loads(report.read_text())["families"]
    assert [(row["architecture"], row["result"]) for row in rows] == [
        *((name, "ok") for name in names[:3]),
        ("Terratorch", "not made"),
    ]
    assert [row["refusals"] for row in rows] == ["all", "all", "all", ""]
    assert "3 ok, 0 REFUSED, 0 WRONG, 0 not run, 1 not made" in capsys.readouterr().out


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_sync_that_forgets_a_tensor_and_one_that_crashes_are_seen() -> None:
    """The negative control of the test above."""
    [forgetful] = doctor_table.examine(["LlamaForCausalLM"], {"worker_extension_cls": f"{FAULTS}ForgetfulPatient"})
    assert (forgetful.result, forgetful.why) == (
        "WRONG",
        "copied noise from a peer: 1 tensors differ, first model.norm.weight",
    )
    [crashing] = doctor_table.examine(["LlamaForCausalLM"], {"worker_extension_cls": f"{FAULTS}CrashingPatient"})
    assert crashing.result == "WRONG"
    assert crashing.why.startswith("vLLM alone runs it, with the store it fails: ")


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"])
def test_names_derived_from_vllm_are_those_that_transformers_saves(architecture: str, tmp_path: Path) -> None:
    made = family(architecture)
    assert made is not None
    deadline = time.monotonic() + 100
    call_apart(make, made, tmp_path / "model", deadline=deadline)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        names = list(file.keys())
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    shapes = call_apart(checkpoint_shapes, tmp_path / "model", {}, deadline=deadline)
    assert {name: tuple(shape) for name, shape in shapes.items()} == saved


def test_a_name_that_vllm_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match="this vLLM has no architecture LamaForCausalLM"):
        doctor_table.run(["LamaForCausalLM"], {})


def test_results_are_made_or_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--make", "out/a.json"])
    assert "not allowed with argument --make" in capsys.readouterr().err


def test_every_family_is_named_once_and_by_its_own_name() -> None:
    assert all(name == made.architecture for name, made in FAMILIES.items())
    assert family("Terratorch") is None
    assert family("LlamaForCausalLM") == Family("LlamaForCausalLM")


@pytest.mark.parametrize(
    ("failure", "row"),
    [
        (NotANumber("the model answers with NaN"), "not run"),
        (EngineFailed("no answer"), "WRONG"),
        (UsageError("cannot be updated"), "REFUSED"),
    ],
)
def test_whose_fault_a_failure_is(failure: Exception, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM alone runs the model a second time: answers that are no numbers may come and go."""

    def fails(*_: object) -> list[check_sync.Finding]:
        raise failure

    monkeypatch.setattr(doctor_table, "call_apart", lambda *_, **__: None)
    monkeypatch.setattr(check_sync, "check_sync", fails)
    monkeypatch.setattr(check_sync, "runs_without_us", lambda *_, **__: "")
    [seen] = doctor_table.examine(["LlamaForCausalLM"], {})
    assert (seen.architecture, seen.result) == ("LlamaForCausalLM", row)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("OSError: Can't load image processor for '.../model'. If", "no image processor is made for it here"),
        ("KeyError: 'x'", "vLLM alone cannot run it: KeyError: 'x'"),
    ],
)
def test_why_a_family_does_not_run(error: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[check_sync.Finding]:
        raise EngineFailed("as seen through the store")

    monkeypatch.setattr(doctor_table, "call_apart", lambda *_, **__: None)
    monkeypatch.setattr(check_sync, "check_sync", fails)
    monkeypatch.setattr(check_sync, "runs_without_us", lambda *_, **__: error)
    [seen] = doctor_table.examine(["LlamaForCausalLM"], {})
    assert (seen.result, seen.why) == ("not run", why)


def test_a_traceback_is_told_by_its_last_error() -> None:
    text = "Traceback (most recent call last):\n  File x\nValueError: it is so\n\nEngine core failed\nmore"
    assert short(text) == "ValueError: it is so"
    nested = "pydantic.ValidationError: 1 validation error for ModelConfig\n  Value error, no such model\n    see x"
    assert short(nested) == "Value error, no such model"
    assert short("") == "?"


def test_what_became_of_malformed_versions_is_counted() -> None:
    def finding(what: str, wrong: str) -> check_sync.Finding:
        return check_sync.Finding(what, wrong, "refusal")

    assert doctor_table._refusals([]) == "all"
    half_way = [finding(f"refuses {n}", f"{check_sync.HALF_WAY}: because {n}") for n in range(2)]
    assert doctor_table._refusals([*half_way, finding("refuses c", check_sync.INSTALLED)]) == (
        f"2 x {check_sync.HALF_WAY}, such as: refuses 0; 1 x {check_sync.INSTALLED}, such as: refuses c"
    )


class Workers:
    """Of an engine whose workers are other processes: of an error that one raises only its text arrives, as vLLM's."""

    def __init__(self, count: int) -> None:
        self.workers = [check_sync.Patient() for _ in range(count)]

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        try:
            return [getattr(worker, method)(*args) for worker in self.workers]
        except Exception as error:
            raise RuntimeError(f"Worker failed with error '{error}'") from None


@pytest.mark.parametrize(
    ("error", "arrives"), [(UsageError("experts with a bias"), TensorHubError), (ValueError("shape"), RuntimeError)]
)
def test_what_a_worker_in_another_process_refuses_is_a_refusal(
    error: Exception, arrives: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as a failure, and the family as WRONG. The control: any other error is one."""

    def connect(self: Any, config: Any) -> None:
        raise error

    monkeypatch.setattr(check_sync.Patient, "tensorhub_connect", connect)
    monkeypatch.setattr(check_sync.Patient, "tensorhub_poll", lambda self: "polled")
    engine = Workers(2)
    assert engines._rpc(engine, "tensorhub_poll", ()) == ["polled", "polled"]
    with pytest.raises(arrives, match=str(error)):
        engines._rpc(engine, "tensorhub_connect", ({},))
