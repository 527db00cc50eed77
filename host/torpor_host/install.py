"""Installing a module: inspect, compile, initialise, describe, take the image, check it.

Done once for given bytes, engine and runtime; the outcome is kept in the store, and installing the same again reads it
(milliseconds). Blocking: call it in a thread. What cannot run here is `InstallRefused`; what runs, but not from an
image, is installed with the reason in `image_refusal` and starts the long way each time.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torpor_services.errors import shortened

from torpor_host import abi, images, wasm_code, wasm_module
from torpor_host.artifacts import Artifact, ArtifactStoreFailed
from torpor_host.engine import GuestEngine
from torpor_host.failures import GuestFailed, GuestTimedOut, InstallFailed, InstallRefused
from torpor_host.guest_context import system_random
from torpor_host.images import Image
from torpor_host.instance import Instance
from torpor_host.limits import Deadline, InstanceLimits
from torpor_host.replay import Discovery, ImageBuildCalls, ReplayClock, SeededRandom

__all__ = ["Discovery", "InstalledModule", "ModuleSource", "install"]

_FORMAT = b"torpor install 2"  # raise when records, images or rewriting change
_RECORDS, _IMAGES, _SOURCES, _BASES, _OVERLAYS = "installs", "images", "sources", "bases", "overlays"
_MANIFEST_MAX = 1 << 20
_PROBE_KEY = abi.ReconcileRequest("torpor-install-check", "torpor-install-check", "start").encode()
_PROBE_TIMEOUT_S = 2.0
_PROBE_REALTIME_NS = 1_800_000_000 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """What is deployed: a wasm file, or a Python file or zip (told apart by content). `filename` is shown in
    tracebacks."""

    form: Literal["core", "python"]
    content: bytes
    filename: str


@dataclass(frozen=True, slots=True)
class InstalledModule:
    """All that a wake needs. Holds no descriptor and none of the guest's memory: a sleeping operator costs this."""

    sha256: str
    """Of the content that was deployed."""
    form: Literal["core", "python"]
    filename: str
    manifest: bytes
    """JSON, an object; its fields are the runtime's to judge."""
    compiled: Artifact
    image: Image | None
    image_refusal: str | None
    """Why it runs without an image."""
    maps: bool
    """Whether it exports `torpor_map`."""
    source: Artifact | None = None
    """A Python operator's content, kept for starting without an image."""

    @property
    def image_bytes(self) -> int:
        """Bytes of image file that belong to this module alone, holes included; 0 without an image."""
        return self.image.own_bytes if self.image is not None else 0

    def start(self, instance: Instance, deadline: Deadline) -> None:
        """The long way, for a module without an image."""
        instance.initialise(deadline=deadline)
        if self.source is not None:
            message = _load_request(self.source.path.read_bytes(), self.filename)
            error = abi.decode_load_result(instance.load_source(message, deadline=deadline))
            if error:
                raise InstallFailed(f"loading failed, though it did not at install: {error[:500]}")
        instance.describe(deadline=deadline)


def install(
    engine: GuestEngine,
    source: ModuleSource,
    *,
    limits: InstanceLimits,
    discovery: Discovery | None = None,
) -> InstalledModule:
    """Raises InstallRefused (the module's fault) and InstallFailed (the host's or the cluster's: try again)."""
    try:
        if source.form == "core":
            return _install_core(engine, source, limits, discovery)
        return _install_python(engine, source, limits, discovery)
    except ArtifactStoreFailed as exc:
        raise InstallFailed(str(exc)) from exc


# Core modules.


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A module that compiles and has the right exports."""

    compiled: Artifact
    image_refusal: str | None
    maps: bool


def _prepare(engine: GuestEngine, wasm: bytes, *, language_runtime: bool) -> _Prepared:
    if len(wasm) > engine.config.module_bytes_max:
        raise InstallRefused(
            f"the module has {len(wasm) >> 20} MiB, {engine.config.module_bytes_max >> 20} MiB are allowed"
        )
    try:
        layout = wasm_module.read_layout(wasm)
        refusal = wasm_module.refusal(layout)
        if refusal is not None:
            raise InstallRefused(refusal)
        image_refusal = wasm_code.image_refusal(wasm, layout)
        rewritten = wasm_module.rewrite(wasm, layout)
    except wasm_module.ModuleInvalid as exc:
        raise InstallRefused(str(exc)) from exc
    compiled = engine.compiler.compile(rewritten)
    loaded = engine.modules.acquire(compiled)
    try:
        refusal = loaded.refusal(language_runtime=language_runtime)
        maps = loaded.has("torpor_map")
    finally:
        engine.modules.release(compiled)
    if refusal is not None:
        raise InstallRefused(refusal)
    return _Prepared(compiled, image_refusal, maps)


def _install_core(
    engine: GuestEngine, source: ModuleSource, limits: InstanceLimits, discovery: Discovery | None
) -> InstalledModule:
    sha256 = hashlib.sha256(source.content).hexdigest()
    prepared = _prepare(engine, source.content, language_runtime=False)
    key = _key(engine, b"core", sha256.encode())

    def installed(outcome: _Outcome) -> InstalledModule:
        return InstalledModule(
            sha256, "core", source.filename, outcome.manifest, prepared.compiled, *outcome.image, prepared.maps
        )

    recorded = _recorded(engine, _IMAGES, key, None)
    if recorded is not None:
        return installed(recorded)
    with engine.store.lock("install", key):
        recorded = _recorded(engine, _IMAGES, key, None)
        if recorded is not None:
            return installed(recorded)
        calls = ImageBuildCalls(discovery)
        instance = _new_instance(engine, prepared.compiled, limits, calls)
        try:
            with _judged(calls, "_initialize"):
                instance.initialise(deadline=_deadline(engine))
            manifest = _manifest(engine, instance, calls)
            image, refusal = None, prepared.image_refusal
            if refusal is None:
                image = images.take_base(engine.store, _IMAGES, key, instance.memory, instance.state())
                refusal = _check(engine, prepared.compiled, limits, instance, image, _reconcile_probe)
                image = image if refusal is None else None
        finally:
            instance.close()
        return installed(_keep_record(engine, key, manifest, image, refusal))


# Python operators, on a base that all share.


@dataclass(frozen=True, slots=True)
class PythonBase:
    """The interpreter, compiled and initialised once."""

    compiled: Artifact
    image: Image | None
    image_refusal: str | None
    maps: bool


def python_base(engine: GuestEngine) -> PythonBase:
    """The base of this process's runtime, built by whoever needs it first (6 s, or 20 ms from the store; then at once).

    A runtime that is replaced while the host runs is noticed at the next install."""
    path = engine.config.python_runtime
    if path is None:
        raise InstallRefused("this host has no Python runtime: set the path of torpor-python.wasm")
    with engine.base_lock:
        try:
            status = path.stat()
            version = (status.st_ino, status.st_size, status.st_mtime_ns)
            known = engine.base
            if known is not None and known[0] == version and _usable(engine, known[1]):
                return known[1]
            base = _find_or_build_base(engine, path.read_bytes())
        except OSError as exc:
            raise InstallFailed(f"the Python runtime {path}: {exc.strerror}") from exc
        engine.base = (version, base)
        return base


def _usable(engine: GuestEngine, base: PythonBase) -> bool:
    """Whether its files are still there."""
    files = [base.compiled] if base.image is None else [base.compiled, base.image.base]
    return all(engine.store.verified(file) for file in files)


def _find_or_build_base(engine: GuestEngine, wasm: bytes) -> PythonBase:
    prepared = _prepare(engine, wasm, language_runtime=True)
    # The seed of string hashes is in the base and in every image over it; it is random, this installation's own,
    # and the same when the base is built again.
    seed = hashlib.sha256(engine.store.secret("hash-seed") + hashlib.sha256(wasm).digest()).digest()
    key = _key(engine, b"base", hashlib.sha256(wasm).digest(), hashlib.sha256(seed).digest())
    recorded = _recorded(engine, _BASES, key, None)
    if recorded is None:
        with engine.store.lock("install", key):
            recorded = _recorded(engine, _BASES, key, None) or _build_base(engine, prepared, key, seed)
    return PythonBase(prepared.compiled, *recorded.image, prepared.maps)


def _build_base(engine: GuestEngine, prepared: _Prepared, key: str, seed: bytes) -> _Outcome:
    limits = InstanceLimits()
    calls = ImageBuildCalls()
    instance = _new_instance(engine, prepared.compiled, limits, calls)
    try:
        instance.face(calls, engine.clock, SeededRandom(seed))
        with _judged(calls, "the Python runtime"):
            instance.initialise(deadline=_deadline(engine))
        image, refusal = None, prepared.image_refusal
        if refusal is None:
            image = images.take_base(engine.store, _BASES, key, instance.memory, instance.state())
            refusal = _check(engine, prepared.compiled, limits, instance, image, _load_probe)
            image = image if refusal is None else None
    finally:
        instance.close()
    return _keep_record(engine, key, b"{}", image, refusal)


def _install_python(
    engine: GuestEngine, source: ModuleSource, limits: InstanceLimits, discovery: Discovery | None
) -> InstalledModule:
    base = python_base(engine)
    sha256 = hashlib.sha256(source.content).hexdigest()
    identity = base.image.identity if base.image is not None else base.compiled.sha256
    key = _key(engine, b"python", sha256.encode(), source.filename.encode(), identity.encode())
    kept = engine.store.load(_SOURCES, key) or engine.store.write_bytes(_SOURCES, key, source.content)

    def installed(outcome: _Outcome) -> InstalledModule:
        return InstalledModule(
            sha256, "python", source.filename, outcome.manifest, base.compiled, *outcome.image, base.maps, kept
        )

    recorded = _recorded(engine, _OVERLAYS, key, base.image)
    if recorded is not None:
        return installed(recorded)
    with engine.store.lock("install", key):
        recorded = _recorded(engine, _OVERLAYS, key, base.image)
        if recorded is not None:
            return installed(recorded)
        calls = ImageBuildCalls(discovery)
        instance = _new_instance(engine, base.compiled, limits, calls)
        try:
            with _judged(calls, source.filename):
                if base.image is not None:
                    engine.clock.not_before(base.image.monotonic_ns)
                    instance.restore(base.image)
                    instance.wake(deadline=_deadline(engine))
                else:
                    instance.initialise(deadline=_deadline(engine))
                loaded = instance.load_source(
                    _load_request(source.content, source.filename), deadline=_deadline(engine)
                )
            error = _decoded(abi.decode_load_result, loaded, "torpor_load")
            if error:
                raise _refused(calls, f"{source.filename}: {error[-2000:]}")
            manifest = _manifest(engine, instance, calls)
            image, refusal = None, base.image_refusal
            if base.image is not None:
                image = images.take_overlay(engine.store, _OVERLAYS, key, instance.memory, instance.state(), base.image)
                refusal = _check(engine, base.compiled, limits, instance, image, _reconcile_probe)
                image = image if refusal is None else None
        finally:
            instance.close()
        return installed(_keep_record(engine, key, manifest, image, refusal))


# Running a guest that is being installed.


def _new_instance(engine: GuestEngine, compiled: Artifact, limits: InstanceLimits, calls: ImageBuildCalls) -> Instance:
    try:
        return Instance(engine, compiled, limits, calls, clock=engine.clock, random=system_random)
    except GuestFailed as exc:
        raise InstallRefused(exc.reason) from exc


def _deadline(engine: GuestEngine) -> Deadline:
    return Deadline.after(engine.config.initialise_timeout_s)


class _judged:  # noqa: N801  (reads as a phrase: with _judged(calls, "describe"))
    """Turns a guest's failure into a refusal that says what ran, and the guest's own last words."""

    def __init__(self, calls: ImageBuildCalls, what: str) -> None:
        self._calls = calls
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, GuestFailed):
            words = self._calls.last_lines(5)
            said = f"; its last output: {words}" if words else ""
            raise _refused(self._calls, f"{self._what}: {error.reason}{said}") from error


def _refused(calls: ImageBuildCalls, reason: str) -> InstallRefused | InstallFailed:
    """The guest's fault, unless the cluster could not be asked."""
    if calls.unavailable:
        return InstallFailed(f"{reason} (the API server could not be asked for discovery)")
    return InstallRefused(reason)


def _decoded(read: Callable[[bytes], Any], message: bytes, name: str) -> Any:
    try:
        return read(message)
    except abi.MessageInvalid as exc:
        raise InstallRefused(f"{name}: {exc}") from exc


def _manifest(engine: GuestEngine, instance: Instance, calls: ImageBuildCalls) -> bytes:
    with _judged(calls, "describe"):
        message = instance.describe(deadline=_deadline(engine))
    error, manifest = _decoded(abi.decode_describe_result, message, "describe")
    if error:
        raise _refused(calls, f"describe: {shortened(error, 2000)}")
    if len(manifest) > _MANIFEST_MAX:
        raise InstallRefused(f"the manifest has {len(manifest)} bytes, {_MANIFEST_MAX} are allowed")
    try:
        value = json.loads(manifest)
    except (ValueError, RecursionError) as exc:
        raise InstallRefused(f"the manifest is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise InstallRefused("the manifest is no JSON object")
    return bytes(manifest)


def _load_request(content: bytes, filename: str) -> bytes:
    return abi.encode_load_request("zip" if content[:4] == b"PK\x03\x04" else "source", filename, content)


# The check of an image.

_Probe = Callable[[Instance, Deadline], bytes]


def _reconcile_probe(instance: Instance, deadline: Deadline) -> bytes:
    """A key that is nowhere, with every host call refused: exercises the operator's code and changes nothing."""
    return instance.reconcile(_PROBE_KEY, deadline=deadline)


def _load_probe(instance: Instance, deadline: Deadline) -> bytes:
    return instance.load_source(_load_request(b"torpor_probe = 1\n", "torpor_probe.py"), deadline=deadline)


def _check(
    engine: GuestEngine,
    compiled: Artifact,
    limits: InstanceLimits,
    original: Instance,
    image: Image,
    probe: _Probe,
) -> str | None:
    """Why a guest woken from the image is not the one it was taken of, or None. Uses `original` up, and closes it
    before the other runs: two guests at their memory limit would be one too many."""
    here = _replay(original, image, probe)
    original.close()
    if isinstance(here.outcome, GuestTimedOut):
        return None  # where the clock cuts in differs each time: nothing to compare
    try:
        woken = Instance(engine, compiled, limits, ImageBuildCalls(), clock=engine.clock, random=system_random)
    except GuestFailed as exc:
        return f"an instance for the check: {exc.reason}"
    try:
        woken.restore(image)
        return _difference(here, _replay(woken, image, probe))
    except GuestFailed as exc:
        return f"restoring the image: {exc.reason}"
    finally:
        woken.close()


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What a guest did in the probe, and what it left."""

    outcome: bytes | GuestFailed
    calls: list[object]
    memory: images.Digests
    globals: bytes


def _replay(instance: Instance, image: Image, probe: _Probe) -> _Replayed:
    calls = ImageBuildCalls()
    instance.face(calls, ReplayClock(image.monotonic_ns, _PROBE_REALTIME_NS), SeededRandom(b"install check"))
    deadline = Deadline.after(_PROBE_TIMEOUT_S)
    outcome: bytes | GuestFailed
    try:
        instance.wake(deadline=deadline)
        outcome = probe(instance, deadline)
    except GuestFailed as exc:
        outcome = exc
    return _Replayed(outcome, calls.made, images.digests(instance.memory), instance.state().globals)


def _difference(here: _Replayed, there: _Replayed) -> str | None:
    one, other = here.outcome, there.outcome
    if isinstance(other, GuestTimedOut):
        return None
    if isinstance(one, GuestFailed) or isinstance(other, GuestFailed):
        if type(one) is not type(other):
            return f"the check's call ended differently after a restore: {_told(one)}, then {_told(other)}"
    elif one != other:
        return "the check's call gave another result after a restore"
    if here.calls != there.calls:
        return "the check's call made other host calls after a restore"
    if here.memory.size != there.memory.size:
        return f"the check left {here.memory.size} bytes of memory, after a restore {there.memory.size}"
    if here.globals != there.globals:
        return "the check left other globals after a restore"
    offset = here.memory.first_difference(there.memory)
    return None if offset is None else f"the check left another memory after a restore, first near {offset:#x}"


def _told(outcome: bytes | GuestFailed) -> str:
    return outcome.reason if isinstance(outcome, GuestFailed) else "a result"


# Records of what was installed.


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What installing came to, and what is kept of it."""

    manifest: bytes
    image: tuple[Image | None, str | None]
    """The image, or why there is none."""


def _key(engine: GuestEngine, *parts: bytes) -> str:
    digest = hashlib.sha256(_FORMAT + engine.fingerprint.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _keep_record(engine: GuestEngine, key: str, manifest: bytes, image: Image | None, refusal: str | None) -> _Outcome:
    record = {
        "manifest": base64.b64encode(manifest).decode(),
        "refusal": refusal,
        "image": None if image is None else images.to_record(image),
    }
    engine.store.write_bytes(_RECORDS, key, json.dumps(record).encode())
    return _Outcome(manifest, (image, refusal))


def _recorded(engine: GuestEngine, kind: str, key: str, base: Image | None) -> _Outcome | None:
    """What was kept, if every file it names is there and whole. With `base` the image is an overlay of it.

    Asked again under the lock: another process may have installed the same meanwhile, and making its image anew would
    take the file away under it."""
    artifact = engine.store.load(_RECORDS, key)
    if artifact is None:
        return None
    record = json.loads(artifact.path.read_bytes())
    image = None
    if record["image"] is not None:
        own = engine.store.load(kind, key)
        files = (own, None) if base is None else (base.base, own)
        image = images.from_record(record["image"], *files)
        if image is None:
            return None
    return _Outcome(base64.b64decode(record["manifest"]), (image, record["refusal"]))
