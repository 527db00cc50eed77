"""A plain JSON client of any Kubernetes API server: the tests' *outside* view, with nothing between.

It shares no code with Torpor, caches nothing and retries nothing, so that a test sees what the server did.
Resources are written as in Torpor's SDKs: "v1/configmaps", "apps/v1/deployments", "example.com/v1/databases".

    async with KubeClient(url, token=token, ca_file=ca) as kube:
        await kube.create("v1/configmaps", {"metadata": {"name": "a", "namespace": "default"}})
        async for event in kube.watch("v1/configmaps", namespace="default"):
            ...
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import aiohttp

Json = dict[str, Any]
Objects = list[Json]  # a name of its own, since KubeClient has a method `list`

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # YAML in name only: JSON is YAML

REQUEST_TIMEOUT_S = 30.0


class ApiError(Exception):
    """An answer of 400 or more; `body` is its Kubernetes Status, or empty if it was none."""

    def __init__(self, status: int, what: str, body: Json) -> None:
        self.status = status
        self.body = body
        self.reason = str(body.get("reason", ""))
        super().__init__(f"{what}: {status} {self.reason}: {body.get('message', '')}")


class WatchEvent(NamedTuple):
    type: str
    object: Json


class KubeClient:
    """Belongs to the event loop that entered it. `ca_file` None: no verification beyond the system's."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        user_agent: str = "torpor-test",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"User-Agent": user_agent, "Accept": "application/json"} | dict(headers or {})
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._ca_file = ca_file
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tls = ssl.create_default_context(cafile=self._ca_file) if self._ca_file else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=0), headers=self._headers, timeout=self._timeout
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Objects

    async def get(self, resource: str, name: str, *, namespace: str | None = None, **query: Any) -> Json:
        return await self.request("GET", path_of(resource, namespace, name), query=query)

    async def find(self, resource: str, name: str, *, namespace: str | None = None) -> Json | None:
        """Like `get`, but None where the object does not exist."""
        try:
            return await self.get(resource, name, namespace=namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, resource: str, *, namespace: str | None = None, **query: Any) -> Json:
        """The list as served, with its metadata; `query` as Kubernetes names it (labelSelector, limit, …)."""
        return await self.request("GET", path_of(resource, namespace), query=query)

    async def items(self, resource: str, *, namespace: str | None = None, **query: Any) -> Objects:
        items: list[Json] = (await self.list(resource, namespace=namespace, **query))["items"]
        return items

    async def create(self, resource: str, body: Json, *, namespace: str | None = None, **query: Any) -> Json:
        """`body` may leave out apiVersion and kind where the server fills them in (built-in types)."""
        return await self.request("POST", path_of(resource, namespace or _namespace(body)), body=body, query=query)

    async def update(self, resource: str, body: Json, *, subresource: str | None = None, **query: Any) -> Json:
        """PUT of the whole object; with its resourceVersion a conflict is ApiError 409."""
        path = path_of(resource, _namespace(body), body["metadata"]["name"], subresource)
        return await self.request("PUT", path, body=body, query=query)

    async def merge_patch(
        self,
        resource: str,
        name: str,
        patch: Json,
        *,
        namespace: str | None = None,
        subresource: str | None = None,
    ) -> Json:
        path = path_of(resource, namespace, name, subresource)
        return await self.request("PATCH", path, body=patch, content_type=MERGE_PATCH)

    async def strategic_patch(
        self,
        resource: str,
        name: str,
        patch: Json,
        *,
        namespace: str | None = None,
        subresource: str | None = None,
    ) -> Json:
        path = path_of(resource, namespace, name, subresource)
        return await self.request("PATCH", path, body=patch, content_type=STRATEGIC_MERGE_PATCH)

    async def json_patch(
        self,
        resource: str,
        name: str,
        operations: Objects,
        *,
        namespace: str | None = None,
        subresource: str | None = None,
    ) -> Json:
        path = path_of(resource, namespace, name, subresource)
        return await self.request("PATCH", path, body=operations, content_type=JSON_PATCH)

    async def apply(
        self,
        resource: str,
        body: Json,
        *,
        field_manager: str = "torpor-test",
        force: bool = True,
        subresource: str | None = None,
    ) -> Json:
        """Server-side apply; `body` needs apiVersion and kind."""
        path = path_of(resource, _namespace(body), body["metadata"]["name"], subresource)
        query = {"fieldManager": field_manager, "force": force}
        return await self.request("PATCH", path, body=body, query=query, content_type=APPLY_PATCH)

    async def delete(
        self, resource: str, name: str, *, namespace: str | None = None, options: Json | None = None
    ) -> Json:
        """The answer is a Status, or the object while finalizers hold it."""
        return await self.request("DELETE", path_of(resource, namespace, name), body=options)

    async def delete_all(self, resource: str, *, namespace: str | None = None, **query: Any) -> Json:
        return await self.request("DELETE", path_of(resource, namespace), query=query)

    # Watching

    async def watch(
        self, resource: str, *, namespace: str | None = None, **query: Any
    ) -> AsyncGenerator[WatchEvent, None]:
        """Events as they come, ERROR events too, until the server ends the watch.

        Raises ApiError where the server refuses to begin. Close it (`contextlib.aclosing`) to leave early.
        """
        path = path_of(resource, namespace)
        async with self._connected.get(
            self._url + path,
            params=_params(query | {"watch": True}),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S),
        ) as response:
            if response.status >= 400:
                raise ApiError(response.status, f"WATCH {path}", _json_object(await response.read()))
            pending = b""
            async for chunk in response.content.iter_any():
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield WatchEvent(event["type"], event["object"])

    async def until(
        self,
        resource: str,
        name: str,
        condition: Callable[[Json | None], object],
        *,
        namespace: str | None = None,
        timeout_s: float = 10.0,
    ) -> Json | None:
        """Wait, on a watch, until `condition(object)` is true; the object is None while it does not exist.

        Returns the object that fulfilled it. Raises TimeoutError, naming the last state seen.
        """
        last: Json | None = None
        try:
            async with asyncio.timeout(timeout_s):
                async for last in self._states(resource, name, namespace):
                    if condition(last):
                        return last
        except TimeoutError as error:
            raise TimeoutError(f"{resource} {namespace}/{name} after {timeout_s} s: {last}") from error
        raise AssertionError("the states of an object never end")

    async def _states(self, resource: str, name: str, namespace: str | None) -> AsyncIterator[Json | None]:
        selector = f"metadata.name={name}"
        while True:
            found = await self.list(resource, namespace=namespace, fieldSelector=selector)
            yield found["items"][0] if found["items"] else None
            version = found["metadata"]["resourceVersion"]
            async for event in self.watch(
                resource, namespace=namespace, fieldSelector=selector, resourceVersion=version
            ):
                if event.type == "ERROR":
                    break
                yield None if event.type == "DELETED" else event.object

    # Anything else

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """A request whose answer is JSON. Raises ApiError; aiohttp's errors where there is no answer."""
        status, answer = await self.raw(
            method, path, body=body, query=query, content_type=content_type, headers=headers
        )
        if status >= 400:
            raise ApiError(status, f"{method} {path}", _json_object(answer))
        parsed: Json = json.loads(answer)
        return parsed

    async def raw(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body as they came, whatever the status. `body` is sent as JSON, bytes as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = dict(headers or {}) | ({"Content-Type": content_type} if data is not None else {})
        async with self._connected.request(
            method, self._url + path, data=data, params=_params(query or {}), headers=sent
        ) as response:
            return response.status, await response.read()

    async def text(self, path: str) -> str:
        """A page that is not JSON, as /metrics and /readyz are."""
        status, answer = await self.raw("GET", path, headers={"Accept": "*/*"})
        if status >= 400:
            raise ApiError(status, f"GET {path}", _json_object(answer))
        return answer.decode()

    @property
    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("a KubeClient is used inside `async with`")
        return self._session


def path_of(
    resource: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None
) -> str:
    """`path_of("apps/v1/deployments", "ns", "web", "status")` is /apis/apps/v1/namespaces/ns/deployments/…"""
    match resource.split("/"):
        case [version, plural]:
            path = f"/api/{version}"
        case [group, version, plural]:
            path = f"/apis/{group}/{version}"
        case _:
            raise ValueError(f"{resource!r} is not written as v1/configmaps or apps/v1/deployments")
    if namespace is not None:
        path += f"/namespaces/{quote(namespace, safe='')}"
    path += f"/{plural}"
    for part in (name, subresource):
        if part is not None:
            path += f"/{quote(part, safe='')}"
    return path


def _namespace(body: Json) -> str | None:
    namespace: str | None = body.get("metadata", {}).get("namespace")
    return namespace


def _params(query: Mapping[str, Any]) -> dict[str, str]:
    """Booleans as Kubernetes writes them; None leaves a parameter out."""
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in query.items()
        if value is not None
    }


def _json_object(answer: bytes) -> Json:
    try:
        parsed = json.loads(answer)
    except ValueError:
        return {"message": answer[:500].decode(errors="replace")}
    return parsed if isinstance(parsed, dict) else {}
