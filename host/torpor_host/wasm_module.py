"""Reads a core module's sections, judges it, and rewrites it so that an image of it can be taken and restored.

Reads no more than the sections that matter and of code only what `wasm_code` asks for; wasmtime validates the rest.
The input may be hostile: every length and count is checked against the bytes that are left before anything is
allocated, and every error is a `ModuleInvalid` that names section and offset.

An image is linear memory and mutable globals. What else a module could change is therefore looked for here:
`image_refusal` says why an image of this module would be wrong, or None. Table contents and dropped segments are set
up by instantiation in the same way each time, so they matter only where an instruction changes them later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"\0asm"
CORE_VERSION = b"\x01\0\0\0"
COMPONENT_VERSION = b"\x0d\0\x01\0"

GLOBAL_EXPORT = "torpor:global:"
START_EXPORT = "torpor:start"
MEMORY_EXPORT = "memory"

IMPORT_MODULES = ("wasi_snapshot_preview1", "torpor")


class ModuleInvalid(Exception):
    """These bytes are not a module that this host runs; the message says where and why."""


class Section(IntEnum):
    CUSTOM = 0
    TYPE = 1
    IMPORT = 2
    FUNCTION = 3
    TABLE = 4
    MEMORY = 5
    GLOBAL = 6
    EXPORT = 7
    START = 8
    ELEMENT = 9
    CODE = 10
    DATA = 11
    DATA_COUNT = 12
    TAG = 13


# DataCount stands before Code, Tag before Global; everything else in the order of its number.
_ORDER = {section: float(section) for section in Section} | {Section.DATA_COUNT: 9.5, Section.TAG: 5.5}

_KINDS = {0: "function", 1: "table", 2: "memory", 3: "global", 4: "tag"}
_NUMERIC = {0x7F: "i32", 0x7E: "i64", 0x7D: "f32", 0x7C: "f64"}
_REFERENCES = {0x70, 0x6F, 0x69}  # funcref, externref, exnref


class Reader:
    """A cursor over bytes with an end. Raises ModuleInvalid with `where` and the absolute offset."""

    __slots__ = ("data", "end", "offset", "where")

    def __init__(self, data: bytes, offset: int, end: int, where: str) -> None:
        self.data = data
        self.offset = offset
        self.end = end
        self.where = where

    def fail(self, what: str) -> ModuleInvalid:
        return ModuleInvalid(f"{self.where}, offset {self.offset:#x}: {what}")

    def byte(self) -> int:
        if self.offset >= self.end:
            raise self.fail("ends too early")
        value = self.data[self.offset]
        self.offset += 1
        return value

    def u32(self) -> int:
        result = shift = 0
        while True:
            byte = self.byte()
            if shift == 28 and byte > 0x0F:
                raise self.fail("number is longer than 32 bits")
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result
            shift += 7

    def skip_leb(self, bytes_max: int) -> None:
        for _ in range(bytes_max):
            if self.byte() < 0x80:
                return
        raise self.fail(f"number is longer than {bytes_max} bytes")

    def count(self, entry_bytes_min: int = 1) -> int:
        """A vector's length, no more than can fit into the rest."""
        number = self.u32()
        if number * entry_bytes_min > self.end - self.offset:
            raise self.fail(f"says {number} entries, {self.end - self.offset} bytes are left")
        return number

    def skip(self, length: int) -> None:
        if length > self.end - self.offset:
            raise self.fail(f"says {length} bytes, {self.end - self.offset} are left")
        self.offset += length

    def name(self) -> str:
        length = self.u32()
        start = self.offset
        self.skip(length)
        try:
            return self.data[start : self.offset].decode()
        except UnicodeDecodeError as exc:
            raise self.fail("a name is not UTF-8") from exc

    def done(self) -> None:
        if self.offset != self.end:
            raise self.fail(f"{self.end - self.offset} bytes too many")


@dataclass(frozen=True, slots=True)
class SectionSpan:
    id: Section
    start: int
    """Of the section's id byte."""
    body: int
    end: int


@dataclass(frozen=True, slots=True)
class Import:
    module: str
    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Export:
    name: str
    kind: str
    index: int


@dataclass(frozen=True, slots=True)
class GlobalVariable:
    """`index` counts imported globals too, of which an accepted module has none."""

    index: int
    type: str
    mutable: bool


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """What was read. Nothing is judged yet but the format."""

    sections: tuple[SectionSpan, ...]
    imports: tuple[Import, ...]
    exports: tuple[Export, ...]
    globals: tuple[GlobalVariable, ...]
    memories: int
    memory_shared: bool
    memory64: bool
    tables: int
    start: int | None
    imported_functions: int

    def section(self, section: Section) -> SectionSpan | None:
        return next((span for span in self.sections if span.id == section), None)

    def export(self, name: str) -> Export | None:
        return next((export for export in self.exports if export.name == name), None)


def read_layout(wasm: bytes) -> ModuleLayout:
    """The layout of a core module. Raises ModuleInvalid, for components too."""
    if wasm[:4] != MAGIC:
        raise ModuleInvalid("not a wasm module: it does not begin with \\0asm")
    if wasm[4:8] == COMPONENT_VERSION:
        raise ModuleInvalid("component: not supported yet by this host; build a core module for wasm32-wasip1")
    if wasm[4:8] != CORE_VERSION:
        raise ModuleInvalid(f"wasm version {wasm[4:8].hex()}: this host reads version 1")
    sections = tuple(_sections(wasm))

    def reader(section: Section) -> Reader | None:
        for span in sections:
            if span.id == section:
                return Reader(wasm, span.body, span.end, f"{section.name.lower()} section")
        return None

    imports, flags = _read_imports(reader(Section.IMPORT))
    memories, shared, memory64 = _read_memories(reader(Section.MEMORY))
    imported_globals = sum(item.kind == "global" for item in imports)
    start = reader(Section.START)
    return ModuleLayout(
        sections=sections,
        imports=imports,
        exports=_read_exports(reader(Section.EXPORT)),
        globals=_read_globals(reader(Section.GLOBAL), imported_globals),
        memories=memories + sum(item.kind == "memory" for item in imports),
        memory_shared=shared or bool(flags & 2),
        memory64=memory64 or bool(flags & 4),
        tables=_read_table_count(reader(Section.TABLE)) + sum(item.kind == "table" for item in imports),
        start=start.u32() if start is not None else None,
        imported_functions=sum(item.kind == "function" for item in imports),
    )


def refusal(layout: ModuleLayout) -> str | None:
    """Why this module cannot run on this host at all, or None. Names what to change."""
    foreign = sorted({item.module for item in layout.imports} - set(IMPORT_MODULES))
    if foreign:
        names = ", ".join(f"{i.module}.{i.name}" for i in layout.imports if i.module in foreign)[:200]
        return f"imports from {', '.join(foreign)[:100]} ({names}): only {' and '.join(IMPORT_MODULES)} are there"
    for item in layout.imports:
        if item.kind != "function":
            return f"imports the {item.kind} {item.module}.{item.name}: only functions can be imported"
    if layout.memory_shared:
        return "has a shared memory: build it without threads"
    if layout.memory64:
        return "has a 64-bit memory: build it for wasm32"
    if layout.memories != 1:
        return f"has {layout.memories} memories: exactly one is needed"
    if layout.export("_start") is not None:
        return (
            "is a command (it exports _start): build a reactor (C and Zig: -mexec-model=reactor,"
            " Go: -buildmode=c-shared, Rust: a cdylib)"
        )
    for export in layout.exports:
        if export.name.startswith("torpor:"):
            return f"exports {export.name[:80]!r}: names that begin with 'torpor:' are the host's"
    memory = layout.export(MEMORY_EXPORT)
    if memory is not None and memory.kind != "memory":
        return f"exports a {memory.kind} as 'memory'"
    return None


def rewrite(wasm: bytes, layout: ModuleLayout) -> bytes:
    """The same module with its memory and all mutable globals exported, and its start function as an export.

    Only the export and start sections change; function and global indices stay what they were.
    """
    entries: list[bytes] = []
    if layout.export(MEMORY_EXPORT) is None:
        entries.append(_export_entry(MEMORY_EXPORT, 2, 0))
    for variable in layout.globals:
        if variable.mutable:
            entries.append(_export_entry(f"{GLOBAL_EXPORT}{variable.index}", 3, variable.index))
    if layout.start is not None:
        entries.append(_export_entry(START_EXPORT, 0, layout.start))
    if not entries:
        return wasm
    span = layout.section(Section.EXPORT)
    old = b""
    if span is not None:
        old_reader = Reader(wasm, span.body, span.end, "export section")
        old_reader.u32()
        old = wasm[old_reader.offset : span.end]
    body = leb(len(layout.exports) + len(entries)) + old + b"".join(entries)
    section = bytes([Section.EXPORT]) + leb(len(body)) + body
    parts = [wasm[:8]]
    written = False
    for item in layout.sections:
        if not written and item.id != Section.CUSTOM and _ORDER[item.id] >= Section.EXPORT:
            parts.append(section)
            written = True
        if item.id not in (Section.EXPORT, Section.START):
            parts.append(wasm[item.start : item.end])
    if not written:
        parts.append(section)
    return b"".join(parts)


def leb(value: int) -> bytes:
    """Unsigned LEB128."""
    out = bytearray()
    while True:
        byte = value & 0x7F
        value >>= 7
        if not value:
            out.append(byte)
            return bytes(out)
        out.append(byte | 0x80)


def _export_entry(name: str, kind: int, index: int) -> bytes:
    encoded = name.encode()
    return leb(len(encoded)) + encoded + bytes([kind]) + leb(index)


def _sections(wasm: bytes) -> list[SectionSpan]:
    spans: list[SectionSpan] = []
    reader = Reader(wasm, 8, len(wasm), "module")
    order = 0.0
    while reader.offset < reader.end:
        start = reader.offset
        number = reader.byte()
        if number > Section.TAG:
            raise ModuleInvalid(f"module, offset {start:#x}: unknown section {number}")
        section = Section(number)
        length = reader.u32()
        body = reader.offset
        if length > reader.end - body:
            raise ModuleInvalid(
                f"{section.name.lower()} section, offset {start:#x}: says {length} bytes, {reader.end - body} are left"
            )
        reader.offset = body + length
        if section != Section.CUSTOM:
            if _ORDER[section] <= order:
                raise ModuleInvalid(f"{section.name.lower()} section, offset {start:#x}: repeated or out of order")
            order = _ORDER[section]
        spans.append(SectionSpan(section, start, body, reader.offset))
    return spans


def _read_imports(reader: Reader | None) -> tuple[tuple[Import, ...], int]:
    """The imports, and the flags of an imported memory (2 shared, 4 of 64 bits)."""
    if reader is None:
        return (), 0
    found: list[Import] = []
    memory_flags = 0
    for _ in range(reader.count(4)):
        module, name, kind = reader.name(), reader.name(), reader.byte()
        match kind:
            case 0:
                reader.u32()
            case 1:
                _value_type(reader)
                _limits(reader)
            case 2:
                memory_flags |= _limits(reader)
            case 3:
                _value_type(reader)
                reader.byte()
            case 4:
                reader.byte()
                reader.u32()
            case _:
                raise reader.fail(f"unknown kind of import {kind}")
        found.append(Import(module, name, _KINDS[kind]))
    reader.done()
    return tuple(found), memory_flags


def _read_exports(reader: Reader | None) -> tuple[Export, ...]:
    if reader is None:
        return ()
    found: list[Export] = []
    for _ in range(reader.count(3)):
        name, kind = reader.name(), reader.byte()
        if kind not in _KINDS:
            raise reader.fail(f"unknown kind of export {kind}")
        found.append(Export(name, _KINDS[kind], reader.u32()))
    reader.done()
    return tuple(found)


def _read_memories(reader: Reader | None) -> tuple[int, bool, bool]:
    if reader is None:
        return 0, False, False
    flags = 0
    number = reader.count(2)
    for _ in range(number):
        flags |= _limits(reader)
    reader.done()
    return number, bool(flags & 2), bool(flags & 4)


def _read_table_count(reader: Reader | None) -> int:
    return reader.count(2) if reader is not None else 0


def _read_globals(reader: Reader | None, imported: int) -> tuple[GlobalVariable, ...]:
    if reader is None:
        return ()
    found: list[GlobalVariable] = []
    for number in range(reader.count(3)):
        kind = _value_type(reader)
        mutable = reader.byte()
        if mutable > 1:
            raise reader.fail(f"mutability {mutable} of global {number}")
        _skip_constant(reader)
        found.append(GlobalVariable(imported + number, kind, mutable == 1))
    reader.done()
    return tuple(found)


def _value_type(reader: Reader) -> str:
    byte = reader.byte()
    if byte in _NUMERIC:
        return _NUMERIC[byte]
    if byte == 0x7B:
        return "v128"
    if byte in (0x63, 0x64):
        reader.skip_leb(5)
        return "reference"
    if byte in _REFERENCES or 0x68 <= byte <= 0x74:
        return "reference"
    raise reader.fail(f"unknown value type {byte:#x}")


def _limits(reader: Reader) -> int:
    """Skips limits, returns their flags."""
    flags = reader.byte()
    if flags & ~0x0F:
        raise reader.fail(f"unknown limits {flags:#x}")
    width = 10 if flags & 4 else 5
    reader.skip_leb(width)
    if flags & 1:
        reader.skip_leb(width)
    if flags & 8:
        reader.skip_leb(5)
    return flags


def _skip_constant(reader: Reader) -> None:
    """A constant expression, to its end."""
    while True:
        opcode = reader.byte()
        match opcode:
            case 0x0B:
                return
            case 0x41 | 0x23 | 0xD2 | 0xD0:  # i32.const, global.get, ref.func, ref.null
                reader.skip_leb(5)
            case 0x42:
                reader.skip_leb(10)
            case 0x43:
                reader.skip(4)
            case 0x44:
                reader.skip(8)
            case 0x6A | 0x6B | 0x6C | 0x7C | 0x7D | 0x7E:  # add, sub, mul of both widths
                continue
            case 0xFD:
                if reader.u32() != 12:
                    raise reader.fail("unknown vector instruction in a constant")
                reader.skip(16)
            case _:
                raise reader.fail(f"unknown instruction {opcode:#x} in a constant")
