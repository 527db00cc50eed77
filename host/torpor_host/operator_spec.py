"""What an operator asks for: a WasmOperator's spec laid over the manifest of its module.

`describe()` gives the defaults, the object wins, field by field at the top level of `spec` (a list replaces a list).
Everything is checked here, once, so that the rest of the host works with values that make sense. Refusals are
`InvalidSpec`, whose message names the field.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, NewType, TypeVar, cast

import msgspec
from torpor_services import crd
from torpor_services.errors import TorporError

OperatorId = NewType("OperatorId", tuple[str, str])  # namespace, name of the WasmOperator


def operator_id(namespace: str, name: str) -> OperatorId:
    """Of texts that are there once: a dozen dictionaries have an operator's id for as long as it lives."""
    return OperatorId((sys.intern(namespace), sys.intern(name)))


T = TypeVar("T", bound=Hashable)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_QUANTITY = re.compile(r"^(\d+)(Ki|Mi|Gi|k|M|G)?$")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 1000, "M": 1000**2, "G": 1000**3}
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")

MEMORY_BYTES_MIN = 1 << 20
MEMORY_BYTES_MAX = 4 << 30  # what a 32-bit guest can address


class InvalidSpec(TorporError):
    """The WasmOperator or the module's manifest asks for something that cannot be. Final until one of them changes."""


class Unsupported(InvalidSpec):
    """It asks for something that this version does not have."""


class MappingKind(Enum):
    SELF = "self"
    OWNER_CONTROLLER = "owner: controller"
    OWNER_ANY = "owner: any"
    LABEL = "label"
    ANNOTATION = "annotation"
    CODE = "code"


class UnloadPolicy(Enum):
    PREDICTIVE = "predictive"
    NEVER = "never"
    IDLE = "idle"


class UnloadState(Enum):
    DISCARD = "discard"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True)
class ResourceRef:
    """A kind as the API server serves it."""

    group: str
    version: str
    resource: str

    @classmethod
    def parse(cls, text: str, where: str) -> ResourceRef:
        parts = text.split("/")
        if len(parts) == 2:
            parts = ["", *parts]
        if len(parts) != 3 or not all(parts[1:]) or any("." in part for part in parts[1:]):
            raise InvalidSpec(f"{where}: {text!r} is not group/version/plural or version/plural")
        return one_of_equal(cls(*parts))

    @property
    def api_root(self) -> str:
        """The path of its group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def __str__(self) -> str:
        return "/".join(part for part in (self.group, self.version, self.resource) if part)


@dataclass(frozen=True, slots=True)
class WatchSpec:
    """One subscription of an operator. `name` is stable across hosts and restarts."""

    name: str  # "for", "owns/0", "watches/1"
    resource: ResourceRef
    mapping: MappingKind
    mapping_key: str = ""  # of the label or annotation
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""
    predicates: tuple[str, ...] = ()

    @property
    def coded(self) -> bool:
        """The guest maps its events."""
        return self.mapping is MappingKind.CODE


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one guest."""

    memory_bytes: int = 256 << 20
    cpu_s: float = 10.0  # processor time of one reconcile, host calls not counted
    deadline_s: float = 60.0  # wall time of one reconcile
    outbound_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unload:
    policy: UnloadPolicy = UnloadPolicy.PREDICTIVE
    idle_after_s: float = 5.0
    state: UnloadState = UnloadState.DISCARD
    latency_budget_s: float = 0.010


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """Where the module is; exactly one of file, config_map, url, oci."""

    file: str = ""
    config_map: tuple[str, str] | None = None  # name, key
    url: str = ""
    oci: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        if self.config_map:
            return f"configMap {self.config_map[0]}/{self.config_map[1]}"
        return self.file or self.url or self.oci


@dataclass(frozen=True, slots=True)
class Declared:
    """What the WasmOperator alone says: enough to fetch and install the module."""

    id: OperatorId
    uid: str
    generation: int
    service_account: str
    module: ModuleRef
    limits: Limits
    raw: Mapping[str, Any] = field(compare=False)


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """What the operator asks for, object over manifest."""

    id: OperatorId
    uid: str
    generation: int
    service_account: str
    module: ModuleRef
    primary: WatchSpec
    watches: tuple[WatchSpec, ...]  # owns and watches, without the primary
    resync_s: float  # 0: never
    concurrency: int
    limits: Limits
    unload: Unload
    settings: bytes  # JSON: {"operator": …, "config": …, "env": …}, as the guest gets it

    @property
    def subscriptions(self) -> tuple[WatchSpec, ...]:
        return (self.primary, *self.watches)


@lru_cache(maxsize=1024)
def _first(value: Hashable) -> Hashable:
    return value


def one_of_equal(value: T) -> T:
    """The value, or an equal one from before: many operators have the same limits, kinds and policies."""
    return cast(T, _first(value))


def declared(obj: Mapping[str, Any]) -> Declared:
    """The WasmOperator checked against its schema, before the module is known; raises InvalidSpec."""
    problems = crd.violations(obj)
    if problems:
        raise InvalidSpec("; ".join(problems[:5]))
    metadata, spec = obj.get("metadata", {}), obj["spec"]
    if not isinstance(metadata.get("name"), str) or not isinstance(metadata.get("namespace"), str):
        raise InvalidSpec("metadata: name and namespace are needed")
    account = spec["serviceAccountName"]
    if not _NAME.match(account):
        raise InvalidSpec(f"spec.serviceAccountName: {account!r} is not a name")
    return Declared(
        id=operator_id(metadata["namespace"], metadata["name"]),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        service_account=account,
        module=_module(spec["module"]),
        limits=one_of_equal(_limits(spec.get("limits", {}))),
        raw=obj,
    )


def resolve(operator: Declared, manifest: bytes) -> OperatorSpec:
    """The object laid over what `describe()` said; raises InvalidSpec."""
    spec = {**_manifest(manifest), **operator.raw["spec"]}
    if "for" not in spec:
        raise InvalidSpec("for: neither the WasmOperator nor the module's manifest says what it reconciles")
    primary = _watch("for", spec["for"], MappingKind.SELF)
    owns = [_watch(f"owns/{i}", w, MappingKind.OWNER_CONTROLLER) for i, w in enumerate(spec.get("owns", []))]
    watches = [_mapped_watch(f"watches/{i}", w) for i, w in enumerate(spec.get("watches", []))]
    return OperatorSpec(
        id=operator.id,
        uid=operator.uid,
        generation=operator.generation,
        service_account=operator.service_account,
        module=operator.module,
        primary=primary,
        watches=(*owns, *watches),
        resync_s=duration_s(spec.get("resync", "0"), "resync"),
        concurrency=spec.get("concurrency", 1),
        limits=one_of_equal(_limits(spec.get("limits", {}))),
        unload=one_of_equal(_unload(spec.get("unload", {}))),
        settings=_settings(operator.id, primary, spec),
    )


def duration_s(text: str, where: str) -> float:
    """Go's notation (`1h30m`, `250ms`) in seconds; `0` is zero. Raises InvalidSpec."""
    if text == "0":
        return 0.0
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidSpec(f"{where}: {text!r} is not a duration such as 500ms, 30s, 10m or 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds > 366 * 86400:
        raise InvalidSpec(f"{where}: {text!r} is more than a year")
    return seconds


def quantity_bytes(text: str, where: str) -> int:
    """A Kubernetes quantity of memory in bytes. Raises InvalidSpec."""
    match = _QUANTITY.match(text)
    if not match:
        raise InvalidSpec(f"{where}: {text!r} is not a quantity such as 64Mi or 1Gi")
    return int(match[1]) * _BYTES[match[2]]


def _manifest(manifest: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(manifest)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidSpec(f"manifest: describe() returned no JSON: {exc}") from exc
    if not isinstance(decoded, dict):
        raise InvalidSpec("manifest: describe() returned no JSON object")
    decoded.pop("sdk", None)
    allowed = {"for", "owns", "watches", "resync", "concurrency", "limits", "unload"}
    for name in decoded:
        if name not in allowed:
            raise InvalidSpec(f"manifest: unknown field {name!r}; known are sdk, {', '.join(sorted(allowed))}")
    problems = crd.spec_violations(decoded, required=False)
    if problems:
        raise InvalidSpec("manifest: " + "; ".join(problems[:5]))
    return decoded


def _module(raw: Mapping[str, Any]) -> ModuleRef:
    given = [name for name in ("file", "configMap", "url", "oci") if raw.get(name)]
    if len(given) != 1:
        raise InvalidSpec(f"spec.module: exactly one of file, configMap, url, oci is needed, not {given or 'none'}")
    if given == ["oci"]:
        raise Unsupported("spec.module.oci: not built yet; use file, configMap or url")
    if given == ["url"] and not raw.get("sha256"):
        raise InvalidSpec("spec.module.sha256: is needed with url")
    config_map = raw.get("configMap")
    return ModuleRef(
        file=raw.get("file", ""),
        config_map=(config_map["name"], config_map["key"]) if config_map else None,
        url=raw.get("url", ""),
        sha256=raw.get("sha256", ""),
    )


def _watch(name: str, raw: Mapping[str, Any], mapping: MappingKind, mapping_key: str = "") -> WatchSpec:
    predicates = tuple(raw.get("predicates", ()))
    if "notOwnWrite" in predicates:
        raise Unsupported(f"{name}.predicates: notOwnWrite is not built yet")
    watch = WatchSpec(
        name=sys.intern(name),
        resource=ResourceRef.parse(raw["resource"], f"{name}.resource"),
        mapping=mapping,
        mapping_key=mapping_key,
        namespace=raw.get("namespace", ""),
        label_selector=raw.get("labelSelector", ""),
        field_selector=raw.get("fieldSelector", ""),
        predicates=predicates,
    )
    return one_of_equal(watch)


def _mapped_watch(name: str, raw: Mapping[str, Any]) -> WatchSpec:
    mapping = raw.get("mapping", {})
    given = [key for key, value in mapping.items() if value]
    if len(given) != 1:
        raise InvalidSpec(f"{name}.mapping: exactly one of owner, label, annotation, self, code is needed")
    match given[0]:
        case "owner":
            kind = MappingKind.OWNER_ANY if mapping["owner"] == "any" else MappingKind.OWNER_CONTROLLER
            return _watch(name, raw, kind)
        case "label":
            return _watch(name, raw, MappingKind.LABEL, mapping["label"])
        case "annotation":
            return _watch(name, raw, MappingKind.ANNOTATION, mapping["annotation"])
        case "self":
            return _watch(name, raw, MappingKind.SELF)
        case _:
            return _watch(name, raw, MappingKind.CODE)


def _limits(raw: Mapping[str, Any]) -> Limits:
    defaults = Limits()
    limits = Limits(
        memory_bytes=_optional(raw, "memory", quantity_bytes, "limits", defaults.memory_bytes),
        cpu_s=_optional(raw, "cpu", duration_s, "limits", defaults.cpu_s),
        deadline_s=_optional(raw, "deadline", duration_s, "limits", defaults.deadline_s),
        outbound_hosts=tuple(raw.get("outboundHosts", ())),
    )
    if not MEMORY_BYTES_MIN <= limits.memory_bytes <= MEMORY_BYTES_MAX:
        raise InvalidSpec(f"limits.memory: {raw['memory']!r} is not between 1Mi and 4Gi")
    for name, value in (("cpu", limits.cpu_s), ("deadline", limits.deadline_s)):
        if not 0.01 <= value <= 3600:
            raise InvalidSpec(f"limits.{name}: {raw[name]!r} is not between 10ms and 1h")
    return limits


def _unload(raw: Mapping[str, Any]) -> Unload:
    defaults = Unload()
    return Unload(
        policy=UnloadPolicy(raw.get("policy", defaults.policy.value)),
        idle_after_s=_optional(raw, "idleAfter", duration_s, "unload", defaults.idle_after_s),
        state=UnloadState(raw.get("state", defaults.state.value)),
        latency_budget_s=_optional(raw, "latencyBudget", duration_s, "unload", defaults.latency_budget_s),
    )


def _optional(raw: Mapping[str, Any], name: str, convert: Any, where: str, default: Any) -> Any:
    return convert(raw[name], f"{where}.{name}") if name in raw else default


def _settings(operator: OperatorId, primary: WatchSpec, spec: Mapping[str, Any]) -> bytes:
    namespace, name = operator
    env: Sequence[Mapping[str, str]] = spec.get("env", [])
    settings = {
        "operator": {"namespace": namespace, "name": name, "for": str(primary.resource)},
        "config": spec.get("config", {}),
        "env": {entry["name"]: entry["value"] for entry in env},
    }
    return msgspec.json.encode(settings)
