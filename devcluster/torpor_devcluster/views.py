"""Between the stored form of an object and the version it is read or written in.

Custom resources convert by `None`: only apiVersion changes. events.k8s.io/v1 is a view of core events, with the
fields renamed as Kubernetes does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torpor_devcluster.history import Stored
from torpor_devcluster.resources import EVENTS, ResourceType

Json = dict[str, Any]

_TO_NEW_EVENT = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
_TO_CORE_EVENT = {new: old for old, new in _TO_NEW_EVENT.items()}


def is_stored_form(resource: ResourceType) -> bool:
    return resource.view_of is None and resource.storage_version in ("", resource.version)


def from_storage(resource: ResourceType, stored: Stored) -> Json:
    """The object in the version of `resource`. Shared: not to be changed."""
    if is_stored_form(resource):
        return stored.object
    if stored.views is None:
        stored.views = {}
    view = stored.views.get(resource.api_version)
    if view is None:
        view = stored.views[resource.api_version] = _view(resource, stored.object)
    return view


def _view(resource: ResourceType, obj: Json) -> Json:
    renames = _TO_NEW_EVENT if resource.view_of == EVENTS else {}
    renamed = {renames.get(key, key): value for key, value in obj.items()}
    if resource.view_of == EVENTS:
        for name in ("reportingController", "reportingInstance"):
            if not renamed.get(name):
                renamed.pop(name, None)
    return {**renamed, "apiVersion": resource.api_version}


def to_storage(resource: ResourceType, obj: Json) -> Json:
    """The stored form, kind and apiVersion first (see `history.Stored`). The top level is a new dict."""
    renames = _TO_CORE_EVENT if resource.view_of == EVENTS else {}
    api_version = resource.api_version
    if resource.view_of == EVENTS:
        api_version = "v1"
    elif resource.storage_version:
        api_version = f"{resource.group}/{resource.storage_version}"
    stored: Json = {"kind": resource.kind, "apiVersion": api_version, "metadata": dict(obj["metadata"])}
    for key, value in obj.items():
        if key not in stored:
            stored[renames.get(key, key)] = value
    return stored


def encode(resource: ResourceType, stored: Stored) -> bytes:
    """The JSON of one object in the version of `resource`."""
    if is_stored_form(resource):
        return stored.data
    return msgspec.json.encode(from_storage(resource, stored))


def encode_item(resource: ResourceType, stored: Stored) -> bytes:
    """The JSON of an object as an item of a list: built-in types leave out kind and apiVersion there."""
    data = encode(resource, stored)
    if resource.custom:
        return data
    prefix = len(f'{{"kind":"{resource.kind}","apiVersion":"{resource.api_version}",')
    return b"{" + data[prefix:]
