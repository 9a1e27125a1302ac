"""Shelves that break a rule on purpose, for the negative controls of the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensorhub_plugins.core.client.shelf import Effect, MarkReady, Retain, Retract, Shelf, Ticket, Withdraw
from tensorhub_plugins.core.types import ShardKey


class ForgetsToWithdraw(Shelf[Any]):
    """A shelf that removes a shard, and leaves the readers at its memory."""

    def _remove(self, keys: Iterable[ShardKey]) -> list[Effect[Any]]:
        super()._remove(keys)
        return []


class OffersWhatHasNotArrived(Shelf[Any]):
    def prepare(self, read: int, key: ShardKey, offer: Any) -> list[Effect[Any]]:
        effects = super().prepare(read, key, offer)
        return [*effects, MarkReady(offer, None)] if effects else []


class LeavesWhatIsGivenUp(Shelf[Any]):
    """A shelf that goes on offering what was reported to the hub as abandoned."""

    def unpublished(self, ticket: Ticket, *, keep: bool) -> list[Effect[Any]]:
        return super().unpublished(ticket, keep=True)


class DropsWhatItIsToRetain(Shelf[Any]):
    def unpublished(self, ticket: Ticket, *, keep: bool) -> list[Effect[Any]]:
        return super().unpublished(ticket, keep=False)


class ServesRetainedFromTheOldMemory(Shelf[Any]):
    def replace(self, key: ShardKey, old: Any, new: Any) -> bool:
        return super().replace(key, old, old)


class ForgetsToRetract(Shelf[Any]):
    """A shelf that drops what will never be whole, and does not notify the hub."""

    def drop(self, read: int, *, restarts_after: int | None) -> list[Effect[Any]]:
        return [
            effect for effect in super().drop(read, restarts_after=restarts_after) if not isinstance(effect, Retract)
        ]


class ServesOnWhatWasDropped(Shelf[Any]):
    def drop(self, read: int, *, restarts_after: int | None) -> list[Effect[Any]]:
        return [
            effect for effect in super().drop(read, restarts_after=restarts_after) if not isinstance(effect, Withdraw)
        ]


class ForgetsToSayThatAllIsHere(Shelf[Any]):
    def complete(self, read: int) -> list[Effect[Any]]:
        return [effect for effect in super().complete(read) if isinstance(effect, MarkReady)]


class ExpectsNothing(Shelf[Any]):
    def is_expected(self, key: ShardKey, request_id: int) -> bool:
        return False


class ForgetsToRetainElsewhere(Shelf[Any]):
    """A shelf that goes on serving what it should retain from memory that its owner reuses."""

    def unpublished(self, ticket: Ticket, *, keep: bool) -> list[Effect[Any]]:
        return [effect for effect in super().unpublished(ticket, keep=keep) if not isinstance(effect, Retain)]
