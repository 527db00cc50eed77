"""Settings: a frozen dataclass read from environment variables, checked at start-up.

    @dataclass(frozen=True, slots=True)
    class CacheConfig:
        listen: str = setting("TORPOR_CACHE_LISTEN", "127.0.0.1:7601", "Address of the gRPC server.")

    config = load(CacheConfig, os.environ)

An invalid value stops start-up with the variable's name (`InvalidSetting`). Types understood: str, int, float, bool,
Path, `X | None`, tuple[str, ...] (comma-separated) and nested setting classes.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torpor_services.errors import InvalidSetting

Config = TypeVar("Config")

REQUIRED: Any = object()


def setting(
    variable: str,
    default: Any = REQUIRED,
    description: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field read from `variable`. `description` gives unit and what changing it does."""
    metadata = {"variable": variable, "description": description, "minimum": minimum, "maximum": maximum}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(config_class: type[Config], environ: Mapping[str, str]) -> Config:
    """Reads every setting of the class; raises InvalidSetting for the first that is wrong or missing."""
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            values[field.name] = load(kind, environ)  # type: ignore[arg-type]
            continue
        variable = field.metadata["variable"]
        text = environ.get(variable, "")
        if text == "":
            if field.default is dataclasses.MISSING:
                raise InvalidSetting(variable, f"is not set; it is {field.metadata['description'] or field.name}")
            continue
        values[field.name] = _checked(variable, _convert(variable, text, kind), field.metadata)
    return config_class(**values)


def describe(config_class: type[Any]) -> list[tuple[str, str, str]]:
    """(variable, default, description) of every setting, for help texts and the reference."""
    rows: list[tuple[str, str, str]] = []
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            rows += describe(hints[field.name])
            continue
        default = "" if field.default in (dataclasses.MISSING, None) else str(field.default)
        rows.append((field.metadata["variable"], default, field.metadata["description"]))
    return rows


def _convert(variable: str, text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    converters: dict[Any, Callable[[str], Any]] = {
        str: str,
        int: int,
        float: float,
        bool: _boolean,
        Path: Path,
    }
    try:
        return converters[kind](text)
    except ValueError as exc:
        raise InvalidSetting(variable, f"{text!r} is not {_article(kind)}") from exc


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError(text)


def _article(kind: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "one of true, false"}
    return names.get(kind, str(kind.__name__))


def _checked(variable: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    minimum, maximum = metadata["minimum"], metadata["maximum"]
    if minimum is not None and value < minimum:
        raise InvalidSetting(variable, f"{value} is below {minimum}")
    if maximum is not None and value > maximum:
        raise InvalidSetting(variable, f"{value} is above {maximum}")
    return value
