"""Request bodies: read within the size limit, decoded, and checked to be the object that the URL speaks of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from torpor_devcluster import errors, protobuf
from torpor_devcluster.metadata import shape_problem
from torpor_devcluster.requestinfo import RequestInfo
from torpor_devcluster.resources import ResourceType

Json = dict[str, Any]

# apiserver: DefaultMaxRequestBodyBytes
BODY_BYTES_MAX = 3 * 1024 * 1024
YAML_DEPTH_MAX = 100

_JSON_TYPES = ("application/json", "text/json", "*/*")
_YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "application/apply-patch+yaml")


async def read_body(request: web.BaseRequest) -> bytes:
    """Raises 413 without reading on."""
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise errors.body_too_large(BODY_BYTES_MAX)
    chunks, size = [], 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > BODY_BYTES_MAX:
            raise errors.body_too_large(BODY_BYTES_MAX)
        chunks.append(chunk)
    return b"".join(chunks)


def decode(data: bytes, content_type: str) -> Any:
    """JSON, YAML or protobuf. Raises 400 and 415."""
    media = content_type.partition(";")[0].strip() or "application/json"
    if media == protobuf.CONTENT_TYPE:
        try:
            return protobuf.decode(data)
        except protobuf.Malformed as error:
            raise errors.unsupported_media_type(str(error)) from None
    if media not in _JSON_TYPES and media not in _YAML_TYPES:
        supported = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
        raise errors.unsupported_media_type(
            f"the body of the request was in an unknown format - accepted media types include: {supported} "
            f"(the devcluster does not speak {media})"
        )
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if media in _YAML_TYPES:
            return _decode_yaml(data)
        raise errors.bad_request(f"the request body is not valid JSON: {error}") from None


def _decode_yaml(data: bytes) -> Any:
    # Only now: most clients send JSON even where they say YAML.
    import yaml

    # The C parser, where the wheel has it, is ten times as fast; both give the same events.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_yaml(yaml.parse(data, Loader=loader))
        loaded = yaml.load(data, Loader=loader)
        # Through JSON: dates, sets and non-string keys of YAML are no API values.
        return msgspec.json.decode(msgspec.json.encode(loaded))
    except (yaml.YAMLError, msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise errors.bad_request(f"error converting YAML to JSON: {error}") from None


def _check_yaml(events: Iterable[Any]) -> None:
    """Refuse what a small text can blow up: aliases of aliases, and endless nesting. Raises ValueError."""
    depth = 0
    for event in events:
        match type(event).__name__:
            case "AliasEvent":
                raise ValueError("aliases are not accepted")
            case "MappingStartEvent" | "SequenceStartEvent":
                depth += 1
            case "MappingEndEvent" | "SequenceEndEvent":
                depth -= 1
        if depth > YAML_DEPTH_MAX:
            raise ValueError(f"nested more than {YAML_DEPTH_MAX} deep")


def as_object(resource: ResourceType, info: RequestInfo, body: Any) -> Json:
    """`body` as an object of the resource at this URL, its identity filled in from there. Raises 400."""
    if not isinstance(body, dict):
        raise errors.bad_request("the request body must be an object")
    if body.get("metadata") is None:
        body["metadata"] = {}
    problem = shape_problem(body)
    if problem:
        raise errors.bad_request(f"{resource.kind} in version {resource.version!r} cannot be handled: {problem}")
    _check_type(resource, body)
    _check_place(resource, info, body["metadata"])
    return body


def _check_type(resource: ResourceType, body: Json) -> None:
    kind, api_version = body.get("kind"), body.get("apiVersion")
    if resource.custom and not kind:
        raise errors.bad_request("Object 'Kind' is missing in the request body")
    if (kind or resource.kind) != resource.kind or (api_version or resource.api_version) != resource.api_version:
        sent = f"{api_version or resource.api_version}, Kind={kind or resource.kind}"
        raise errors.bad_request(
            f"{resource.kind} in version {resource.version!r} cannot be handled as a {resource.kind}: "
            f"the body is of {sent}, the URL of {resource.api_version}, Kind={resource.kind}"
        )
    body["kind"], body["apiVersion"] = resource.kind, resource.api_version


def _check_place(resource: ResourceType, info: RequestInfo, metadata: Json) -> None:
    if resource.namespaced:
        if metadata.get("namespace", info.namespace) not in ("", info.namespace):
            raise errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        metadata["namespace"] = info.namespace
    else:
        metadata.pop("namespace", None)
    if not info.name:
        return
    if metadata.get("name", info.name) != info.name:
        raise errors.bad_request(
            f"the name of the object ({metadata['name']}) does not match the name on the URL ({info.name})"
        )
    metadata["name"] = info.name
