"""Finds the few instructions that change what an image does not hold: tables, and segments after they were dropped.

Decoding 60 MB of code in Python takes minutes, and almost no module has such an instruction. So their byte patterns are
searched first (fast, with false hits inside constants), and only the functions with a hit are decoded exactly. A
function that cannot be decoded counts as one that changes everything: the module then runs without an image, which is
slower and never wrong.
"""

from __future__ import annotations

import re

from torpor_host.wasm_module import ModuleInvalid, ModuleLayout, Reader, Section

# An index may be written with needless continuation bytes: 0x80 … 0x00.
_TABLE_SET = rb"\x26"
_PREFIXED = rb"\xfc(?:[\x08\x09\x0c-\x0f\x11]|[\x88\x89\x8c-\x8f\x91]\x80*\x00)"
_PATTERN_ONE_TABLE = re.compile(_TABLE_SET + rb"(?:\x00|\x80+\x00)|" + _PREFIXED, re.DOTALL)
_PATTERN_TABLES = re.compile(_TABLE_SET + rb"|" + _PREFIXED, re.DOTALL)

_TABLE_OPCODES = {12: "table.init", 14: "table.copy", 15: "table.grow", 17: "table.fill"}
_MEMORY_INIT, _DATA_DROP, _ELEM_DROP = 8, 9, 13

_UNREADABLE = "an instruction that this host cannot read"


def image_refusal(wasm: bytes, layout: ModuleLayout) -> str | None:
    """Why an image of memory and globals would miss state of this module, or None."""
    for variable in layout.globals:
        if variable.mutable and variable.type in ("v128", "reference"):
            return f"global {variable.index} is mutable and of type {variable.type}: an image holds numbers only"
    found = _state_changes(wasm, layout)
    for what, function in found.items():
        if what in _TABLE_OPCODES.values() or what in ("table.set", _UNREADABLE):
            return f"function {function} has {what}: an image does not hold tables"
    if "data.drop" in found and "memory.init" in found:
        function = found["data.drop"]
        return f"function {function} has data.drop, and memory.init is used: an image does not know what was dropped"
    return None


def _state_changes(wasm: bytes, layout: ModuleLayout) -> dict[str, int]:
    """Instruction name to the index of the first function that has it."""
    span = layout.section(Section.CODE)
    if span is None:
        return {}
    pattern = _PATTERN_ONE_TABLE if layout.tables <= 1 else _PATTERN_TABLES
    found: dict[str, int] = {}
    reader = Reader(wasm, span.body, span.end, "code section")
    number = reader.count(3)
    # One pass over the hits and one over the bodies, both ascending.
    hits = pattern.finditer(wasm, reader.offset, span.end)
    hit = next(hits, None)
    for index in range(number):
        size = reader.u32()
        start = reader.offset
        reader.skip(size)
        end = reader.offset
        while hit is not None and hit.start() < start:
            hit = next(hits, None)
        if hit is None:
            break
        if hit.start() < end:
            function = layout.imported_functions + index
            for what in _decode_function(wasm, start, end, function):
                found.setdefault(what, function)
    return found


def _decode_function(wasm: bytes, start: int, end: int, function: int) -> set[str]:
    reader = Reader(wasm, start, end, f"function {function}")
    found: set[str] = set()
    try:
        for _ in range(reader.count(2)):
            reader.skip_leb(5)
            if reader.byte() in (0x63, 0x64):
                reader.skip_leb(5)
        while reader.offset < end:
            what = _instruction(reader)
            if what is not None:
                found.add(what)
    except ModuleInvalid:
        found.add(_UNREADABLE)
    return found


def _instruction(reader: Reader) -> str | None:
    """Reads one instruction; its name if it is one that is looked for."""
    opcode = reader.byte()
    if opcode <= 0x01 or 0x45 <= opcode <= 0xC4 or opcode in (0x05, 0x0B, 0x0F, 0x1A, 0x1B, 0xD1):
        return None
    if 0x20 <= opcode <= 0x25:  # local and global get, set, tee; table.get
        reader.skip_leb(5)
        return None
    if 0x28 <= opcode <= 0x3E:
        _memory_argument(reader)
        return None
    match opcode:
        case 0x41:
            reader.skip_leb(5)
        case 0x42:
            reader.skip_leb(10)
        case 0x43:
            reader.skip(4)
        case 0x44:
            reader.skip(8)
        case 0x02 | 0x03 | 0x04:  # block, loop, if: a block type is a signed number of 33 bits or a value type
            _block_type(reader)
        case 0x0C | 0x0D | 0x10 | 0x12 | 0x3F | 0x40 | 0xD2 | 0xD0:  # branches, calls, memory.size and grow, references
            reader.skip_leb(5)
        case 0x0E:
            for _ in range(reader.count() + 1):
                reader.skip_leb(5)
        case 0x11 | 0x13:
            reader.skip_leb(5)
            reader.skip_leb(5)
        case 0x1C:
            for _ in range(reader.count()):
                if reader.byte() in (0x63, 0x64):
                    reader.skip_leb(5)
        case 0x26:
            reader.skip_leb(5)
            return "table.set"
        case 0xFC:
            return _prefixed(reader)
        case 0xFD:
            _vector(reader)
        case _:
            raise reader.fail(f"unknown instruction {opcode:#x}")
    return None


def _block_type(reader: Reader) -> None:
    if reader.data[reader.offset : reader.offset + 1] in (b"\x63", b"\x64"):
        reader.byte()
    reader.skip_leb(5)


def _memory_argument(reader: Reader) -> None:
    align = reader.u32()
    if align & 0x40:
        reader.skip_leb(5)
    reader.skip_leb(10)


def _prefixed(reader: Reader) -> str | None:
    opcode = reader.u32()
    operands = {8: 2, 9: 1, 10: 2, 11: 1, 12: 2, 13: 1, 14: 2, 15: 1, 16: 1, 17: 1}
    if opcode > 22:
        raise reader.fail(f"unknown instruction 0xfc {opcode}")
    for _ in range(operands.get(opcode, 0)):
        reader.skip_leb(5)
    if opcode in _TABLE_OPCODES:
        return _TABLE_OPCODES[opcode]
    return {_MEMORY_INIT: "memory.init", _DATA_DROP: "data.drop", _ELEM_DROP: "elem.drop"}.get(opcode)


def _vector(reader: Reader) -> None:
    opcode = reader.u32()
    if opcode <= 11 or opcode in (92, 93):
        _memory_argument(reader)
    elif opcode in (12, 13):
        reader.skip(16)
    elif 21 <= opcode <= 34:
        reader.skip(1)
    elif 84 <= opcode <= 91:
        _memory_argument(reader)
        reader.skip(1)
    elif opcode > 0x133:
        raise reader.fail(f"unknown vector instruction {opcode:#x}")
