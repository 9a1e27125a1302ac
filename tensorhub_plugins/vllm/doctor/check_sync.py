"""`tensorhub doctor check-sync --model PATH`: do weights that come through the store equal weights from disk?

For this model, on this machine, with this vLLM. It starts two engines, which do nothing else:
    reference   loads the model from disk
    patient     is made with zeros, and starts from what the doctor publishes
Besides the model's weights the doctor publishes *noise*: another checkpoint of the same names, dtypes and shapes. What
an update does not renew is then noise where the weights should be, or weights where noise should be, and cannot be
right by accident. The patient starts from noise, and in turn
    noise differs      from the reference: in tensors and in answers; a check that does not notice would prove nothing
    converted          the weights, published as a checkpoint, make the patient equal the reference
    converted to noise the noise again, and the patient is as it was when it started from it
    copied noise       the reference copies from the patient, and equals it: nothing of its own weights is left
    copied             the weights again: the patient converts them; the reference, zeroed before, copies them
Equal means `==`, for the digest of everything reachable from the model (reachable_tensors.py) and for every answer,
including its log-probabilities. What answering alone changes is scratch and left out.

Then versions that no trainer should publish (`malformed`): each must be refused by name with nothing changed, and a
good version must install afterwards.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from tensorhub_plugins.core import Client, TensorHubError, UsageError, start_server
from tensorhub_plugins.vllm import drafts
from tensorhub_plugins.vllm.doctor.engines import (
    EngineFailed,
    Process,
    check_numbers,
    engine_options,
    plain_options,
    short,
)
from tensorhub_plugins.vllm.worker import draft
from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension
from tensorhub_plugins.vllm.worker.reachable_tensors import walk
from tensorhub_plugins.vllm.worker.weights import digest, tensors

RUN, MODEL = "doctor", "patient"
NAMES_SHOWN_MAX = 5
NOISE_FACTOR, NOISE_OFFSET = 1.125, 1 / 64  # small, so that the model goes on computing with sane numbers
MISSING_MAX = 8  # kinds of tensors that are omitted, one at a time
MALFORMED_SIZE_BYTES_MAX = 1 << 30  # a larger checkpoint is published fewer times
QUESTIONS_AFTER_REFUSAL = 1

PEER = "a peer"  # the source of a copy

# What may have happened to a malformed version that was not refused as it should be.
INSTALLED, HALF_WAY = "it was installed", "half way, and the engine cannot answer any more"
NAMELESS, BROKEN_FOR_GOOD = "refused without the tensor's name", "the engine installs nothing any more"

Weights = dict[str, torch.Tensor]


class Patient(TensorHubWorkerExtension):
    def tensorhub_try(self, method: str, args: tuple[Any, ...]) -> tuple[Any, str]:
        """Return the result, or how it is refused: vLLM keeps only the text of an error in another process."""
        try:
            return getattr(self, method)(*args), ""
        except TensorHubError as error:
            return None, str(error)

    def tensorhub_everything(self) -> dict[str, str]:
        """Return the digest of every tensor and the value of every float of the model, by name."""
        return {name: _told(value) for name, value in walk(self._with_draft())}

    def tensorhub_zero(self) -> None:
        """Zero every tensor that a copy from a peer writes."""
        for tensor in tensors(self._with_draft()).values():
            tensor.zero_()

    def _with_draft(self) -> torch.nn.Module:
        return draft.together(self.model_runner.get_model(), draft.of_worker(self))


def _told(value: torch.Tensor | float) -> str:
    if isinstance(value, float):
        return repr(value)
    return f"{value.dtype} {list(value.shape)} {digest(value.contiguous())}"


class CheckedEngine(Protocol):
    def rpc(self, method: str, *args: Any) -> list[Any]: ...
    def update(self, version: int) -> list[dict[str, Any]]: ...
    def answers(self, questions: int | None = None) -> list[Any]: ...
    def close(self) -> None: ...


Start = Callable[[Path, dict[str, Any]], CheckedEngine]  # a model's folder and the loader's options


@dataclass(frozen=True)
class Finding:
    """One line of the report; wrong is empty if all is well."""

    what: str
    wrong: str = ""
    of: Literal["sync", "refusal"] = "sync"

    def __str__(self) -> str:
        return f"WRONG {self.what}: {self.wrong}" if self.wrong else f"ok    {self.what}"


def check_sync(model: Path, start: Start, **options: Any) -> Iterator[Finding]:
    """Yield findings as they are made; the first of the sync that is wrong is the last. options: of the store.

    Raises UsageError when this model is refused, EngineFailed when vLLM cannot run it."""
    with ExitStack() as stack:
        hub = stack.enter_context(start_server())
        trainer = _Trainer(stack.enter_context(Client(hub.address, run=RUN, model=MODEL, replica="doctor")))
        joining = {"hub": hub.address, "run": RUN, "model": MODEL, "serve_from": "live", **options}
        weights = read_checkpoint(model)

        reference = start(model, {"disk": "only"})
        stack.callback(reference.close)
        reference.rpc("tensorhub_connect", {**joining, "replica": "reference"})
        healthy, scratch = _healthy(reference)

        trainer.publish(noise(weights))
        bare = stack.enter_context(tempfile.TemporaryDirectory())
        patient = start(_without_weights(model, Path(bare)), {**joining, "replica": "patient"})
        stack.callback(patient.close)
        proof = _Proof(trainer, reference, patient, weights, healthy, _state(patient), scratch)
        for finding in proof.sync():
            yield finding
            if finding.wrong:
                return
        yield from proof.refusals()


def read_checkpoint(model: Path) -> Weights:
    """Return all tensors by their Hugging Face names."""
    from safetensors.torch import load_file

    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{model} holds no *.safetensors: give the folder of a Hugging Face model")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def noise(weights: Weights) -> Weights:
    """Return another checkpoint: every float differs, and has about the same size, so that nothing overflows.

    The same every time. Integers that are no weights (positions, counters) are kept: their values are addresses."""
    return {name: _noise(tensor) for name, tensor in weights.items()}


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.element_size() > 1:
        # Reversed, so that no two rows stay the same; then shifted, for what is the same in reverse.
        other = tensor.flatten().flip(0).float() * NOISE_FACTOR + NOISE_OFFSET
        return other.to(tensor.dtype).reshape(tensor.shape)
    if tensor.dim() > 1:  # quantized weights
        return tensor.flatten().view(torch.uint8).flip(0).view(tensor.dtype).reshape(tensor.shape)
    return tensor.clone()


def _without_weights(model: Path, folder: Path) -> Path:
    for file in model.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf"):
            shutil.copy(file, folder)
    return folder


class _Trainer:
    """A trainer that publishes versions 1, 2, 3 and holds only the newest."""

    def __init__(self, client: Client) -> None:
        self._client, self.version = client, 0

    def publish(self, weights: Weights) -> int:
        self._client.publish(self.version + 1, weights)
        if self.version:
            self._client.unpublish(self.version)
        self.version += 1
        return self.version


# --- the proof ---


@dataclass(frozen=True)
class _State:
    layouts: list[str]
    everything: list[dict[str, str]]  # one for each worker
    answers: list[Any]


def _healthy(engine: CheckedEngine) -> tuple[_State, frozenset[str]]:
    """Return the state to compare with, and the names of what answering alone changes."""
    before = _state(engine)
    check_numbers(before.answers)
    after = engine.rpc("tensorhub_everything")
    return before, frozenset(_differing(before.everything, after))


def _state(engine: CheckedEngine, questions: int | None = None) -> _State:
    layouts = [worker["layout"] for worker in engine.rpc("tensorhub_poll")]
    return _State(layouts, engine.rpc("tensorhub_everything"), engine.answers(questions))


@dataclass(frozen=True)
class _Proof:
    trainer: _Trainer
    reference: CheckedEngine
    patient: CheckedEngine
    weights: Weights
    healthy: _State  # the reference's, as loaded from disk
    noisy: _State  # the patient's, as it started from noise
    scratch: frozenset[str]

    def sync(self) -> Iterator[Finding]:
        what = "negative control: started from noise, which is noticed"
        yield _different(what, self.healthy, self.noisy, self.scratch)

        _update(self.patient, self.trainer.publish(self.weights))
        yield self._same("converted from the checkpoint", self.healthy, _state(self.patient))

        version = self.trainer.publish(noise(self.weights))
        _update(self.patient, version)
        yield self._same("converted to noise, as when it started", self.noisy, _state(self.patient))

        source = _copy(self.reference, version)
        yield self._same(f"copied noise from {source}", self.noisy, _state(self.reference))

        version = self.trainer.publish(self.weights)
        _update(self.patient, version)
        peer = self._same("converted again", self.healthy, _state(self.patient))
        if peer.wrong:
            yield peer
            return
        if source == PEER:  # else nothing restores a table that no checkpoint holds
            self.reference.rpc("tensorhub_zero")
        source = _copy(self.reference, version)
        yield self._same(f"copied from {source}", self.healthy, _state(self.reference))

    def refusals(self) -> Iterator[Finding]:
        """Publish malformed versions made of noise, so that what is installed of them shows; yield the findings."""
        refused = 0
        for fault in malformed(noise(self.weights)):
            what = f"refuses a version {fault.what} {fault.name}"
            results = self.patient.update(self.trainer.publish(fault.weights))
            wrong = _not_refused(fault, results)
            if wrong == INSTALLED and not self._same(what, self.noisy, _state(self.patient)).wrong:
                wrong = ""  # the model does not use this tensor
            elif not wrong:
                wrong = self._same(what, self.healthy, _state(self.patient, QUESTIONS_AFTER_REFUSAL)).wrong
            refused += not wrong and not results[0]["installed"]
            if wrong:
                yield Finding(what, wrong, "refusal")
            if wrong or results[0]["installed"]:
                try:
                    _update(self.patient, self.trainer.publish(self.weights))
                except TensorHubError as error:
                    yield Finding("a good version afterwards", f"{BROKEN_FOR_GOOD}: {_first_line(error)}", "refusal")
                    return
        _update(self.patient, self.trainer.publish(self.weights))
        finding = self._same("a good version afterwards", self.healthy, _state(self.patient))
        yield Finding(f"refuses {refused} malformed versions; {finding.what}", finding.wrong, "refusal")

    def _same(self, what: str, before: _State, now: _State) -> Finding:
        return _same(what, before, now, self.scratch)


def _update(engine: CheckedEngine, version: int) -> list[dict[str, Any]]:
    results = engine.update(version)
    for result in results:
        if not result["installed"]:
            raise TensorHubError(str(result["error"]), version=version)
    return [result["report"] for result in results]


def _copy(engine: CheckedEngine, version: int) -> str:
    """Update from the peer. Return the source: PEER, or, if none offers a copy, "the checkpoint"."""
    sources = {source.split("/")[0] for report in _update(engine, version) for source in report["sources"]}
    if sources == {"patient"}:
        return PEER
    if sources == {"doctor"}:
        return "the checkpoint (peers do not offer copies of this model)"
    raise TensorHubError(f"it was to be copied from the peer, and came from {sorted(sources)}", version=version)


def _differing(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> list[str]:
    return sorted(
        {
            name
            for mine, other in zip(ours, theirs, strict=True)
            for name in mine.keys() | other.keys()
            if mine.get(name) != other.get(name)
        }
    )


def _same(what: str, healthy: _State, now: _State, scratch: frozenset[str]) -> Finding:
    if healthy.layouts != now.layouts:
        return Finding(what, "the engines' layouts differ, so they could not copy from each other")
    wrong = [name for name in _differing(healthy.everything, now.everything) if name not in scratch]
    if wrong:
        return Finding(what, f"{len(wrong)} tensors differ, first {', '.join(wrong[:NAMES_SHOWN_MAX])}")
    if healthy.answers[: len(now.answers)] != now.answers:
        return Finding(what, "all tensors are equal, and the answers are not: something that is not synced has changed")
    count = sum(len(worker) for worker in now.everything) - len(scratch)
    return Finding(f"{what}: {count} tensors and floats and {len(now.answers)} answers are equal")


def _different(what: str, healthy: _State, now: _State, scratch: frozenset[str]) -> Finding:
    differing = [name for name in _differing(healthy.everything, now.everything) if name not in scratch]
    if not differing:
        return Finding(what, "the digests are those from before")
    telling = [pair for pair in zip(healthy.answers, now.answers, strict=True) if _holds_numbers(pair[0])]
    if not telling:  # a process reward model does so when no prompt holds the end of a step
        return Finding(what, "all answers are empty: have the model answer for every token, by --engine")
    if any(mine == other for mine, other in telling):
        return Finding(what, "an answer is that from before: this engine does not compute with these tensors")
    return Finding(f"{what}: {len(differing)} tensors differ, and all answers")


def _holds_numbers(answer: Any) -> bool:
    return isinstance(answer, float) or (isinstance(answer, (list, tuple)) and any(map(_holds_numbers, answer)))


# --- what must be refused ---


@dataclass(frozen=True)
class Malformed:
    what: str
    name: str  # of the wrong tensor
    weights: Weights


def malformed(weights: Weights) -> Iterator[Malformed]:
    """Yield checkpoints that no trainer should publish, each with one wrong tensor.

    One tensor of every kind (equal names but for numbers) is omitted in turn, because an engine detects them in
    different places; other faults are put into one tensor outside the experts and, if there are any, one of theirs."""
    kinds: dict[str, str] = {re.sub(r"\d+", "#", name): name for name in weights}  # the last of every kind
    small = sum(tensor.nbytes for tensor in weights.values()) < MALFORMED_SIZE_BYTES_MAX
    for name in _some(list(kinds.values()), MISSING_MAX if small else 1):
        yield Malformed("without", name, {key: tensor for key, tensor in weights.items() if key != name})
    matrices = [name for name in kinds.values() if weights[name].dim() == 2]
    victims = [name for name in matrices if "expert" in name][:1] + [n for n in matrices if "expert" not in n][-1:]
    surplus = f"{(victims or list(weights))[-1].rpartition('.')[0]}.surplus"
    yield Malformed("with a surplus", surplus, {**weights, surplus: torch.ones(8)})
    for name in victims:
        tensor = weights[name]
        yield Malformed("with two rows missing in", name, {**weights, name: tensor[:-2].clone()})
        yield Malformed("with two rows too many in", name, {**weights, name: torch.cat([tensor, tensor[:2]])})
        yield Malformed("with integers in", name, {**weights, name: torch.ones_like(tensor, dtype=torch.int32)})


def _some(names: list[str], count: int) -> list[str]:
    """Return so many of them, half of them of experts if there are any, spread over all places."""
    experts = [name for name in names if "expert" in name]
    others = [name for name in names if "expert" not in name]
    first = experts[:: max(1, -(-len(experts) // max(1, count // 2)))]
    left = max(1, count - len(first))
    return (first + others[:: max(1, -(-len(others) // left))])[:count]


def _not_refused(fault: Malformed, results: list[dict[str, Any]]) -> str:
    for result in results:
        if result["installed"]:
            return INSTALLED
        if result["broken"]:
            return f"{HALF_WAY}: {_first_line(result['error'])}"
    if not any(fault.name in str(result["error"]) for result in results):
        return f"{NAMELESS}: {_first_line(results[0]['error'])}"
    return ""


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0][:200]


# --- the command line ---


def run(model: Path, settings: Mapping[str, Any]) -> int:
    """Print the findings; return 0: all is well, 1: something is wrong, 2: the model is refused or cannot be run.

    settings: more options of vllm.LLM."""
    status, method = 0, (settings.get("speculative_config") or {}).get("method")
    options = {"draft": "store"} if drafts.is_of_the_model(method) else {}
    try:
        for finding in check_sync(model, starter(settings), **options):
            print(finding, flush=True)
            status = 1 if finding.wrong else status
    except EngineFailed as error:
        print(error, file=sys.stderr)
        print(f"FAILED {short(error)}\n{_whose_fault(model, settings)}")
        return 2
    except TensorHubError as error:
        print(f"REFUSED {error}")
        return 2
    return status


def starter(settings: Mapping[str, Any], **process: Any) -> Start:
    return lambda folder, extra: Process(folder, {**engine_options(extra), **settings}, **process)


def runs_without_us(model: Path, settings: Mapping[str, Any], **process: Any) -> str:
    """Return "" if vLLM by itself loads the model from disk and answers; else its error."""
    theirs = {key: value for key, value in settings.items() if key != "worker_extension_cls"}
    try:
        engine = Process(model, {**plain_options(), **theirs}, **process)
        try:
            check_numbers(engine.answers())
        finally:
            engine.close()
    except TensorHubError as error:
        return str(error)
    return ""


def _whose_fault(model: Path, settings: Mapping[str, Any]) -> str:
    if runs_without_us(model, settings):
        return "vLLM by itself cannot run this model here either"
    return "vLLM by itself runs this model"
