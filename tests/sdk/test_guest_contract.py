"""What the embedding gets: whole messages, whatever the operator's code does."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from torpor_sdk import Denied, OperatorError, _frames, _guest

Load = Callable[[str], None]

OPERATOR = """
from torpor_sdk import Operator, Watch, by_label, requeue_after

op = Operator(
    for_="example.com/v1/databases",
    owns=["v1/secrets"],
    watches=[Watch("v1/configmaps", mapping=by_label("example.com/database"))],
    resync="1h",
    concurrency=2,
)

@op.reconcile
def reconcile(request, kube):
    BODY
"""


def with_body(body: str) -> str:
    return OPERATOR.replace("BODY", body.replace("\n", "\n    "))


def reconcile(name: str = "orders") -> list[str]:
    message = _guest.reconcile(_frames.encode("shop", name, "watch", 0, "00-abc"))
    return [field.decode() for field in _frames.decode(message, fields_min=3)]


def test_describe_gives_the_manifest_of_the_abi(load: Load) -> None:
    load(with_body("pass"))
    error, manifest = _frames.decode(_guest.describe())
    assert error == b""
    assert json.loads(manifest) == {
        "for": {"resource": "example.com/v1/databases"},
        "owns": [{"resource": "v1/secrets"}],
        "watches": [{"resource": "v1/configmaps", "mapping": {"label": "example.com/database"}}],
        "resync": "1h",
        "concurrency": 2,
        "sdk": "python/0.1.0",
    }


def test_describe_discovers_the_operators_own_groups_for_the_image(load: Load, host: Any) -> None:
    kinds = {"resources": [{"name": "databases", "kind": "Database", "namespaced": True}]}
    host.answer("GET", "/apis/example.com/v1", 200, kinds)
    load(
        with_body(
            "meta = {'name': 'b', 'namespace': 'a'}\n"
            "kube.apply({'apiVersion': 'example.com/v1', 'kind': 'Database', 'metadata': meta})"
        )
    )
    _guest.describe()
    assert host.requests() == ["GET /apis/example.com/v1"]
    host.asked.clear()
    reconcile()
    assert [request.split("?")[0] for request in host.requests()] == [
        "PATCH /apis/example.com/v1/namespaces/a/databases/b"
    ]


def test_describe_does_without_discovery_where_there_is_none(load: Load, host: Any) -> None:
    host.fail("GET", "/apis/example.com/v1", "denied")
    load(with_body("pass"))
    assert _frames.decode(_guest.describe())[0] == b""


def test_a_reconcile_that_returns_nothing_is_done(load: Load) -> None:
    load(with_body("pass"))
    assert reconcile() == ["done", "", ""]


def test_a_reconcile_asks_to_be_called_again_in_milliseconds(load: Load) -> None:
    load(with_body("return requeue_after(minutes=1, seconds=0.5)"))
    assert reconcile() == ["requeue", "60500", ""]


def test_the_request_has_every_field_of_the_message(load: Load) -> None:
    load(
        with_body(
            "raise ValueError((request.namespace, request.name, request.cause, request.attempt, request.traceparent))"
        )
    )
    assert reconcile()[2].endswith("ValueError: ('shop', 'orders', 'watch', 0, '00-abc')")


def test_a_request_without_its_last_fields_is_understood(load: Load) -> None:
    load(with_body("raise ValueError((request.attempt, request.traceparent))"))
    message = _guest.reconcile(_frames.encode("shop", "orders", "start"))
    assert _frames.decode(message)[2].endswith(b"ValueError: (0, '')")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "the operator called exit(3)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise MemoryError", "MemoryError"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("f = lambda: f()\nf()", "RecursionError"),
        ("class Bad(Exception):\n    def __str__(self): raise RuntimeError\nraise Bad", "Bad"),
        ("return True", "reconcile returned bool True; it may return None or requeue_after(...)"),
        ("import json; json.loads('[' * 100_000)", "RecursionError"),
    ],
)
def test_whatever_the_operator_does_is_an_error_message(load: Load, body: str, said: str) -> None:
    load(with_body(body))
    outcome, after, message = reconcile()
    assert (outcome, after) == ("error", "")
    assert said in message
    assert len(message) < 20_000


def test_an_error_shows_the_operators_lines_and_no_others(load: Load) -> None:
    load(with_body("kube.update({'apiVersion': 'v1', 'kind': 'Secret', 'metadata': {'name': 'a', 'namespace': 'b'}})"))
    message = reconcile()[2]
    assert 'File "operator.py", line 14, in reconcile' in message
    assert "kube.update({" in message
    assert "torpor_sdk/" not in message
    assert message.endswith(
        "torpor_sdk.errors.NotFound: PUT /api/v1/namespaces/b/secrets/a: 404 NotFound: nothing here"
    )


def test_an_error_in_the_middle_of_causes_shows_each(load: Load) -> None:
    load(with_body("try:\n    1 / 0\nexcept ZeroDivisionError as exc:\n    raise LookupError('then') from exc"))
    message = reconcile()[2]
    assert message.index("ZeroDivisionError") < message.index("direct cause") < message.index("LookupError: then")
    assert "torpor_sdk/" not in message


def test_a_broken_message_from_the_host_is_an_error_message(load: Load) -> None:
    load(with_body("pass"))
    outcome, _, message = _frames.decode(_guest.reconcile(b"\xff\xff"))
    assert outcome == b"error"
    assert b"FrameError" in message


def test_without_an_operator_every_call_says_so() -> None:
    assert _frames.decode(_guest.describe())[0] == b"no operator is loaded"
    assert _frames.decode(_guest.reconcile(b""))[2] == b"no operator is loaded"
    assert _frames.decode(_guest.map(b""))[0] == b"no operator is loaded"


def test_a_mapping_in_code_gives_keys(load: Load) -> None:
    load(
        with_body("pass")
        + """
@op.map("v1/nodes")
def databases(event, kube):
    yield ("shop", event.type.lower())
    yield "shop/" + event.object.name
    yield "shop/" + event.object.name
    if event.old:
        yield ("shop", event.old.name)
"""
    )
    new, old = ({"metadata": {"name": name}} for name in ("new", "old"))
    message = _guest.map(_frames.encode(1, "MODIFIED", json.dumps(new), json.dumps(old)))
    assert _frames.decode(message) == [b"", b"shop/modified", b"shop/new", b"shop/old"]


def test_a_deleted_object_is_mapped_by_what_it_was(load: Load) -> None:
    load(with_body("pass") + '\n@op.map("v1/nodes")\ndef keys(event, kube): return [("", event.object.name)]\n')
    message = _guest.map(_frames.encode(1, "DELETED", "", json.dumps({"metadata": {"name": "gone"}})))
    assert _frames.decode(message) == [b"", b"/gone"]


@pytest.mark.parametrize("key", ["'a/b/c'", "'name'", "('a',)", "('a', '')", "3", "None"])
def test_what_is_no_key_is_an_error_of_the_mapping(load: Load, key: str) -> None:
    load(with_body("pass") + f'\n@op.map("v1/nodes")\ndef keys(event, kube): return [{key}]\n')
    (error,) = _frames.decode(_guest.map(_frames.encode(1, "ADDED", "{}")))
    assert b"a key is (namespace, name)" in error


def test_a_watch_without_code_cannot_be_mapped(load: Load) -> None:
    load(with_body("pass"))
    (error,) = _frames.decode(_guest.map(_frames.encode(0, "ADDED", "{}")))
    assert error == b"watch 0 has no mapping that is code"


def test_every_wake_gives_other_random_numbers(load: Load) -> None:
    load(with_body("pass"))
    state = random.getstate()
    seen = set()
    for _ in range(100):
        random.setstate(state)
        _guest.wake()
        seen.add(random.getrandbits(64))
    assert len(seen) == 100


def test_the_authors_wake_functions_run_and_cannot_break_a_wake(load: Load, host: Any) -> None:
    load(
        with_body("raise ValueError(woken)") + "\nwoken = []\n@op.wake\ndef again():\n    woken.append(1)\n    1 / 0\n"
    )
    _guest.wake()
    assert reconcile()[2].endswith("ValueError: [1]")
    ((level, line),) = host.lines
    assert level == 3
    assert "ZeroDivisionError" in line


def test_configuration_is_read_anew_for_each_reconcile(load: Load, host: Any) -> None:
    load("from torpor_sdk import config, env\n" + with_body("raise ValueError((config().get('size'), dict(env)))"))
    host.settings = {"config": {"size": 1}, "env": {"A": "x"}}
    assert reconcile()[2].endswith("ValueError: (1, {'A': 'x'})")
    host.settings = {"config": {"size": 2}}
    assert reconcile()[2].endswith("ValueError: (2, {})")


def test_configuration_is_asked_for_once_in_a_reconcile(load: Load, host: Any) -> None:
    load("from torpor_sdk import config, env\n" + with_body("config(); config(); env.get('A')"))
    asked: list[int] = []
    host.settings = {"config": {}}
    native = host.config
    host.config = lambda: asked.append(1) or native()  # type: ignore[method-assign,func-returns-value]
    import sys

    sys.modules["_torpor"].config = host.config  # type: ignore[attr-defined]
    assert reconcile()[0] == "done"
    assert len(asked) == 1


@pytest.mark.parametrize("call", ["config()", "env['A']", "http.fetch('https://example.com')"])
def test_nothing_of_a_wake_is_read_while_the_image_is_built(load: Load, call: str) -> None:
    with pytest.raises(Denied, match="call it inside reconcile"):
        load(f"from torpor_sdk import config, env, http\n{call}\n" + with_body("pass"))


def test_logging_goes_to_the_host_with_its_level(load: Load, host: Any) -> None:
    load(
        "import logging\nfrom torpor_sdk import log\n"
        + with_body("log.info('about %s', request)\nlogging.getLogger('library').critical('bad')\nlog.debug('no')")
    )
    import logging

    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        root.setLevel(logging.INFO)
        reconcile()
    finally:
        root.setLevel(before[0])
    assert host.lines == [(1, "about shop/orders"), (3, "bad")]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "operator.py defines no operator"),
        (
            "from torpor_sdk import Operator\na = Operator(for_='v1/pods')\nb = Operator(for_='v1/pods')",
            "defines 2 operators",
        ),
        ("\xff", "is no Python source"),
    ],
)
def test_a_module_that_is_no_operator_is_refused_by_name(host: Any, source: str, said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        _guest.load("source", "operator.py", source.encode("latin-1"))


def test_a_syntax_error_shows_the_line(host: Any) -> None:
    with pytest.raises(SyntaxError) as caught:
        _guest.load("source", "operator.py", b"x = 1\ndef broken(:\n")
    text = _guest.explain(caught.value)
    assert 'File "operator.py", line 2' in text
    assert "def broken(:" in text


def test_an_operator_without_reconcile_is_refused_at_describe(load: Load) -> None:
    load("from torpor_sdk import Operator\nop = Operator(for_='v1/pods')")
    error, manifest = _frames.decode(_guest.describe())
    assert b"has no reconcile function" in error
    assert manifest == b""


def test_an_unknown_kind_of_code_is_refused(host: Any) -> None:
    with pytest.raises(OperatorError, match="loads source and zip, not 'wheel'"):
        _guest.load("wheel", "a.whl", b"")


def test_a_huge_message_hides_neither_the_kind_of_error_nor_its_beginning(load: Load) -> None:
    load(with_body("raise ValueError('the name ' + 'x' * 1_000_000)"))
    result = reconcile()
    assert result[0] == "error" and len(result[2]) < 2000
    assert "\nValueError: the name xxx" in result[2] and "in reconcile" in result[2]
    assert "ValueError: the name xxx" in result[2][-700:], "the end that a status keeps has it"
