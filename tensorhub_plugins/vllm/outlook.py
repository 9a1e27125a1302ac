"""PURE: what the doctors of frameworks say: what will happen, all that is wrong, and what was not checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tensorhub_plugins.core import TensorHubError, UsageError
from tensorhub_plugins.core.options import Need, RecoverWeights, StoreOptions, TrainingOptions, need_summary

BESIDE = "memory: engines beside it on its host use the same copies, and take none of their own"
MISSPELT_MIN = 0.7  # difflib's ratio; other back ends of verl are below 0.5, of torch (nccl, gloo, xccl) below 0.3


class Model(NamedTuple):
    """What is known of a model before anything loads it; see model_size.py."""

    elements: int  # how many numbers it has
    is_exact: bool = True  # counted in its files; else what transformers makes of its configuration
    heads: int | None = None  # of attention


class Outlook:
    """Sentences for people. Nothing that is wrong keeps the other questions from being asked."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.wrong: list[str] = []
        self.unseen: list[str] = []

    def ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return what it returns; None where it raises what is wrong, which is kept."""
        try:
            return question(*arguments)
        except TensorHubError as error:
            self.refuse(error.message)
        except Exception as error:  # of a value that was not thought of
            at = error.__traceback__
            while at is not None and at.tb_next is not None:
                at = at.tb_next
            place = f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}, line {at.tb_lineno}" if at else ""
            what, words = getattr(question, "__qualname__", repr(question)), " ".join(str(error).split())
            self.refuse(f"{what} could not be asked: {type(error).__name__}: {words} ({place})")
        return None

    def tell(self, question: Callable[..., str | None], *arguments: Any) -> None:
        """Keep the sentence that is the answer to this question."""
        if answer := self.ask(question, *arguments):
            self.said.append(answer)

    def refuse(self, sentence: str) -> None:
        """Keep what is wrong, once."""
        if sentence not in self.wrong:
            self.wrong.append(sentence)

    def add(self, other: Outlook) -> None:
        self.said += other.said
        for sentence in other.wrong:
            self.refuse(sentence)
        self.unseen += other.unseen


def check_number(value: object, option: str, least: int = 1) -> None:
    """UsageError for what is no whole number, or is below `least`. option: how people set it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{option} is {value!r}: give a whole number, {least} or more")


def is_meant(word: str, name: str) -> bool:
    """Return whether this is that name, or close enough to be the same misspelt."""
    return bool(difflib.get_close_matches(word.lower(), [name], cutoff=MISSPELT_MIN))


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def gpus_summary(parts: Mapping[str, int]) -> str:
    """Return what a cluster must have, in all and for what. parts: a number of GPUs by what they are for."""
    for_ = ", ".join(f"{number} for {what}" for what, number in parts.items() if number)
    return f"GPUs: {sum(parts.values())} are needed ({for_})"


def adapter_summary(model: str, base: str) -> str:
    """Return what a run will do with its LoRA adapter. model: its history's; base: where engines find the weights."""
    return (
        f"LoRA: the adapter is all that is published, as model {model}, and that hosts keep versions of; engines read "
        f"the base weights from {base} as they start, and keep them"
    )


def recovery_summary(mode: RecoverWeights, *, retains: bool) -> str:
    """Return where a run that resumes has its weights from."""
    if mode == "latest":
        what = "takes the NEWEST weights that workers hold, with the OLDER optimizer, data and step of its checkpoint"
    else:
        what = "takes the weights of its checkpoint from workers that hold them"
    less = "" if retains else "; LOOK: retain_copies=2 has another host hold a copy, else none may"
    return f"a run that resumes {what}, and loads them where no worker holds them{less}"


def fleet_summary(options: TrainingOptions, target: object) -> str:
    """Return how many replicas a run has. target: how many there shall be, or what says so."""
    spares = f", {options.fleet_spares} more as spares" if options.fleet_spares else ""
    bounds = f"at least {options.fleet_min}, at most {options.fleet_max}{spares}"
    return f"fleet: {target}, {bounds}; `tensorhub fleet` adds and drains"


def memory_summary(options: StoreOptions, model: Model, worker: str, need: Need, workers: int) -> str:
    """Return what hosts need of `need` for each of so many workers. Raise UsageError where a budget that is kept is
    less."""
    how = "" if model.is_exact else "; the number of weights is from the model's configuration"
    return f"memory: {need_summary(options, worker, need, workers)}{how}"


def check_heads(model: Model | None, parallel: int, option: str) -> None:
    """UsageError for a tensor parallel size that vLLM refuses. option: how people set it."""
    if model is not None and model.heads and model.heads % parallel:
        raise UsageError(
            f"{option} is {parallel}: vLLM wants one that divides the model's {model.heads} attention heads"
        )
