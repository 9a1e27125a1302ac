"""The documentation is true: links lead somewhere, commands and texts exist, tables are what the code computes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.site import build
from tensorhub_plugins.core import errors
from tensorhub_plugins.core.options import Need
from tensorhub_plugins.verl.checks import DROP_IN_COPIES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RUNBOOK, OPERATE = ((DOCS / name).read_text() for name in ("runbook.md", "operate.md"))


def dead_links(folder: Path) -> list[str]:
    """Return the links of pages in a folder that lead to no file there."""
    dead = []
    for page in folder.rglob("*.md"):
        for link in build.LINK.findall(page.read_text()):
            path = link.partition("#")[0]
            if path and "://" not in link and not (page.parent / path).is_file():
                dead.append(f"{page.relative_to(folder)}: {link}")
    return dead


@pytest.mark.slow  # it asks each command for its help
def test_every_link_leads_to_a_page_or_a_file_that_comes_along(tmp_path: Path) -> None:
    build.stage(tmp_path / "pages")
    assert len(list((tmp_path / "pages").rglob("*.md"))) >= len(build.PAGES)
    assert dead_links(tmp_path / "pages") == []
    (tmp_path / "pages" / "index.md").write_text("[gone](docs/gone.md)\n")  # the control
    assert dead_links(tmp_path / "pages") == ["index.md: docs/gone.md"]


def test_every_document_is_in_the_menu() -> None:
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= set(build.PAGES)
    assert all((ROOT / page).is_file() for page in build.PAGES if not page.startswith(build.REFERENCE))


def test_every_option_is_described() -> None:
    fields = [
        field for _, _, classes in build.OPTIONS for file, name in classes for field in build.fields_of(file, name)
    ]
    own = {"`hub`", "`run`", "`model`", "`replica`", "`advertise_host`"}  # of vLLM's worker: the names say it
    assert {name for name, _, _, comment in fields if not comment} <= own
    assert ("`keep`", "`int`", "`1`") in {field[:3] for field in fields} and len(fields) > 60


def test_the_reference_has_every_command() -> None:
    words = [sys.executable, "-m", "tensorhub_plugins.core.cli", "--help"]
    known = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = set(re.search(r"\{([\w,]+)\}", known)[1].split(","))
    assert found == {command.split()[0] for command in build.COMMANDS}


# --- the runbook ---


def unknown_commands(text: str) -> list[str]:
    """Return the `tensorhub ...` commands of a text that its --help does not know, or not with these flags."""
    wrong, helps = [], {}
    for said in sorted(set(re.findall(r"`tensorhub ([^`]+)`", text))):
        words = said.split()
        if words[0] == "doctor" and words[1] in ("verl", "openrlhf"):
            continue  # their arguments are the framework's
        name = [word for word in words[:2] if re.fullmatch(r"[a-z-]+", word)]
        if words[0] not in ("fleet", "doctor"):
            name = name[:1]
        key = " ".join(name)
        if key not in helps:
            asked = [sys.executable, "-m", "tensorhub_plugins.core.cli", *name, "--help"]
            done = subprocess.run(asked, capture_output=True, text=True)
            helps[key] = done.stdout if done.returncode == 0 else None
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        if helps[key] is None or not all(flag in helps[key] for flag in flags):
            wrong.append(said)
    return wrong


@pytest.mark.slow
def test_the_commands_of_the_runbook_exist() -> None:
    assert len(re.findall(r"`tensorhub [^`]+`", RUNBOOK + OPERATE)) > 15
    assert unknown_commands(RUNBOOK + OPERATE) == []
    assert unknown_commands("`tensorhub pin 7 --modell actor` `tensorhub pim 7`") == ["pim 7", "pin 7 --modell actor"]


def test_what_the_runbook_quotes_is_said_by_the_code() -> None:
    source = " ".join(file.read_text() for file in (ROOT / "tensorhub_plugins").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # texts that are written over several lines
    quoted = {text for text in re.findall(r'"([^"]+)"', RUNBOOK) if " " in text}
    assert len(quoted) >= 4 and [text for text in quoted if text not in source] == []
    named = set(re.findall(r"`([A-Z]\w+)`", RUNBOOK + OPERATE)) - {"FOLDER", "DO"}
    alerts = {
        rule["alert"]
        for rule in yaml.safe_load((ROOT / "recipes/deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    }
    assert [name for name in named - alerts if not name.startswith("TENSORHUB_") and not hasattr(errors, name)] == []
    assert alerts <= named


# --- sizing ---

BYTES = {"7B": 2 * 7.616e9, "32B": 2 * 32.76e9, "70B": 2 * 70.55e9, "235B": 2 * 235.1e9}


def test_the_memory_of_the_sizing_table_is_what_the_doctors_compute() -> None:
    rows = re.findall(
        r"^\| (\w+B) \((\d+) GB\) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$",
        (DOCS / "sizing.md").read_text(),
        re.M,
    )
    assert {row[0] for row in rows} == set(BYTES)
    for name, *numbers in rows:
        size, ranks, trainer, tp, engines, drop_in = map(int, numbers)
        whole = int(BYTES[name])
        share, part = Need(whole // ranks, 2), Need(whole // tp, 2)
        computed = [
            whole,
            share.size_bytes * min(8, ranks),
            part.size_bytes * tp,
            Need(whole, DROP_IN_COPIES).size_bytes * 8,
        ]
        assert [round(each / 1e9) for each in computed] == pytest.approx([size, trainer, engines, drop_in], abs=1)


def complaints_of(line: str, model: Path) -> list[str]:
    """Return what verl's doctor has against a command line, but for the absence of data and of a GPU build of vLLM."""
    words = re.sub(r"model.path=\S+", f"model.path={model}", line.replace("\\\n", " ")).split()
    asked = [sys.executable, "-m", "tensorhub_plugins.core.cli", "doctor", "verl", *words[3:]]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=model)
    said = [text for text in done.stderr.splitlines() if text.startswith("tensorhub: ")]
    return [text for text in said if "not on this machine: data." not in text and "vllm version None" not in text]


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_the_doctor_has_nothing_against_the_command_lines(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    shape = {"hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {"intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768}
    shape |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    lines = re.findall(r"```\n(python -m verl.*?)```", (DOCS / "sizing.md").read_text(), re.S)
    assert len(lines) == 2 and [complaints_of(line, tmp_path) for line in lines] == [[], []]
    (wrong,) = complaints_of(
        lines[1].replace("parameter_sync_step=1", "parameter_sync_step=3"), tmp_path
    )  # the control
    assert "parameter_sync_step (3)" in wrong


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs here: make docs fetches it")
def test_the_site_is_built(tmp_path: Path) -> None:
    subprocess.run([sys.executable, build.__file__, "--out", str(tmp_path)], check=True)
    assert (tmp_path / "site" / "docs" / "runbook.html").is_file()
