"""Runs an operator's functions against a `FakeKube`, with a host that gives configuration, time and HTTP."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

from torpor_sdk import _frames, _host, clock, settings
from torpor_sdk.errors import OperatorError
from torpor_sdk.kube import Kube
from torpor_sdk.objects import Resource, name_of, namespace_of
from torpor_sdk.operators import Event, Operator
from torpor_sdk.requests import Cause, Request, Requeue

from ._fake import FakeKube
from ._selectors import matches_fields, matches_labels

# (method, url, headers, body) to (status, headers, body).
FakeHTTP = Callable[[str, str, Mapping[str, str], bytes], tuple[int, Mapping[str, str], bytes]]
# An operator and its cluster that still change each other after this many rounds will never stop.
ROUNDS_MAX = 20


def reconcile(
    op: Operator,
    request: Request | str | Mapping[str, Any],
    kube: FakeKube,
    *,
    config: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    http: FakeHTTP | None = None,
    now: datetime | None = None,
    cause: Cause = "watch",
    attempt: int = 0,
) -> Requeue | None:
    """One reconcile, as the host would call it: of a `Request`, of `"namespace/name"`, or of an object's key.

    What the operator raises goes through. `now` holds the time still. `http` answers `http.fetch`; without it every
    host is off the list.
    """
    with _host_of(config, env, http, now):
        return op.run(_request(request, cause, attempt), _client(op, kube))


def map_event(
    op: Operator,
    resource: str,
    type: Literal["ADDED", "MODIFIED", "DELETED"],
    obj: Mapping[str, Any],
    kube: FakeKube | None = None,
    *,
    old: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """The keys, as `namespace/name`, that the operator's code maps a change to."""
    index = next(
        (
            number
            for number, watch in enumerate(op.watches)
            if str(watch.kind) == resource and watch.mapping == {"code": True}
        ),
        None,
    )
    if index is None:
        raise OperatorError(f"the operator has no @op.map({resource!r})")
    event = Event(type, Resource(obj), None if old is None else Resource(old))
    with _host_of(config, env, None, None):
        return op.keys(index, event, _client(op, kube or FakeKube()))


def converge(
    op: Operator,
    kube: FakeKube,
    *,
    config: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    http: FakeHTTP | None = None,
    now: datetime | None = None,
) -> dict[str, Requeue | None]:
    """Reconciles every primary, again and again until nothing changes: the result for each key.

    Keys that have gone since the round before are reconciled too. Raises `AssertionError` for an operator that
    never comes to rest.
    """
    keys = _primaries(op, kube)
    for _ in range(ROUNDS_MAX):
        before = kube.changes
        results = {
            key: reconcile(op, key, kube, config=config, env=env, http=http, now=now, cause="resync") for key in keys
        }
        after = _primaries(op, kube)
        if kube.changes == before and after == keys:
            return results
        keys = after + [key for key in keys if key not in after]
        if kube.changes == before:
            keys = after
    raise AssertionError(f"after {ROUNDS_MAX} rounds the operator still writes: {kube.writes[-1]}")


def _primaries(op: Operator, kube: FakeKube) -> list[str]:
    watch = op.primary
    kube.cluster.define_resource(watch.kind)
    return [
        f"{obj.namespace}/{obj.name}"
        for obj in kube.list(str(watch.kind), watch.namespace or "")
        if matches_labels(obj, watch.labels) and matches_fields(obj, watch.fields)
    ]


def _client(op: Operator, kube: FakeKube) -> Kube:
    for watch in (op.primary, *op.owns, *op.watches):
        kube.cluster.define_resource(watch.kind)
    return op.kube(send=kube.cluster.send)


def _request(given: Request | str | Mapping[str, Any], cause: Cause, attempt: int) -> Request:
    if isinstance(given, Request):
        return given
    if isinstance(given, str):
        namespace, _, name = given.rpartition("/")
        return Request(namespace, name, cause, attempt)
    return Request(namespace_of(given), name_of(given), cause, attempt)


@contextlib.contextmanager
def _host_of(
    config: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
    http: FakeHTTP | None,
    now: datetime | None,
) -> Iterator[None]:
    settings.forget()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_host.replaced(FakeHost(config or {}, env or {}, http)))
        if now is not None:
            stack.enter_context(clock.frozen(now))
        yield
    settings.forget()


class FakeHost:
    """The host's functions for a unit test, over the same messages as the real ones."""

    def __init__(self, config: Mapping[str, Any], env: Mapping[str, str], http: FakeHTTP | None) -> None:
        self._settings = {"config": dict(config), "env": dict(env)}
        self._http = http

    def config(self) -> bytes:
        return json.dumps(self._settings).encode()

    def http_fetch(self, message: bytes, /) -> bytes:
        method, url, lines, body = _frames.decode(message, fields_min=4)[:4]
        if self._http is None:
            return _frames.encode("", "", "", "denied", "this test allows no outbound hosts: pass http=")
        headers = dict(line.split(": ", 1) for line in _frames.text(lines).splitlines())
        status, answered, content = self._http(_frames.text(method), _frames.text(url), headers, body)
        return _frames.encode(status, "".join(f"{name}: {value}\n" for name, value in answered.items()), content)

    def kube_request(self, message: bytes, /) -> bytes:
        return _frames.encode("", "", "", "invalid", "in a test the cluster is a FakeKube")

    def kube_tree(self, message: bytes, /) -> bytes:
        return _frames.encode("", "", "", "unimplemented", "FakeKube has no trees")

    def log(self, level: int, text: str, /) -> None:
        """Tests read logs through `logging` (pytest's caplog)."""
