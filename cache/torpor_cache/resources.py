"""Names of things: a resource as the API server serves it, an object's key, and a place in the order of changes.

Pure values, and the parsing of them from outside; knows of no server and no store.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, NewType
from urllib.parse import quote

from torpor_services.errors import TorporError

ResourceVersion = NewType("ResourceVersion", int)
"""Compared as an integer within one resource and history. 0 is none, and never sent: to a server it means "any"."""

NO_VERSION = ResourceVersion(0)

_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_VERSION = re.compile(r"[1-9][0-9]{0,19}")  # 64 bits have 20 digits at most


class InvalidResource(TorporError, ValueError):
    """A text that names no resource."""


class InvalidResourceVersion(TorporError, ValueError):
    """A resourceVersion that is not a positive whole number. Kubernetes' own always are."""


class ObjectKey(NamedTuple):
    """Namespace (empty for cluster-scoped objects) and name. A tuple, since its hash and order are then C's."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True, order=True)
class Resource:
    """Group (empty: core), version and plural, as in the API's paths."""

    group: str
    version: str
    resource: str

    @classmethod
    def parse(cls, text: str) -> Resource:
        """Reads "v1/configmaps", "/v1/configmaps" or "apps/v1/deployments"; raises InvalidResource."""
        parts = text.split("/")
        if len(parts) == 2:
            parts.insert(0, "")
        if len(parts) != 3:
            raise InvalidResource(f"{text!r} is not written as v1/configmaps or apps/v1/deployments")
        return cls.checked(*parts)

    @classmethod
    def checked(cls, group: str, version: str, resource: str) -> Resource:
        """A resource of parts that came from outside; raises InvalidResource where one could not stand in a path."""
        for what, part in (("version", version), ("resource", resource), ("group", group)):
            if not part and what == "group":
                continue
            if len(part) > 253 or not _DNS_NAME.fullmatch(part):
                raise InvalidResource(f"{part[:80]!r} is no {what} of a resource")
        return cls(group, version, resource)

    @property
    def api_version(self) -> str:
        """As objects write it: "v1", "apps/v1"."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The API's path of the collection, an object, or a subresource of one."""
        path = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if namespace:
            path += f"/namespaces/{quote(namespace, safe='')}"
        path += f"/{self.resource}"
        for part in (name, subresource):
            if part:
                path += f"/{quote(part, safe='')}"
        return path

    def __str__(self) -> str:
        return f"{self.api_version}/{self.resource}"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the sequence of changes of one resource; comparable only within one history of the cluster."""

    history: str
    resource_version: ResourceVersion


def parse_resource_version(text: str) -> ResourceVersion:
    """The version as a number; raises InvalidResourceVersion for anything but a positive whole number."""
    if not _VERSION.fullmatch(text):
        raise InvalidResourceVersion(f"{text[:40]!r} is no resourceVersion: a positive whole number is expected")
    return ResourceVersion(int(text))
