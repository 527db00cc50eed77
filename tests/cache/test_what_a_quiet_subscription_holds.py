"""What is left of a subscription while nothing happens: little, and nothing of the messages that it came in."""

import gc
import sys

from torpor.cache.v1 import cache_pb2
from torpor_cache.encoding import EventEncoder
from torpor_cache.fanout import Feed
from torpor_cache.mapping import LabelMapping
from torpor_cache.resources import ObjectKey, Resource
from torpor_cache.subscribing import OwnerAsked, read_subscribe
from torpor_cache.subscriptions import SELF_MAPPINGS, Emission, EventType, Payload, Subscription
from torpor_cache.testing_informer import FakeInformer, LocalStream
from torpor_services.clock import ManualClock


def subscribe(*mappings: cache_pb2.Mapping) -> cache_pb2.Subscribe:
    resource = cache_pb2.Resource(group="", version="v1", resource="secrets")
    return cache_pb2.Subscribe(subscription=1, resource=resource, mappings=mappings)


def test_nothing_of_the_message_is_kept():
    owner = cache_pb2.OwnerMapping(owner=cache_pb2.Resource(group="example.com", version="v1", resource="databases"))
    wanted = read_subscribe(subscribe(cache_pb2.Mapping(owner=owner), cache_pb2.Mapping(label="for")))
    assert wanted.mappings == (
        OwnerAsked(Resource("example.com", "v1", "databases"), any_owner=False, cluster_scoped=False),
        LabelMapping("for"),
    )
    held, seen = [wanted], set()
    while held:
        value = held.pop()
        if id(value) not in seen and not isinstance(value, type):
            seen.add(id(value))
            assert "cache_pb2" not in type(value).__module__
            held += gc.get_referents(value)


def test_without_a_mapping_the_object_itself_is_meant():
    assert read_subscribe(subscribe()).mappings is SELF_MAPPINGS


def test_tables_that_were_full_are_let_go():
    informer = FakeInformer()
    feed = Feed(informer, ManualClock())
    informer.attach(feed)
    stream = LocalStream(feed)
    for number in range(100):
        informer.put(f"listed-{number}")
    subscription = stream.subscribe(1).subscription
    stream.take()
    for number in range(100):
        informer.put(f"new-{number}")
    assert len(subscription.pending) == 100
    stream.take()
    fresh = Subscription(2)
    for table in ("pending", "remaining", "_overtaken"):
        assert sys.getsizeof(getattr(subscription, table)) == sys.getsizeof(getattr(fresh, table)), table


def test_encoded_events_are_not_kept_for_nobody():
    encoder, subject = EventEncoder(), FakeInformer().put("a").new
    emission = Emission(EventType.ADDED, subject, subject.resource_version, (ObjectKey("ns", "a"),))
    for _ in range(2):
        encoder.encode("same", emission, Payload.FULL, "h")
    assert encoder.encoded == 1
    encoder.forget()
    encoder.encode("same", emission, Payload.FULL, "h")
    assert encoder.encoded == 2
