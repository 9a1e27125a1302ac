"""The proof of tensorhub_plugins/vllm/doctor/check_sync.py for every architecture that vLLM knows.

One row each, made, examined and thrown away one after the other; one that crashes or hangs costs its own row.
    ok       weights through the store equal weights from disk
    REFUSED  the store says that it cannot sync this model, and why
    WRONG    it synced it, and it is not the same
    not run  vLLM alone cannot run it here either; the reason is given
    not made nothing here makes such a model: draft models, remote code
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.conformance.families import family
from recipes.conformance.make import make
from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.vllm.doctor import check_sync
from tensorhub_plugins.vllm.doctor.engines import EngineFailed, NotANumber, call_apart, short

RESULTS = ("ok", "REFUSED", "WRONG", "not run", "not made")
FAMILY_TIMEOUT_S = 180.0
ENGINE_OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}


@dataclass(frozen=True)
class Row:
    architecture: str
    result: str
    why: str
    refusals: str  # of malformed versions: "all", or which were not refused
    seconds: float


def run(only: Sequence[str], options: Mapping[str, Any], *, report: Path | None = None) -> int:
    """Print the table, and write it to the report as it grows; 1: something is wrong."""
    names = architectures()
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise UsageError(f"this vLLM has no architecture {', '.join(unknown)}: give names as in its config.json")
    rows: list[Row] = []
    for row in examine(list(only) or names, options):
        rows.append(row)
        print(f"{row.result:<8} {row.architecture:<44} {row.seconds:5.1f} s  {row.why}".rstrip(), flush=True)
        if row.result == "ok" and row.refusals != "all":
            print(f"{'':8} malformed versions: {row.refusals}", flush=True)
        if report is not None:
            families = [asdict(row) for row in rows]
            report.write_text(json.dumps({**_versions(), "engine": dict(options), "families": families}, indent=1))
    counts = {result: sum(row.result == result for row in rows) for result in RESULTS}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(counts["WRONG"] > 0 or any(row.result == "ok" and row.refusals != "all" for row in rows))


def architectures() -> list[str]:
    """Return all that vLLM's registry has."""
    from vllm.model_executor.models import ModelRegistry

    return sorted(ModelRegistry.get_supported_archs())


def examine(names: Sequence[str], options: Mapping[str, Any]) -> Iterator[Row]:
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            result, why, refusals = _examine(name, Path(folder), options, began + FAMILY_TIMEOUT_S)
        why = why.replace(folder, "...")  # says where the model lay, and nothing about it
        yield Row(name, result, why, refusals, round(time.monotonic() - began, 1))


def _examine(name: str, folder: Path, options: Mapping[str, Any], deadline: float) -> tuple[str, str, str]:
    log = folder / "log"
    made = family(name)
    if made is None:
        return "not made", _why_nothing_makes_it(name), ""
    model = folder / "model"
    try:
        call_apart(_prepare, name, model, deadline=deadline, log=log)
    except TensorHubError as error:
        return "not run", f"it could not be made: {short(error)}", ""
    settings = {**ENGINE_OPTIONS, **made.engine, **options}
    findings: list[check_sync.Finding] = []
    try:
        findings += check_sync.check_sync(model, check_sync.starter(settings, deadline=deadline, log=log))
    except NotANumber as error:  # said of the engine that reads from disk, before anything is published
        return "not run", f"vLLM alone cannot run it: {short(error)}", ""
    except EngineFailed as error:
        failure = check_sync.runs_without_us(model, settings, deadline=deadline, log=log)
        if failure:
            return "not run", _why_vllm_cannot(short(failure)), ""
        return "WRONG", f"vLLM alone runs it, with the store it fails: {short(error)}", ""
    except TensorHubError as error:
        return "REFUSED", short(error), ""
    wrong = [finding for finding in findings if finding.wrong]
    sync = [f"{finding.what}: {finding.wrong}" for finding in wrong if finding.of == "sync"]
    if sync:
        return "WRONG", sync[0], ""
    return "ok", "", _refusals([finding for finding in wrong if finding.of == "refusal"])


def _why_nothing_makes_it(name: str) -> str:
    from vllm.model_executor.models import registry

    if name in getattr(registry, "_SPECULATIVE_DECODING_MODELS", {}):
        return "a draft model: it comes with its target, from disk"
    if name.startswith("Transformers"):
        return "what vLLM calls its Transformers back end, through which other rows go"
    return "transformers has no class for it, and there is no recipe here"


def _why_vllm_cannot(error: str) -> str:
    missing = re.search(r"Can't load (image processor|video processor|feature extractor)", error)
    return f"no {missing[1]} is made for it here" if missing else f"vLLM alone cannot run it: {error}"


def _prepare(architecture: str, model: Path) -> None:
    """Make the model, in a process of its own, and let vLLM note what its class can do.

    vLLM would do that by importing itself once more, in yet another process, which takes seconds; it keeps a note.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda function: function()
    made = family(architecture)
    assert made is not None
    make(made, model)
    with suppress(Exception):  # the engine will say it better
        registry.ModelRegistry.models[architecture].inspect_model_cls()


def _refusals(wrong: Sequence[check_sync.Finding]) -> str:
    """Return how many malformed versions had which outcome, with one example each."""
    examples: dict[str, list[str]] = {}
    for finding in wrong:
        examples.setdefault(finding.wrong.split(":")[0], []).append(finding.what)
    return "; ".join(f"{len(what)} x {became}, such as: {what[0]}" for became, what in examples.items()) or "all"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import vllm

    return {"vllm": vllm.__version__, "transformers": version("transformers"), "torch": version("torch")}
