"""The protocol as a pure function: what follows what, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor_cache.objects import ChangeType, StoredObject, parse_object
from torpor_cache.resources import NO_VERSION, ResourceVersion
from torpor_cache.watch_protocol import (
    Apply,
    BackingOff,
    BookmarkArrived,
    CloseWatch,
    DropStage,
    Elapsed,
    Empty,
    Ended,
    Event,
    Failed,
    Failure,
    FailureKind,
    FetchPage,
    InitialWatch,
    InitListed,
    InitPage,
    ObjectArrived,
    Opened,
    OpenWatch,
    PageArrived,
    Refused,
    Replace,
    Report,
    Silent,
    Stage,
    StageChange,
    Started,
    State,
    Traits,
    UnexpectedEvent,
    Wait,
    Watching,
    classify,
    is_live,
    step,
)

PAGES = Traits(streaming=False)
KINDS = list(FailureKind)


def _failure(kind: FailureKind) -> Failure:
    return Failure(kind, kind.value)


def _item(version: int) -> StoredObject:
    return parse_object(
        b'{"metadata":{"name":"a","uid":"u","resourceVersion":"%d"}}' % version, kind="K", api_version="v1"
    )


def _version(number: int) -> ResourceVersion:
    return ResourceVersion(number)


def test_a_list_begins_as_a_stream_where_the_server_may_know_it():
    assert step(Empty(), Started()) == (InitialWatch(Traits()), (OpenWatch(NO_VERSION),))
    assert step(Empty(PAGES), Started()) == (InitPage(PAGES), (FetchPage("", 500),))


@pytest.mark.parametrize(
    ("kind", "then", "slowly"),
    [
        (FailureKind.GONE, Empty, False),
        (FailureKind.FUTURE, Empty, False),
        (FailureKind.BUSY, InitListed, False),
        (FailureKind.UNREACHABLE, InitListed, False),
        (FailureKind.SERVER, InitListed, False),
        (FailureKind.MALFORMED, InitListed, False),
        (FailureKind.TOO_LARGE, InitListed, False),
        (FailureKind.DENIED, InitListed, True),
        (FailureKind.MISSING, Empty, True),
    ],
)
def test_where_a_watch_that_is_refused_leads(kind, then, slowly):
    state, effects = step(InitListed(_version(5), Traits()), Refused(_failure(kind)))
    assert isinstance(state, BackingOff) and isinstance(state.then, then)
    assert effects[-1] == Wait(_failure(kind), slowly)
    assert any(isinstance(effect, Report) for effect in effects) is slowly
    assert not is_live(state)


def test_an_invalid_watch_is_final():
    state, effects = step(InitListed(_version(5), Traits()), Refused(_failure(FailureKind.INVALID)))
    assert isinstance(state, Failed) and Report(_failure(FailureKind.INVALID), final=True) in effects


@pytest.mark.parametrize("kind", [FailureKind.UNREACHABLE, FailureKind.BUSY])
def test_no_number_of_refused_connections_makes_a_relist(kind):
    state: State = InitListed(_version(5), Traits())
    for _ in range(50):
        state, _ = step(state, Refused(_failure(kind)))
        state, effects = step(state, Elapsed())
        assert effects == (OpenWatch(_version(5)),)


def test_a_bad_page_token_begins_the_list_anew():
    state, effects = step(InitPage(PAGES, "token"), Refused(_failure(FailureKind.GONE)))
    assert isinstance(state, BackingOff) and state.then == Empty(PAGES)
    assert effects[0] == DropStage()


def test_a_page_that_does_not_come_is_asked_for_again_with_its_token():
    state, _ = step(InitPage(PAGES, "token", 62), Refused(_failure(FailureKind.UNREACHABLE)))
    state, effects = step(state, Elapsed())
    assert effects == (FetchPage("token", 62),)


def test_a_watch_that_goes_back_is_closed_and_listed_anew():
    for event in (ObjectArrived(ChangeType.MODIFIED, _item(9)), BookmarkArrived(_version(8), False)):
        state, effects = step(Watching(_version(9), Traits()), event)
        assert isinstance(state, BackingOff) and isinstance(state.then, Empty)
        assert effects[0] == CloseWatch()


def test_two_broken_streams_lead_to_pages():
    state: State = InitialWatch(Traits())
    for _ in range(2):
        state, _ = step(state, Ended(0.1))
        state, effects = step(state, Elapsed())
    assert effects == (FetchPage("", 500),)


def test_what_the_driver_cannot_have_seen_is_a_bug_of_ours():
    for state, event in (
        (Empty(), Elapsed()),
        (Watching(_version(1), Traits()), Opened()),
        (InitPage(PAGES), Silent()),
    ):
        with pytest.raises(UnexpectedEvent):
            step(state, event)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (410, {"reason": "Expired"}, FailureKind.GONE),
        (500, {"reason": "Expired"}, FailureKind.GONE),
        (504, {"details": {"causes": [{"reason": "ResourceVersionTooLarge"}]}}, FailureKind.FUTURE),
        (504, {"message": "Timeout: Too large resource version: 99, current: 5"}, FailureKind.FUTURE),
        (504, {"details": {"causes": "hostile"}}, FailureKind.SERVER),
        (429, {}, FailureKind.BUSY),
        (401, {}, FailureKind.DENIED),
        (403, {}, FailureKind.DENIED),
        (404, {}, FailureKind.MISSING),
        (422, {}, FailureKind.INVALID),
        (405, {}, FailureKind.INVALID),
        (503, {}, FailureKind.SERVER),
        (302, {}, FailureKind.SERVER),
    ],
)
def test_what_an_answer_means(code, status, kind):
    assert classify(code, status).kind is kind


def test_retry_after_comes_from_the_header_or_the_status():
    assert classify(429, {"details": {"retryAfterSeconds": 4}}).retry_after_s == 4
    assert classify(429, {"details": {"retryAfterSeconds": 4}}, 9.0).retry_after_s == 9
    assert classify(429, {"details": {"retryAfterSeconds": "x"}}).retry_after_s is None


def _events(state: State, draw) -> Event:
    """Something that can happen in this state."""
    failure = _failure(draw(st.sampled_from(KINDS)))
    version = _version(draw(st.integers(1, 30)))
    item = _item(version)
    kind = draw(st.sampled_from(list(ChangeType)))
    stream: list[Event] = [
        ObjectArrived(kind, item),
        BookmarkArrived(version, draw(st.booleans())),
        Ended(draw(st.sampled_from([0.1, 5.0])), draw(st.none() | st.just(failure))),
        Silent(),
    ]
    match state:
        case Empty():
            return Started()
        case BackingOff():
            return Elapsed()
        case InitPage():
            return draw(
                st.sampled_from([PageArrived(version, "", [item]), PageArrived(version, "t", []), Refused(failure)])
            )
        case InitListed():
            return draw(st.sampled_from([Opened(), Refused(failure)]))
        case InitialWatch():
            return draw(st.sampled_from([Opened(), Refused(failure), *stream]))
        case _:
            return draw(st.sampled_from(stream))


@given(st.data())
def test_versions_to_watch_from_come_only_from_lists_bookmarks_and_watches_that_began_at_one(data):
    state: State = Empty(Traits())
    known: set[int] = set()  # versions that may be watched from
    staged = in_flight = False
    for _ in range(40):
        if isinstance(state, Failed):
            break
        event = _events(state, data.draw)
        before = state
        state, effects = step(state, event)
        requests = [effect for effect in effects if isinstance(effect, OpenWatch | FetchPage | Wait)]
        for effect in effects:
            match effect:
                case Replace(resource_version=version):
                    known.add(version)
                    staged = False
                case Apply(item=item):
                    assert isinstance(before, Watching) and item.resource_version > before.resource_version
                    known.add(item.resource_version)
                case Stage() | StageChange():
                    staged = True
                case DropStage():
                    staged = False
                case OpenWatch(resource_version=version) if version != NO_VERSION:
                    assert version in known
                    assert not staged
        if isinstance(before, Watching) and isinstance(event, BookmarkArrived) and isinstance(state, Watching):
            known.add(event.resource_version)
        assert len(requests) <= 1
        # Something is always in flight: a request just made, or a watch that is open.
        in_flight = bool(requests) or isinstance(state, Watching | InitialWatch | Failed)
        assert in_flight, (before, event, state, effects)
