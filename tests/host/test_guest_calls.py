"""Calls into a guest and out of it: results, limits, and every way a guest can break the ABI."""

import threading
import time
from collections.abc import Callable

import pytest
from torpor_host import abi
from torpor_host.engine import GuestEngine
from torpor_host.failures import (
    GuestExited,
    GuestFailed,
    GuestOutOfMemory,
    GuestProtocolError,
    GuestStopped,
    GuestTimedOut,
    GuestTrapped,
    InstallRefused,
    InstanceClosed,
)
from torpor_host.hostcalls import CallResponse, FetchResponse, KubeRequest
from torpor_host.instance import Instance
from torpor_host.limits import MIB, Deadline, InstanceLimits
from torpor_host.testing import DONE, Guests, wat_guest, wat_text

Woken = Callable[..., Instance]

SPIN = "(loop $l (br $l)) (unreachable)"
KUBE = '(import "torpor" "kube_request" (func $kube (param i32 i32) (result i32)))'
FETCH = '(import "torpor" "http_fetch" (func $fetch (param i32 i32) (result i32)))'
EXIT = '(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))'

GET = abi.encode([b"GET", b"/api/v1/pods", b"application/json", b"", b"body", b"70"])


def number(code: str) -> str:
    """A reconcile that returns the i32 of `code` as its result's length, at address 0."""
    return f"(i64.extend_i32_u (i32.and {code} (i32.const 0xffff)))"


def answer(call: str) -> str:
    """A reconcile that makes a host call and returns what `take` gives, at 32768."""
    return f"""(local $n i32) (local.set $n {call})
      (i64.or (i64.const {32768 << 32}) (i64.extend_i32_u (call $take (i32.const 32768) (local.get $n))))"""


# Results.


def test_result_comes_back_and_the_request_went_in(guests: Guests, woken: Woken):
    echo = woken(
        wat_guest(
            "(i64.or (i64.shl (i64.extend_i32_u (local.get $ptr)) (i64.const 32)) (i64.extend_i32_u (local.get $len)))"
        )
    )
    assert abi.decode(guests.run(echo, "a")) == [b"default", b"a", b"watch", b"0", b""]
    assert guests.run(woken(wat_guest()), "a") == DONE


def test_result_outside_of_memory_is_a_protocol_error_and_the_end_of_the_instance(guests: Guests, woken: Woken):
    instance = woken(wat_guest("(i64.const 0xfffffff000000100)"))
    with pytest.raises(GuestProtocolError, match="256 bytes at 0xfffffff0 lies outside"):
        guests.run(instance)
    assert not instance.alive
    with pytest.raises(InstanceClosed):
        guests.run(instance)


def test_result_longer_than_allowed_is_a_protocol_error(guests: Guests, woken: Woken):
    instance = woken(wat_guest("(i64.const 0x7fffffff)"))
    with pytest.raises(GuestProtocolError, match="a result of 2147483647 bytes: the limit"):
        guests.run(instance)


@pytest.mark.parametrize(
    ("alloc", "failure", "reason"),
    [
        ("(i32.const 0)", GuestOutOfMemory, r"torpor_alloc\(\d+\) answered 0"),
        ("(i32.const -4)", GuestProtocolError, "answered 0xfffffffc, outside of its memory"),
        ("(unreachable)", GuestTrapped, "unreachable"),
    ],
)
def test_allocators_that_fail(guests: Guests, woken: Woken, alloc: str, failure: type[GuestFailed], reason: str):
    with pytest.raises(failure, match=reason):
        guests.run(woken(wat_guest(alloc=alloc)))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("(unreachable)", "unreachable"),
        ("(i64.load (i32.const -8))", "memory out of bounds"),
        ("(i64.div_u (i64.const 1) (i64.const 0))", "integer division by zero"),
    ],
)
def test_traps_are_named(guests: Guests, woken: Woken, code: str, reason: str):
    instance = woken(wat_guest(code))
    with pytest.raises(GuestTrapped, match=reason):
        guests.run(instance)
    assert not instance.alive


def test_endless_recursion_is_a_trap_and_the_next_guest_runs(guests: Guests, woken: Woken):
    deep = woken(
        wat_guest(
            "(call $deep (i64.const 1))",
            fields="""(func $deep (param i64) (result i64)
        (i64.add (i64.const 1) (call $deep (i64.add (local.get 0) (i64.const 1)))))""",
        )
    )
    failures: list[BaseException] = []

    def run() -> None:
        try:
            guests.run(deep)
        except GuestFailed as exc:
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(failure) for failure in failures] == [GuestTrapped]
    assert "stack overflow" in str(failures[0])
    assert guests.run(woken(wat_guest())) == DONE


# Limits.


def test_spinning_guest_is_stopped_when_its_cpu_budget_is_used_up(guests: Guests, woken: Woken):
    instance = woken(wat_guest(SPIN), InstanceLimits(cpu_budget_s=0.1))
    start = time.thread_time()
    with pytest.raises(GuestTimedOut, match="CPU budget"):
        guests.run(instance)
    assert 0.1 <= time.thread_time() - start < 0.5


def test_spinning_guest_is_stopped_a_grace_after_its_deadline(guests: Guests, woken: Woken):
    instance = woken(wat_guest(SPIN), InstanceLimits(cpu_budget_s=60, grace_s=0.05))
    with pytest.raises(GuestTimedOut, match=r"within 0.05 s after its deadline"):
        guests.run(instance, timeout_s=0.05)


def test_guest_that_spins_in_a_start_of_its_own_is_refused_at_install(engine: GuestEngine, guests: Guests):
    object.__setattr__(engine.config, "initialise_timeout_s", 0.1)
    with pytest.raises(InstallRefused, match=r"_initialize: (used up its CPU budget|did not return)"):
        guests.install(wat_guest(fields=f"(func $start {SPIN}) (start $start)"))


def test_waiting_in_a_host_call_costs_no_cpu_budget(guests: Guests, woken: Woken):
    """A slow answer must not end a guest that has barely run: the budget is processor time."""

    def slow(request: KubeRequest, deadline: Deadline) -> CallResponse:
        time.sleep(0.15)
        return CallResponse(200)

    guests.calls.on_kube = slow
    code = f"(drop (call $kube (i32.const 4096) (i32.const {len(GET)}))) $done"
    instance = woken(
        wat_guest(code, imports=KUBE, fields=f"(data (i32.const 4096) {wat_text(GET)})"),
        InstanceLimits(cpu_budget_s=0.1),
    )
    assert guests.run(instance) == DONE


def test_guest_that_loops_over_host_calls_is_stopped_too(guests: Guests, woken: Woken):
    code = "(loop $l (call $log (i32.const 1) (i32.const 0) (i32.const 1)) (br $l)) (unreachable)"
    instance = woken(wat_guest(code), InstanceLimits(cpu_budget_s=60, grace_s=0))
    with pytest.raises(GuestTimedOut, match="deadline"):
        guests.run(instance, timeout_s=0.1)


def test_memory_beyond_the_limit_is_not_given_and_a_guest_that_ends_over_it_is_out_of_memory(
    guests: Guests, woken: Woken
):
    code = "(loop $l (br_if $l (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))) (unreachable)"
    instance = woken(wat_guest(code), InstanceLimits(memory_bytes=4 * MIB))
    with pytest.raises(GuestOutOfMemory, match=r"4\.0 of|4\.0 MiB of 4\.0 MiB in use"):
        guests.run(instance)


def test_module_whose_memory_is_larger_than_the_limit_is_refused_at_install(guests: Guests):
    with pytest.raises(InstallRefused, match=r"instantiation within 1 MiB: .*memory minimum size"):
        guests.install(wat_guest(pages=64), InstanceLimits(memory_bytes=MIB))


def test_stop_ends_a_spinning_guest(guests: Guests, woken: Woken):
    instance = woken(wat_guest("(call $log (i32.const 1) (i32.const 0) (i32.const 1))" + SPIN), InstanceLimits())
    started = threading.Event()
    guests.calls.log = lambda level, text: started.set()  # type: ignore[method-assign]
    threading.Thread(target=lambda: (started.wait(10), instance.stop("the lease was lost"))).start()
    with pytest.raises(GuestStopped, match="the lease was lost"):
        guests.run(instance, timeout_s=30)


def test_host_calls_of_a_stopped_guest_are_fenced(guests: Guests, woken: Woken, monkeypatch: pytest.MonkeyPatch):
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    instance = woken(
        wat_guest(answer(f"(call $kube (i32.const 4096) (i32.const {len(GET)}))"), imports=KUBE, fields=data)
    )
    instance.stop("the lease was lost")
    monkeypatch.setattr(guests.engine.ticker, "enter", lambda: None)  # a tick before the call would end the guest there
    monkeypatch.setattr(guests.engine.ticker, "leave", lambda: None)
    fields = abi.decode(guests.run(instance))
    assert fields[3:] == [b"fenced", b"the lease was lost"]
    assert guests.calls.requests == []


# Host calls.


def test_kube_request_reaches_the_runtime_and_its_answer_the_guest(guests: Guests, woken: Woken):
    guests.calls.on_kube = lambda request, deadline: CallResponse(201, "text/x", b"\0\xff" * 10)
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    instance = woken(
        wat_guest(answer(f"(call $kube (i32.const 4096) (i32.const {len(GET)}))"), imports=KUBE, fields=data)
    )
    assert abi.decode(guests.run(instance)) == [b"201", b"text/x", b"\0\xff" * 10, b"", b""]
    assert guests.calls.requests == [KubeRequest("GET", "/api/v1/pods", "application/json", "", b"body")]
    assert 0 < guests.calls.deadlines[0].remaining_s() <= 0.07


def test_fetch_answer_has_headers(guests: Guests, woken: Woken):
    message = abi.encode([b"GET", b"https://example.com", b"X-A: 1\n"])
    guests.calls.on_fetch = lambda request, deadline: FetchResponse(200, (("B", "2"),), b"x")
    data = f"(data (i32.const 4096) {wat_text(message)})"
    instance = woken(
        wat_guest(answer(f"(call $fetch (i32.const 4096) (i32.const {len(message)}))"), imports=FETCH, fields=data)
    )
    assert abi.decode(guests.run(instance)) == [b"200", b"B: 2\n", b"x", b"", b""]


def test_calls_after_the_deadline_answer_deadline_without_reaching_the_runtime(guests: Guests, woken: Woken):
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    instance = woken(
        wat_guest(answer(f"(call $kube (i32.const 4096) (i32.const {len(GET)}))"), imports=KUBE, fields=data)
    )
    fields = abi.decode(guests.run(instance, timeout_s=0))
    assert fields[3] == b"deadline"
    assert guests.calls.requests == []


def test_exception_in_the_runtime_is_unavailable_for_the_guest_that_asked_and_nobody_else(guests: Guests, woken: Woken):
    def fail(request: KubeRequest, deadline: Deadline) -> CallResponse:
        raise RuntimeError("a bug")

    guests.calls.on_kube = fail
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    instance = woken(
        wat_guest(answer(f"(call $kube (i32.const 4096) (i32.const {len(GET)}))"), imports=KUBE, fields=data)
    )
    fields = abi.decode(guests.run(instance))
    assert fields[3:] == [b"unavailable", b"the host failed: RuntimeError: a bug"]
    assert guests.run(woken(wat_guest())) == DONE
    assert instance.alive


def test_exception_in_the_log_sink_does_not_end_the_guest(guests: Guests, woken: Woken):
    def fail(level: int, text: str) -> None:
        raise KeyError("a bug")

    guests.calls.log = fail  # type: ignore[method-assign]
    instance = woken(wat_guest("(call $log (i32.const 1) (i32.const 0) (i32.const 1)) $done"))
    assert guests.run(instance) == DONE


def test_answer_longer_than_a_message_may_be_is_too_large(guests: Guests, woken: Woken):
    guests.calls.on_kube = lambda request, deadline: CallResponse(200, "x", b"x" * 5000)
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    wasm = wat_guest(answer(f"(call $kube (i32.const 4096) (i32.const {len(GET)}))"), imports=KUBE, fields=data)
    fields = abi.decode(guests.run(woken(wasm, InstanceLimits(message_bytes_max=4096))))
    assert (fields[0], fields[3], fields[4]) == (b"", b"too-large", b"the answer is longer than 4096 bytes")


@pytest.mark.parametrize(
    ("pointer", "length"),
    [(-4, 8), (-1, 0x7FFFFFFF), (0, -1), (131072, 1), (4096, 3), (131072 - 4, 8)],
)
def test_bad_buffers_answer_minus_one_and_never_trap(guests: Guests, woken: Woken, pointer: int, length: int):
    code = number(f"(call $kube (i32.const {pointer}) (i32.const {length}))")
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    assert len(guests.run(woken(wat_guest(code, imports=KUBE, fields=data)))) == 0xFFFF
    assert guests.calls.requests == []


def test_take_without_a_result_answers_minus_one(guests: Guests, woken: Woken):
    instance = woken(wat_guest(number("(call $take (i32.const 32768) (i32.const 4))")))
    assert len(guests.run(instance)) == 0xFFFF


def test_take_into_a_wrong_buffer_keeps_the_result(guests: Guests, woken: Woken):
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    code = f"""(local $n i32) (local.set $n (call $kube (i32.const 4096) (i32.const {len(GET)})))
      (drop (call $take (i32.const -1) (local.get $n)))
      {number("(call $take (i32.const 32768) (local.get $n))")}"""
    instance = woken(wat_guest(code, imports=KUBE, fields=data))
    assert 0 < len(guests.run(instance)) < 0xFFFF


def test_result_of_one_call_is_gone_in_the_next(guests: Guests, woken: Woken):
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    code = f"""(if (result i64) (i32.eqz (global.get $seen))
      (then (global.set $seen (call $kube (i32.const 4096) (i32.const {len(GET)}))) $done)
      (else {number("(call $take (i32.const 32768) (i32.const 9))")}))"""
    fields = data + "(global $seen (mut i32) (i32.const 0))"
    instance = woken(wat_guest(code, imports=KUBE, fields=fields))
    assert guests.run(instance) == DONE
    assert len(guests.run(instance)) == 0xFFFF


def test_log_lines_carry_their_level_and_wrong_pointers_are_ignored(guests: Guests, woken: Woken):
    code = """(call $log (i32.const 2) (i32.const 4096) (i32.const 4))
      (call $log (i32.const 1) (i32.const -1) (i32.const 4))
      (call $log (i32.const 99) (i32.const 4096) (i32.const 3)) $done"""
    guests.run(woken(wat_guest(code, fields='(data (i32.const 4096) "h\\c3\\a9y\\ff")')))
    assert guests.calls.logged == [(2, "héy"), (3, "hé")]


def test_output_beyond_the_bound_is_dropped_and_counted(guests: Guests, woken: Woken):
    code = """(local $i i32) (loop $l (call $log (i32.const 1) (i32.const 4096) (i32.const 100))
      (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 50)))) $done"""
    guests.run(woken(wat_guest(code), InstanceLimits(output_bytes_max=1000)))
    assert len(guests.calls.logged) == 11
    assert guests.calls.logged[-1] == (2, "4000 bytes of output dropped: a call may write 1000")


def test_proc_exit_ends_the_call_with_its_code_even_if_the_guest_goes_on(guests: Guests, woken: Woken):
    well_behaved = woken(wat_guest("(call $exit (i32.const 7)) (unreachable)", imports=EXIT))
    with pytest.raises(GuestExited, match=r"proc_exit\(7\)") as caught:
        guests.run(well_behaved)
    assert caught.value.code == 7
    assert not well_behaved.alive
    for rest in (SPIN, "$done"):
        with pytest.raises(GuestExited, match=r"proc_exit\(3\)"):
            guests.run(woken(wat_guest("(call $exit (i32.const 3))" + rest, imports=EXIT)))


# Installing.


@pytest.mark.parametrize(
    ("wasm", "reason"),
    [
        (wat_guest(version=2), "speaks ABI version 2, this host speaks 1"),
        (wat_guest(imports='(import "torpor" "later" (func))'), "unknown import: `torpor::later`"),
        (wat_guest(imports='(import "wasi_snapshot_preview1" "fd_write" (func))'), "incompatible import type"),
        (wat_guest(describe="(unreachable)"), "describe: unreachable"),
        (wat_guest(describe_result=abi.encode([b"no CRD"])), "describe: no CRD"),
        (wat_guest(describe_result=abi.encode([b"", b"{"])), "the manifest is no JSON"),
        (wat_guest(describe_result=abi.encode([b"", b"[" * 60000])), "the manifest is no JSON"),
        (wat_guest(describe_result=abi.encode([b"", b"[]"])), "no JSON object"),
        (wat_guest(describe_result=b"\xff\xff\xff\xffx"), "describe: field 0 says"),
        (wat_guest(fields='(func (export "torpor_wake") (param i32))'), "exports torpor_wake with another type"),
        (b"\0asm\x01\0\0\0\x05\x03\x01\x00\x01", "does not export torpor_abi_version, torpor_alloc"),
    ],
)
def test_modules_that_are_no_operator_are_refused_with_the_reason(guests: Guests, wasm: bytes, reason: str):
    with pytest.raises(InstallRefused) as caught:
        guests.install(wasm)
    assert reason in caught.value.reason


def test_refusal_carries_the_guests_last_words(guests: Guests):
    code = "(call $log (i32.const 3) (i32.const 4096) (i32.const 5)) (unreachable)"
    with pytest.raises(InstallRefused, match="its last output: panic"):
        guests.install(wat_guest(describe=code, fields='(data (i32.const 4096) "panic")'))


def test_host_calls_at_install_are_refused_without_reaching_anyone(guests: Guests):
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    code = f"""(drop (call $take (i32.const 32768) (call $kube (i32.const 4096) (i32.const {len(GET)}))))
      (call $log (i32.const 3) (i32.const 32784) (i32.const 40)) (unreachable)"""
    with pytest.raises(InstallRefused, match=r"denied.*not possible while"):
        guests.install(wat_guest(describe=code, imports=KUBE, fields=data))


# Closing.


def test_close_is_idempotent_and_calls_afterwards_are_refused(guests: Guests, woken: Woken):
    instance = woken(wat_guest())
    instance.close()
    instance.close()
    assert not instance.alive
    with pytest.raises(InstanceClosed):
        guests.run(instance)
    instance.private_bytes()
    instance.stop("late")


def test_close_waits_for_a_running_call(guests: Guests, woken: Woken):
    entered, release = threading.Event(), threading.Event()

    def block(request: KubeRequest, deadline: Deadline) -> CallResponse:
        entered.set()
        release.wait(10)
        return CallResponse(200)

    guests.calls.on_kube = block
    data = f"(data (i32.const 4096) {wat_text(GET)})"
    code = f"(drop (call $kube (i32.const 4096) (i32.const {len(GET)}))) $done"
    instance = woken(wat_guest(code, imports=KUBE, fields=data))
    results: list[bytes] = []
    runner = threading.Thread(target=lambda: results.append(guests.run(instance)))
    runner.start()
    entered.wait(10)
    closer = threading.Thread(target=instance.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    release.set()
    closer.join(10)
    runner.join(10)
    assert results == [DONE]
    assert not instance.alive


def test_ticker_sleeps_when_no_guest_runs(engine: GuestEngine, guests: Guests, woken: Woken):
    guests.run(woken(wat_guest()))
    deadline = time.monotonic() + 10
    while not engine.ticker.parked:
        assert time.monotonic() < deadline
        time.sleep(0.02)
