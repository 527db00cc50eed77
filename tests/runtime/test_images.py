"""Memory taken after `describe` and put back: what every wake starts from."""

from __future__ import annotations

from torpor_runtime.testing import Guest, operator

WAKES = 100
PAGE = 4096
# Measured: 31 to 35; with counted references or scattered code it is 60 to 130.
PAGES_OF_A_RECONCILE_MAX = 50
# Measured: 93, of which 29 are the operator's own objects.
PAGES_OF_AN_OPERATOR_MAX = 150

# Of 32 bits: UINT_MAX >> 2.
IMMORTAL = 0x3FFF_FFFF
GATHERED_BYTES_MAX = 128 * 1024

NAMES = """
import os, random, secrets, uuid
print(random.randrange(1 << 60), random.SystemRandom().random(), secrets.token_hex(8))
print(uuid.uuid4(), os.urandom(8).hex())
"""


def described(guest: Guest, body: str) -> bytes:
    assert guest.load(operator(body)) == [b""]
    assert guest.send("torpor_describe")[0] == b""
    return guest.image()


def test_100_wakes_from_one_image_give_100_random_names_of_each_kind(guest: Guest) -> None:
    image = described(guest, NAMES)
    seen: list[list[str]] = []
    for _ in range(WAKES):
        guest.restore(image)
        guest.call("torpor_wake")
        before = len(guest.output)
        assert guest.reconcile() == [b"done"]
        seen.append(guest.printed(before).split())
    for kind in zip(*seen, strict=True):
        assert len(set(kind)) == WAKES


def test_without_the_wake_call_names_would_repeat(guest: Guest) -> None:
    """Holds the test above to something: it is the call that makes the difference."""
    image = described(guest, "import random\nprint(random.randrange(1 << 60))")
    seen = set()
    for _ in range(3):
        guest.restore(image)
        before = len(guest.output)
        guest.reconcile()
        seen.add(guest.printed(before))
    assert len(seen) == 1


def test_a_wake_function_that_fails_is_logged_and_stops_nothing(guest: Guest) -> None:
    guest.load(operator("pass") + "\n@op.wake\ndef broken():\n    raise SystemExit('not now')\n")
    guest.send("torpor_describe")
    guest.call("torpor_wake")
    assert any(level == 3 and "not now" in text for level, text in guest.logged)
    assert guest.reconcile() == [b"done"]


def test_a_hook_of_the_runtime_that_fails_is_logged(guest: Guest) -> None:
    guest.load("import _torpor_boot\n_torpor_boot.wake = None\n" + operator("pass"))
    guest.call("torpor_wake")
    assert any(level == 3 and "not callable" in text for level, text in guest.logged)
    assert guest.reconcile() == [b"done"]


def test_the_warm_up_runs_through_and_leaves_nothing_behind(guest: Guest) -> None:
    assert guest.calls == [] and guest.logged == [] and guest.output == []
    assert guest.reconcile()[0] == b"error"
    printed = guest.run(
        """
import _torpor_boot, linecache
print(repr(_torpor_boot.warm_up_error), "warm-up.py" in linecache.cache)
"""
    )
    assert printed == "'' False\n"


def test_nothing_printed_before_the_image_is_printed_again(guest: Guest) -> None:
    assert guest.load("print('once', end='')\n" + operator("pass")) == [b""]
    guest.send("torpor_describe")
    image = guest.image()
    for _ in range(3):
        guest.restore(image)
        guest.call("torpor_wake")
        guest.reconcile()
    assert guest.printed() == "once"


def test_a_reconcile_changes_few_pages(guest: Guest) -> None:
    image = described(guest, "import json, gc\njson.loads('{\"a\": [1, 2, 3]}')\ngc.collect()")
    guest.restore(image)
    guest.call("torpor_wake")
    guest.reconcile()
    after = guest.image()
    pages = sum(image[at : at + PAGE] != after[at : at + PAGE] for at in range(0, len(after), PAGE))
    assert 0 < pages < PAGES_OF_A_RECONCILE_MAX


def test_an_operator_changes_few_pages_of_the_base(guest: Guest) -> None:
    base = guest.image()
    image = described(guest, "kube.get(request)")
    pages = sum(base[at : at + PAGE] != image[at : at + PAGE] for at in range(0, len(image), PAGE))
    assert 0 < pages < PAGES_OF_AN_OPERATOR_MAX


def test_references_to_what_was_made_at_import_are_not_counted(guest: Guest) -> None:
    guest.load(
        operator(
            "import sys; kept = [MADE[0]] * 50; print(sys.getrefcount(MADE), sys.getrefcount(MADE[0]), "
            "sys.getrefcount(object()))"
        )
        + "\nMADE = [{'a': 'mutable'}]\n"
    )
    guest.send("torpor_describe")
    before = len(guest.output)
    assert guest.reconcile() == [b"done"]
    of_list, of_dict, of_new = map(int, guest.printed(before).split())
    assert of_list == of_dict == IMMORTAL
    assert of_new == 1


def test_what_was_made_at_import_can_be_changed_and_dropped(guest: Guest) -> None:
    made = "\nMADE = {'list': [1], 'text': 'a' * 40}\nHELD = [object() for _ in range(100)]\n"
    body = "MADE['list'].append(2); MADE['text'] += 'b'; HELD.clear(); MADE['new'] = {}; print(MADE)"
    assert guest.load(operator(body) + made) == [b""]
    guest.send("torpor_describe")
    image = guest.image()
    for _ in range(2):
        guest.restore(image)
        before = len(guest.output)
        assert guest.reconcile() == [b"done"]
        assert eval(guest.printed(before)) == {"list": [1, 2], "text": "a" * 40 + "b", "new": {}}


def test_code_that_every_reconcile_runs_lies_together(guest: Guest) -> None:
    """Its counters change each time it runs."""
    printed = guest.run(
        "import json, torpor_sdk._frames as frames, torpor_sdk.kube as kube\n"
        "print(id(json.JSONEncoder.iterencode.__code__), id(frames.encode_all.__code__), "
        "id(kube.Kube.request.__code__), id(json.detect_encoding.__code__))"
    )
    at = [int(address) for address in printed.split()]
    assert max(at) - min(at) < GATHERED_BYTES_MAX


def test_gathered_code_still_tells_where_it_came_from(guest: Guest) -> None:
    printed = guest.run(
        "import json, torpor_sdk.kube as kube\n"
        "for f in (json.dumps, kube.Kube.get, kube.Kube.modify):\n"
        "    print(f.__code__.co_qualname, f.__code__.co_filename)"
    )
    assert printed.splitlines() == [
        "dumps <frozen json>",
        "Kube.get <frozen torpor_sdk.kube>",
        "Kube.modify <frozen torpor_sdk.kube>",
    ]


def test_hash_seeds_differ_between_bases(guest: Guest, second_guest: Guest) -> None:
    say = "print(hash('alpha'))"
    assert guest.run(say) != second_guest.run(say)
