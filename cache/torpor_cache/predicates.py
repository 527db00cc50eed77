"""Which changes of an object concern a subscriber.

A predicate narrows *modifications*; creations and deletions pass all but `DELETION`. Where a predicate cannot know (no
generation, as of Secrets and ConfigMaps; no previous object, as after a restart; a deletion that has begun) the change
passes: a reconcile too many is cheap, a lost one is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import assert_never

from torpor_cache.objects import ChangeType, StoredObject


class Predicate(Enum):
    """What must have changed."""

    GENERATION = "generation"
    LABELS = "labels"
    ANNOTATIONS = "annotations"
    DELETION = "deletion"


def passes(
    predicates: Iterable[Predicate], change: ChangeType, old: StoredObject | None, new: StoredObject | None
) -> bool:
    """Whether all predicates let the change through."""
    return all(_passes(predicate, change, old, new) for predicate in predicates)


def _passes(predicate: Predicate, change: ChangeType, old: StoredObject | None, new: StoredObject | None) -> bool:
    if change is ChangeType.DELETED or new is None or new.metadata.deletion_timestamp:
        return True
    if predicate is Predicate.DELETION:
        return False
    if change is ChangeType.ADDED or old is None:
        return True
    match predicate:
        case Predicate.GENERATION:
            before, after = old.metadata.generation, new.metadata.generation
            return not before or not after or before != after
        case Predicate.LABELS:
            return old.metadata.labels != new.metadata.labels
        case Predicate.ANNOTATIONS:
            return old.metadata.annotations != new.metadata.annotations
        case _:
            assert_never(predicate)
