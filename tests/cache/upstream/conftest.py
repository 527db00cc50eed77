"""A scripted API server that speaks real HTTP, a clock whose sleeps tests can wait for, and a listener that notes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import HealthCheck, settings
from torpor_cache.apiserver import ApiServer, Credentials
from torpor_cache.histories import Histories
from torpor_cache.informers import Informers, WatchScope
from torpor_cache.kubeconfig import FixedCredentials
from torpor_cache.objects import Change
from torpor_cache.resources import Position, Resource
from torpor_services.clock import ManualClock

# A loaded machine is no failure; 60 examples find what these properties are about.
settings.register_profile("torpor", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("torpor")

WAIT_S = 20.0  # of real time, for what happens at once on an idle machine
CONFIG_MAPS = WatchScope(Resource.parse("v1/configmaps"))


def config_map(
    name: str, version: int, *, uid: str = "", namespace: str = "default", **metadata: Any
) -> dict[str, Any]:
    return {
        "kind": "ConfigMap",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            **metadata,
        },
    }


def listing(version: int, *items: dict[str, Any], token: str = "") -> dict[str, Any]:
    """As a list of a built-in kind: its items have no kind."""
    bare = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for item in items]
    metadata = {"resourceVersion": str(version)} | ({"continue": token} if token else {})
    return {"kind": "ConfigMapList", "apiVersion": "v1", "metadata": metadata, "items": bare}


def event(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": item}


def bookmark(version: int, *, ends_initial: bool = False) -> dict[str, Any]:
    metadata: dict[str, Any] = {"resourceVersion": str(version), "creationTimestamp": None}
    if ends_initial:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    return event("BOOKMARK", {"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata})


def status(code: int, reason: str = "", **more: Any) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, **more}


@dataclass
class Exchange:
    """One request, and the answer that the test gives to it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "true"

    def reply(self, code: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        lines = [f"HTTP/1.1 {code} X", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        self._over.set()

    def begin(self) -> Exchange:
        """200, and a body that comes in pieces."""
        self._writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        return self

    def send(self, *events: dict[str, Any]) -> None:
        self.send_bytes(b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in events))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

    def end(self) -> None:
        """As agreed."""
        self._writer.write(b"0\r\n\r\n")
        self._over.set()

    def cut(self) -> None:
        """Without a word, in the middle."""
        self._writer.transport.abort()
        self._over.set()

    async def closed_by_client(self) -> None:
        async with asyncio.timeout(WAIT_S):
            assert await self._reader.read(1) == b""


class ScriptedApi:
    """Every request waits for the test to answer it; the cache's history is answered here."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Exchange] = asyncio.Queue()
        self.history = "history-1"
        self.newest = 1
        self.url = ""
        self._connections: set[asyncio.StreamWriter] = set()
        self._exchanges: list[Exchange] = []

    async def __aenter__(self) -> ScriptedApi:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        for exchange in self._exchanges:
            exchange._over.set()
        await self.settle()

    async def stop_listening(self) -> Callable[[], Any]:
        """New connections are refused until what is returned is awaited."""
        port = self._server.sockets[0].getsockname()[1]
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()

        async def again() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

        return again

    async def next(self) -> Exchange:
        async with asyncio.timeout(WAIT_S):
            return await self.requests.get()

    async def next_list(self) -> Exchange:
        exchange = await self.next()
        assert not exchange.is_watch, exchange
        return exchange

    async def next_watch(self) -> Exchange:
        exchange = await self.next()
        assert exchange.is_watch, exchange
        return exchange

    async def settle(self) -> None:
        """Until nothing of ours is under way on this loop."""
        for _ in range(20):
            await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                exchange = await self._parse(head, reader, writer)
                self._exchanges.append(exchange)
                if "/namespaces/torpor-system/" in exchange.path:
                    self._answer_history(exchange)
                else:
                    await self.requests.put(exchange)
                await exchange._over.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _parse(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
        first, *lines = head.decode().rstrip().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        parts = urlsplit(target)
        return Exchange(method, parts.path, dict(parse_qsl(parts.query)), headers, body, reader, writer)

    def _answer_history(self, exchange: Exchange) -> None:
        """The ConfigMap, and the list whose version says how far the cluster is."""
        body = {"metadata": {"name": "torpor-history", "resourceVersion": "1"}, "data": {"id": self.history}}
        if exchange.query.get("limit") == "1":
            body = {"metadata": {"resourceVersion": str(self.newest)}}
        exchange.reply(200, body)


class StepClock(ManualClock):
    """Tests wait for a sleep of a certain length to be asked for, then let its time pass."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: list[float] = []
        self._news = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self._asked.append(seconds)
        self._news.set()
        await super().sleep(seconds)

    async def asked(self, low_s: float, high_s: float) -> float:
        """The next sleep of this length that no test has waited for yet."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for place, seconds in enumerate(self._asked):
                    if low_s <= seconds <= high_s:
                        del self._asked[: place + 1]
                        return seconds
                self._news.clear()
                await self._news.wait()

    async def pass_wait(self, low_s: float, high_s: float) -> float:
        seconds = await self.asked(low_s, high_s)
        await self.advance(seconds)
        return seconds


class Notes:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.changes: list[Change] = []
        self._news = asyncio.Event()

    def _note(self, what: Any) -> None:
        self.told.append(what)
        self._news.set()

    def on_change(self, change: Change) -> None:
        self.changes.append(change)
        self._note((change.type.value, change.key.name, change.resource_version))

    def on_synced(self) -> None:
        self._note("synced")

    def on_bookmark(self, position: Position) -> None:
        self._note(("bookmark", position.resource_version))

    def on_resync(self) -> None:
        self._note("resync")

    def on_error(self, status: bytes, final: bool) -> None:
        self._note(("error", json.loads(status).get("code"), final))

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while what not in self.told:
                self._news.clear()
                await self._news.wait()

    async def until_told(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.changes) < count:
                self._news.clear()
                await self._news.wait()


@dataclass
class Kit:
    """What upstream tests need, imported nowhere: pytest imports each test file by itself."""

    api: ScriptedApi
    clock: StepClock
    informers: Informers
    server: ApiServer
    scope: WatchScope = CONFIG_MAPS
    Notes: type[Notes] = Notes
    config_map = staticmethod(config_map)
    listing = staticmethod(listing)
    event = staticmethod(event)
    bookmark = staticmethod(bookmark)
    status = staticmethod(status)

    def acquire(self, scope: WatchScope | None = None) -> tuple[Any, Notes]:
        notes = Notes()
        return self.informers.acquire(scope or self.scope, notes), notes

    async def refuse_streaming(self) -> None:
        """The server is one that does not know streaming lists."""
        exchange = await self.api.next_watch()
        assert exchange.query["sendInitialEvents"] == "true"
        exchange.reply(422, status(422, "Invalid", message="sendInitialEvents is forbidden"))

    async def synced(self, version: int = 10, *items: dict[str, Any]) -> tuple[Any, Notes, Exchange]:
        """An informer that has listed these at this version, and its open watch."""
        informer, notes = self.acquire()
        await self.refuse_streaming()
        (await self.api.next_list()).reply(200, listing(version, *items))
        watch = (await self.api.next_watch()).begin()
        await notes.until(("bookmark", version))
        return informer, notes, watch


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    clock = StepClock()
    async with ScriptedApi() as api:
        source = FixedCredentials(Credentials(api.url))
        async with ApiServer(source, user_agent="torpor-cache-test", clock=clock) as server:
            async with Informers(server, Histories(server), clock=clock) as informers:
                yield Kit(api, clock, informers, server)
