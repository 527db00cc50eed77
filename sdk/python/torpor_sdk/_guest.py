"""What the embedding calls in a guest: one function for each export of the ABI, messages in and out as bytes.

`load` lets through what the operator's code raises at import (`explain` is its text). Everything else answers with a
whole message whatever the operator's code does, SystemExit and MemoryError among it, with a traceback of the
operator's lines as the error. `wake` never raises.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

from . import _frames, _host, _load, _tracebacks, logs, settings
from .errors import OperatorError
from .logs import log
from .objects import Resource
from .operators import Event, Operator
from .requests import Request, Requeue

_operator: Operator | None = None


def load(kind: str, filename: str, content: bytes) -> None:
    """Loads an operator: `kind` is `source` or `zip`. Before `describe`, once. Raises whatever stopped it."""
    global _operator
    logs.install()
    settings.forget()
    try:
        with _host.building_image():
            _operator = _the_operator(_import(kind, filename, content), filename)
    except OperatorError as exc:
        # A definition that is wrong as a whole has no line to show, only the SDK's own.
        raise (exc if _tracebacks.has_operator_lines(exc) else exc.with_traceback(None)) from None
    finally:
        _flush()


def describe() -> bytes:
    """The describe result. Also discovers what the manifest names, for the image."""
    try:
        operator = _loaded()
        manifest = json.dumps(operator.manifest(), ensure_ascii=False)
        with _host.building_image():
            operator.prepare(operator.kube())
        return _frames.encode("", manifest)
    except BaseException as exc:
        return _frames.encode(explain(exc), "")
    finally:
        _flush()


def reconcile(message: bytes) -> bytes:
    """The reconcile result for a reconcile request."""
    try:
        operator = _loaded()
        settings.forget()
        result = operator.run(_request(message), operator.kube())
        return _result(result)
    except BaseException as exc:
        return _frames.encode("error", "", explain(exc))
    finally:
        _flush()


def map(message: bytes) -> bytes:
    """The map result for a map request."""
    try:
        operator = _loaded()
        settings.forget()
        watch, kind, new, old = _frames.decode(message, fields_min=4)[:4]
        event = Event(_frames.text(kind), _object(new or old), _object(old) if old else None)  # type: ignore[arg-type]  # ADDED, ...
        keys = operator.keys(_frames.number(watch), event, operator.kube())
        return _frames.encode("", *keys)
    except BaseException as exc:
        return _frames.encode(explain(exc))
    finally:
        _flush()


def wake() -> None:
    """After an image was restored: nothing that was random in the image may stay so."""
    settings.forget()
    random = sys.modules.get("random")
    if random is not None:
        random.seed(int.from_bytes(os.urandom(32)))  # A number: bytes would be hashed first.
    if _operator is not None:
        try:
            _operator.woken()
        except BaseException as exc:
            log.error("wake: %s", explain(exc))
    _flush()


def _import(kind: str, filename: str, content: bytes) -> ModuleType:
    if kind == "source":
        return _load.load_source(filename, content)
    if kind == "zip":
        return _load.load_zip(filename, content)
    raise OperatorError(f"{filename}: this runtime loads source and zip, not {kind!r}")


def _the_operator(module: ModuleType, filename: str) -> Operator:
    found = {id(value): value for value in vars(module).values() if isinstance(value, Operator)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise OperatorError(f'{filename} defines no operator; write: op = Operator(for_="group/version/resource")')
    raise OperatorError(f"{filename} defines {len(found)} operators; a module is one operator")


def _loaded() -> Operator:
    if _operator is None:
        raise OperatorError("no operator is loaded")
    return _operator


def _request(message: bytes) -> Request:
    namespace, name, cause, attempt, traceparent = _frames.decode(message, fields_min=5)[:5]
    return Request(
        _frames.text(namespace),
        _frames.text(name),
        _frames.text(cause),
        _frames.number(attempt),
        _frames.text(traceparent),
    )


def _result(result: Requeue | None) -> bytes:
    return _frames.encode("done") if result is None else _frames.encode("requeue", result.after_ms)


def _object(field: bytes) -> Resource:
    read: Any = json.loads(field) if field else {}
    return Resource(read if isinstance(read, dict) else {})


def explain(exc: BaseException) -> str:
    """An exception for a person: its traceback without the SDK's own lines, at most 16,000 characters."""
    if isinstance(exc, SystemExit):
        return f"the operator called exit({exc.code!r}); raise an error or return instead\n{_tracebacks.render(exc)}"
    if isinstance(exc, OperatorError) and not _tracebacks.has_operator_lines(exc):
        return str(exc)
    return _tracebacks.render(exc)


def _flush() -> None:
    """What an operator prints goes out with the call that printed it, and never into an image."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except Exception:  # noqa: S110 - an operator may have put anything there
            pass
