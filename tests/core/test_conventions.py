"""How the code is kept readable: no constant patched, no long file or function, every variable in a table."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
from source_code import constants, environment_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tensorhub_plugins"

LINES_MAX = 620  # of one file, ours or a test: what is read in one sitting
FUNCTION_LINES_MAX = 50
# All that may happen to an update, in one table (see its header).
LONG_FUNCTIONS = {"vllm/worker/update_state.py handle"}

CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
OF_CORE = re.compile(r"tensorhub_plugins\.core[\w.]*")


# --- no test patches a constant of core ---


def patched_constants(file: Path) -> list[str]:
    """The module constants of core that a test changes: with `setattr` or `mock.patch`, or by assigning to one.

    "?" stands for a name that can only be known when the test runs.
    """
    nodes = list(ast.walk(ast.parse(file.read_text())))
    modules: dict[str, str] = {}  # what the file calls them
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Call, ast.Subscript)):
            by_name = re.match(
                rf"(sys\.modules\[|(importlib\.)?import_module\().({OF_CORE.pattern})", ast.unparse(node.value)
            )
            if by_name:
                modules |= {ast.unparse(target): by_name.group(3) for target in node.targets}

    def module_named(owner: str) -> str:
        by_name = OF_CORE.search(owner)
        first, dot, rest = owner.partition(".")
        return by_name.group() if by_name else modules.get(owner, f"{modules.get(first, first)}{dot}{rest}")

    found = []
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [(ast.unparse(each.value), each.attr) for each in targets if isinstance(each, ast.Attribute)]
        elif isinstance(node, ast.Call):
            found += _changed_by(node)
    return [
        f"{module}.{name}"
        for owner, name in found
        for module in [module_named(owner)]
        if (name == "?" or CONSTANT.fullmatch(name)) and OF_CORE.fullmatch(module) and _is_ours(module)
    ]


def _is_ours(module: str) -> bool:
    """A module, or a class in one; not what it has imported from elsewhere."""
    parts = module.split(".")
    path = ROOT.joinpath(*parts[: -1 if parts[-1][0].isupper() else None])
    return path.is_dir() or path.with_suffix(".py").is_file()


def _changed_by(call: ast.Call) -> list[tuple[str, str]]:
    """What a call of `setattr` or `mock.patch` changes: of whom, and which names."""
    function = ast.unparse(call.func)
    if not re.search(r"setattr$|patch(\.object|\.multiple)?$", function):
        return []
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    owner = call.args[0] if call.args else given.pop("target", None)
    name = call.args[1] if len(call.args) > 1 else given.pop("attribute", given.pop("name", None))
    if owner is None:
        return []
    if isinstance(owner, (ast.Constant, ast.JoinedStr)):  # "package.module.NAME"
        text = ast.unparse(owner).strip("f'\"").replace(".__name__}", "").replace("{", "")
        module, _, last = text.rpartition(".")
        return [(module, last)]
    if function.endswith("multiple"):
        return [(ast.unparse(owner), str(keyword)) for keyword in given]
    return [(ast.unparse(owner), str(name.value) if isinstance(name, ast.Constant) else "?")]


@pytest.mark.slow
def test_no_test_patches_a_constant_of_core() -> None:
    """What a test has to change an operator may have to change, too: it is a field of some limits."""
    patched = {file.name: patched_constants(file) for file in sorted((ROOT / "tests").rglob("*.py"))}
    assert {name: constants for name, constants in patched.items() if constants} == {}


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(source, "BACKLOG", 1)',
        'monkeypatch.setattr(source, name="BACKLOG", value=1)',
        'monkeypatch.setattr(f"{source.__name__}.BACKLOG", 1)',
        'patch.setattr("tensorhub_plugins.core.transports.stream.source.BACKLOG", 1)',
        'mock.patch.object(source, "BACKLOG", 1)',
        'mock.patch.object(target=source, attribute="BACKLOG", new=1)',
        'mock.patch("tensorhub_plugins.core.transports.stream.source.BACKLOG", 1)',
        "mock.patch.multiple(source, BACKLOG=1)",
        'setattr(source, "BACKLOG", 1)',
        "source.BACKLOG = 1",
        "source.BACKLOG: int = 1",
        "source.BACKLOG += 1",
        "core.transports.stream.source.BACKLOG = 1",
        "tensorhub_plugins.core.transports.stream.source.BACKLOG = 1",
        'sys.modules["tensorhub_plugins.core.transports.stream.source"].BACKLOG = 1',
        'it = import_module("tensorhub_plugins.core.transports.stream.source")\nit.BACKLOG = 1',
    ],
)
def test_a_patched_constant_is_found(line: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    where = "tensorhub_plugins.core.transports.stream"
    start = f"import {where}.source\nfrom {where} import source\nfrom tensorhub_plugins import core\n"
    file.write_text(f"{start}{line}")
    assert patched_constants(file) == [f"{where}.source.BACKLOG"]
    file.write_text(f"{start}{line.replace('BACKLOG', 'backlog')}")
    assert patched_constants(file) == []


def test_a_name_that_is_not_written_out_counts(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text('from tensorhub_plugins.core import cli\nfor n in ("A", "B"):\n    monkeypatch.setattr(cli, n, 1)')
    assert patched_constants(file) == ["tensorhub_plugins.core.cli.?"]


# --- lengths ---


def too_long(root: Path) -> list[str]:
    return [str(file) for file in sorted(root.rglob("*.py")) if len(file.read_text().splitlines()) > LINES_MAX]


def long_functions(root: Path) -> set[str]:
    return {
        f"{file.relative_to(root)} {node.name}"
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    }


def test_no_file_is_too_long(tmp_path: Path) -> None:
    assert [*too_long(PACKAGE), *too_long(ROOT / "tests"), *too_long(ROOT / "recipes")] == []
    (tmp_path / "file.py").write_text("pass\n" * LINES_MAX)
    assert too_long(tmp_path) == []
    (tmp_path / "file.py").write_text("pass\n" * (LINES_MAX + 1))
    assert too_long(tmp_path) == [str(tmp_path / "file.py")]


def test_no_function_is_too_long(tmp_path: Path) -> None:
    assert long_functions(PACKAGE) == LONG_FUNCTIONS
    for name, lines in (("f", FUNCTION_LINES_MAX - 1), ("g", FUNCTION_LINES_MAX)):
        (tmp_path / f"{name}.py").write_text(f"def {name}():\n" + "    pass\n" * lines)
    assert long_functions(tmp_path) == {"g.py g"}


# --- what `python -O` leaves out ---


def guards(folder: Path) -> list[str]:
    """The asserts here that are more than a word to the type checker (`is not None`, `isinstance`): they would look at
    something, or do something, that `python -O` leaves out."""
    return [
        f"{file.relative_to(folder)}: {ast.unparse(node)}"
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert) and "testing" not in file.parts and not _is_for_types(node.test)
    ]


def _is_for_types(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(ast.And(), values):
            return all(map(_is_for_types, values))
        case ast.Compare(of, [ast.IsNot()], [ast.Constant(None)]):
            return isinstance(of, ast.Name | ast.Attribute | ast.Subscript)
        case ast.Call(ast.Name("isinstance"), [ast.Name() | ast.Attribute(), _]):
            return True
    return False


def test_no_assert_guards_anything(tmp_path: Path) -> None:
    assert guards(PACKAGE) == []
    for line in ("queue.popleft() == segment", "self._holds_together", "0 < size", "find(x) is not None"):
        (tmp_path / "a.py").write_text(f"assert {line}")
        assert guards(tmp_path) == [f"a.py: assert {line}"]
    (tmp_path / "a.py").write_text("assert x is not None and isinstance(y, Z)")
    assert guards(tmp_path) == []


# --- what a text names is there ---


def not_there(text: str, files: set[str]) -> set[str]:
    """The files of Python that this text names and nobody has."""
    return set(re.findall(r"\b\w+\.py\b", text)) - files


# Where only the kernel's own files are read, which are ASCII.
OF_THE_KERNEL = {
    "core/device/drivers.py", "core/machine.py", "core/process_lifetime.py", "core/protocol/advertised.py",
    "core/transports/rdma/rails.py", "core/transports/shm/process_memory.py",
}  # fmt: skip


def without_encoding(package: Path) -> list[str]:
    """Texts that are read or written in whatever encoding the user's locale has."""
    return [
        f"{name}: {line.strip()}"
        for file in sorted(package.rglob("*.py"))
        for name in [str(file.relative_to(package))]
        for line in file.read_text().splitlines()
        if re.search(r"(?<!files)\.(read|write)_text\(", line) and "utf-8" not in line and name not in OF_THE_KERNEL
    ]


def test_no_text_is_in_the_encoding_of_the_locale(tmp_path: Path) -> None:
    assert without_encoding(PACKAGE) == []
    (tmp_path / "a.py").write_text("p.read_text()\np.write_text('x')\np.read_text('utf-8')\np.read_bytes()\n")
    assert without_encoding(tmp_path) == ["a.py: p.read_text()", "a.py: p.write_text('x')"]


def test_files_that_a_text_names_are_there() -> None:
    files = {file.name for folder in (PACKAGE, ROOT / "tests", ROOT / "recipes") for file in folder.rglob("*.py")}
    texts = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    of_others = {"llama.py"}  # vLLM's
    assert {str(file): names for file in texts if (names := not_there(file.read_text(), files | of_others))} == {}
    assert not_there("see hub.py and hublink.py", files) == {"hublink.py"}


# --- environment variables ---


def test_contributing_names_every_environment_variable() -> None:
    """A table that nobody checks is soon wrong."""
    sources = {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}
    named = {name: text for source in sources.values() for name, text in constants(source).items()}
    used = {name for source in sources.values() for name in re.findall(r"TENSORHUB_[A-Z0-9_]+", source)}
    for name, source in sources.items():
        variables, unclear = environment_of(source, named)
        assert not unclear, f"{name}: which variables?"
        used |= variables
    assert used == set(re.findall(r"^\| `(\w+)`", _environment_variables(), re.MULTILINE))


def _environment_variables() -> str:
    """The table of CONTRIBUTING."""
    return (ROOT / "CONTRIBUTING.md").read_text().split("## Environment variables")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    "line",
    [
        'os.environ.get("NEW_ONE", "")',
        'os.environ["NEW_ONE"]',
        'os.environ["NEW_ONE"] = "1"',
        'os.environ.setdefault("NEW_ONE", "1")',
        'os.getenv("NEW_ONE")',
        'getenv("NEW_ONE")',
        'environ.pop("NEW_ONE")',
        '"NEW_ONE" in os.environ',
        "os.environ.get(HERE)",
        "os.environ.get(THERE)",
        'for name in (HERE, "NEW_ONE"):\n    os.environ.get(name)',
    ],
)
def test_a_variable_is_found(line: str) -> None:
    assert environment_of(f'HERE = "NEW_ONE"\n{line}', {"THERE": "NEW_ONE", "HERE": "another file's"}) == (
        {"NEW_ONE"},
        [],
    )


@pytest.mark.parametrize(
    "line", ["dict(os.environ)", "os.environ.get(some())", "os.environ.copy()", "getenv(f'A_{x}')"]
)
def test_a_variable_that_cannot_be_known_is_found(line: str) -> None:
    used, unclear = environment_of(line, {})
    assert not used and len(unclear) == 1


# --- commit subjects ---

SUBJECT_LENGTH_MAX = 72


def git(*arguments: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run git there, also from a hook, which is told of its own repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(["git", *arguments], cwd=at, env=environment, capture_output=True, text=True, check=False)


def new_subjects(root: Path) -> list[str]:
    """The subjects of the commits that main does not have. Skips where there is no main to compare with."""
    for base in ("main", "origin/main"):
        try:
            found = git("log", "--no-merges", "--format=%s", f"{base}..HEAD", "--", at=root)
        except FileNotFoundError:
            pytest.skip("there is no git")
        if found.returncode == 0:
            return found.stdout.splitlines()
    pytest.skip("there is no branch main to compare with: a clone of one commit, or no clone")


def over_long(subjects: list[str]) -> list[str]:
    return [subject for subject in subjects if len(subject) > SUBJECT_LENGTH_MAX]


def test_the_subject_of_a_new_commit_fits_in_a_line() -> None:
    assert over_long(new_subjects(ROOT)) == []


def test_a_subject_that_is_too_long_is_found(tmp_path: Path) -> None:
    commit = (
        "-c",
        "user.name=x",
        "-c",
        "user.email=x",
        "-c",
        "core.hooksPath=",
        "commit",
        "--allow-empty",
        "--message",
    )
    for arguments in (
        ("init", "--initial-branch=main"),
        (*commit, f"core: old {'x' * 72}"),
        ("checkout", "-b", "new"),
        (*commit, f"core: {'x' * 66}"),
        (*commit, f"core: {'x' * 67}\n\nWhy."),
    ):
        done = git(*arguments, at=tmp_path)
        assert done.returncode == 0, done.stderr
    assert over_long(new_subjects(tmp_path)) == [f"core: {'x' * 67}"]


# --- recipes, which neither mypy nor a quick test sees whole ---


def bound_in(file: Path) -> set[str]:
    """Return the names that a module binds outside of functions and classes."""
    found: set[str] = set()
    open_ = list(ast.parse(file.read_text()).body)
    while open_:
        node = open_.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
                continue
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(each.asname or each.name).partition(".")[0] for each in names}
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
        open_ += ast.iter_child_nodes(node)
    return found


def unbound(root: Path, folder: str = "recipes") -> list[str]:
    """Return what modules of this folder import from modules of ours which do not have it."""
    found = []
    for file in sorted((root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                ("recipes", "tensorhub_plugins")
            ):
                continue
            place = root / str(node.module).replace(".", "/")
            module = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
            names = bound_in(module) if module.exists() else set()
            lost = [each.name for each in node.names if each.name not in names]
            lost = [name for name in lost if "__getattr__" not in names and not list(place.glob(f"{name}*"))]
            found += [f"{file.relative_to(root)}: {node.module} has no {name}" for name in lost]
    return found


def test_what_recipes_import_of_ours_is_there(tmp_path: Path) -> None:
    assert unbound(ROOT) == []
    (tmp_path / "recipes/demo").mkdir(parents=True)
    (tmp_path / "recipes/demo/one.py").write_text("import os\nif os:\n    A = 1\ndef b(): c = 1\n")
    text = "from recipes.demo.one import A, b, c, os\nfrom recipes.demo import one, two\nfrom recipes.no import x\n"
    (tmp_path / "recipes/other.py").write_text(text)
    assert [each.rpartition(": ")[2] for each in unbound(tmp_path)] == [
        "recipes.demo.one has no c",
        "recipes.demo has no two",
        "recipes.no has no x",
    ]


# --- the changelog ----------------------------------------------------------------------------------------------------

CHANGE_LENGTH_MAX = 150
HEADINGS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]  # Keep a Changelog's, in its order


def wrong_changes(text: str) -> list[str]:
    """Return what is not one line a change, below headings that come once each."""
    _, _, listed = text.partition("\n## [Unreleased]\n")
    lines = [line for line in listed.split("\n## [")[0].splitlines() if line]
    headings = [line.removeprefix("### ") for line in lines if line.startswith("#")]
    wrong = [line for line in lines if not line.startswith(("- ", "### ")) or len(line) > CHANGE_LENGTH_MAX]
    return wrong + ([] if headings == [each for each in HEADINGS if each in headings] else headings)


def test_the_changelog_has_one_line_a_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert wrong_changes(text) == []
    begin = "\n## [Unreleased]\n\n### Added\n"
    for more in (
        "- one\n  that goes on\n",
        f"- {'long ' * 40}\n",
        "- one\n\n### Added\n- two\n",
        "\n### Other\n- one\n",
    ):
        assert wrong_changes(begin + more)
    assert wrong_changes(begin + "- one\n\n### Fixed\n- two\n") == []
