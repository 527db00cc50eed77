"""Many different mirrors side by side, the objects they look after, and what must have become of them.

Each operator has its own module (language, hash), ServiceAccount, rights and label selector. `Load` creates, changes
and deletes objects and knows which ConfigMaps must be there when all is reconciled, to the letter.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torpor_guests_testing import Guest, fleet
from torpor_kubernetes_testing import KubeClient, create_service_account

from torpor_mesh_testing.cluster import EXAMPLE_KINDS, WASM_OPERATORS, condition_of, mirror_rules, operator_object
from torpor_mesh_testing.mesh import Mesh

REQUESTS_AT_ONCE = 16
LABEL = "operator"
Data = dict[str, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Member:
    """One operator of a fleet; its build id is its name."""

    guest: Guest
    resource: str

    @property
    def name(self) -> str:
        return self.guest.build_id

    def data(self, value: str) -> Data:
        """What its ConfigMap for an object with this value holds."""
        return {"value": value, "by": self.guest.language, "build": self.name}


def members(counts: Mapping[str, int], kinds: Sequence[str] = EXAMPLE_KINDS) -> list[Member]:
    """So many of each language, spread over the kinds; builds what is missing."""
    return [Member(guest, kinds[number % len(kinds)]) for number, guest in enumerate(fleet(counts))]


async def deploy(mesh: Mesh, kube: KubeClient, namespace: str, crew: Sequence[Member], **spec: Any) -> None:
    """Creates accounts, rights and operators; returns when all of them are ready. `spec` is added to each."""
    for member in crew:
        member.guest.place(mesh.modules)
    await each(
        crew,
        lambda member: create_service_account(kube, namespace, member.name, mirror_rules(member.resource)),
    )
    await each(crew, lambda member: kube.create(WASM_OPERATORS, _object(member, namespace, spec)))
    await until_ready(kube, namespace, [member.name for member in crew])


async def until_ready(kube: KubeClient, namespace: str, names: Iterable[str], *, timeout_s: float = 180.0) -> None:
    """Until each of these WasmOperators says Ready. Raises TimeoutError that names those which do not."""
    missing = dict.fromkeys(names, "no status")

    def settled(event: str, obj: dict[str, Any]) -> bool:
        name = obj["metadata"]["name"]
        if name in missing:
            status, reason, message = condition_of(obj, "Ready")
            missing[name] = f"{status} {reason} {message}"
            if status == "True":
                del missing[name]
        return not missing

    try:
        await follow(kube, WASM_OPERATORS, namespace, settled, timeout_s=timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"not ready after {timeout_s} s: {missing}") from error


async def follow(
    kube: KubeClient,
    resource: str,
    namespace: str,
    settled: Callable[[str, dict[str, Any]], bool],
    *,
    timeout_s: float,
) -> None:
    """Lists and watches until `settled(event type, object)` is true; objects of the list come as ADDED."""
    async with asyncio.timeout(timeout_s):
        listed = await kube.list(resource, namespace=namespace)
        # Each is told, also after the first that settles it.
        done = [settled("ADDED", obj) for obj in listed["items"]]
        if any(done):
            return
        version = listed["metadata"]["resourceVersion"]
        while True:
            async with contextlib.aclosing(
                kube.watch(resource, namespace=namespace, resourceVersion=version)
            ) as events:
                async for event in events:
                    version = event.object["metadata"]["resourceVersion"]
                    if settled(event.type, event.object):
                        return


@dataclass
class Load:
    """Objects of a fleet. Every choice comes from `seed`."""

    kube: KubeClient
    namespace: str
    fleet: Sequence[Member]
    seed: int = 0
    objects: dict[str, tuple[Member, str]] = field(default_factory=dict)  # name → whose, value

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._created = 0
        self._changed = 0

    @property
    def expected(self) -> dict[str, Data]:
        """ConfigMaps by name."""
        return {f"{name}-{member.name}": member.data(value) for name, (member, value) in self.objects.items()}

    async def create(self, count: int) -> None:
        """An equal share for each operator."""
        names = [f"object-{self._created + number:04d}" for number in range(count)]
        self._created += count
        wanted = {name: (self.fleet[number % len(self.fleet)], f"made-{name}") for number, name in enumerate(names)}
        await each(wanted.items(), lambda item: self._create(item[0], *item[1]))
        self.objects |= wanted

    async def change(self, count: int) -> None:
        """Another value for so many, some of them several times in a row."""
        names = self._random.sample(sorted(self.objects), count)
        for name in names:
            self._changed += 1
            self.objects[name] = (self.objects[name][0], f"changed-{self._changed}")
        await each(names, self._change)

    async def delete(self, count: int) -> None:
        names = self._random.sample(sorted(self.objects), count)
        gone = {name: self.objects.pop(name) for name in names}
        await each(gone.items(), lambda item: self._delete(item[0], item[1][0]))

    async def _create(self, name: str, member: Member, value: str) -> None:
        await self.kube.create(
            _kind(member),
            {
                "apiVersion": "example.com/v1",
                "kind": member.resource.removesuffix("s").capitalize(),
                "metadata": {"name": name, "namespace": self.namespace, "labels": {LABEL: member.name}},
                "spec": {"value": value},
            },
        )

    async def _change(self, name: str) -> None:
        member, value = self.objects[name]
        patches = [f"passing-{value}", value] if self._random.random() < 0.3 else [value]
        for patch in patches:
            await self.kube.merge_patch(_kind(member), name, {"spec": {"value": patch}}, namespace=self.namespace)

    async def _delete(self, name: str, member: Member) -> None:
        await self.kube.delete(_kind(member), name, namespace=self.namespace)

    async def until_reconciled(self, *, timeout_s: float = 60.0) -> None:
        """Until the namespace's ConfigMaps are exactly those expected. Raises TimeoutError that names what differs."""
        expected = self.expected
        present: dict[str, Data] = {}

        def settled(event: str, obj: dict[str, Any]) -> bool:
            name = obj["metadata"]["name"]
            if event == "DELETED":
                present.pop(name, None)
            else:
                present[name] = obj.get("data") or {}
            return present == expected

        try:
            await follow(self.kube, "v1/configmaps", self.namespace, settled, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"after {timeout_s} s: {_difference(expected, present)}") from error


def _difference(expected: Mapping[str, Data], present: Mapping[str, Data]) -> str:
    missing = sorted(expected.keys() - present.keys())
    extra = sorted(present.keys() - expected.keys())
    wrong = [name for name in sorted(expected.keys() & present.keys()) if expected[name] != present[name]]
    shown = {name: (present[name], expected[name]) for name in wrong[:3]}
    return (
        f"of {len(expected)} ConfigMaps {len(missing)} are missing {missing[:5]}, {len(extra)} too many {extra[:5]}, "
        f"{len(wrong)} wrong (present, expected) {shown}"
    )


async def each(items: Iterable[T], act: Callable[[T], Awaitable[object]]) -> None:
    """Some at a time; the first failure ends all."""
    slots = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def one(item: T) -> None:
        async with slots:
            await act(item)

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(one(item))


def _kind(member: Member) -> str:
    return f"example.com/v1/{member.resource}"


def _object(member: Member, namespace: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return operator_object(
        member.name,
        namespace,
        member.guest.filename,
        resource=member.resource,
        selector=f"{LABEL}={member.name}",
        **spec,
    )
