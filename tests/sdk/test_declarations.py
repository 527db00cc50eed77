"""What an author declares: checked when the operator is imported, not when the first change comes."""

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from torpor_sdk import (
    Operator,
    OperatorError,
    Owned,
    Request,
    Watch,
    by_annotation,
    by_label,
    by_owner,
    by_self,
    requeue_after,
    requeue_at,
)
from torpor_sdk.clock import frozen
from torpor_sdk.requests import Requeue


def declared(**arguments: object) -> Operator:
    op = Operator(**{"for_": "v1/pods", **arguments})  # type: ignore[arg-type]
    op.reconcile(lambda request, kube: None)
    return op


def test_the_manifest_has_every_field_that_was_given() -> None:
    op = declared(
        for_=Watch(
            "example.com/v1/databases",
            namespace="shop",
            labels={"tier": "gold"},
            fields="metadata.name!=x",
            predicates=["generation", "notOwnWrite"],
        ),
        owns=[Owned("v1/secrets", labels="app=db"), "apps/v1/statefulsets"],
        watches=[
            Watch("v1/configmaps", mapping=by_label("db")),
            Watch("v1/services", mapping=by_annotation("db")),
            Watch("v1/endpoints", mapping=by_self()),
            Watch("v1/pods", mapping=by_owner("any")),
        ],
        resync=timedelta(minutes=90),
        concurrency=3,
    )
    op.map("v1/nodes")(lambda event, kube: [])
    assert op.manifest() == {
        "for": {
            "resource": "example.com/v1/databases",
            "namespace": "shop",
            "labelSelector": "tier=gold",
            "fieldSelector": "metadata.name!=x",
            "predicates": ["generation", "notOwnWrite"],
        },
        "owns": [{"resource": "v1/secrets", "labelSelector": "app=db"}, {"resource": "apps/v1/statefulsets"}],
        "watches": [
            {"resource": "v1/configmaps", "mapping": {"label": "db"}},
            {"resource": "v1/services", "mapping": {"annotation": "db"}},
            {"resource": "v1/endpoints", "mapping": {"self": True}},
            {"resource": "v1/pods", "mapping": {"owner": "any"}},
            {"resource": "v1/nodes", "mapping": {"code": True}},
        ],
        "resync": "5400s",
        "concurrency": 3,
        "sdk": "python/0.1.0",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"for_": "databases"}, "'databases' is not group/version/resource"),
        ({"for_": Watch("v1/pods", mapping=by_self())}, "its key is its own"),
        ({"owns": [Watch("v1/pods", mapping=by_self())]}, "use watches="),
        ({"watches": [Watch("v1/pods")]}, "say which key a change concerns"),
        ({"watches": ["v1/pods"]}, "say which key a change concerns"),
        ({"watches": [Watch("v1/pods", mapping={"code": True})]}, "is written with @op.map"),
        ({"resync": "ten hours"}, "'ten hours' is no duration"),
        ({"resync": timedelta(-1)}, "it is negative"),
        ({"concurrency": 17}, "1 to 16 keys can run at once"),
        ({"concurrency": 0}, "1 to 16 keys can run at once"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_with_the_way_out(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        declared(**arguments)


def test_an_unknown_predicate_is_refused_with_those_there_are() -> None:
    with pytest.raises(OperatorError, match="no predicate 'spec'; there are generation, labels"):
        Watch("v1/pods", predicates=["spec"])  # type: ignore[list-item]


def test_a_second_reconcile_function_is_refused() -> None:
    op = declared()
    with pytest.raises(OperatorError, match="this is the second"):
        op.reconcile(lambda request, kube: None)


def test_async_functions_are_refused_with_the_reason() -> None:
    async def reconcile(request: object, kube: object) -> None: ...

    with pytest.raises(OperatorError, match="must be a plain function, not async def"):
        Operator(for_="v1/pods").reconcile(reconcile)


class Bound:
    def method(self, request: object, kube: object) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        lambda request, kube: None,
        lambda request, kube, more=1: None,
        lambda request, *rest: None,
        lambda *all, **named: None,
        lambda request, kube, *, named=1: None,
        Bound().method,
        partial(lambda first, request, kube: None, 1),
    ],
)
def test_a_function_that_can_be_called_is_taken(function: Any) -> None:
    op = Operator(for_="v1/pods")
    assert op.reconcile(function) is function
    assert op.run(Request("a", "b"), op.kube()) is None


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda request: None, "request"),
        (lambda: None, ""),
        (lambda a, b, c: None, "a, b, c"),
        (lambda request, kube, *, named: None, "request, kube, named"),
        (Bound.method, "self, request, kube"),
    ],
)
def test_a_function_with_other_parameters_is_refused(function: Any, takes: str) -> None:
    with pytest.raises(OperatorError, match=rf"is called with \(request, kube\), but .* takes \({takes}\)"):
        Operator(for_="v1/pods").reconcile(function)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(OperatorError, match="must be a function, not str"):
        Operator(for_="v1/pods").reconcile("reconcile")  # type: ignore[type-var]


@pytest.mark.parametrize("finalizer", ["cleanup", "example.com/cleanup"])
def test_a_finalizer_needs_a_domain_and_to_be_the_only_one_of_its_name(finalizer: str) -> None:
    op = Operator(for_="v1/pods")
    op.finalizer("example.com/cleanup")(lambda obj, kube: None)
    with pytest.raises(OperatorError, match=r"needs a domain|is there twice"):
        op.finalizer(finalizer)(lambda obj, kube: None)


def test_the_manager_is_the_given_name_or_made_from_the_primary(host: object) -> None:
    assert declared(name="mine").manager() == "mine"
    assert declared(for_="example.com/v1/databases").manager() == "torpor-databases.example.com"
    assert declared(for_="v1/pods").manager() == "torpor-pods"


def test_the_manager_is_the_wasmoperators_name_where_the_host_tells_it(host: object) -> None:
    host.settings = {"operator": {"namespace": "shop", "name": "orders-operator"}}  # type: ignore[attr-defined]
    assert declared().manager() == "orders-operator"


@pytest.mark.parametrize(
    ("given", "after_ms"),
    [
        (requeue_after(minutes=30), 1_800_000),
        (requeue_after(hours=1, minutes=1, seconds=1), 3_661_000),
        (requeue_after(timedelta(days=1)), 86_400_000),
        (requeue_after(seconds=0.0001), 1),
        (requeue_after(seconds=-5), 0),
    ],
)
def test_delays_are_whole_milliseconds_never_too_early(given: Requeue, after_ms: int) -> None:
    assert given.after_ms == after_ms


def test_a_moment_is_a_delay_from_now() -> None:
    with frozen(datetime(2026, 3, 1, 12, tzinfo=UTC)):
        assert requeue_at(datetime(2026, 3, 1, 13, tzinfo=UTC)).after_ms == 3_600_000
        assert requeue_at(datetime(2026, 3, 1, 13)).after_ms == 3_600_000
        assert requeue_at(datetime(2026, 3, 1, 11, tzinfo=UTC)).after_ms == 0
