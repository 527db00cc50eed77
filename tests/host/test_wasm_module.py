"""Reading and rewriting of core modules, with modules from WAT and with hostile bytes."""

import pytest
import wasmtime
from hypothesis import given, settings
from hypothesis import strategies as st
from torpor_host import wasm_code, wasm_module
from torpor_host.testing import wat_guest
from torpor_host.wasm_module import ModuleInvalid, Section, leb, read_layout, refusal, rewrite

STATEFUL = """(module
  (type $f (func))
  (memory 1 4)
  (table 2 funcref)
  (global $fixed i32 (i32.const 1))
  (global $counter (mut i32) (i32.const 2))
  (global $big (mut i64) (i64.const -3))
  (global $real (mut f64) (f64.const 0.5))
  (func $start (global.set $counter (i32.const 9)))
  (start $start)
  (elem (i32.const 0) $start)
  (data (i32.const 8) "hello")
)"""


def wat(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


def image_refusal(text: str) -> str | None:
    wasm = wat(text)
    return wasm_code.image_refusal(wasm, read_layout(wasm))


def test_rewritten_module_exports_memory_and_mutable_globals_and_does_not_start_by_itself():
    wasm = wat(STATEFUL)
    out = rewrite(wasm, read_layout(wasm))
    engine = wasmtime.Engine()
    store = wasmtime.Store(engine)
    instance = wasmtime.Instance(store, wasmtime.Module(engine, out), [])
    exports = instance.exports(store)
    assert set(exports) == {
        "memory",
        "torpor:global:1",
        "torpor:global:2",
        "torpor:global:3",
        "torpor:start",
    }
    assert exports["torpor:global:1"].value(store) == 2
    exports["torpor:start"](store)
    assert exports["torpor:global:1"].value(store) == 9
    assert exports["torpor:global:3"].value(store) == 0.5
    assert bytes(exports["memory"].read(store, 8, 13)) == b"hello"


def test_rewriting_keeps_existing_exports_and_custom_sections():
    wasm = wat_guest() + bytes([0]) + leb(6) + leb(4) + b"note!"
    out = rewrite(wasm, read_layout(wasm))
    before = {export.name for export in read_layout(wasm).exports}
    after = {export.name for export in read_layout(out).exports}
    assert after - before == {"torpor:global:0"}
    assert out.endswith(b"note!")


def test_module_that_needs_no_change_is_returned_as_it_is():
    wasm = wat('(module (memory (export "memory") 1))')
    assert rewrite(wasm, read_layout(wasm)) is wasm


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('(module (import "env" "f" (func)) (memory 1))', "imports from env (env.f)"),
        ('(module (import "torpor" "m" (memory 1)))', "imports the memory torpor.m"),
        ('(module (import "torpor" "t" (table 1 funcref)) (memory 1))', "imports the table torpor.t"),
        ('(module (import "torpor" "g" (global i32)) (memory 1))', "imports the global torpor.g"),
        ("(module (memory 1 2 shared))", "shared memory"),
        ("(module (memory i64 1))", "64-bit memory"),
        ("(module (memory 1) (memory 1))", "2 memories"),
        ("(module)", "0 memories"),
        ('(module (memory 1) (func (export "_start")))', "is a command"),
        ('(module (memory 1) (func (export "torpor:start")))', "the host's"),
        ('(module (memory 1) (func (export "memory")))', "exports a function as 'memory'"),
    ],
)
def test_modules_that_cannot_run_here_are_refused_with_the_reason(text: str, reason: str):
    found = refusal(read_layout(wat(text)))
    assert found is not None
    assert reason in found


def test_an_ordinary_guest_is_neither_refused_nor_kept_from_an_image():
    wasm = wat_guest()
    layout = read_layout(wasm)
    assert refusal(layout) is None
    assert wasm_code.image_refusal(wasm, layout) is None


def test_components_are_refused_by_name():
    with pytest.raises(ModuleInvalid, match="component: not supported yet by this host"):
        read_layout(b"\0asm\x0d\0\x01\0")


@pytest.mark.parametrize(
    ("wasm", "message"),
    [
        (b"", "not a wasm module"),
        (b"#!/usr/bin/env python", "not a wasm module"),
        (b"\0asm\x02\0\0\0", "version 02000000"),
        (b"\0asm\x01\0\0\0\x63\x00", "offset 0x8: unknown section 99"),
        (b"\0asm\x01\0\0\0\x05", "module, offset 0x9: ends too early"),
        (b"\0asm\x01\0\0\0\x05\xff\xff\xff\xff\x0f", "memory section, offset 0x8: says 4294967295 bytes"),
        (b"\0asm\x01\0\0\0\x05\xff\xff\xff\xff\xff\x01", "longer than 32 bits"),
        (b"\0asm\x01\0\0\0\x02\x05\xff\xff\xff\xff\x0f", "import section, offset 0xf: says 4294967295 entries"),
        (b"\0asm\x01\0\0\0\x07\x04\x01\x7fab", "export section, offset 0xc: says 127 bytes, 2 are left"),
        (b"\0asm\x01\0\0\0\x05\x03\x01\x00\x01\x05\x03\x01\x00\x01", "memory section, offset 0xd: repeated"),
        (b"\0asm\x01\0\0\0\x06\x04\x01\x7f\x01\x41", "global section, offset 0xe: ends too early"),
        (b"\0asm\x01\0\0\0\x06\x04\x01\x11\x01\x0b", "unknown value type 0x11"),
    ],
)
def test_broken_modules_are_refused_with_section_and_offset(wasm: bytes, message: str):
    with pytest.raises(ModuleInvalid, match=message):
        read_layout(wasm)


@given(st.binary(max_size=400))
@settings(max_examples=400, deadline=None)
def test_random_sections_raise_module_invalid_or_nothing(tail: bytes):
    wasm = b"\0asm\x01\0\0\0" + tail
    try:
        layout = read_layout(wasm)
    except ModuleInvalid:
        return
    refusal(layout)
    wasm_code.image_refusal(wasm, layout)
    rewrite(wasm, layout)


@given(position=st.integers(min_value=8), value=st.integers(0, 255), cut=st.integers(min_value=0))
@settings(max_examples=400, deadline=None)
def test_damaged_guest_raises_module_invalid_or_stays_readable(position: int, value: int, cut: int):
    wasm = bytearray(wat_guest())
    wasm[position % len(wasm)] = value
    damaged = bytes(wasm[: len(wasm) - cut % 40])
    try:
        layout = read_layout(damaged)
        wasm_code.image_refusal(damaged, layout)
        rewrite(damaged, layout)
    except ModuleInvalid as exc:
        assert str(exc)  # anything else than ModuleInvalid fails the test


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("(table.set 0 (i32.const 0) (ref.null func))", "table.set"),
        ("(drop (table.grow 0 (ref.null func) (i32.const 1)))", "table.grow"),
        ("(table.fill 0 (i32.const 0) (ref.null func) (i32.const 1))", "table.fill"),
        ("(table.copy 0 0 (i32.const 0) (i32.const 0) (i32.const 1))", "table.copy"),
        ("(table.init 0 $e (i32.const 0) (i32.const 0) (i32.const 1))", "table.init"),
    ],
)
def test_modules_that_change_a_table_get_no_image(instruction: str, reason: str):
    text = f"""(module (memory 1) (table 2 funcref) (elem $e func $f)
      (func $f) (func {instruction}))"""
    assert image_refusal(text) == f"function 1 has {reason}: an image does not hold tables"


def test_dropping_data_matters_only_if_it_could_be_used_again():
    drop = "(func (data.drop $d))"
    init = "(func (memory.init $d (i32.const 0) (i32.const 0) (i32.const 1)))"
    body = '(module (memory 1) (data $d "x") {})'
    assert image_refusal(body.format(drop)) is None
    assert image_refusal(body.format(init)) is None
    assert "data.drop" in (image_refusal(body.format(drop + init)) or "")


@pytest.mark.parametrize(
    ("declaration", "kind"),
    [("(mut v128) (v128.const i64x2 0 0)", "v128"), ("(mut funcref) (ref.null func)", "reference")],
)
def test_mutable_globals_that_are_no_numbers_get_no_image(declaration: str, kind: str):
    reason = image_refusal(f"(module (memory 1) (global {declaration}))")
    assert reason == f"global 0 is mutable and of type {kind}: an image holds numbers only"
    assert image_refusal(f"(module (memory 1) (global {declaration.replace('(mut ', '').replace(')', '', 1)}))") is None


def test_constants_that_look_like_table_writes_are_decoded_and_pass():
    # i32.const 38 is 41 26; followed by unreachable it reads 26 00, the bytes of `table.set 0`.
    text = """(module (memory 1) (table 1 funcref)
      (func (drop (i32.const 38)) (unreachable) (drop (i64.const 0x8fc)) (br_table 0 0 (i32.const 38)))
      (func (param v128) (result v128) (i8x16.shuffle 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
         (v128.const i32x4 0x26 0x08fc 0x26 0) (local.get 0)))
      (func (result i32) (block (result i32) (i32.load offset=38 align=1 (i32.const 0)))))"""
    wasm = wat(text)
    span = read_layout(wasm).section(Section.CODE)
    assert span is not None
    assert b"\x26\x00" in wasm[span.body : span.end]
    assert image_refusal(text) is None


def test_code_that_cannot_be_decoded_counts_as_changing_everything():
    wasm = wat("(module (memory 1) (table 1 funcref) (func (drop (i32.const 38)) unreachable))")
    at = wasm.index(b"\x41\x26\x1a\x00")
    broken = wasm[:at] + b"\xf5\x26\x00\x00" + wasm[at + 4 :]
    assert "cannot read" in (wasm_code.image_refusal(broken, read_layout(broken)) or "")


def test_numbers_may_be_written_with_needless_bytes():
    # table.set with its index as 80 00
    body = b"\x00\x41\x00\xd0\x70\x26\x80\x00\x0b"
    wasm = (
        b"\0asm\x01\0\0\0"
        + b"\x01\x04\x01\x60\x00\x00"
        + b"\x03\x02\x01\x00"
        + b"\x04\x04\x01\x70\x00\x01"
        + b"\x05\x03\x01\x00\x01"
        + b"\x0a"
        + leb(len(body) + 2)
        + b"\x01"
        + leb(len(body))
        + body
    )
    wasmtime.Module.validate(wasmtime.Engine(), wasm)
    assert "table.set" in (wasm_code.image_refusal(wasm, read_layout(wasm)) or "")


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32 - 1])
def test_leb_is_read_as_it_was_written(value: int):
    encoded = leb(value)
    assert wasm_module.Reader(encoded, 0, len(encoded), "test").u32() == value
