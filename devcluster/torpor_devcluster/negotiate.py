"""What the client accepts: JSON in one of the shapes object, Table or PartialObjectMetadata; nothing else is spoken.

Clients that prefer protobuf but name JSON too get JSON with its true content type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torpor_devcluster.errors import not_acceptable

Shape = Literal["object", "table", "partial", "discovery"]

_SHAPES: dict[tuple[str, str], Shape] = {
    ("Table", "meta.k8s.io"): "table",
    ("PartialObjectMetadata", "meta.k8s.io"): "partial",
    ("PartialObjectMetadataList", "meta.k8s.io"): "partial",
    ("APIGroupDiscoveryList", "apidiscovery.k8s.io"): "discovery",
}


@dataclass(frozen=True, slots=True)
class Accepted:
    shape: Shape
    content_type: str = "application/json"


PLAIN = Accepted("object")


def negotiate(accept: str, *, discovery: bool = False) -> Accepted:
    """The first of the client's wishes that can be met, in its order. Raises 406."""
    if not accept.strip():
        return PLAIN
    for wish in accept.split(","):
        media, *parameters = [part.strip() for part in wish.split(";")]
        if media not in ("application/json", "application/*", "*/*"):
            continue
        given = dict(parameter.split("=", 1) for parameter in parameters if "=" in parameter)
        if "as" not in given:
            return PLAIN
        shape = _SHAPES.get((given["as"], given.get("g", "")))
        version = {"discovery": "v2"}.get(shape or "", "v1")
        if shape is None or given.get("v") != version or discovery != (shape == "discovery"):
            continue
        if shape != "discovery":
            return Accepted(shape)
        return Accepted(shape, f"application/json;g={given['g']};v={given['v']};as={given['as']}")
    raise not_acceptable("only the following media types are accepted: application/json")
