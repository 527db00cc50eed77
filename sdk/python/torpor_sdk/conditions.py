"""Conditions in `status.conditions`, by the API conventions."""

from typing import Any, Literal

from . import clock
from .objects import Object, child, conditions_of, metadata_of

ConditionStatus = Literal["True", "False", "Unknown"]


def set_condition(
    obj: Object, type: str, status: bool | ConditionStatus | None, reason: str, message: str = ""
) -> bool:
    """Sets a condition in the object at hand; True if that changed it. Write it with `kube.patch_status`:

    >>> db = {"metadata": {"generation": 2}}
    >>> set_condition(db, "Ready", False, "Starting", "0 of 3 replicas")
    True
    >>> set_condition(db, "Ready", False, "Starting", "0 of 3 replicas")
    False

    None is Unknown. `lastTransitionTime` moves only when `status` does; `observedGeneration` follows the object.
    """
    wanted: dict[str, Any] = {
        "type": type,
        "status": _status(status),
        "reason": reason,
        "message": message,
    }
    generation = metadata_of(obj).get("generation")
    if generation is not None:
        wanted["observedGeneration"] = generation
    before = get_condition(obj, type)
    moved = before is None or before.get("status") != wanted["status"]
    wanted["lastTransitionTime"] = (
        clock.timestamp() if moved or before is None else before.get("lastTransitionTime") or clock.timestamp()
    )
    if before == wanted:
        return False
    others = conditions_of(obj)
    child(obj, "status")["conditions"] = (
        [*others, wanted] if before is None else [wanted if entry is before else entry for entry in others]
    )
    return True


def get_condition(obj: Object, type: str) -> dict[str, Any] | None:
    """The condition of this type."""
    return next((entry for entry in conditions_of(obj) if entry.get("type") == type), None)


def is_true(obj: Object, type: str) -> bool:
    """Whether the object has the condition with status True."""
    found = get_condition(obj, type)
    return found is not None and found.get("status") == "True"


def _status(status: bool | ConditionStatus | None) -> ConditionStatus:
    if isinstance(status, str):
        return status
    return "Unknown" if status is None else "True" if status else "False"
