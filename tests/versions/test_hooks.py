"""What the adapters use of vLLM is there in every version that is promised: names, what functions take, base classes.

The versions' sources come from the package index, a hundred files each, and are kept: later runs need no network.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
import vllm_sources
from vllm_sources import KEPT, Function, Sources, Unreachable, installed, keep

from tensorhub_plugins.vllm import names
from tensorhub_plugins.vllm.worker import methods

PACKAGE = Path(names.__file__).parents[1]
# Methods of vLLM's workers that may change weights: their bytes are compared.
COMPARED = ("apply_model", "elastic_ep_execute", "reset_weights")
# Attributes of torch, Ray, transformers and the standard library that vLLM calls alike.
ELSEWHERE = frozenset(
    {
        *(
            "_fields",
            "_tp_size",
            "all_gather",
            "pooling_task",
            "append",
            "architectures",
            "bind",
            "cancel",
            "exitcode",
            "headers",
            "hostname",
            "insert",
        ),
        *("loads", "observe", "popleft", "recv", "terminate", "to_dict", "weight", "weight_loader"),
    }
)
LINE = re.compile(r"(?P<module>[\w.]+):(?P<path>[\w.]+)(?P<takes>\(.*\))?(?P<exactly> exactly)?(?: \| (?P<range>.+))?$")


@dataclass(frozen=True)
class Hook:
    module: str
    path: str
    takes: str | None
    exactly: bool
    first: tuple[int, ...]
    last: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.module}:{self.path}{self.takes or ''}"

    def problem(self, sources: Sources) -> str | None:
        """Return what is wrong with it in that version."""
        found = sources.member(self.module, self.path)
        problem = f"{self} is not there" if found is None else self._mismatch(found)
        if not self.first <= minor(sources.version) <= self.last:
            return None if problem else f"{self} is there: its line says it is not"
        return problem

    def _mismatch(self, found: ast.AST) -> str | None:
        """Return how it differs from what is expected of it."""
        if self.takes is None:
            return None
        if not isinstance(found, Function):
            return f"{self} is no function"
        wanted = ast.parse(f"def f{self.takes}: ...").body[0].args  # type: ignore[attr-defined]
        problem = _difference(found, wanted, is_method="." in self.path, exactly=self.exactly)
        return f"{self} {problem}" if problem else None


def _difference(found: Any, wanted: ast.arguments, *, is_method: bool, exactly: bool) -> str | None:
    has = found.args
    is_static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in found.decorator_list)
    places = [a.arg for a in (*has.posonlyargs, *has.args)][is_method and not is_static :]
    needed = set(places[: len(places) - len(has.defaults)])
    needed |= {a.arg for a, default in zip(has.kwonlyargs, has.kw_defaults, strict=True) if default is None}
    known = {*places, *(a.arg for a in has.kwonlyargs)}
    given, named = [a.arg for a in wanted.args], [a.arg for a in wanted.kwonlyargs]
    if given != places[: len(given)]:
        return f"takes {', '.join(places)} in this order"
    if not has.kwarg and set(named) - known:
        return f"knows no {', '.join(sorted(set(named) - known))}"
    if needed - {*given, *named}:
        return f"needs {', '.join(sorted(needed - {*given, *named}))}"
    if exactly and (known - {*given, *named} or has.vararg or has.kwarg):
        return f"takes more: {ast.unparse(has)}"
    return None


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@functools.cache
def table() -> list[Hook]:
    lines = (Path(__file__).parent / "hooks.txt").read_text().splitlines()
    return [hook_of(line) for line in lines if line and not line.startswith("#")]


def hook_of(line: str) -> Hook:
    parts = LINE.match(line)
    assert parts, line
    module, path, takes, exactly, limits = parts.groups()
    ends = dict(limit.split(" ") for limit in (limits or "").split(", ") if limit)
    first, last = (minor(ends.get(which, default)) for which, default in (("from", "0.0"), ("until", "99.0")))
    return Hook(module, path, takes, bool(exactly), first, last)


@functools.cache
def package(naming: str = "") -> dict[str, ast.Module]:
    """Return the trees of our files whose text has this in it."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {file: ast.parse(text) for file, text in texts.items() if naming in text}


@functools.cache
def imports() -> dict[str, list[tuple[str, str]]]:
    """Return (module, name) of all that each file imports from vLLM, by file: once for all versions."""
    return {
        file: [
            (str(node.module), alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        ]
        for file, tree in package("from vllm").items()
    }


@functools.cache
def subclasses() -> list[tuple[str, ast.ClassDef, set[str], list[tuple[str, str]]]]:
    """Return (file, class, names it defines, bases as module and name) of our classes whose bases are vLLM's."""
    found = []
    for file, tree in package("from vllm").items():
        origins = {name: module for module, name in imports()[file]}
        for ours in (node for node in ast.walk(tree) if origins and isinstance(node, ast.ClassDef)):
            names_of_bases = [ast.unparse(base).partition("[")[0] for base in ours.bases]
            bases = [(origins[name], name) for name in names_of_bases if name in origins]
            if bases:
                found.append((file, ours, {member for member, _ in Sources("").members("", ours)}, bases))
    return found


def problems_of_imports(sources: Sources) -> Iterator[str]:
    lines = {(hook.module, hook.path) for hook in table()}
    for file, imported in imports().items():
        for module, name in imported:
            if (module, name) not in lines and not sources.find(module, name):
                yield f"{file} imports {name} of {module}, where it is not"


def problems_of_classes(sources: Sources) -> Iterator[str]:
    """Yield what a base class of vLLM asks of ours and they lack."""
    lines = {(hook.module, hook.path) for hook in table()}
    for file, ours, own, bases in subclasses():
        for origin, name in bases:
            found = sources.find(origin, name)
            if not found or not isinstance(found[1], ast.ClassDef):
                continue
            asked = {member for member, node in sources.members(*found) if _is_asked(member, node)}
            for member in sorted(asked - own):
                if (origin, f"{name}.{member}") not in lines:
                    yield f"{file}: {ours.name} has no {member}, which {name} asks for"


def _is_asked(name: str, node: ast.AST) -> bool:
    marks = node.decorator_list if isinstance(node, Function) else []
    return name == "__init_subclass__" or any("abstractmethod" in ast.unparse(mark) for mark in marks)


def problems_of_workers(sources: Sources) -> Iterator[str]:
    """Yield methods of vLLM's workers of which nobody has said whether they change weights (worker/methods.py)."""
    known = {*methods.LEAVE_WEIGHTS, *methods.CHANGE_WEIGHTS, *COMPARED}
    for module in ("gpu_worker", "cpu_worker", "xpu_worker", "worker_base"):  # the last: what vLLM puts around each
        module = f"vllm.v1.worker.{module}"
        for worker in getattr(sources.module(module), "body", ()):
            if isinstance(worker, ast.ClassDef) and worker.name.endswith(("Worker", "WorkerWrapperBase")):
                for name, node in sources.members(module, worker):
                    is_method = isinstance(node, Function) and "property" not in map(ast.unparse, node.decorator_list)
                    if is_method and not name.startswith("_") and name not in known:
                        yield f"{worker.name}.{name} may change weights: put it into worker/methods.py, or here"


def problems(sources: Sources) -> list[str]:
    of_lines = filter(None, (hook.problem(sources) for hook in table()))
    others = (problems_of_imports, problems_of_classes, problems_of_workers)
    return sorted({*of_lines, *(problem for each in others for problem in each(sources))})


@pytest.mark.heavy
@pytest.mark.long  # the first time it fetches a thousand small files
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("release", names.RELEASES.values())
def test_a_promised_version_has_all_that_the_adapters_use(release: str) -> None:
    modules = {hook.module for hook in table()} | {module for imported in imports().values() for module, _ in imported}
    kept = KEPT / release / "checked"
    if kept.exists() and kept.read_text() == asked_of(release):  # a release does not change: it has passed this before
        return
    try:
        sources = Sources(release)
        sources.prefetch(modules)
        found = problems(sources)
    except Unreachable as error:
        pytest.skip(str(error))
    assert not found, "\n".join(["", *found])
    keep(kept, asked_of(release).encode())


def asked_of(release: str) -> str:
    """Return a digest of all that the answer about a release depends on, besides its sources."""
    texts = [Path(file).read_text() for file in (__file__, vllm_sources.__file__, Path(__file__).parent / "hooks.txt")]
    ours = [(file, ours.name, sorted(own), bases) for file, ours, own, bases in subclasses()]
    known = sorted(methods.LEAVE_WEIGHTS), sorted(methods.CHANGE_WEIGHTS)
    return hashlib.sha256(repr([release, sys.version, texts, imports(), ours, known]).encode()).hexdigest()


def test_what_is_asked_of_a_release_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is asked of it: another release, method of a worker, import or class of ours."""
    asked = [asked_of("0.29.0"), asked_of("0.30.0")]
    monkeypatch.setattr(methods, "LEAVE_WEIGHTS", methods.LEAVE_WEIGHTS - {"execute_model"})
    asked.append(asked_of("0.29.0"))
    some_file = next(file for file, found in imports().items() if found)
    monkeypatch.setitem(imports(), some_file, [])
    asked.append(asked_of("0.29.0"))
    monkeypatch.setattr(sys.modules[__name__], "subclasses", list)
    asked.append(asked_of("0.29.0"))
    assert len(set(asked)) == len(asked)


def test_the_range_is_said_alike_everywhere() -> None:
    root = PACKAGE.parent
    first, *_, last = names.VERSIONS["vllm"]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm>={first},<{minor(last)[0]}.{minor(last)[1] + 1}"]
    for framework in ("verl", "openrlhf"):
        assert [d for d in extras[framework] if d.startswith("vllm")] == [f"vllm=={names.run_with(framework)[-1]}.0"]
    readme = (root / "README.md").read_text()
    assert f"vLLM {first} to {last} (vLLM's own weight transfer: from {names.WEIGHT_TRANSFER_FIRST})" in readme
    assert f"run with {names.listed(names.run_with('vllm'))}" in readme
    assert f"on every node (vLLM {names.listed(names.run_with('verl'), 'or')}, others are refused)" in readme
    assert f"(it takes vLLM {names.listed(names.run_with('openrlhf'), 'or')}, other versions are refused)" in readme
    assert list(names.RELEASES) == list(names.VERSIONS["vllm"])


@pytest.mark.slow
def test_the_installed_version_has_it_too() -> None:
    """The same of one version, without a network."""
    pytest.importorskip("vllm")
    found = problems(installed())
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("vllm.v1.engine.core:EngineCore.is_scheduler_paused()", None),
        ("vllm.v1.engine.core:EngineCore.is_paused", "is not there"),
        ("vllm.v1.engine.core:EngineCore.is_scheduler_paused() | until 0.25", "is there: its line says it is not"),
        ("vllm.v1.engine.core:EngineCore.reset_prefix_cache(reset_connector)", "in this order"),
        ("vllm.v1.engine.core:EngineCore.reset_prefix_cache(*, reset_all)", "knows no reset_all"),
        ("vllm.v1.engine.core:EngineCore.reset_prefix_cache() exactly", "takes more"),
        ("vllm.v1.engine.core:EngineCoreProc._handle_client_request(request_type)", "needs request"),
    ],
)
def test_a_version_that_lacks_something_is_noticed(line: str, says: str | None) -> None:
    pytest.importorskip("vllm")
    problem = hook_of(line).problem(installed())
    assert (problem is None) if says is None else says in str(problem)


def test_a_method_of_a_worker_that_nobody_has_looked_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vLLM's workers, of what it puts around them, and where only their base has it."""
    pytest.importorskip("vllm")
    known = methods.LEAVE_WEIGHTS
    monkeypatch.setattr(methods, "LEAVE_WEIGHTS", known - {"execute_model", "init_worker", "pin_lora"})
    found = {problem.split(" ")[0] for problem in problems_of_workers(installed())}
    assert found >= {"Worker.execute_model", "WorkerWrapperBase.init_worker", "CPUWorker.pin_lora"}


@pytest.mark.slow
def test_what_is_used_of_vllm_has_a_line() -> None:
    """A name that the adapter neither defines nor has from elsewhere, and that vLLM defines, is one of vLLM's."""
    pytest.importorskip("vllm")
    lines = {name for hook in table() for name in hook.path.split(".")}
    used = {name: where for name, where in foreign_names().items() if name not in {*lines, *ELSEWHERE}}
    unknown = {name: where for name, where in used.items() if name in defined_by_vllm()}
    assert not unknown, "put a line into hooks.txt (or a word into ELSEWHERE) for each"
    assert {"is_scheduler_paused", "response_mqs"} <= lines & set(foreign_names()) & defined_by_vllm()  # the control


@functools.cache
def foreign_names() -> dict[str, str]:
    """Return the attributes that the vLLM adapter asks of objects, and where, without those that it defines."""
    own = set(dir(builtins)).union(
        *map(dir, (torch.Tensor, torch.nn.Module, torch, str, dict, Path, type(foreign_names)))
    )
    for tree in package().values():
        for node in ast.walk(tree):
            if isinstance(node, Function | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                own.add(node.attr)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own.update(target.id for target in targets if isinstance(target, ast.Name))
    found: dict[str, str] = {}
    for file, tree in package().items():
        modules = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        for node in ast.walk(tree) if file.startswith("vllm/") else ():
            name = None
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in modules:
                name = node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if name and name not in own:
                found.setdefault(name, f"{file}:{node.lineno}")
    return found


@functools.cache
def defined_by_vllm() -> frozenset[str]:
    root = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
    places = ("v1", "config", "engine", "entrypoints", "distributed", "model_executor/model_loader", "platforms")
    pattern = re.compile(r"^ *(?:async )?(?:def|class) (\w+)|^ *self\.(\w+)\b[^=\n]*= |^    (\w+): ", re.M)
    texts = (file.read_text() for place in places for file in (root / place).rglob("*.py"))
    return frozenset(name for text in texts for names in pattern.findall(text) for name in names if name)
