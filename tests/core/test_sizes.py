"""How large each part of the package may be: a number that nobody counts always grows.

A commit that raises a ceiling says why. One that takes lines away lowers it, as a ceiling far above is none.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "tensorhub_plugins"

# Lines of the files in a folder, without those in folders that have a ceiling of their own. The aim is 36,500 in all.
CEILINGS = {
    "core": 3_527,
    "core/client": 5_701,
    "core/deltas": 685,
    "core/device": 920,
    "core/device/kernels": 515,
    "core/hub": 5_886,
    "core/memory": 3_785,
    "core/operations": 1_820,
    "core/protocol": 1_193,
    "core/security": 742,
    "core/transfer": 2_007,
    "core/transports": 7_123,
    "openrlhf": 2_805,
    "verl": 4_389,
    "vllm": 7_954,
    "vllm/doctor": 800,
    "vllm/ray/fleet": 1_730,
    "vllm/worker": 5_934,
}
ROOM, ROOM_LINES = 0.1, 150  # below a ceiling, as a part of it or in lines: for changes that need no reason
INIT_LINES_MAX = 40  # of a file beside the folders: __init__.py

# Both frameworks have so many lines of their own in a file of this name. What is the same belongs into vllm/, once.
TWIN_LINES_MAX = 120


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def sizes(package: Path, folders: set[str]) -> dict[str, int]:
    """Return the lines of each of these folders; of a file in none of them under its own name."""
    found = dict.fromkeys(sorted(folders), 0)
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        above = [str(folder) for folder in name.parents if str(folder) in folders]
        place = above[0] if above else str(name)
        found[place] = found.get(place, 0) + lines_of(path)
    return found


def wrong_sizes(package: Path, ceilings: dict[str, int]) -> list[str]:
    wrong = []
    for folder, lines in sizes(package, set(ceilings)).items():
        ceiling = ceilings.get(folder, INIT_LINES_MAX)
        if lines > ceiling:
            wrong.append(f"{folder} has {lines} lines, of {ceiling}: take some away, or raise its ceiling and say why")
        elif folder in ceilings and ceiling - lines > max(ROOM * ceiling, ROOM_LINES):
            wrong.append(f"{folder} has only {lines} lines, of {ceiling}: lower its ceiling")
    return wrong


def twins(package: Path, one: str = "verl", other: str = "openrlhf") -> set[str]:
    """Return the names of files that are above the limit in both of these folders."""
    large = [{p.name for p in (package / f).glob("*.py") if lines_of(p) > TWIN_LINES_MAX} for f in (one, other)]
    return large[0] & large[1]


def test_no_part_grows_unnoticed(tmp_path: Path) -> None:
    assert wrong_sizes(PACKAGE, CEILINGS) == []
    for name, lines in (("core/a.py", 120), ("core/hub/b.py", 100), ("late.py", 41)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * lines)
    assert sizes(tmp_path, {"core", "core/hub"}) == {"core": 120, "core/hub": 100, "late.py": 41}
    assert [text.split(",")[0] for text in wrong_sizes(tmp_path, {"core": 119, "core/hub": 251})] == [
        "core has 120 lines",
        "core/hub has only 100 lines",
        "late.py has 41 lines",
    ]


def test_what_both_frameworks_need_is_written_once(tmp_path: Path) -> None:
    assert twins(PACKAGE) == set()
    for folder, name, lines in (("verl", "a.py", 121), ("openrlhf", "a.py", 121), ("verl", "b.py", 121)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("pass\n" * lines)
    (tmp_path / "openrlhf" / "b.py").write_text("pass\n" * 120)
    assert twins(tmp_path) == {"a.py"}
