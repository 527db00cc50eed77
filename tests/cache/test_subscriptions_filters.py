"""What a change means behind a filter: type, keys, predicates."""

import pytest
from torpor_cache.mapping import AnnotationMapping, CodeMapping, LabelMapping, OwnerMapping, SelfMapping
from torpor_cache.objects import ChangeType
from torpor_cache.predicates import Predicate, passes
from torpor_cache.resources import ObjectKey
from torpor_cache.selectors import FieldSelector, LabelSelector
from torpor_cache.subscriptions import EventType, Filter
from torpor_cache.testing_informer import FakeInformer, make_object

OWNER = OwnerMapping("example.com", "Database")


def key(name, namespace="ns"):
    return ObjectKey(namespace, name)


def test_an_object_that_leaves_the_selection_is_deleted_at_the_version_of_the_change():
    informer = FakeInformer()
    selecting = Filter(labels=LabelSelector.parse("app=x"))
    informer.put("a", labels={"app": "x"})
    change = informer.put("a", labels={"app": "y"})
    outcome = selecting.outcome(change)
    assert outcome.type is EventType.DELETED
    assert change.resource_version == 3
    assert change.old.labels == {"app": "x"}


def test_an_object_that_enters_the_selection_is_added():
    informer = FakeInformer()
    informer.put("a")
    assert (
        Filter(labels=LabelSelector.parse("app")).outcome(informer.put("a", labels={"app": "x"})).type
        is EventType.ADDED
    )


def test_what_never_was_selected_is_no_event():
    informer = FakeInformer()
    other = Filter(labels=LabelSelector.parse("app=x"))
    assert other.outcome(informer.put("a")) is None
    assert other.outcome(informer.put("a", labels={"app": "y"})) is None
    assert other.outcome(informer.delete("a")) is None


def test_a_filter_sees_its_own_namespace_and_fields_only():
    informer = FakeInformer()
    named = Filter(namespace="ns", fields=FieldSelector.parse("metadata.name=a"))
    assert named.outcome(informer.put("a", namespace="other")) is None
    assert named.outcome(informer.put("b")) is None
    assert named.outcome(informer.put("a")).type is EventType.ADDED


def test_keys_come_from_the_old_and_the_new_object():
    informer = FakeInformer()
    owned = Filter(mappings=(OWNER,))
    informer.put("a", owner="first")
    assert owned.outcome(informer.put("a", owner="second")).keys == (key("first"), key("second"))
    assert owned.outcome(informer.delete("a")).keys == (key("second"),)


def test_an_object_that_maps_to_nothing_is_no_event():
    informer = FakeInformer()
    assert Filter(mappings=(OWNER,)).outcome(informer.put("a")) is None


def test_code_mappings_are_told_every_change_without_keys():
    informer = FakeInformer()
    outcome = Filter(mappings=(CodeMapping(),)).outcome(informer.put("a"))
    assert outcome.keys == ()


@pytest.mark.parametrize(
    ("mapping", "fields", "expected"),
    [
        (SelfMapping(), {}, [key("a")]),
        (LabelMapping("for"), {"labels": {"for": "x"}}, [key("x")]),
        (AnnotationMapping("for"), {"annotations": {"for": "x"}}, [key("x")]),
        (AnnotationMapping("for"), {"annotations": {"for": "other/x"}}, [key("x", "other")]),
        (AnnotationMapping("for"), {"annotations": {"for": "a/b/c"}}, []),
        (AnnotationMapping("for"), {"annotations": {"for": "/"}}, []),
        (OwnerMapping("example.com", "Database", cluster_scoped=True), {"owner": "x"}, [key("x", "")]),
        (OwnerMapping("other.com", "Database"), {"owner": "x"}, []),
        (OwnerMapping("example.com", "Table"), {"owner": "x"}, []),
    ],
)
def test_mappings(mapping, fields, expected):
    outcome = Filter(mappings=(mapping,)).outcome(FakeInformer().put("a", **fields))
    assert list(outcome.keys if outcome else ()) == expected


def test_owners_that_are_not_controllers_count_only_where_any_owner_does():
    reference = {"apiVersion": "example.com/v2", "kind": "Database", "name": "x", "uid": "u"}
    change = FakeInformer().put("a", ownerReferences=[reference])
    assert Filter(mappings=(OWNER,)).outcome(change) is None
    any_owner = OwnerMapping("example.com", "Database", any_owner=True)
    assert Filter(mappings=(any_owner,)).outcome(change).keys == (key("x"),)


def test_mappings_are_united():
    change = FakeInformer().put("a", labels={"for": "a"}, owner="x")
    both = Filter(mappings=(SelfMapping(), LabelMapping("for"), OWNER))
    assert both.outcome(change).keys == (key("a"), key("x"))


def updated(predicate, old, new):
    return passes([predicate], ChangeType.MODIFIED, old, new)


def test_generation_passes_only_a_new_generation():
    old, same, new = (make_object("a", v, generation=g) for v, g in ((1, 1), (2, 1), (3, 2)))
    assert not updated(Predicate.GENERATION, old, same)
    assert updated(Predicate.GENERATION, old, new)


def test_generation_passes_kinds_that_have_none():
    assert updated(Predicate.GENERATION, make_object("a", 1), make_object("a", 2))


def test_predicates_pass_where_the_previous_object_is_unknown():
    new = make_object("a", 2, generation=1)
    for predicate in (Predicate.GENERATION, Predicate.LABELS, Predicate.ANNOTATIONS):
        assert updated(predicate, None, new)


def test_every_predicate_passes_once_a_deletion_has_begun():
    old = make_object("a", 1, generation=1)
    new = make_object("a", 2, generation=1, deletionTimestamp="2026-01-01T00:00:00Z", finalizers=["x"])
    assert all(updated(predicate, old, new) for predicate in Predicate)


def test_labels_and_annotations_compare_theirs():
    plain, labelled = make_object("a", 1), make_object("a", 2, labels={"x": "1"})
    annotated = make_object("a", 3, annotations={"x": "1"})
    assert updated(Predicate.LABELS, plain, labelled)
    assert not updated(Predicate.LABELS, plain, annotated)
    assert updated(Predicate.ANNOTATIONS, plain, annotated)
    assert not updated(Predicate.ANNOTATIONS, plain, labelled)


def test_the_deletion_predicate_passes_the_end_only():
    informer = FakeInformer()
    ending = Filter(predicates=(Predicate.DELETION,))
    assert ending.outcome(informer.put("a")) is None
    assert ending.outcome(informer.put("a", labels={"x": "1"})) is None
    assert ending.outcome(informer.delete("a")).type is EventType.DELETED


def test_predicates_never_hide_that_an_object_left_the_selection():
    informer = FakeInformer()
    narrow = Filter(labels=LabelSelector.parse("app"), predicates=(Predicate.GENERATION,))
    informer.put("a", labels={"app": "x"}, generation=1)
    assert narrow.outcome(informer.put("a", generation=1)).type is EventType.DELETED


def test_an_object_that_enters_the_selection_passes_predicates_that_compare():
    informer = FakeInformer()
    narrow = Filter(labels=LabelSelector.parse("app"), predicates=(Predicate.GENERATION,))
    informer.put("a", generation=1)
    assert narrow.outcome(informer.put("a", labels={"app": "x"}, generation=1)).type is EventType.ADDED
