"""What tests of operators say again and again."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from torpor_sdk.conditions import ConditionStatus, get_condition
from torpor_sdk.objects import Object, describe, metadata_of, name_of
from torpor_sdk.operators import Operator
from torpor_sdk.requests import Request

from ._fake import FakeKube
from ._run import reconcile


def assert_condition(obj: Object, type: str, status: ConditionStatus | bool, reason: str | None = None) -> None:
    """The object has this condition."""
    found = get_condition(obj, type)
    assert found is not None, f"{describe(obj)} has no condition {type}"
    wanted = str(status)
    assert found["status"] == wanted, f"{describe(obj)}: {type} is {found['status']}, not {wanted}: {found}"
    assert reason is None or found["reason"] == reason, f"{describe(obj)}: {type} because of {found['reason']}"


def assert_owned(obj: Mapping[str, Any], owner: Mapping[str, Any]) -> None:
    """The owner is the object's controller."""
    references = metadata_of(obj).get("ownerReferences") or []
    uid = metadata_of(owner).get("uid")
    assert any(ref.get("uid") == uid and ref.get("controller") for ref in references), (
        f"{describe(obj)} is not controlled by {describe(owner)}: {references}"
    )


def assert_event(kube: FakeKube, obj: Mapping[str, Any], reason: str, *, count: int | None = None) -> None:
    """An event with this reason was recorded about the object."""
    about = [event for event in kube.list("v1/events") if event["involvedObject"].get("name") == name_of(obj)]
    found = [event for event in about if event["reason"] == reason]
    assert found, f"no event {reason} about {describe(obj)}; there are: {[event['reason'] for event in about]}"
    assert count is None or found[0]["count"] == count, f"event {reason} happened {found[0]['count']} times"


def assert_settled(
    op: Operator,
    request: Request | str | Mapping[str, Any],
    kube: FakeKube,
    *,
    config: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    now: datetime | None = None,
) -> None:
    """One more reconcile changes nothing: an operator that writes on every look wakes itself for ever."""
    before, sent = kube.changes, len(kube.sent)
    reconcile(op, request, kube, config=config, env=env, now=now)
    assert kube.changes == before, f"another reconcile changed something: {[s for s in kube.sent[sent:] if s.is_write]}"
