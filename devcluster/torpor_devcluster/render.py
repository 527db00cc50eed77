"""Stored objects as answers: whole, as rows of a Table, or their metadata alone, as the client accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from torpor_devcluster import table, views
from torpor_devcluster.calls import Call, Reply
from torpor_devcluster.clock import Clock
from torpor_devcluster.history import Stored
from torpor_devcluster.listing import Page

Json = dict[str, Any]


class Renderer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def object(self, call: Call, stored: Stored, code: int = 200) -> Reply:
        return Reply(self.encoder(call)(stored), code)

    def encoder(self, call: Call) -> Callable[[Stored], bytes]:
        """How single objects are written for this client: in an answer, or in the events of a watch."""
        resource = call.resource
        match call.accepted.shape:
            case "table":
                return lambda stored: self._table(call, [stored], {"resourceVersion": str(stored.revision)})
            case "partial":
                return lambda stored: msgspec.json.encode(table.partial(views.from_storage(resource, stored)))
        return lambda stored: views.encode(resource, stored)

    def list(self, call: Call, page: Page) -> Reply:
        match call.accepted.shape:
            case "table":
                return Reply(self._table(call, page.objects, page.metadata()))
            case "partial":
                shown = [views.from_storage(call.resource, stored) for stored in page.objects]
                return Reply(msgspec.json.encode(table.partial_list(shown, page.metadata())))
        return Reply(_list_body(call, page))

    def _table(self, call: Call, objects: Sequence[Stored], metadata: Json) -> bytes:
        shown = [views.from_storage(call.resource, stored) for stored in objects]
        include, now_s = call.query.get("includeObject", "Metadata"), self._clock.now_s()
        return msgspec.json.encode(table.table(call.resource, shown, metadata, include=include, now_s=now_s))


def _list_body(call: Call, page: Page) -> bytes:
    """Joined from the stored bytes: a list of 20,000 objects encodes none of them."""
    resource = call.resource
    metadata = page.list_metadata(resource)
    head = msgspec.json.encode({"kind": resource.list_kind, "apiVersion": resource.api_version, "metadata": metadata})
    items = b",".join([views.encode_item(resource, stored) for stored in page.objects])
    return head[:-1] + b',"items":[' + items + b"]}"
