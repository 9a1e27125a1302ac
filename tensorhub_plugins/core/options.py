"""PURE: options that a user has given, into a Struct, or a UsageError that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tensorhub_plugins.core.errors import UsageError

Options = TypeVar("Options", bound=msgspec.Struct)


def convert(given: Mapping[str, Any], kind: type[Options], *, where: str, hidden: Sequence[str] = ()) -> Options:
    """where: what the user wrote them in, as errors name it. hidden: fields that are not options there.

    Texts are taken for what they spell ("3" for 3). Raises UsageError naming the option, with a hint for a misspelt
    one.
    """
    names = [field.name for field in msgspec.structs.fields(kind) if field.name not in hidden]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(names)}"
            raise UsageError(f"{where} has no option {name!r}: {hint}")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:  # "Expected `int`, got `str` - at `$.keep`"
        text, _, path = str(error).partition(" - at ")
        text, name = f"{text[:1].lower()}{text[1:]}", path.strip("`").removeprefix("$.")
        raise UsageError(f"{where}: {f'option {name}: ' if name else ''}{text}") from error


def check_limits(options: msgspec.Struct, limits: Mapping[str, tuple[float, float]], *, where: str) -> None:
    """UsageError for the first option outside its limits, both of which are allowed."""
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if not low <= value <= high:
            raise UsageError(f"{where}: option {name} is {value}: choose a number from {low} to {high}")


def check_given(options: msgspec.Struct, names: Sequence[str], *, where: str) -> None:
    """UsageError for the first of these that is there and empty."""
    for name in names:
        if getattr(options, name) in ("", ()):
            raise UsageError(f"{where}: option {name} is empty: give a value, or leave it out")


def check_tested(package: str, version: str, tested: Sequence[str], *, way_out: str) -> None:
    """UsageError unless `version` is one of `tested`, which may be prefixes. way_out: how a user runs others all the
    same."""
    if not any(version == one or version.startswith((f"{one}.", f"{one}+")) for one in tested):
        raise UsageError(
            f"{package} {version} was not tested with this adapter: install {package} {' or '.join(tested)}, or "
            f"{way_out} at your own risk"
        )
