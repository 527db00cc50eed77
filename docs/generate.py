"""Writes `docs/reference/` from the code: settings, commands, the fields of a WasmOperator.

.venv/bin/python docs/generate.py            # writes
.venv/bin/python docs/generate.py --check    # exits 1 and names the pages that are not what the code says
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torpor_services import crd
from torpor_services.config import describe, load
from torpor_services.errors import InvalidSetting

REFERENCE = Path(__file__).resolve().parent / "reference"
_NOTE = "<!-- Written by docs/generate.py; change the code and run it again. -->\n"


def pages() -> dict[str, str]:
    """Every generated page: file name and text."""
    return {"commands.md": _commands(), "settings.md": _settings(), "wasmoperator.md": _wasm_operator()}


def main(arguments: list[str]) -> int:
    """0 where the pages are, or are now, what the code says."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    made = pages()
    if arguments:
        stale = [name for name, text in made.items() if _read(REFERENCE / name) != text]
        for name in stale:
            print(f"docs/reference/{name} is not what the code says: run docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    REFERENCE.mkdir(exist_ok=True)
    for name, text in made.items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# Commands.


def _commands() -> str:
    from torpor_cli.app import app

    text = app.generate_docs(output_format="markdown", include_hidden=False)
    return _NOTE + "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


# Settings.


def _settings() -> str:
    from torpor_cache.config import CacheConfig
    from torpor_host.config import HostConfig
    from torpor_scheduler.config import SchedulerConfig

    parts = [
        _NOTE,
        "# Settings of the services\n",
        "Each service reads its settings from environment variables at start-up. A wrong or missing one ends the start "
        "with exit code 2 and the variable's name. `torpor up` and `torpor run` set addresses, folders and the host's "
        "name themselves, whatever the environment says; everything else they pass on.\n",
        "Traces are sent where `OTEL_EXPORTER_OTLP_ENDPOINT` is set; the other `OTEL_…` variables then mean what "
        "OpenTelemetry says.\n",
    ]
    services: tuple[tuple[str, str, type[Any]], ...] = (
        ("cache", "torpor_cache", CacheConfig),
        ("host", "torpor_host", HostConfig),
        ("scheduler", "torpor_scheduler", SchedulerConfig),
    )
    for name, module, config in services:
        parts += [f"## {name}\n", f"`python -m {module}`\n", *_table(config)]
    return "\n".join(parts)


def _table(config: type[Any]) -> Iterator[str]:
    required = _required(config)
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for variable, default, description in sorted(describe(config)):
        shown = "required" if variable in required else f"`{default}`" if default else ""
        rows.append(f"| `{variable}` | {shown} | {_cell(description)} |")
    yield "\n".join(rows) + "\n"


def _required(config: type[Any]) -> set[str]:
    """The settings without which it does not load."""
    given: dict[str, str] = {}
    while True:
        try:
            load(config, given)
        except InvalidSetting as missing:
            if missing.variable in given:
                return set(given)
            given[missing.variable] = "x"
        else:
            return set(given)


# The WasmOperator.


def _wasm_operator() -> str:
    version = crd.definition()["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    parts = [
        _NOTE,
        "# The WasmOperator\n",
        f"`{crd.definition()['spec']['group']}/{version['name']}`, namespaced. What the module's manifest says is the "
        "default; the object wins, field by field at the top level of `spec`. A field that is not listed here is "
        "refused by `torpor apply`, `torpor run` and the host.\n",
        "Accepted by the schema and refused at install, by name, since they are not built yet: `module.oci`, a module "
        "that is a component, the predicate `notOwnWrite`.\n",
        "## spec\n",
        *_fields(schema["spec"], set(schema["spec"].get("required", ()))),
        "## status\n",
        *_fields(schema["status"], set()),
    ]
    return "\n".join(parts)


def _fields(schema: Mapping[str, Any], required: set[str]) -> Iterator[str]:
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for path, field, is_required in _walk(schema, "", required):
        rows.append(f"| `{path}` | {_type(field)}{', required' if is_required else ''} | {_meaning(field)} |")
    yield "\n".join(rows) + "\n"


def _walk(schema: Mapping[str, Any], prefix: str, required: set[str]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    for name, field in schema.get("properties", {}).items():
        path = prefix + name
        yield path, field, name in required
        inner, path = (field["items"], path + "[]") if field.get("type") == "array" else (field, path)
        yield from _walk(inner, path + ".", set(inner.get("required", ())))


def _type(field: Mapping[str, Any]) -> str:
    kind = field.get("type", "any")
    return f"list of {field['items'].get('type', 'any')}s" if kind == "array" else str(kind)


def _meaning(field: Mapping[str, Any]) -> str:
    said = [_cell(field.get("description", ""))]
    choices = field.get("enum") or field.get("items", {}).get("enum")
    if choices:
        said.append("One of " + ", ".join(f"`{choice}`" for choice in choices) + ".")
    if "minimum" in field or "maximum" in field:
        said.append(f"{field.get('minimum', '')} to {field.get('maximum', '')}.")
    if "maxItems" in field:
        said.append(f"At most {field['maxItems']}.")
    return " ".join(part for part in said if part)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
