"""What an operator goes through: load, describe, reconcile; and that no error of it is more than an error."""

from __future__ import annotations

import io
import json
import random
import zipfile

import pytest
import wasmtime
from torpor_runtime.testing import Guest, message, operator

NESTED = 100_000


def zipped(files: dict[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_an_operator_is_loaded_described_and_reconciled(guest: Guest) -> None:
    stored = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "orders", "namespace": "shop"}}
    guest.kube = lambda fields: message("200", "application/json", json.dumps(stored))
    source = operator("print('found', kube.get(request).name)")

    assert guest.load(source) == [b""]
    error, manifest = guest.send("torpor_describe")
    assert error == b""
    assert json.loads(manifest)["for"]["resource"] == "v1/configmaps"
    assert guest.reconcile() == [b"done"]
    assert guest.printed() == "found orders\n"
    name, fields = guest.calls[-1]
    assert (name, fields[0], fields[1]) == ("kube_request", b"GET", b"/api/v1/namespaces/shop/configmaps/orders")


def test_the_abi_version_is_one(guest: Guest) -> None:
    assert guest.call("torpor_abi_version") == 1


def test_a_requeue_is_told_in_milliseconds(guest: Guest) -> None:
    guest.load("from torpor_sdk import requeue_after\n" + operator("return requeue_after(minutes=30)"))
    assert guest.reconcile() == [b"requeue", b"1800000"]


def test_a_mapping_gives_its_keys(guest: Guest) -> None:
    guest.load(operator("pass") + "\n@op.map('v1/nodes')\ndef names(event, kube):\n    return ['shop/a', 'shop/b']\n")
    guest.send("torpor_describe")
    node = json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})
    assert guest.send("torpor_map", message("0", "ADDED", node, "")) == [b"", b"shop/a", b"shop/b"]


def test_a_syntax_error_is_the_load_error_with_its_line(guest: Guest) -> None:
    (error,) = guest.load("a = 1\ndef broken(:\n    pass\n", "shop.py")
    text = error.decode()
    assert "SyntaxError: invalid syntax" in text
    assert '"shop.py", line 2' in text
    assert "def broken(:" in text
    assert "<frozen" not in text


def test_a_failing_import_shows_the_operators_line(guest: Guest) -> None:
    (error,) = guest.load("value = {}\nvalue['missing']  # here\n", "shop.py")
    text = error.decode()
    assert "KeyError: 'missing'" in text
    assert "value['missing']  # here" in text
    assert "<frozen" not in text


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise SystemExit", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise MemoryError", "MemoryError"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("class Odd(Exception):\n  def __str__(self): raise SystemExit\nraise Odd", "Odd"),
        ("import os; os.abort", None),
    ],
)
def test_whatever_is_raised_ends_the_call_only(guest: Guest, statement: str, told: str | None) -> None:
    guest.load(operator(f"if request.attempt == 0:\n    exec({statement!r}, {{}})"))
    guest.send("torpor_describe")
    outcome, *rest = guest.reconcile()
    if told is None:
        assert outcome == b"done"
    else:
        assert outcome == b"error"
        assert told in rest[1].decode()
    assert guest.exit_status is None
    # And the next call is none the worse for it.
    assert guest.send("torpor_reconcile", message("shop", "orders", "retry", "1", "")) == [b"done"]


def test_exit_at_import_is_the_load_error(guest: Guest) -> None:
    (error,) = guest.load("import sys\nsys.exit('no')\n")
    assert b"exit" in error
    assert guest.exit_status is None


@pytest.mark.parametrize("depth", [1_500, 2_500, 10_000, NESTED])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deeply_nested_json_is_an_error_and_not_a_trap(guest: Guest, depth: int, opening: str) -> None:
    guest.kube = lambda fields: message("200", "application/json", opening * depth)
    guest.load(operator("kube.get(request)"))
    outcome, _, text = guest.reconcile()
    assert outcome == b"error"
    assert b"RecursionError" in text or b"JSON" in text
    guest.kube = lambda fields: message("200", "application/json", "{}")
    assert guest.reconcile() == [b"done"]


@pytest.mark.parametrize(
    "expression",
    [
        "eval('(' * 50_000)",
        "compile('-' * 50_000 + '1', 'x', 'eval')",
        "__import__('ast').literal_eval('[' * 150 + ']' * 150)",
        "__import__('re').match('(?:a|b)*x', 'ab' * 100_000)",
        "__import__('pickle').dumps(nested)",
        "repr(nested)",
        "nested == other",
        "__import__('copy').deepcopy(nested)",
    ],
)
def test_deep_recursion_in_c_is_an_error_and_not_a_trap(guest: Guest, expression: str) -> None:
    guest.load(
        operator(
            f"""
nested, other = [], []
for _ in range({NESTED}):
    nested, other = [nested], [other]
try:
    {expression}
except (RecursionError, MemoryError, SyntaxError):
    pass
del nested, other
"""
        )
    )
    assert guest.reconcile() == [b"done"]


@pytest.mark.parametrize(
    "recursion",
    [
        "def f(x): return max([x], key=f)\nf(1)",
        "class X:\n    def __repr__(self): return repr([self])\nrepr(X())",
        "def f(): exec('f()', {'f': f})\nf()",
        "class X:\n    def __eq__(self, other): return [self] == [other]\nX() == X()",
        "import re\ndef f(match): return re.sub('a', f, 'a')\nf(None)",
    ],
)
def test_recursion_through_c_is_an_error_even_without_pythons_own_limit(guest: Guest, recursion: str) -> None:
    (error,) = guest.load(f"import sys\nsys.setrecursionlimit(1_000_000)\n{recursion}\n")
    assert b"RecursionError" in error
    assert guest.load(operator("pass")) == [b""]


def test_memory_at_its_limit_is_an_error(engine: wasmtime.Engine, module: wasmtime.Module) -> None:
    guest = Guest(engine, module, memory_bytes_max=64 << 20)
    guest.start()
    guest.load(operator("kept = []\nwhile request.attempt == 0:\n    kept.append(bytearray(1 << 20))"))
    outcome, _, text = guest.reconcile()
    assert outcome == b"error"
    assert b"MemoryError" in text
    assert guest.send("torpor_reconcile", message("a", "b", "retry", "1", "")) == [b"done"]
    guest.close()


def test_more_input_than_there_is_memory_is_refused_by_alloc(engine: wasmtime.Engine, module: wasmtime.Module) -> None:
    guest = Guest(engine, module, memory_bytes_max=64 << 20)
    guest.start()
    assert guest.call("torpor_alloc", 1 << 30) == 0
    assert guest.call("torpor_alloc", -1) == 0
    guest.load(operator("pass"))
    assert guest.reconcile() == [b"done"]
    guest.close()


@pytest.mark.parametrize("export", ["torpor_load", "torpor_reconcile", "torpor_map"])
def test_bytes_that_are_no_message_are_an_error_of_the_call(guest: Guest, export: str) -> None:
    seed = random.Random(7)
    guest.load(operator("pass"))
    good = message("source", "x.py", "x = 1") if export == "torpor_load" else message("shop", "orders", "watch")
    for broken in (
        b"",
        b"\xff",
        b"\xff\xff\xff\xff",
        good[:-1],
        good + b"\x01",
        *(seed.randbytes(40) for _ in range(20)),
    ):
        assert len(guest.send(export, broken)) >= 1
    assert guest.reconcile() == [b"done"]


def test_a_call_before_load_says_what_is_missing(guest: Guest) -> None:
    assert b"no operator" in guest.send("torpor_describe")[0]
    assert b"no operator" in guest.reconcile()[2]


def test_a_zip_brings_packages_and_data(guest: Guest) -> None:
    content = zipped(
        {
            "main.py": "from shop import rules\n" + operator("print(rules.greeting(), rules.__file__)"),
            "shop/__init__.py": "",
            "shop/rules.py": (
                "from importlib.resources import files\n"
                "def greeting():\n    return files('shop').joinpath('hello.txt').read_text()\n"
            ),
            "shop/hello.txt": "hello",
        }
    )
    assert guest.send("torpor_load", message("zip", "shop.zip", content)) == [b""]
    assert guest.reconcile() == [b"done"]
    assert guest.printed() == "hello shop.zip/shop/rules.py\n"


def test_a_traceback_out_of_a_zip_shows_its_lines(guest: Guest) -> None:
    content = zipped(
        {
            "main.py": "import rules\n" + operator("rules.fail()"),
            "rules.py": "def fail():\n    raise ValueError('no')  # this one\n",
        }
    )
    assert guest.send("torpor_load", message("zip", "shop.zip", content)) == [b""]
    outcome, _, text = guest.reconcile()
    assert outcome == b"error"
    assert b"raise ValueError('no')  # this one" in text


def test_what_is_printed_is_out_before_the_next_host_call(guest: Guest) -> None:
    seen: list[str] = []

    def answer(fields: list[bytes]) -> bytes:
        seen.append(guest.printed())
        return message("200", "application/json", "{}")

    guest.kube = answer
    guest.load(operator("print('before')\nprint('half', end='')\nkube.get(request)"))
    guest.reconcile()
    assert seen[-1] == "before\nhalf"


def test_streams_are_told_apart(guest: Guest) -> None:
    guest.load(operator("import sys\nprint('out')\nprint('err', file=sys.stderr)"))
    guest.reconcile()
    assert b"".join(text for fd, text in guest.output if fd == 1) == b"out\n"
    assert b"".join(text for fd, text in guest.output if fd == 2) == b"err\n"


def test_an_operator_may_close_or_replace_the_streams(guest: Guest) -> None:
    guest.load(operator("import sys\nsys.stdout.close()\nsys.stderr = None"))
    assert guest.reconcile() == [b"done"]
    guest.load(operator("return None"))
    assert guest.reconcile() == [b"done"]


def test_configuration_is_read_when_asked(guest: Guest) -> None:
    guest.load("import _torpor\n" + operator("import json\nprint(json.loads(_torpor.config())['config']['colour'])"))
    guest.reconcile()
    assert guest.printed() == "green\n"


def test_log_lines_carry_their_level(guest: Guest) -> None:
    guest.load("import _torpor\n" + operator("_torpor.log(2, 'smoke ☁')\n_torpor.log(0, b'bytes')"))
    guest.reconcile()
    assert guest.logged[-2:] == [(2, "smoke ☁"), (0, "bytes")]


def test_a_host_that_refuses_is_an_exception(guest: Guest) -> None:
    guest.refuse_with = -1
    guest.load("import _torpor\n" + operator("_torpor.kube_tree(b'x')"))
    outcome, _, text = guest.reconcile()
    assert outcome == b"error"
    assert b"RuntimeError: kube_tree: the host refused the message" in text
