"""Kubernetes events, counted up where the same one happens again.

client-go keeps the events it has sent in memory; an operator that sleeps keeps nothing. So the name of an event is
made from all that makes two events the same (object, type, reason, message, source), and the count lives in the
cluster: until the API server drops the event (after an hour by default), the next one finds it.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from . import clock
from .objects import metadata_of, name_of, namespace_of

# The API server's limit is 1,024 bytes.
MESSAGE_BYTES_MAX = 1024
_NAME_CHARACTERS_MAX = 253
_DIGEST_CHARACTERS = 16


def new_event(obj: Mapping[str, Any], *, reason: str, message: str, type: str, source: str) -> dict[str, Any]:
    """A first event about an object, with the name that the next same one will have."""
    text = message.encode("utf-8", "replace")[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore")
    uid = str(metadata_of(obj).get("uid") or "")
    same = "\0".join((str(obj.get("kind")), namespace_of(obj), name_of(obj), uid, type, reason, text, source))
    digest = hashlib.sha256(same.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    now = clock.timestamp()
    # Events about cluster-scoped objects live in `default`, as kubectl expects.
    namespace = namespace_of(obj) or "default"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{name_of(obj)[: _NAME_CHARACTERS_MAX - _DIGEST_CHARACTERS - 1]}.{digest}",
            "namespace": namespace,
        },
        "involvedObject": {
            "apiVersion": obj.get("apiVersion"),
            "kind": obj.get("kind"),
            "name": name_of(obj),
            "namespace": namespace_of(obj),
            "uid": uid,
            "resourceVersion": str(metadata_of(obj).get("resourceVersion") or ""),
        },
        "type": type,
        "reason": reason,
        "message": text,
        "source": {"component": source},
        "reportingComponent": source,
        "reportingInstance": "torpor",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def counted_up(existing: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes an event happen once more."""
    count = existing.get("count")
    return {"count": (count if isinstance(count, int) else 0) + 1, "lastTimestamp": clock.timestamp()}
