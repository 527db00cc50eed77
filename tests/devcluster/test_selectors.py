"""Label and field selectors, by what they match and what they refuse."""

from typing import Any

import pytest
from torpor_devcluster.catalogue import Catalogue
from torpor_devcluster.errors import ApiError
from torpor_devcluster.resources import ResourceType
from torpor_devcluster.selectors import parse_selector


def resource(plural: str) -> ResourceType:
    found = Catalogue().find("", "v1", plural)
    assert found is not None
    return found


def matches(selector: str, labels: dict[str, str]) -> bool:
    obj: Any = {"metadata": {"name": "x", "labels": labels}}
    return parse_selector(resource("pods"), selector, "").matches(obj)


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ("", {}, True),
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "c"}, False),
        ("a!=b", {}, True),
        ("a!=b", {"a": "b"}, False),
        ("a in (b, c)", {"a": "c"}, True),
        ("a in (b,)", {"a": ""}, True),
        ("a notin (b)", {}, True),
        ("a notin (b)", {"a": "b"}, False),
        ("a", {"a": ""}, True),
        ("!a", {"a": ""}, False),
        ("a=", {"a": ""}, True),
        ("a=,b=c", {"a": "", "b": "c"}, True),
        ("a>1", {"a": "2"}, True),
        ("a<1", {"a": "2"}, False),
        ("a>1", {"a": "x"}, False),
        ("x.io/a=b,!c", {"x.io/a": "b"}, True),
        (" a = b , c in (d) ", {"a": "b", "c": "d"}, True),
    ],
)
def test_a_label_selector_matches(selector: str, labels: dict[str, str], expected: bool) -> None:
    assert matches(selector, labels) is expected


@pytest.mark.parametrize(
    "selector", ["a b", "=a", "a in", "a in (", "a in b", "a,,b", "a/b/c", "a=b,", "a>x", "a=b c", "(", "a=!"]
)
def test_a_malformed_label_selector_is_a_bad_request(selector: str) -> None:
    with pytest.raises(ApiError) as error:
        matches(selector, {})
    assert error.value.code == 400


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("metadata.name=x", True),
        ("metadata.name!=x", False),
        ("status.phase=Running,spec.nodeName=", True),
        ("status.phase==Pending", False),
        ("spec.hostNetwork=false", True),
    ],
)
def test_a_field_selector_matches(selector: str, expected: bool) -> None:
    pod: Any = {"metadata": {"name": "x"}, "spec": {}, "status": {"phase": "Running"}}
    assert parse_selector(resource("pods"), "", selector).matches(pod) is expected


@pytest.mark.parametrize(
    ("plural", "selector"),
    [("pods", "spec.foo=x"), ("configmaps", "data.x=y"), ("pods", "x"), ("nodes", "metadata.namespace=x")],
)
def test_a_field_that_the_type_does_not_offer_is_a_bad_request(plural: str, selector: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_selector(resource(plural), "", selector)
    assert error.value.code == 400


def test_a_selector_that_pins_the_name_says_so() -> None:
    assert parse_selector(resource("pods"), "", "metadata.name=x,status.phase=Running").name == "x"
    assert parse_selector(resource("pods"), "", "metadata.name!=x").name is None
