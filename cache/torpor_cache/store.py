"""The objects of one watch scope, at one position: what reads and snapshots are answered from.

Invariant: at most one object a key. Only the reflector writes, between two awaits of the loop, so that a reader who
does not await sees one consistent state. Knows nothing of versions' order; the reflector does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torpor_cache.objects import StoredObject
from torpor_cache.resources import ObjectKey
from torpor_cache.selectors import FieldSelector, LabelSelector

EVERY_LABEL = LabelSelector()
EVERY_FIELD = FieldSelector()


class Store:
    """Indexed by namespace, then name: a list of one namespace touches nothing of the others."""

    __slots__ = ("_bytes", "_count", "_namespaces")

    def __init__(self, objects: Iterable[StoredObject] = ()) -> None:
        self._namespaces: dict[str, dict[str, StoredObject]] = {}
        self._count = 0
        self._bytes = 0
        for item in objects:
            self.put(item)

    def get(self, key: ObjectKey) -> StoredObject | None:
        names = self._namespaces.get(key.namespace)
        return None if names is None else names.get(key.name)

    def select(
        self,
        namespace: str = "",
        label_selector: LabelSelector = EVERY_LABEL,
        field_selector: FieldSelector = EVERY_FIELD,
    ) -> list[StoredObject]:
        """The matching objects in the API server's order, by namespace and name. Empty namespace: all of them."""
        selected: Iterable[StoredObject] = self._candidates(namespace, field_selector.required("metadata.name"))
        if label_selector:
            selected = (item for item in selected if label_selector.matches(item.labels))
        if field_selector:
            paths = field_selector.paths
            selected = (item for item in selected if field_selector.matches(item.fields(paths)))
        return sorted(selected, key=_key)

    def _candidates(self, namespace: str, name: str | None) -> Iterator[StoredObject]:
        if namespace:
            spaces: Iterable[dict[str, StoredObject]] = (self._namespaces.get(namespace, {}),)
        else:
            spaces = self._namespaces.values()
        if name is not None:
            return (names[name] for names in spaces if name in names)
        return (item for names in spaces for item in names.values())

    def put(self, item: StoredObject) -> None:
        """Adds the object, or replaces what has its key."""
        names = self._namespaces.get(item.key.namespace)
        if names is None:
            names = self._namespaces[item.key.namespace] = {}
        old = names.get(item.key.name)
        if old is None:
            self._count += 1
        else:
            self._bytes -= len(old.json)
        self._bytes += len(item.json)
        names[item.key.name] = item

    def remove(self, key: ObjectKey) -> StoredObject | None:
        """What was there, if anything."""
        names = self._namespaces.get(key.namespace)
        old = names.pop(key.name, None) if names is not None else None
        if old is not None:
            self._count -= 1
            self._bytes -= len(old.json)
            if not names:
                del self._namespaces[key.namespace]
        return old

    def clear(self) -> None:
        self._namespaces = {}
        self._count = 0
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Of JSON; what Python adds to it is about 500 bytes an object."""
        return self._bytes

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StoredObject]:
        return self._candidates("", None)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ObjectKey) and self.get(key) is not None


def _key(item: StoredObject) -> ObjectKey:
    return item.key
