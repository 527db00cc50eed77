"""Deletes objects when their time has come.

An object says when, by annotation: `ttl.example.com/expires-at: 2026-03-01T12:00:00Z`, or `ttl.example.com/ttl: 2h30m`
counted from its creation. There is no loop and no list of what is due: each object's time is the timer of its key, kept
by the host while the operator sleeps.
"""

import re
from datetime import datetime, timedelta

from torpor_sdk import (
    Kube,
    Operator,
    Request,
    Requeue,
    Resource,
    Watch,
    config,
    log,
    now,
    parse_timestamp,
    requeue_at,
)

CLASS = "ttl.example.com/class"  # label: which instance looks after the object
EXPIRES_AT = "ttl.example.com/expires-at"
TTL = "ttl.example.com/ttl"
TTL_DAYS_MAX = 3650

DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

# Which resource is up to the WasmOperator: `for.resource` and the same in `config.resource`.
op = Operator(for_=Watch("v1/configmaps", labels={CLASS: "default"}, predicates=["annotations"]))


@op.reconcile
def reconcile(request: Request, kube: Kube) -> Requeue | None:
    obj = kube.get(config().get("resource", "v1/configmaps"), request.name, request.namespace)
    if obj is None or obj.deleting or obj.labels.get(CLASS) != config().get("class", "default"):
        return None
    try:
        moment = expiry(obj)
    except ValueError as exc:
        kube.event(obj, "InvalidTTL", str(exc), "Warning")
        return None
    if moment is None:
        return None
    if moment > now():
        return requeue_at(moment)
    log.info("%s expired at %s", request.key, moment.isoformat())
    # Only as it was read: a time that was put off meanwhile is a conflict, and looked at again.
    kube.delete(obj, unchanged=True)
    return None


def expiry(obj: Resource) -> datetime | None:
    """When the object is to go, the earlier of both annotations. Raises `ValueError` for one that says nothing."""
    moments: list[datetime] = []
    if EXPIRES_AT in obj.annotations:
        try:
            moments.append(parse_timestamp(obj.annotations[EXPIRES_AT]))
        except ValueError:
            raise ValueError(
                f"{EXPIRES_AT}: {obj.annotations[EXPIRES_AT]!r} is no time; 2026-03-01T12:00:00Z is"
            ) from None
    if TTL in obj.annotations:
        created = parse_timestamp(obj.metadata["creationTimestamp"])
        moments.append(created + duration(obj.annotations[TTL]))
    return min(moments, default=None)


def duration(text: str) -> timedelta:
    found = DURATION.fullmatch(text.strip())
    if not text.strip() or found is None:
        raise ValueError(f"{TTL}: {text!r} is no duration; 7d, 2h30m and 90s are")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    try:
        total = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except OverflowError:
        total = timedelta.max
    if total > timedelta(days=TTL_DAYS_MAX):
        raise ValueError(f"{TTL}: {text!r} is more than {TTL_DAYS_MAX} days")
    return total
