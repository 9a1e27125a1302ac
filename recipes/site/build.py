"""Build the documentation as a site that needs no server: `make docs`, then open out/site/index.html.

The pages are the repository's own .md files. References (options, commands, environment variables) are made from the
code. Every link leads somewhere, or the build fails: what a page links to in the repository comes along.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
REFERENCE = "reference"

# The menu: sections, and the files under them.
MENU: dict[str, list[str]] = {
    "Start": [
        HOME,
        "recipes/verl_grpo/README.md",
        "recipes/openrlhf_grpo/README.md",
        "recipes/vllm_serve/README.md",
        "recipes/trl_grpo/README.md",
        "recipes/demo/README.md",
        "docs/loop.md",
        "docs/sizing.md",
    ],
    "Elastic": ["recipes/verl_grpo_elastic/README.md", "recipes/openrlhf_grpo_elastic/README.md"],
    "Two sites": ["recipes/verl_grpo_two_sites/README.md", "recipes/openrlhf_grpo_two_sites/README.md"],
    "Operate": [
        "docs/operate.md",
        "docs/runbook.md",
        "docs/metrics.md",
        "recipes/deploy/README.md",
        "docs/where-it-runs.md",
        "docs/waits.md",
        "SECURITY.md",
        "recipes/rdma_vm/README.md",
    ],
    "Know": [
        "docs/guarantees.md",
        "docs/serving.md",
        "docs/lora.md",
        "docs/slime.md",
        "recipes/conformance/README.md",
        "docs/comparison.md",
        "tensorhub_plugins/core/README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ],
    "Measured": [
        "recipes/bench/README.md",
        "recipes/bench/workloads/README.md",
        "recipes/bench/verl_stall/README.md",
        "recipes/bench/openrlhf_stall/README.md",
        "recipes/bench/vllm_start/README.md",
        "recipes/bench/delta/README.md",
        "recipes/bench/rdma/README.md",
        "recipes/bench/gpu/README.md",
    ],
    "Reference": [f"{REFERENCE}/options.md", f"{REFERENCE}/commands.md", f"{REFERENCE}/environment.md"],
}
PAGES = [page for pages in MENU.values() for page in pages]

# Where a user writes options, and the classes that have them, with what each inherits before its own.
OPTIONS = (
    (
        "verl",
        "`+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tensorhub.NAME=VALUE`",
        (("core/options.py", "StoreOptions"), ("core/options.py", "TrainingOptions"), ("verl/config.py", "Options")),
    ),
    (
        "OpenRLHF",
        "`--vllm.sync_backend 'tensorhub:?NAME=VALUE&NAME=VALUE'`",
        (
            ("core/options.py", "StoreOptions"),
            ("core/options.py", "TrainingOptions"),
            ("openrlhf/config.py", "Options"),
        ),
    ),
    (
        "vLLM",
        "`--model-loader-extra-config '{\"NAME\": VALUE}'`",
        (("core/options.py", "StoreOptions"), ("vllm/config.py", "WorkerConfig"), ("vllm/config.py", "StartConfig")),
    ),
)
COMMANDS = (
    "server",
    "keygen",
    "status",
    "top",
    "timeline",
    "pin",
    "unpin",
    "withdraw",
    "doctor machine",
    "doctor check-sync",
    "fleet add",
    "fleet drain",
    "bench",
    "completion",
)
LINK = re.compile(r"(?<=\])\(([^()\s]+)\)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the pages and the site")
    out = parser.parse_args().out
    stage(out / "pages")
    settings = out / "mkdocs.yaml"
    settings.write_text(yaml.safe_dump(configuration(), sort_keys=False))
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", str(settings)]
    built = subprocess.run(mkdocs, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode
    if built == 0:
        print(out / "site" / "index.html")
    return built


def configuration() -> dict[str, object]:
    """Return mkdocs' settings. No page asks another host for anything: no fonts, and a search that works from files."""
    return {
        "site_name": "TensorHub plugins",
        "docs_dir": "pages",
        "site_dir": "site",
        "use_directory_urls": False,
        "theme": {"name": "material", "font": False, "features": ["navigation.sections", "content.code.copy"]},
        "plugins": ["offline", "search"],
        "markdown_extensions": ["tables", "toc", "pymdownx.superfences", "pymdownx.highlight"],
        "validation": {"anchors": "warn"},
        "nav": [{section: [staged(page) for page in pages]} for section, pages in MENU.items()],
    }


def staged(page: str) -> str:
    return "index.md" if page == HOME else page


def stage(folder: Path) -> None:
    """Write all pages, and what they link to, into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for page, text in [
        *((page, (ROOT / page).read_text()) for page in PAGES if not page.startswith(REFERENCE)),
        *made(),
    ]:
        target = folder / staged(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(LINK.sub(lambda found, page=page: f"({relinked(page, found[1], folder)})", text))


def relinked(page: str, link: str, folder: Path) -> str:
    """Return a link of a page as it is in the site: a folder's is its README's, and what is no page comes along."""
    path, sharp, anchor = link.partition("#")
    if not path or "://" in link:
        return link
    target = os.path.normpath(Path(page).parent / path)
    if (ROOT / target).is_dir():
        readme = f"{target}/README.md"
        target = readme if readme in PAGES else next_to(target)
    if target not in PAGES and (ROOT / target).is_file():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / target, folder / target)
    return os.path.relpath(staged(target), Path(staged(page)).parent) + sharp + anchor


def next_to(folder: str) -> str:
    """Return a file that shows what a folder is: its first Python file with tests, or its first file."""
    files = sorted((ROOT / folder).glob("test_*.py")) or sorted(
        each for each in (ROOT / folder).iterdir() if each.is_file()
    )
    return str(files[0].relative_to(ROOT))


# --- made from the code ---


def made() -> Iterator[tuple[str, str]]:
    """Yield the pages of the reference, each with its text."""
    yield f"{REFERENCE}/options.md", options_page()
    yield f"{REFERENCE}/commands.md", commands_page()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| name | what it does |") :].partition("\n\n")[0]
    yield f"{REFERENCE}/environment.md", f"# Environment variables\n\n{table}\n"


def options_page() -> str:
    parts = ["# Options\n\nA name that does not exist, and a value of another kind, are refused before the start."]
    for title, where, classes in OPTIONS:
        parts.append(f"## {title}\n\n{where}\n\n| option | kind | default | |\n| --- | --- | --- | --- |")
        rows = {field[0]: field for file, name in classes for field in fields_of(file, name)}
        parts[-1] += "".join(
            "\n| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows.values()
        )
    return "\n\n".join(parts) + "\n"


def fields_of(file: str, name: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, kind, default and comment of each field of a class: the comment of its line, or those above it."""
    source = (ROOT / "tensorhub_plugins" / file).read_text()
    lines = source.splitlines()
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in found.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        line = node.lineno - 1
        comment = lines[node.end_lineno - 1][node.end_col_offset :].strip().removeprefix("# ")
        while not comment.startswith("# ") and lines[line - 1].strip().startswith("# "):
            line -= 1
            comment = f"{lines[line].strip()[2:]} {comment}".strip()
        value = ast.unparse(node.value) if node.value is not None else ""
        if isinstance(node.value, ast.Name):  # a constant: its value
            value = repr(getattr(importlib.import_module(f"tensorhub_plugins.{file[:-3].replace('/', '.')}"), value))
        default = f"`{value}`" if value else "must be given"
        yield f"`{node.target.id}`", f"`{ast.unparse(node.annotation)}`", default, comment


def commands_page() -> str:
    parts = ["# Commands"]
    for command in COMMANDS:
        words = [sys.executable, "-m", "tensorhub_plugins.core.cli", *command.split(), "--help"]
        environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
        text = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
        parts.append(f"## tensorhub {command}\n\n```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
