"""An operator: what it watches, and the functions that the host calls.

One module defines one `Operator`. It is built at import, before the image is taken; it keeps no state that matters.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

from . import settings
from .errors import OperatorError
from .kinds import Kinds
from .kube import Kube, Send
from .manifest import CONCURRENCY_MAX, Owned, Predicate, Selector, Watch, duration
from .objects import Resource, finalizers_of
from .requests import Request, Requeue

__version__ = "0.1.0"
Reconcile = Callable[[Request, Kube], Requeue | None]
Finalize = Callable[[Resource, Kube], Requeue | None]
Key = Request | tuple[str, str] | str
MapEvent = Callable[["Event", Kube], Iterable[Key]]
# Of a code object (`inspect.CO_…`): coroutines and asynchronous generators, and `*args`.
_CO_ASYNC = 0x80 | 0x200
_CO_VARARGS = 0x04
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a watched object, for a mapping that is code. `old` is None for ADDED."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Resource
    old: Resource | None = None


class Operator:
    """An operator.

    >>> op = Operator(for_="example.com/v1/databases", owns=["v1/secrets", "apps/v1/statefulsets"])
    >>> @op.reconcile
    ... def reconcile(request, kube):
    ...     db = kube.get(request)
    ...     if db is not None:
    ...         kube.patch_status(db, {"ready": True})

    `for_` is the primary: its changes are reconciled by its own key. Changes of what it `owns` are reconciled by
    the key of the owner. `watches` need a mapping each (`by_label`, ...), or use `@op.map`. `resync` reconciles every
    key that often (10h by default on the host; "0" for never). `concurrency` keys run at once, each in a guest of
    its own. `name` is the field manager of its writes and the source of its events; by default the WasmOperator's name.
    """

    def __init__(
        self,
        *,
        for_: str | Watch,
        owns: Sequence[str | Owned] = (),
        watches: Sequence[Watch] = (),
        resync: str | timedelta | None = None,
        concurrency: int | None = None,
        name: str | None = None,
    ) -> None:
        self.primary = for_ if isinstance(for_, Watch) else Watch(for_)
        if self.primary.mapping is not None:
            raise OperatorError(f"for_={self.primary.kind} cannot have a mapping: its key is its own")
        self.owns = [_owned(given) for given in owns]
        self.watches = [_mapped(given) for given in watches]
        self.resync = None if resync is None else duration(resync)
        if concurrency is not None and not 1 <= concurrency <= CONCURRENCY_MAX:
            raise OperatorError(f"concurrency={concurrency}: 1 to {CONCURRENCY_MAX} keys can run at once")
        self.concurrency = concurrency
        self._name = name
        self._kinds = Kinds()
        self._reconcile: Reconcile | None = None
        self._finalizers: dict[str, Finalize] = {}
        self._maps: dict[int, MapEvent] = {}
        self._on_wake: list[Callable[[], object]] = []

    # ---- what an author says

    def reconcile(self, function: F) -> F:
        """The function that brings one key in order: `(request, kube) -> None | requeue_after(...)`.

        What it raises is logged and tried again with back-off.
        """
        if self._reconcile is not None:
            raise OperatorError("an operator has one reconcile function; this is the second")
        self._reconcile = _plain(function, "reconcile", ("request", "kube"))
        return function

    def finalizer(self, finalizer: str) -> Callable[[F], F]:
        """A function that cleans up before a primary goes: `(obj, kube) -> None | requeue_after(...)`.

        >>> op = Operator(for_="example.com/v1/databases")
        >>> @op.finalizer("example.com/cleanup")
        ... def cleanup(db, kube):
        ...     kube.delete("v1/persistentvolumeclaims", f"data-{db.name}-0", db.namespace)

        Primaries get the finalizer before they are reconciled. When one is being deleted the function runs
        instead of reconcile; when it returns None, the finalizer is removed; with `requeue_after` it stays, and the
        function runs again. It must be able to run twice.
        """
        if "/" not in finalizer:
            raise OperatorError(f"finalizer {finalizer!r} needs a domain, as example.com/{finalizer}")
        if finalizer in self._finalizers:
            raise OperatorError(f"finalizer {finalizer} is there twice")

        def register(function: F) -> F:
            self._finalizers[finalizer] = _plain(function, "a finalizer", ("obj", "kube"))
            return function

        return register

    def map(
        self,
        resource: str,
        *,
        namespace: str | None = None,
        labels: Selector | None = None,
        fields: Selector | None = None,
        predicates: Iterable[Predicate] = (),
    ) -> Callable[[F], F]:
        """Watches a resource and maps its changes to keys with code: `(event, kube) -> keys`.

        >>> op = Operator(for_="example.com/v1/databases")
        >>> @op.map("v1/nodes")
        ... def databases_on(event, kube):
        ...     return [("shop", name) for name in event.object.labels.get("databases", "").split(".") if name]

        A key is `(namespace, name)`, `"namespace/name"` or a `Request`. Every change wakes the operator: prefer a
        declared mapping where one will do.
        """
        watch = Watch(
            resource, namespace=namespace, labels=labels, fields=fields, predicates=predicates, mapping={"code": True}
        )

        def register(function: F) -> F:
            self._maps[len(self.watches)] = _plain(function, "a mapping", ("event", "kube"))
            self.watches.append(watch)
            return function

        return register

    def wake(self, function: F) -> F:
        """A function without arguments that runs after each wake, before anything else: reseed here generators of
        your own. (The module `random` is reseeded for you.)"""
        self._on_wake.append(_plain(function, "a wake function", ()))
        return function

    # ---- what the guest does with it

    def manifest(self) -> dict[str, Any]:
        """What the host reads at install. Raises `OperatorError` for an operator that could not run."""
        if self._reconcile is None:
            raise OperatorError("the operator has no reconcile function; write one and put @op.reconcile before it")
        said: dict[str, Any] = {
            "for": self.primary.manifest(),
            "owns": [owned.manifest() for owned in self.owns],
            "watches": [watch.manifest() for watch in self.watches],
            "resync": self.resync,
            "concurrency": self.concurrency,
            "sdk": f"python/{__version__}",
        }
        return {key: value for key, value in said.items() if value}

    def prepare(self, kube: Kube) -> None:
        """What needs discovery, before the image is taken."""
        kube.prepare(watch.kind for watch in (self.primary, *self.owns, *self.watches))

    def kube(self, send: Send | None = None) -> Kube:
        """The client for one call."""
        return Kube(
            primary=self.primary.kind, kinds=self._kinds, manager=self.manager, **({"send": send} if send else {})
        )

    def manager(self) -> str:
        """The given name, or the WasmOperator's, or one made from the primary."""
        if self._name:
            return self._name
        kind = self.primary.kind
        return settings.identity() or f"torpor-{kind.resource}{'.' if kind.group else ''}{kind.group}"

    def run(self, request: Request, kube: Kube) -> Requeue | None:
        """One reconcile, finalizers first."""
        if self._reconcile is None:
            raise OperatorError("the operator has no reconcile function")
        if self._finalizers:
            obj = kube.get(request)
            if obj is not None and obj.deleting:
                return self._finalize(obj, kube)
            for finalizer in self._finalizers if obj is not None else ():
                kube.add_finalizer(obj, finalizer)  # type: ignore[arg-type]  # not None: see the line above
            kube.hand_on(request, obj)
        return _checked(self._reconcile(request, kube), self._reconcile)

    def _finalize(self, obj: Resource, kube: Kube) -> Requeue | None:
        for finalizer, function in self._finalizers.items():
            if finalizer not in finalizers_of(obj):
                continue
            again = _checked(function(obj, kube), function)
            if again is not None:
                return again
            kube.remove_finalizer(obj, finalizer)
        return None

    def keys(self, watch: int, event: Event, kube: Kube) -> list[str]:
        """The keys that a mapping in code names, as `namespace/name`."""
        function = self._maps.get(watch)
        if function is None:
            raise OperatorError(f"watch {watch} has no mapping that is code")
        return list(dict.fromkeys(_key(key, function) for key in function(event, kube) or ()))

    def woken(self) -> None:
        """Runs the author's wake functions."""
        for function in self._on_wake:
            function()


def _owned(given: str | Watch) -> Watch:
    watch = given if isinstance(given, Watch) else Owned(given)
    if watch.mapping is not None:
        raise OperatorError(f"owns={watch.kind} cannot have a mapping: it is the controller; use watches=")
    return watch


def _mapped(watch: Watch | str) -> Watch:
    if isinstance(watch, str) or watch.mapping is None:
        named = watch if isinstance(watch, str) else watch.kind
        raise OperatorError(
            f"watches={named}: say which key a change concerns, as in Watch({str(named)!r}, "
            "mapping=by_label('example.com/database')), or use @op.map"
        )
    if watch.mapping == {"code": True}:
        raise OperatorError(
            f"watches={watch.kind}: a mapping that is code is written with @op.map({str(watch.kind)!r})"
        )
    return watch


def _plain(function: Any, what: str, parameters: tuple[str, ...]) -> Any:
    """Refuses at import what would only fail when the first change comes.

    Looks at the code object: `inspect.signature` touches 70 KB of memory, which every operator's image would carry.
    """
    code = getattr(function, "__code__", None)
    if not callable(function) or code is None:
        if callable(function):
            return function  # A class, a partial: the call will tell.
        raise OperatorError(f"{what} must be a function, not {type(function).__name__}")
    if code.co_flags & _CO_ASYNC:
        raise OperatorError(
            f"{what} must be a plain function, not async def: calls block this guest only, nobody else waits"
        )
    most = code.co_argcount - (getattr(function, "__self__", None) is not None)
    least = most - len(function.__defaults__ or ())
    needs_keywords = code.co_kwonlyargcount > len(function.__kwdefaults__ or ())
    if needs_keywords or not least <= len(parameters) <= (most if not code.co_flags & _CO_VARARGS else sys.maxsize):
        taken = ", ".join(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        raise OperatorError(f"{what} is called with ({', '.join(parameters)}), but {function.__name__} takes ({taken})")
    return function


def _checked(result: object, function: Callable[..., object]) -> Requeue | None:
    if result is None or isinstance(result, Requeue):
        return result
    if isinstance(result, Mapping | bool | int | str | float):
        shown = f"{type(result).__name__} {result!r:.60}"
    else:
        shown = type(result).__name__
    raise OperatorError(f"{function.__name__} returned {shown}; it may return None or requeue_after(...)")


def _key(key: object, function: Callable[..., object]) -> str:
    if isinstance(key, Request):
        return f"{key.namespace}/{key.name}"
    if isinstance(key, str) and key.count("/") == 1 and not key.endswith("/"):
        return key
    if isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key) and key[1]:
        return f"{key[0]}/{key[1]}"
    raise OperatorError(
        f"{getattr(function, '__name__', 'the mapping')} named {key!r}; a key is (namespace, name) or 'namespace/name'"
    )
