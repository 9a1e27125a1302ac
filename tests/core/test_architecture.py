"""Who may import whom, and what the pure modules may not touch. Each rule has a control that must break it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tensorhub_plugins"

# Of core. Later lines import earlier ones, never the other way round; rooms on one line do not know each other.
LAYERS = [
    {"errors", "log"},
    {"types", "options", "run_log", "deadline"},
    {"manifest"},
    {"protocol", "memory"},
    {"hub", "transports"},
    {"transfer"},
    {"client"},
    {"testing", "cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# Decide, and leave it to a shell to act: time, randomness and identity are arguments.
PURE = {
    "types",
    "manifest",
    "protocol.messages",
    "hub.candidates",
    "hub.following",
    "hub.hub",
    "hub.limits",
    "hub.outbox",
    "hub.publishing",
    "hub.reading",
    "hub.registry",
    "hub.report",
    "hub.selection",
    "hub.state",
    "hub.waiters",
    "memory.moves",
    "transfer.events",
    "transfer.limits",
    "transfer.replication",
    "transfer.sharing",
    "transports.limits",
    "client.session",
    "client.shelf",
}
PURE_IN_ADAPTERS = {
    "vllm.engine.spans",
    "vllm.ray.fleet_events",
    "vllm.ray.fleet_state",
    "vllm.ray.fleet_types",
    "vllm.worker.update_state",
    "openrlhf.work",
    "verl.checks",
    "verl.health",
    "verl.versions",
}
CLOCKS_AND_CHANCE = {"time", "random", "os"}
SHELLS = {"asyncio", "logging", "queue", "select", "socket", "threading", "torch", "zmq"}
BANNED_IN_PURE = CLOCKS_AND_CHANCE | SHELLS

# (who, never whom). The one lazy exception is the command `tensorhub doctor`, which is named below.
NEVER = [
    ("core", "vllm"),
    ("core", "verl"),
    ("core", "openrlhf"),
    ("vllm", "verl"),
    ("vllm", "openrlhf"),
    ("verl", "openrlhf"),
    ("openrlhf", "verl"),
    ("core.hub", "core.memory"),
    ("core.hub", "core.transports"),
    ("core.client", "core.hub.server"),
]
EXCEPTIONS = {("core.cli", "vllm")}

# What adapters may know of core, besides the names that its package offers.
ADAPTERS = ("vllm", "verl", "openrlhf")
FOR_ADAPTERS = {"options", "run_log", "log"}

LINES_MAX = 620  # of one file, ours or a test: what is read in one sitting

CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")

Import = tuple[str, str]  # module, what it imports; both below tensorhub_plugins, or a name of the standard library


def imports(files: Iterable[Path], package: Path) -> Iterator[Import]:
    """What is imported when the code runs, at the top of a file or inside a function."""
    for file in files:
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        for node in _runtime_nodes(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((module, _below(alias.name)) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                base = _below(node.module)
                yield module, base
                # `from package import module` names a module, too.
                if node.module.startswith("tensorhub_plugins"):
                    yield from ((module, _below(f"{node.module}.{alias.name}")) for alias in node.names)


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from _runtime_nodes(child)


def _below(module: str) -> str:
    return module.removeprefix("tensorhub_plugins.") if module.startswith("tensorhub_plugins.") else module


def _is_in(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def upward(found: Iterable[Import]) -> list[str]:
    wrong = []
    for module, imported in found:
        parts, others = module.split("."), imported.split(".")
        if parts[0] != "core" or others[0] != "core" or len(parts) < 2 or len(others) < 2:
            continue
        room, other = parts[1], others[1]
        if room not in LEVEL:
            if room != "__init__":
                wrong.append(f"{module} is on no level")
        elif other in LEVEL and room != other and LEVEL[other] >= LEVEL[room]:
            wrong.append(f"{module} imports {imported}")
    return wrong


def impure(found: Iterable[Import]) -> list[str]:
    pure = {f"core.{module}" for module in PURE} | PURE_IN_ADAPTERS
    return [
        f"{module} imports {imported}"
        for module, imported in found
        if module in pure and imported.split(".")[0] in BANNED_IN_PURE
    ]


def forbidden(found: Iterable[Import]) -> list[str]:
    return [
        f"{module} imports {imported}"
        for module, imported in found
        for who, whom in NEVER
        if _is_in(module, who) and _is_in(imported, whom) and (module, whom) not in EXCEPTIONS
    ]


def inner(found: Iterable[Import]) -> list[str]:
    return [
        f"{module} imports {imported}"
        for module, imported in found
        if module.split(".")[0] in ADAPTERS
        for first, *rooms in [imported.split(".")]
        if first == "core" and rooms and rooms[0] in LEVEL.keys() - FOR_ADAPTERS
    ]


def patched_constants(file: Path) -> list[str]:
    """The module constants of core that a test changes: with `setattr` or `mock.patch`, or by assigning to one."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    modules = {}  # what the file calls them
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    changed = []
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            changed += [(each.value, each.attr) for each in targets if isinstance(each, ast.Attribute)]
        elif isinstance(node, ast.Call) and re.search(r"setattr$|patch(\.object|\.multiple)?$", ast.unparse(node.func)):
            owner, *others = [*node.args, None]
            if isinstance(owner, ast.Constant):  # "package.module.NAME"
                module, _, name = str(owner.value).rpartition(".")
                changed.append((ast.Name(module), name))
            elif owner is not None:
                names = [each.value for each in others if isinstance(each, ast.Constant)]
                names += [keyword.arg for keyword in node.keywords]
                changed += [(owner, str(name)) for name in names[: None if "multiple" in ast.unparse(node.func) else 1]]
    found = [(modules.get(ast.unparse(owner), ast.unparse(owner)), name) for owner, name in changed]
    return [
        f"{module}.{name}"
        for module, name in found
        if CONSTANT.fullmatch(name) and module.startswith("tensorhub_plugins.core")
    ]


def found_in(package: Path) -> list[Import]:
    return list(imports(sorted(package.rglob("*.py")), package))


@pytest.mark.parametrize("rule", [upward, impure, forbidden, inner])
def test_the_rules_hold(rule: object) -> None:
    assert rule(found_in(PACKAGE)) == []  # type: ignore[operator]


@pytest.mark.parametrize(
    ("rule", "file", "line"),
    [
        (upward, "core/errors.py", "from tensorhub_plugins.core.types import Location"),
        (upward, "core/memory/slab.py", "from tensorhub_plugins.core.transports import tcp"),
        (upward, "core/hub/hub.py", "def f():\n    from tensorhub_plugins.core import client"),
        (upward, "core/newroom/thing.py", "from tensorhub_plugins.core import errors"),
        (impure, "core/hub/hub.py", "import time"),
        (impure, "core/memory/moves.py", "def f():\n    from torch import Tensor"),
        (impure, "vllm/worker/update_state.py", "import threading"),
        (forbidden, "core/client/client.py", "from tensorhub_plugins.core.hub.server import start_server"),
        (forbidden, "verl/config.py", "import tensorhub_plugins.openrlhf.config"),
        (forbidden, "core/client/client.py", "from tensorhub_plugins import vllm"),
        (inner, "verl/config.py", "from tensorhub_plugins.core.errors import UsageError"),
        (inner, "vllm/worker/updater.py", "def f():\n    from tensorhub_plugins.core import client"),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(rule: object, file: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(rule(found_in(tmp_path))) >= 1  # type: ignore[operator]
    path.write_text(f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line.splitlines()[-1].strip()}")
    if "newroom" not in file:
        assert rule(found_in(tmp_path)) == []  # type: ignore[operator]


def test_no_test_patches_a_constant_of_core() -> None:
    """What a test has to change an operator may have to change, too: it is a field of some limits."""
    patched = {file.name: patched_constants(file) for file in sorted((ROOT / "tests").rglob("*.py"))}
    assert {name: constants for name, constants in patched.items() if constants} == {}


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(source, "BACKLOG", 1)',
        'patch.setattr("tensorhub_plugins.core.transports.stream.source.BACKLOG", 1)',
        'mock.patch.object(source, "BACKLOG", 1)',
        'mock.patch("tensorhub_plugins.core.transports.stream.source.BACKLOG", 1)',
        "mock.patch.multiple(source, BACKLOG=1)",
        "source.BACKLOG = 1",
        "tensorhub_plugins.core.transports.stream.source.BACKLOG = 1",
    ],
)
def test_a_patched_constant_is_found(line: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    where = "tensorhub_plugins.core.transports.stream"
    file.write_text(f"import {where}.source\nfrom {where} import source\n{line}")
    assert patched_constants(file) == [f"{where}.source.BACKLOG"]
    file.write_text(f"import {where}.source\nfrom {where} import source\n{line.replace('BACKLOG', 'backlog')}")
    assert patched_constants(file) == []


def test_all_pure_modules_are_there() -> None:
    pure = {f"core.{module}" for module in PURE} | PURE_IN_ADAPTERS
    assert [module for module in pure if not (PACKAGE / f"{module.replace('.', '/')}.py").exists()] == []


def test_rooms_are_at_most_two_deep() -> None:
    deep = [str(file) for file in (PACKAGE / "core").rglob("*.py") if len(file.relative_to(PACKAGE / "core").parts) > 3]
    assert deep == []


def too_long(root: Path) -> list[str]:
    return [str(file) for file in sorted(root.rglob("*.py")) if len(file.read_text().splitlines()) > LINES_MAX]


def test_no_file_is_too_long(tmp_path: Path) -> None:
    assert [*too_long(PACKAGE), *too_long(ROOT / "tests"), *too_long(ROOT / "recipes")] == []
    (tmp_path / "file.py").write_text("pass\n" * LINES_MAX)
    assert too_long(tmp_path) == []
    (tmp_path / "file.py").write_text("pass\n" * (LINES_MAX + 1))
    assert too_long(tmp_path) == [str(tmp_path / "file.py")]


def test_contributing_names_every_environment_variable() -> None:
    """A table that nobody checks is soon wrong."""
    used = {name for file in PACKAGE.rglob("*.py") for name in re.findall(r"TENSORHUB_[A-Z_]+[A-Z]", file.read_text())}
    table = set(re.findall(r"^\| `(TENSORHUB_[A-Z_]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert used == table
