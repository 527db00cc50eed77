"""From a WasmOperator object to something that runs: check, fetch, compile, image, lay the object over the manifest.

Blocking, on an install worker. What is wrong comes back as a value, with the reason that the status shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torpor_services.errors import one_line

from torpor_host import module_sources, operator_spec
from torpor_host.failures import InstallFailed, InstallRefused
from torpor_host.hostcalls import CallError, CallResponse, KubeRequest
from torpor_host.install import Discovery, InstalledModule, ModuleSource
from torpor_host.limits import Deadline, InstanceLimits
from torpor_host.module_sources import ModuleContent, ModuleUnavailable
from torpor_host.operator_record import Installation
from torpor_host.operator_spec import Declared, InvalidSpec, Limits, OperatorSpec, Unsupported

log = logging.getLogger(__name__)

_CALL_S = 15.0
_WASM_MAGIC = b"\0asm"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why it cannot run. `final`: until the object changes."""

    reason: str
    message: str
    final: bool


class Ask(Protocol):
    """A request to the Kubernetes API as the operator."""

    def __call__(self, request: KubeRequest, deadline: Deadline) -> CallResponse: ...


@dataclass(frozen=True, slots=True)
class Installer:
    """`install_module` is `install.install` with its engine."""

    install_module: Callable[[ModuleSource, InstanceLimits, Discovery], InstalledModule]
    modules_dir: Path | None

    def install(self, obj: Mapping[str, Any], ask: Ask) -> Installation | Problem:
        """Blocking; a second to a minute when the module is new. Raises nothing."""
        try:
            return self._install(obj, ask)
        except Unsupported as exc:
            return Problem("Unsupported", one_line(exc, 1000), final=True)
        except InvalidSpec as exc:
            return Problem("InvalidSpec", one_line(exc, 1000), final=True)
        except ModuleUnavailable as exc:
            return Problem("ModuleUnavailable", one_line(exc, 1000), final=exc.final)
        except InstallRefused as exc:
            return Problem("ModuleRefused", exc.reason, final=True)
        except InstallFailed as exc:
            return Problem("InstallFailed", exc.reason, final=False)
        except Exception as exc:
            log.exception("installing failed in the host")
            return Problem("InstallFailed", f"the host failed: {one_line(exc)}", final=False)

    def _install(self, obj: Mapping[str, Any], ask: Ask) -> Installation:
        declared = operator_spec.declared(obj)
        content = module_sources.fetch(
            declared.module,
            namespace=declared.id[0],
            folder=self.modules_dir,
            read_config_map=lambda namespace, name: _read_config_map(ask, namespace, name),
        )
        source = ModuleSource(_form(content, declared), content.content, content.filename)
        installed = self.install_module(source, instance_limits(declared.limits), _discovery(ask))
        spec = operator_spec.resolve(declared, installed.manifest)
        _check_coded(spec, installed)
        return Installation(spec, installed, _cluster_scoped(spec, ask))


def _check_coded(spec: OperatorSpec, installed: InstalledModule) -> None:
    """Refuses mappings in code that the module does not have, as far as it can be known before an event comes."""
    for watch in spec.watches:
        if not watch.coded:
            continue
        if not installed.maps:
            raise InstallRefused(
                f"{watch.name}.mapping.code: the module exports no torpor_map; export it, or map by owner, label,"
                " annotation or self"
            )
        # The SDK tells its mappings apart by their place; other languages may map whatever they are asked for.
        if installed.form == "python" and watch.name not in _mapped_by_code(installed.manifest):
            raise InvalidSpec(
                f"{watch.name}.mapping.code: the module has no @op.map in this place; a mapping in code keeps its place"
                " among the module's watches"
            )


def _mapped_by_code(manifest: bytes) -> list[str]:
    watches = msgspec.json.decode(manifest).get("watches", [])
    return [f"watches/{i}" for i, watch in enumerate(watches) if watch.get("mapping", {}).get("code")]


def instance_limits(limits: Limits) -> InstanceLimits:
    """What the engine enforces of a WasmOperator's limits."""
    return InstanceLimits(memory_bytes=limits.memory_bytes, cpu_budget_s=limits.cpu_s)


def _form(content: ModuleContent, declared: Declared) -> Any:
    if content.content.startswith(_WASM_MAGIC):
        if content.content[4:8] == b"\x0d\x00\x01\x00":
            raise Unsupported(f"module {declared.module}: is a component; components are not built yet")
        return "core"
    if content.filename.endswith(".wasm"):
        raise InvalidSpec(f"module {declared.module}: is no WebAssembly module")
    return "python"


def _read_config_map(ask: Ask, namespace: str, name: str) -> tuple[int, bytes]:
    path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
    answer = ask(KubeRequest("GET", path, "application/json", "", b""), Deadline.after(_CALL_S))
    if answer.error is not None:
        raise ModuleUnavailable(f"ConfigMap {namespace}/{name}: {answer.error}: {answer.message}", final=False)
    return answer.status, answer.body


def _discovery(ask: Ask) -> Discovery:
    def answer(request: KubeRequest) -> CallResponse | None:
        return ask(request, Deadline.after(_CALL_S))

    return answer


def _cluster_scoped(spec: OperatorSpec, ask: Ask) -> bool:
    """From discovery; a kind that does not exist yet counts as namespaced, as most are."""
    resource = spec.primary.resource
    path = resource.api_root
    answer = ask(KubeRequest("GET", path, "application/json", "", b""), Deadline.after(_CALL_S))
    if answer.error in {CallError.FENCED, CallError.DENIED, CallError.UNAVAILABLE, CallError.DEADLINE}:
        raise InstallFailed(f"discovery of {resource}: {answer.error}: {answer.message}")
    try:
        listed = msgspec.json.decode(answer.body)["resources"] if answer.status == 200 else []
        return any(kind["name"] == resource.resource and not kind["namespaced"] for kind in listed)
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return False
