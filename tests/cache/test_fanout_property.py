"""Whatever the order of changes, subscriptions and reads: no gap, nothing twice, nothing goes back.

Input: random steps on five objects, three clients with other batch sizes and credits, one of which reconnects.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from torpor_cache.fanout import After, Feed
from torpor_cache.history import History
from torpor_cache.mapping import OwnerMapping
from torpor_cache.resources import NO_VERSION, ObjectKey, Position, ResourceVersion
from torpor_cache.selectors import LabelSelector
from torpor_cache.subscriptions import Filter, Payload
from torpor_cache.testing_informer import FakeInformer, LocalStream
from torpor_services.clock import ManualClock

NAMES = ("a", "b", "c", "d", "e")
SELECTED = Filter(labels=LabelSelector.parse("app=x"))
OWNED = Filter(mappings=(OwnerMapping("example.com", "Database"),))

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(NAMES), st.sampled_from(("x", "y")), st.sampled_from("ABC")),
        st.tuples(st.just("delete"), st.sampled_from(NAMES)),
        st.tuples(st.just("recreate"), st.sampled_from(NAMES)),
        st.tuples(st.just("read"), st.integers(1, 3)),
        st.tuples(st.just("credit"), st.integers(1, 3)),
        st.tuples(st.just("subscribe"), st.integers(1, 3)),
        st.tuples(st.just("reconnect"), st.integers(1, 3)),
        st.tuples(st.just("forget")),
    ),
    max_size=60,
)


NOWHERE = Position("h1", NO_VERSION)


def forget(informer):
    """History reaches back to now only."""
    version = informer.position.resource_version
    informer.history = History(ManualClock())
    informer.history.begin(version)


class Client:
    """Holds what it was told, and complains of what must not be."""

    def __init__(self, feed, wanted, batch):
        self.feed, self.wanted, self.batch = feed, wanted, batch
        self.position = None
        self.has = {}
        self.dirty = set()
        self.stream = None

    def subscribe(self):
        if self.stream is not None:
            return
        self.stream = LocalStream(self.feed, events_max=self.batch)
        known = tuple((ObjectKey("ns", name), uid) for name, (uid, _) in self.has.items())
        resume = After(self.position or NOWHERE, known)
        self.stream.subscribe(1, self.wanted, resume=resume, payload=Payload.FULL, credit=3)

    def disconnect(self):
        if self.stream is not None:
            self.feed.remove(self.stream.members[1])
            self.stream = None

    def read(self):
        for received in self.stream.take_batch().get(1, []) if self.stream else []:
            self.take(received)

    def take(self, received):
        name, kind = received.key[1], received.type
        if kind == "RESYNC":
            self.position = None
            return
        assert self.position is None or received.version >= self.position.resource_version, "positions never go back"
        if received.version:
            self.position = Position(received.history, ResourceVersion(received.version))
        self.dirty |= {key for _, key in received.keys}
        if kind in ("ADDED", "MODIFIED"):
            version = version_in(received)
            before = self.has.get(name)
            assert before is None or before[1] <= version, "an object never goes back"
            self.has[name] = (received.uid, version)
        elif kind == "DELETED" and self.has.get(name, ("",))[0] == received.uid:
            del self.has[name]


def version_in(received):
    return int(received.event.object.split(b'"resourceVersion":"')[1].split(b'"')[0])


def apply(step, informer, clients, uids):
    match step:
        case ("put", name, app, owner):
            uid = uids.setdefault(name, f"{name}-0")
            informer.put(name, uid=uid, labels={"app": app}, owner=owner)
        case ("forget",):
            forget(informer)
        case ("delete", name) if ObjectKey("ns", name) in informer.store:
            informer.delete(name)
        case ("recreate", name):
            uids[name] = f"{uids.get(name, name)}+"
            informer.put(name, uid=uids[name], labels={"app": "x"}, owner="A")
        case ("read", number):
            clients[number].read()
        case ("credit", number) if clients[number].stream is not None:
            clients[number].stream.credit(1, 2)
        case ("subscribe", number):
            clients[number].subscribe()
        case ("reconnect", number):
            clients[number].disconnect()
            clients[number].subscribe()


@settings(max_examples=300, deadline=None)
@given(steps)
def test_every_client_ends_with_what_the_store_holds(script):
    informer = FakeInformer()
    feed = Feed(informer, ManualClock())
    informer.attach(feed)
    clients = {1: Client(feed, Filter(), 2), 2: Client(feed, SELECTED, 1), 3: Client(feed, OWNED, 500)}
    uids = {}
    for step in script:
        apply(step, informer, clients, uids)
    for client in clients.values():
        client.subscribe()
        client.stream.credit(1, 1_000)
        for _ in range(200):
            client.read()
        expected = {
            item.key.name: (item.uid, item.resource_version) for item in informer.store if client.wanted.selects(item)
        }
        assert client.has == expected
        assert client.position.resource_version <= informer.position.resource_version
        owners = {o.name for item in informer.store for o in item.metadata.owner_references}
        if client.wanted is OWNED:
            assert owners <= client.dirty
