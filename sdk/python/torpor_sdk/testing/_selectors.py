"""Label and field selectors, as the API server reads them."""

import re
from collections.abc import Mapping
from typing import Any

from torpor_sdk.objects import metadata_of

_SET = re.compile(r"\s*(?P<key>[^\s!=,()]+)\s+(?P<how>in|notin)\s*\((?P<values>[^)]*)\)\s*")
_EQUAL = re.compile(r"\s*(?P<key>[^\s!=,()]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s,()]*)\s*")
_EXISTS = re.compile(r"\s*(?P<not>!?)\s*(?P<key>[^\s!=,()]+)\s*")


def matches_labels(obj: Mapping[str, Any], selector: str) -> bool:
    """Raises `ValueError` for what is no selector."""
    labels = metadata_of(obj).get("labels") or {}
    return all(_holds(part, labels) for part in _split(selector))


def matches_fields(obj: Mapping[str, Any], selector: str) -> bool:
    """Any field by its dotted path; a missing one is empty."""
    for part in _split(selector):
        found = _EQUAL.fullmatch(part)
        if not found:
            raise ValueError(f"{part!r} is no field selector")
        value: Any = obj
        for key in found["key"].split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if (str(value or "") == found["value"]) == (found["how"] == "!="):
            return False
    return True


def _holds(part: str, labels: Mapping[str, str]) -> bool:
    if found := _SET.fullmatch(part):
        values = [value.strip() for value in found["values"].split(",")]
        return (labels.get(found["key"]) in values) == (found["how"] == "in")
    if found := _EQUAL.fullmatch(part):
        return (labels.get(found["key"]) == found["value"]) == (found["how"] != "!=")
    if found := _EXISTS.fullmatch(part):
        return (found["key"] in labels) != bool(found["not"])
    raise ValueError(f"{part!r} is no label selector")


def _split(selector: str) -> list[str]:
    """At commas that are not in parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", selector) if part.strip()]
