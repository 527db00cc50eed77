"""WASI as a C guest (zig's libc) sees it, in a host that answers it itself."""

import threading
import time
from collections.abc import Callable

import pytest
from torpor_host.failures import GuestExited, GuestFailed, GuestOutOfMemory, GuestTrapped
from torpor_host.install import InstalledModule
from torpor_host.instance import Instance
from torpor_host.limits import MIB, Deadline, InstanceLimits
from torpor_host.testing import Guests, c_guest, wat_guest

SOURCE = r"""
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
extern char **environ;
static int counter;
static char buffer[4096];
static void hex(char *to, const unsigned char *from, int n) {
    for (int i = 0; i < n; i++) sprintf(to + 2 * i, "%02x", from[i]);
}
static int deep(int n) { volatile char pad[256]; pad[0] = n; return n ? deep(n - 1) + pad[0] : 0; }
EXPORT(torpor_reconcile) uint64_t reconcile(const char *message, uint32_t len) {
    /* fields: namespace, name, cause, attempt */
    uint32_t n, at = 0; char name[64] = "", number[16] = "";
    memcpy(&n, message, 4); at = 4 + n;
    memcpy(&n, message + at, 4); memcpy(name, message + at + 4, n < 63 ? n : 63); at += 4 + n;
    memcpy(&n, message + at, 4); at += 4 + n;
    memcpy(&n, message + at, 4); memcpy(number, message + at + 4, n < 15 ? n : 15);
    int attempt = atoi(number);
    struct timespec t;
    if (!strcmp(name, "random")) {
        unsigned char r[16]; getentropy(r, 16); hex(buffer, r, 16); return tell(buffer);
    }
    if (!strcmp(name, "monotonic") || !strcmp(name, "realtime")) {
        clock_gettime(name[0] == 'm' ? CLOCK_MONOTONIC : CLOCK_REALTIME, &t);
        sprintf(buffer, "%lld", (long long)t.tv_sec * 1000000000 + t.tv_nsec); return tell(buffer);
    }
    if (!strcmp(name, "sleep")) {
        t.tv_sec = attempt / 1000; t.tv_nsec = attempt % 1000 * 1000000; nanosleep(&t, 0); return tell("slept");
    }
    if (!strcmp(name, "sleepless")) { t.tv_sec = 1; t.tv_nsec = 0; for (;;) nanosleep(&t, 0); }
    if (!strcmp(name, "poll")) {
        struct pollfd p = { .fd = 1, .events = POLLOUT }; int r = poll(&p, 1, 10000);
        sprintf(buffer, "%d %d", r, p.revents & POLLOUT ? 1 : 0); return tell(buffer);
    }
    if (!strcmp(name, "exit")) exit(attempt);
    if (!strcmp(name, "abort")) { fprintf(stderr, "about to abort"); abort(); }
    if (!strcmp(name, "bomb")) { for (;;) { char *volatile p = malloc(65536); if (!p) abort(); memset(p, 1, 65536); } }
    if (!strcmp(name, "print")) {
        printf("one\ntwo\n"); fprintf(stderr, "three\n"); printf("half"); fflush(stdout); return tell("printed");
    }
    if (!strcmp(name, "environment")) {
        int count = 0; for (char **e = environ; e && *e; e++) count++;
        sprintf(buffer, "%d %s", count, getenv("PATH") ? "PATH" : "nothing"); return tell(buffer);
    }
    if (!strcmp(name, "files")) {
        struct stat s; int a = open("/etc/passwd", O_RDONLY), ea = errno;
        int b = open("relative", O_CREAT | O_RDWR, 0600), eb = errno; int c = stat(".", &s), d = opendir("/") != 0;
        ea = ea == ENOENT || ea == ENOTCAPABLE; eb = eb == ENOENT || eb == ENOTCAPABLE;
        sprintf(buffer, "%d %d %d %d %d %d", a, ea, b, eb, c, d);
        return tell(buffer);
    }
    if (!strcmp(name, "stdin")) { int r = read(0, buffer, 10); sprintf(buffer, "%d", r); return tell(buffer); }
    if (!strcmp(name, "count")) { sprintf(buffer, "%d", ++counter); return tell(buffer); }
    if (!strcmp(name, "deep")) { sprintf(buffer, "%d", deep(attempt)); return tell(buffer); }
    return tell("unknown");
}
"""


@pytest.fixture
def module(guests: Guests) -> InstalledModule:
    return guests.install(c_guest(SOURCE))


@pytest.fixture
def instance(guests: Guests, module: InstalledModule) -> Instance:
    return guests.wake(module)


def test_module_of_a_c_compiler_gets_an_image(module: InstalledModule):
    assert module.image_refusal is None
    assert module.image is not None


def test_a_hundred_wakes_give_a_hundred_random_numbers(guests: Guests, module: InstalledModule):
    seen = set()
    for _ in range(100):
        instance = guests.wake(module)
        seen.add(guests.told(instance, "random"))
        instance.close()
    assert len(seen) == 100


def test_monotonic_clock_never_goes_back_across_wakes(guests: Guests, module: InstalledModule):
    last = module.image.monotonic_ns if module.image else 0
    for _ in range(20):
        instance = guests.wake(module)
        for _ in range(2):
            now = int(guests.told(instance, "monotonic"))
            assert now > last
            last = now
        instance.close()


def test_realtime_is_the_hosts(guests: Guests, instance: Instance):
    before = time.time_ns()
    told = int(guests.told(instance, "realtime"))
    assert before <= told <= time.time_ns()


def test_sleep_takes_its_time_and_gives_the_cpu_slot_back(guests: Guests, instance: Instance):
    start = time.monotonic()
    assert guests.told(instance, "sleep", attempt=60) == "slept"
    assert 0.06 <= time.monotonic() - start < 8
    assert guests.calls.blocked == 1


def test_sleep_over_the_deadline_ends_at_the_deadline(guests: Guests, instance: Instance):
    start = time.monotonic()
    assert guests.told(instance, "sleep", attempt=3_600_000, timeout_s=0.1) == "slept"
    assert 0.1 <= time.monotonic() - start < 8
    assert instance.alive


def test_guest_that_only_sleeps_is_stopped_after_the_deadline(guests: Guests, module: InstalledModule):
    instance = guests.wake(module, InstanceLimits(grace_s=0.05))
    start = time.monotonic()
    with pytest.raises(GuestFailed, match="after its deadline"):
        guests.run(instance, "sleepless", timeout_s=0.1)
    assert time.monotonic() - start < 8


def test_stop_ends_a_sleep_at_once(guests: Guests, instance: Instance):
    threading.Thread(target=lambda: (guests.calls.waiting.wait(10), instance.stop("drained"))).start()
    start = time.monotonic()
    try:
        guests.told(instance, "sleep", attempt=60_000, timeout_s=60)
    except GuestFailed as exc:
        assert exc.reason == "drained"
    assert time.monotonic() - start < 5


def test_poll_on_output_is_ready_at_once(guests: Guests, instance: Instance):
    assert guests.told(instance, "poll") == "1 1"


def test_exit_code_is_told(guests: Guests, instance: Instance):
    with pytest.raises(GuestExited) as caught:
        guests.run(instance, "exit", attempt=3)
    assert caught.value.code == 3


def test_abort_is_a_trap_and_what_was_printed_is_not_lost(guests: Guests, instance: Instance):
    with pytest.raises(GuestTrapped, match="unreachable"):
        guests.run(instance, "abort")
    assert guests.calls.logged == [(2, "about to abort")]


def test_memory_bomb_ends_at_its_limit_and_alone(guests: Guests, module: InstalledModule):
    other = guests.wake(module)
    bomb = guests.wake(module, InstanceLimits(memory_bytes=24 * MIB))
    with pytest.raises(GuestOutOfMemory, match=r"of 24\.0 MiB in use"):
        guests.run(bomb, "bomb")
    assert guests.told(other, "count") == "1"


def test_output_becomes_lines_and_a_half_line_comes_at_the_end(guests: Guests, instance: Instance):
    assert guests.told(instance, "print") == "printed"
    assert sorted(guests.calls.logged) == [(1, "half"), (1, "one"), (1, "two"), (2, "three")]


def test_there_is_no_environment(guests: Guests, instance: Instance, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORPOR_TEST_SECRET", "hunter2")
    assert guests.told(instance, "environment") == "0 nothing"


def test_there_are_no_files(guests: Guests, instance: Instance):
    assert guests.told(instance, "files") == "-1 1 -1 1 -1 0"
    assert guests.told(instance, "stdin") == "0"


def test_state_is_gone_with_the_instance_and_stays_within_it(guests: Guests, module: InstalledModule):
    first = guests.wake(module)
    assert [guests.told(first, "count") for _ in range(3)] == ["1", "2", "3"]
    first.close()
    assert guests.told(guests.wake(module), "count") == "1"


def test_ten_thousand_frames_fit_and_endless_ones_trap_on_a_worker_thread(guests: Guests, module: InstalledModule):
    outcomes: list[object] = []

    def run(depth: int) -> None:
        instance = guests.wake(module)
        try:
            outcomes.append(guests.told(instance, "deep", attempt=depth))
        except GuestFailed as exc:
            outcomes.append(type(exc))

    for depth in (100, 100_000_000):
        thread = threading.Thread(target=run, args=(depth,))
        thread.start()
        thread.join()
    assert isinstance(outcomes[0], str)
    assert outcomes[1] is GuestTrapped


# Hostile use of the raw interface.

_WASI = '(import "wasi_snapshot_preview1" "{0}" (func $f (param {1}) (result i32)))'


@pytest.mark.parametrize(
    ("name", "parameters", "arguments", "errno"),
    [
        ("random_get", "i32 i32", "(i32.const -8) (i32.const 64)", 21),
        ("random_get", "i32 i32", "(i32.const 0) (i32.const -1)", 21),
        ("clock_time_get", "i32 i64 i32", "(i32.const 1) (i64.const 0) (i32.const -4)", 21),
        ("clock_time_get", "i32 i64 i32", "(i32.const 9) (i64.const 0) (i32.const 0)", 28),
        ("fd_write", "i32 i32 i32 i32", "(i32.const 1) (i32.const -8) (i32.const 1) (i32.const 0)", 21),
        ("fd_write", "i32 i32 i32 i32", "(i32.const 1) (i32.const 0) (i32.const -1) (i32.const 0)", 28),
        ("fd_write", "i32 i32 i32 i32", "(i32.const 3) (i32.const 0) (i32.const 0) (i32.const 0)", 8),
        ("fd_write", "i32 i32 i32 i32", "(i32.const 1) (i32.const 0) (i32.const 0) (i32.const -2)", 21),
        ("poll_oneoff", "i32 i32 i32 i32", "(i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)", 28),
        ("poll_oneoff", "i32 i32 i32 i32", "(i32.const 0) (i32.const 0) (i32.const -1) (i32.const 0)", 28),
        ("poll_oneoff", "i32 i32 i32 i32", "(i32.const -9) (i32.const 0) (i32.const 1) (i32.const 0)", 21),
        ("args_get", "i32 i32", "(i32.const -1) (i32.const -1)", 21),
        ("environ_sizes_get", "i32 i32", "(i32.const -1) (i32.const -1)", 21),
        ("fd_prestat_get", "i32 i32", "(i32.const 3) (i32.const 0)", 8),
        ("fd_fdstat_get", "i32 i32", "(i32.const 1) (i32.const -1)", 21),
        ("fd_seek", "i32 i64 i32 i32", "(i32.const 1) (i64.const 0) (i32.const 0) (i32.const 0)", 70),
        ("path_open", "i32 i32 i32 i32 i32 i64 i64 i32 i32",
         "(i32.const 3) (i32.const 0) (i32.const 0) (i32.const -1) (i32.const 0) (i64.const -1) (i64.const -1)"
         " (i32.const 0) (i32.const -1)", 8),
        ("sock_send", "i32 i32 i32 i32 i32", "(i32.const 3)" + " (i32.const 0)" * 4, 58),
        ("proc_raise", "i32", "(i32.const 9)", 52),
    ],
)  # fmt: skip
def test_wrong_arguments_answer_an_errno(
    guests: Guests,
    woken: Callable[..., Instance],
    name: str,
    parameters: str,
    arguments: str,
    errno: int,
):
    code = f"(i64.extend_i32_u (call $f {arguments}))"
    instance = woken(wat_guest(code, imports=_WASI.format(name, parameters)))
    assert len(guests.run(instance)) == errno


def test_all_functions_of_preview_1_are_there():
    from torpor_host.wasi import _FUNCTIONS

    assert len(_FUNCTIONS) == 46
    assert {"fd_write", "poll_oneoff", "random_get", "sock_accept"} < set(_FUNCTIONS)


def test_timers_of_one_poll_end_with_the_nearest(guests: Guests, woken: Callable[..., Instance]):
    def subscription(data: int, nanoseconds: int) -> bytes:
        return (
            data.to_bytes(8, "little")
            + bytes(8)
            + (1).to_bytes(8, "little")
            + nanoseconds.to_bytes(8, "little")
            + bytes(16)
        )

    from torpor_host.testing import wat_text

    both = subscription(77, 10_000_000_000) + subscription(78, 20_000_000)
    instance = woken(
        wat_guest(
            "(drop (call $f (i32.const 4096) (i32.const 8192) (i32.const 2) (i32.const 16384)))"
            f" (i64.const {8192 << 32 | 32})",
            imports=_WASI.format("poll_oneoff", "i32 i32 i32 i32"),
            fields=f"(data (i32.const 4096) {wat_text(both)})",
        )
    )
    start = time.monotonic()
    event = guests.run(instance)
    assert 0.02 <= time.monotonic() - start < 8
    assert int.from_bytes(event[:8], "little") == 78


def test_clock_moves_forward_to_what_an_image_says():
    from torpor_host.guest_clock import GuestClock

    now = [1_000]
    clock = GuestClock(boottime_ns=lambda: now[0], realtime_ns=lambda: 1_735_689_600 * 10**9 + 5_000)
    assert clock.monotonic_ns() == 5_000
    clock.not_before(9_000)
    assert clock.monotonic_ns() == 9_001
    clock.not_before(3_000)
    now[0] += 10
    assert clock.monotonic_ns() == 9_011


def test_deadlines_narrow_and_never_widen():
    now = [100.0]
    deadline = Deadline.after(5, lambda: now[0])
    assert deadline.within(2).at_s == 102
    assert deadline.within(9).at_s == 105
    assert deadline.within(None) is deadline
    now[0] = 106
    assert deadline.passed
    assert deadline.remaining_s() == 0


def test_log_sink_that_fails_on_the_last_half_line_does_not_change_the_outcome(guests: Guests, instance: Instance):
    def fail(level: int, text: str) -> None:
        raise KeyError("a bug")

    guests.calls.log = fail  # type: ignore[method-assign]
    assert guests.told(instance, "print") == "printed"
