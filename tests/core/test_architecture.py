"""Who may import whom, and what the pure modules may not touch. Each rule has controls that must break it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from source_code import Import, below, imports, loops, module_of, offered_by

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tensorhub_plugins"

# Of core. Later lines import earlier ones, never the other way round; rooms on one line do not know each other.
LAYERS = [
    {"errors"},
    {"log", "threads"},
    {"digests", "device"},
    {"deltas"},
    {"types", "run_log", "progress", "deadline", "process_lifetime", "machine", "work", "files"},
    {"options", "resources"},
    {"manifest"},
    {"protocol", "memory"},
    {"security"},
    {"hub", "transports"},
    {"transfer"},
    {"client"},
    {"operations", "folders"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

SHELLS_OF_THE_HUB = {  # all else there decides
    f"core.hub.{name}" for name in ("server", "exposition", "unfinished", "__init__")
}


def pure_of(package: Path) -> set[str]:
    """Return the modules that decide, and leave it to a shell to act: by their place or by what they say of themselves.
    Time, randomness and identity are arguments of theirs."""
    return {
        module
        for file in package.rglob("*.py")
        for module in [module_of(file, package)]
        for says in [ast.get_docstring(ast.parse(file.read_text())) or ""]
        if module not in SHELLS_OF_THE_HUB and (_is_in(module, "core.hub") or re.search(r"\bPURE\b(?! but)", says))
    }


# All that pure modules need. What is not here has a clock, chance, a socket, a thread, or is torch.
LIBRARIES_OF_PURE = {
    "__future__", "bisect", "blake3", "collections", "dataclasses", "difflib", "enum", "functools", "heapq",
    "itertools", "json", "math", "hashlib", "hmac", "msgspec", "re", "shlex", "typing", "typing_extensions", "weakref",
    "xxhash", "zlib",
}  # fmt: skip
# Of ours, beside each other. `Deadline` asks the clock.
HELPERS_OF_PURE = {
    "core.errors",
    "core.deadline.bounded",
    "core.deadline.TIMEOUT_S",
    "core.deadline.remaining_s",
    "core.deadline.size_s",
    "verl.config",
}

# All others are adapters: they know core, vllm and themselves. So is a folder that nobody has named here.
SHARED = {"core": {"core"}, "vllm": {"core", "vllm"}}
NOT_INSTALLED = {"recipes", "tests"}  # beside us
NEVER = [
    ("core.hub", "core.memory"),
    ("core.hub", "core.transports"),
    ("core.client", "core.hub.server"),
]
LAZY = {("core.cli", "verl.doctor"), ("core.cli", "openrlhf.doctor")}  # by name, when a command asks for them

# What adapters may know of core, besides the names that its package offers.
FOR_ADAPTERS = {"files", "options", "run_log", "log", "progress", "work"}

Rule = Callable[[Iterable[Import]], list[str]]


def _is_in(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def _as_defined(imported: str) -> str:
    """Below our package, under the name of its module: `core.Client` is `core.client.client.Client`."""
    package, _, name = below(imported).partition(".")
    first, dot, rest = name.partition(".")
    return (
        OFFERED.get(first, below(imported)) + dot + rest if package == "core" and first in OFFERED else below(imported)
    )


OFFERED = offered_by(PACKAGE / "core" / "__init__.py")
PURE, PURE_MIN = pure_of(PACKAGE), 57


def upward(found: Iterable[Import]) -> list[str]:
    wrong = []
    for module, imported in found:
        parts, others = module.split("."), _as_defined(imported).split(".")
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
    known = PURE | HELPERS_OF_PURE
    wrong = []
    for module, imported in found:
        ours = _as_defined(imported)
        is_fine = imported.split(".")[0] in LIBRARIES_OF_PURE
        if ours:  # what stands above one of them is only named on the way to it
            is_fine = any(_is_in(ours, name) or _is_in(name, ours) for name in known)
        if module in PURE and not is_fine and ours != imported != "tensorhub_plugins":
            wrong.append(f"{module} imports {imported}")
    return wrong


def forbidden(found: Iterable[Import]) -> list[str]:
    wrong = []
    for module, imported in found:
        who, ours = module.split(".")[0], below(imported)
        whom = (ours or imported).split(".")[0]
        may = SHARED.get(who, {"core", "vllm", who})
        is_adapter = (PACKAGE / whom).is_dir() and whom not in may  # ours, or the framework of that name
        is_never = any(_is_in(module, one) and _is_in(ours, other) for one, other in NEVER)
        is_lazy = any(module == one and _is_in(ours, other) for one, other in LAZY)
        if (is_adapter and not is_lazy) or is_never or whom in NOT_INSTALLED:
            wrong.append(f"{module} imports {imported}")
    return wrong


def inner(found: Iterable[Import]) -> list[str]:
    return [
        f"{module} imports {imported}"
        for module, imported in found
        for first, *rooms in [below(imported).split(".")]
        if module.split(".")[0] not in ("core", "__init__")
        and first == "core"
        and rooms
        and rooms[0] in LEVEL.keys() - FOR_ADAPTERS
    ]


# How torch and CUDA are asked to touch a device, by the names that stand for it in code.
OF_A_DEVICE = re.compile(
    r"torch\.(cuda|accelerator|Stream|Event)\b|torch\._C\._cuda|\.(cuda|cpu|pin_memory|is_pinned)\(|cudart|cudaHost"
    r"|libcuda|\.cu[A-Z]"
    r"|\b(current_|wait_|default_)stream\b|\brecord_stream\b|\bset_device\b"
)
TO_A_DEVICE = re.compile(r"(^|\.)device$|^f?['\"](cpu|cuda)")
DRIVERS = "core.device.drivers"
# CUDA's handles of memory, by libcuda: within calls of the device, which it is given.
HANDLES, OF_LIBCUDA = {"core.device.libcuda", "core.transports.cuda_ipc.driver"}, re.compile(r"libcuda|\.cu[A-Z]")


def touching(package: Path) -> list[str]:
    """What touches a device, or pins memory, or knows a stream, outside of the module for it."""
    found = []
    for file in sorted(package.rglob("*.py")):
        module, tree = module_of(file, package), ast.parse(file.read_text())
        found += [
            f"{module}: {what}"
            for what in _touches(tree)
            if module != DRIVERS and not (module in HANDLES and OF_LIBCUDA.search(what))
        ]
    return found


def _touches(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (f"{base}{a.name}" for a in node.names if OF_A_DEVICE.search(f"{base}{a.name}"))
        elif (
            isinstance(node, ast.Constant)
            and str(node.value).startswith("libcuda")
            or isinstance(node, ast.Attribute)
            and OF_A_DEVICE.search(ast.unparse(node))
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            targets = [*node.args, *keywords.values()] if getattr(node.func, "attr", "") == "to" else []
            is_to_device = any(TO_A_DEVICE.search(ast.unparse(target)) for target in targets)
            function = ast.unparse(node.func) + "("
            if is_to_device or keywords.keys() & {"non_blocking", "pin_memory"} or OF_A_DEVICE.search(function):
                yield ast.unparse(node)


RULES: list[Rule] = [upward, impure, forbidden, inner]


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_hold(rule: Rule) -> None:
    assert rule(imports(PACKAGE)) == []


CORE = "tensorhub_plugins.core"


@pytest.mark.parametrize(
    ("rule", "file", "line"),
    [
        (upward, "core/errors.py", f"from {CORE}.types import Location"),
        (upward, "core/memory/slab.py", f"from {CORE}.transports import tcp"),
        (upward, "core/memory/slab.py", "from ..transports import tcp"),
        (upward, "core/memory/slab.py", f"from {CORE} import Client"),
        (upward, "core/memory/slab.py", f"import {CORE}.transports.tcp as t"),
        (upward, "core/hub/hub.py", f"def f():\n    from {CORE} import client"),
        (upward, "core/hub/hub.py", f"def f():\n    import_module('{CORE}.client.client')"),
        (upward, "core/newroom/thing.py", f"from {CORE} import errors"),
        (impure, "core/hub/hub.py", "import time"),
        (impure, "core/hub/hub.py", "from uuid import uuid4"),
        (impure, "core/hub/hub.py", "from numpy import random as chance"),
        (impure, "core/hub/hub.py", "import time as _t"),
        (impure, "core/hub/hub.py", f"from {CORE}.deadline import Deadline"),
        (impure, "core/hub/hub.py", f"from {CORE} import deadline\nnow = deadline.Deadline.after(0)"),
        (impure, "core/hub/hub.py", f"from {CORE} import Deadline"),
        (impure, "core/hub/hub.py", "from .server import time"),
        (impure, "core/hub/hub.py", "def f():\n    import importlib"),
        (impure, "core/memory/moves.py", "def f():\n    from torch import Tensor"),
        (impure, "vllm/worker/update_state.py", "import threading"),
        (impure, "vllm/worker/update_state.py", "from tensorhub_plugins.vllm.worker import updater"),
        (impure, "vllm/worker/update_state.py", f"from {CORE} import Client"),
        (forbidden, "core/client/client.py", f"from {CORE}.hub.server import start_server"),
        (forbidden, "core/client/client.py", f"from {CORE} import hub\nhub.server.start_server()"),
        (forbidden, "verl/config.py", "import tensorhub_plugins.openrlhf.config"),
        (forbidden, "verl/config.py", "import tensorhub_plugins.openrlhf.config as c"),
        (forbidden, "verl/config.py", "from ..openrlhf import config"),
        (forbidden, "verl/config.py", "names = ['tensorhub_plugins.openrlhf.config']"),
        (forbidden, "core/client/client.py", "from tensorhub_plugins import vllm"),
        (forbidden, "core/client/client.py", "import vllm"),
        (forbidden, "newone/config.py", "from tensorhub_plugins.verl import config"),
        (forbidden, "vllm/config.py", "from recipes import demo"),
        (inner, "verl/config.py", f"from {CORE}.errors import UsageError"),
        (inner, "verl/config.py", f"import {CORE}.hub.server"),
        (inner, "verl/config.py", f"from {CORE}.hub import *"),
        (inner, "verl/config.py", "from tensorhub_plugins import core\nHub = core.hub.hub.Hub"),
        (inner, "newone/config.py", f"from {CORE}.errors import UsageError"),
        (inner, "vllm/worker/updater.py", f"def f():\n    from {CORE} import client"),
        (inner, "vllm/worker/updater.py", f"if TYPE_CHECKING:\n    pass\nelse:\n    from {CORE} import client"),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(rule: Rule, file: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert len(rule(imports(tmp_path))) >= 1
    path.write_text("import typing\nif typing.TYPE_CHECKING:\n    " + line.replace("\n", "\n    "))
    if "newroom" not in file:
        assert rule(imports(tmp_path)) == []


def test_every_room_of_core_is_on_a_level_and_in_its_readme() -> None:
    rooms = {
        path.stem for path in (PACKAGE / "core").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__"} == set(LEVEL)
    table = (PACKAGE / "core" / "README.md").read_text().partition("| package |")[2].partition("\n\n")[0]
    named = [
        {name.strip("/") for name in re.findall(r"`([a-z_]+/?)`", line.split("|")[1])}
        for line in table.splitlines()[2:]
    ]
    assert named == LAYERS


def test_only_one_module_touches_a_device() -> None:
    assert touching(PACKAGE) == []
    tree = ast.parse((PACKAGE / "core" / "device" / "drivers.py").read_text())
    assert {"torch.cuda"} <= set(_touches(tree))  # it would be found there


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda",
        "from torch.cuda import Stream",
        "one.copy_(other, non_blocking=True)",
        "torch.empty(3, pin_memory=True)",
        "one.pin_memory()",
        "one.cuda()",
        "one.cpu()",
        "one.to('cpu', dtype)",
        "one.to(other.device)",
        "one.to(device=device)",
        "one.record_stream(stream)",
        "torch.cuda.current_stream().wait_stream(other)",
        "library.cudaHostRegister(address, size, 0)",
        "ctypes.CDLL('libcuda.so.1')",
        "library.cuMemGetHandleForAddressRange(fd, address, size, 1, 0)",
        "torch.Stream()",
        "torch.accelerator.synchronize()",
    ],
)
def test_who_touches_a_device_is_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "core" / "memory" / "slab.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"def f():\n    {line}")
    assert touching(tmp_path)
    drivers = tmp_path / "core" / "device" / "drivers.py"
    drivers.parent.mkdir()
    path.rename(drivers)
    assert touching(tmp_path) == []
    drivers.write_text("one.to(torch.float32)\nthreading.Event()\nasyncio.StreamReader()")
    drivers.rename(path)
    assert touching(tmp_path) == []


def test_no_module_imports_itself_on_a_round_way(tmp_path: Path) -> None:
    def found(package: Path) -> list[str]:
        return loops(imports(package, lazy=False), (module_of(file, package) for file in package.rglob("*.py")))

    assert found(PACKAGE) == []
    for name, line in (("a", "from tensorhub_plugins.b import x"), ("b", "from . import c"), ("c", "from . import a")):
        (tmp_path / f"{name}.py").write_text(line)
    (tmp_path / "d.py").write_text("from . import a")
    assert found(tmp_path) == ["a", "b", "c"]
    (tmp_path / "c.py").write_text("def later():\n    from . import a")
    assert found(tmp_path) == []


def test_all_pure_modules_are_held(tmp_path: Path) -> None:
    assert len(PURE) >= PURE_MIN and {"core.hub.hub", "core.client.session", "vllm.ray.members"} <= PURE
    for name, text in (("core/hub/quota.py", ""), ("verl/plan.py", '"""Plans. PURE."""'), ("verl/free.py", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert pure_of(tmp_path) == {"core.hub.quota", "verl.plan"}


def too_deep(core: Path) -> list[str]:
    return [str(file.relative_to(core)) for file in core.rglob("*.py") if len(file.relative_to(core).parts) > 3]


def test_rooms_are_at_most_two_deep(tmp_path: Path) -> None:
    assert too_deep(PACKAGE / "core") == []
    for folder in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        folder.mkdir(parents=True)
        (folder / "file.py").touch()
    assert too_deep(tmp_path) == ["a/b/c/file.py"]
