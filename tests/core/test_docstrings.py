"""Everything public in core says what it is; an interface is described once. And every docstring says it in English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tensorhub_plugins"
CORE = PACKAGE / "core"


def public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Classes, functions and methods of which no name on the way begins with an underscore."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            name = f"{prefix}{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{name}.")


def is_described(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return ast.get_docstring(node) is not None or any("overload" in ast.unparse(d) for d in node.decorator_list)


def interfaces(sources: list[str]) -> set[str]:
    """The methods of all protocols, and of classes from which others inherit."""
    kinds = [node for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for kind in kinds for base in kind.bases}
    return {
        name
        for kind in kinds
        if kind.name in bases or any("Protocol" in ast.unparse(base) for base in kind.bases)
        for name, node in public(kind)
        if is_described(node)
    }


def undocumented(source: str, described: set[str]) -> list[str]:
    tree = ast.parse(source)
    missing = [] if ast.get_docstring(tree) else ["the file"]
    for name, node in public(tree):
        is_method_of_an_interface = "." in name and node.name in described
        if not is_described(node) and not is_method_of_an_interface:
            missing.append(name)
    return missing


def test_everything_public_in_core_is_described() -> None:
    sources = {str(file.relative_to(CORE)): file.read_text() for file in CORE.rglob("*.py")}
    described = interfaces(list(sources.values()))
    assert {"read", "serve"} <= described
    assert {file: names for file, source in sources.items() if (names := undocumented(source, described))} == {}


def test_what_is_not_described_is_found() -> None:
    source = "class A:\n    def read(self): ...\n    def other(self): ...\ndef read(): ...\ndef _f(): ..."
    assert undocumented(source, {"read"}) == ["the file", "A", "A.other", "read"]
    assert undocumented('"""A file."""\ndef f():\n    """Does."""', set()) == []


# --- docstrings of functions are imperative sentences, in the field's words ---

# No imperative sentence begins with one of these.
NO_VERB = re.compile(
    r"""(a|about|above|after|again|against|all|also|always|among|an|and|another|any|around|as|at|back|because|before|behind
    |below|beside|between|beyond|both|but|by|bytes|down|during|each|either|else|enough|even|ever|every|few|for|from|here
    |how|however|if|in|inside|instead|into|it|its|just|last|least|less|like|many|more|most|much|names|neither|never|next
    |no|none|nor|not|nothing|now|numbers|of|off|on|once|one|only|or|other|out|outside|over|own|part|per|rather|same
    |seconds|several|since|so|some|still|such|than|that|the|their|then|there|these|they|this|those|through|till|to
    |together|too|toward|true|false|twice|two|under|unless|until|up|upon|very|what|when|where|whether|which|while|who
    |whoever|whom|whose|why|with|within|without|yet|you)\Z""",
    re.I | re.X,
)
# A process is an `it`: say reader, source, caller, worker, no worker; release, abandon or expire, incarnation.
DIALECT = re.compile(
    r"\b(who|whom|whoever|(no|some|any)body|let go|(give|gives|given|gave) up|former li(fe|ves))\b", re.I
)
PERSONS = re.compile(r"\b(no|some|any)body\b", re.I)
COMMENT = re.compile(r"^(?:.*  | *)# (.+)$", re.M)


def begins_with_a_verb(docstring: str) -> bool:
    """As far as the word's form shows: capitalized, no participle, no third person, not followed by a stop."""
    word = "".join(docstring.split(maxsplit=1)[:1])
    is_word = word.replace("-", "").isalpha() and word[:1].isupper()
    return is_word and not NO_VERB.match(word) and not re.search("[^e]ed$|[^s]s$", word)


def findings(source: str) -> Iterator[str]:
    """Docstrings of functions without a verb at the beginning, then texts and comments with words of a dialect."""
    prose = COMMENT.findall(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:  # messages
            prose.append(node.value)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            docstring = ast.get_docstring(node)
            if docstring is None:
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not begins_with_a_verb(docstring):
                yield f"{node.name}: {(docstring.splitlines() or ['nothing'])[0]}"
    yield from (line for text in prose for line in text.splitlines() if DIALECT.search(line))


def test_docstrings_are_imperative_sentences_in_the_fields_words() -> None:
    files = {str(file.relative_to(PACKAGE)): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    assert [f"{file}: {found}" for file, source in files.items() for found in findings(source)] == []


def test_the_pages_for_users_are_in_the_fields_words() -> None:
    root = PACKAGE.parent
    pages = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    lines = [(page.name, line) for page in pages for line in page.read_text().splitlines()]
    assert [line for line in lines if PERSONS.search(line[1])] == []
    assert PERSONS.search("a version that nobody holds") and not PERSONS.search("whoever reads `docs/who.md`")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('def size():\n    """Of the stream."""', ["size: Of the stream."]),
        ('def size():\n    """Returns the size."""', ["size: Returns the size."]),
        ('def size():\n    """shards: how many."""', ["size: shards: how many."]),
        ('def size():\n    """Stop; twice is fine."""', ["size: Stop; twice is fine."]),
        ('async def size():\n    """"""', ["size: nothing"]),
        ('def size():\n    """Feed\n    it."""', []),
        ('def ask():\n    """Pass it on.\n\n    Who waits is named."""', ["    Who waits is named."]),
        ("x = 1  # nobody reads it\n# let go of it\ny = 2", ["nobody reads it", "let go of it"]),
        ('class A:\n    """The size of it."""\n    def f(self):\n        """Return whether it is so."""', []),
        ("raise ValueError(f'{key} is held by nobody')", [" is held by nobody"]),
        ("whose = 'who'  # the one whose name it is", []),
    ],
)
def test_other_docstrings_are_found(source: str, found: list[str]) -> None:
    assert [each.strip() for each in findings(source)] == [each.strip() for each in found]
