"""List-then-watch as a state machine without a network: `step(state, event) -> (state, effects)`.

The driver (`watcher`) performs the effects in order and feeds back what happens. Exactly one thing is in flight in
each state (a page, a watch, a wait), and its outcome is the next event. Names are those of kube-rs' runtime.

              ┌──────────────────────── relist ───────────────────────┐
    Empty ──▶ InitialWatch ── initial-events-end ──────────────▶ Watching ◀─▶ InitListed (watch to open)
      │            │ not understood, not in time                       ▲            ▲
      └──────────▶ InitPage ── last page ──────────────────────────────┴── opened ──┘
    anything ── trouble ──▶ BackingOff(then) ── elapsed ──▶ then          refused for good ──▶ Failed

What holds in every state: a version to watch from comes from a list's metadata, from its closing bookmark, or from an
event or bookmark of a watch that began at such a version; never from the events that stand for a list. Objects of a
list that is under way are staged, and replace what is known at once when the list is complete.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias, assert_never

import msgspec

from torpor_cache.objects import ChangeType, StoredObject
from torpor_cache.resources import NO_VERSION, ResourceVersion

PAGE_LIMIT = 500  # objects; as client-go's pager
PAGE_SHRINK = 8  # a page that is too large in bytes is asked for again with this fraction of objects
SHORT_WATCH_S = 1.0  # a watch that ends sooner without an event is an error, or empty replies make a busy loop
FAILURES_BEFORE_RELIST = 3  # of one kind of watch failure that a list might mend
SILENCES_BEFORE_RELIST = 2  # a server restored from a backup keeps silent to a watch from the future
INITIAL_FAILURES_BEFORE_PAGES = 2  # streamed lists that break off before paged ones are tried


class FailureKind(Enum):
    GONE = "gone"  # 410: the version or continue token is too old
    FUTURE = "future"  # "too large resource version": the server is behind, or went back
    BUSY = "busy"  # 429
    UNREACHABLE = "unreachable"  # no answer, or the connection broke
    SERVER = "server"  # 5xx
    DENIED = "denied"  # 401, 403
    MISSING = "missing"  # 404: no such kind (now)
    INVALID = "invalid"  # any other 4xx: asking again is of no use
    MALFORMED = "malformed"  # not what the API promises
    TOO_LARGE = "too large"  # a page or line beyond the driver's bounds


class Failure(msgspec.Struct, frozen=True):
    kind: FailureKind
    message: str
    status: dict[str, Any] = {}
    retry_after_s: float | None = None
    nobody_listens: bool = False  # the connection was refused: trying again is cheap


class Traits(msgspec.Struct, frozen=True):
    """What has been learnt about the server; survives relists."""

    streaming: bool = True  # it may understand sendInitialEvents
    bookmarks: bool = False  # it has sent one in the course of a watch, so their absence means something


# ---- states ---------------------------------------------------------------------------------------------------------


class Empty(msgspec.Struct, frozen=True):
    """Nothing to continue from. Starts a list at once; fails nowhere, as it does nothing."""

    traits: Traits = Traits()
    failures: int = 0


class InitPage(msgspec.Struct, frozen=True):
    """A page of a LIST without version is in flight.

    No answer, 429, 5xx: the same page again; after 3 in a row from Empty. 410 (the token is too old): Empty. Too large:
    the same page with fewer objects. 401, 403, 404: reported, then Empty, slowly. Other 4xx: Failed.
    """

    traits: Traits
    continue_token: str = ""
    limit: int = PAGE_LIMIT
    failures: int = 0


class InitialWatch(msgspec.Struct, frozen=True):
    """A streaming list: a watch whose first events are the objects, ended by a marked bookmark.

    Not understood (4xx) or not ended in time: InitPage, and no streaming list ever again. Breaks off: Empty; the second
    time InitPage. 401, 403, 404: reported, then Empty, slowly.
    """

    traits: Traits
    failures: int = 0


class InitListed(msgspec.Struct, frozen=True):
    """Everything up to `resource_version` is known; the watch from there is being opened.

    No answer, 429: the same again. 5xx: the same, after 3 in a row Empty. 410, too large a version, 404: Empty. 401,
    403: reported, then the same, slowly. Other 4xx: Failed.
    """

    resource_version: ResourceVersion
    traits: Traits
    failures: int = 0


class Watching(msgspec.Struct, frozen=True):
    """The watch is open and everything up to `resource_version` is known.

    Ends as agreed: InitListed at once. Ends within 1 s without an event, breaks, or is silent for too long: InitListed,
    after a wait; after 3 (silent: 2) in a row that showed nothing Empty. 410, a version that goes back: Empty.
    """

    resource_version: ResourceVersion
    traits: Traits
    heard: bool = False  # an event or bookmark has come on this watch
    failures: int = 0


class BackingOff(msgspec.Struct, frozen=True):
    """Waiting before `then` is entered. Cannot fail."""

    then: Empty | InitPage | InitListed
    failure: Failure


class Failed(msgspec.Struct, frozen=True):
    """The server will never accept this: final."""

    failure: Failure


State: TypeAlias = Empty | InitPage | InitialWatch | InitListed | Watching | BackingOff | Failed


# ---- events ---------------------------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """First event of a driver."""


class PageArrived(msgspec.Struct, frozen=True):
    """A page of the list. `continue_token` is empty on the last; only its `resource_version` counts then."""

    resource_version: ResourceVersion
    continue_token: str
    items: list[StoredObject]


class Refused(msgspec.Struct, frozen=True):
    """The page or watch that was asked for did not come."""

    failure: Failure


class Opened(msgspec.Struct, frozen=True):
    """The watch that was asked for is open."""


class ObjectArrived(msgspec.Struct, frozen=True):
    type: ChangeType
    item: StoredObject


class BookmarkArrived(msgspec.Struct, frozen=True):
    resource_version: ResourceVersion
    ends_initial: bool


class Ended(msgspec.Struct, frozen=True):
    """The watch is over: as agreed where there is no failure. An ERROR event ends it too."""

    lived_s: float
    failure: Failure | None = None


class Silent(msgspec.Struct, frozen=True):
    """The watch has said nothing for longer than it may, or the streamed list does not end."""


class Elapsed(msgspec.Struct, frozen=True):
    """The wait is over."""


Event: TypeAlias = Started | PageArrived | Refused | Opened | ObjectArrived | BookmarkArrived | Ended | Silent | Elapsed


# ---- effects --------------------------------------------------------------------------------------------------------


class FetchPage(msgspec.Struct, frozen=True):
    """GET a page, without a version. Answered by PageArrived or Refused."""

    continue_token: str
    limit: int


class OpenWatch(msgspec.Struct, frozen=True):
    """Watch from this version; from none: as a streaming list. Answered by Opened or Refused."""

    resource_version: ResourceVersion


class CloseWatch(msgspec.Struct, frozen=True):
    """The open watch is of no more use."""


class Wait(msgspec.Struct, frozen=True):
    """Back off, for at least `retry_after_s`; `slowly` where only a person can mend it. Answered by Elapsed."""

    failure: Failure
    slowly: bool = False


class Stage(msgspec.Struct, frozen=True):
    """Objects of the list under way."""

    items: list[StoredObject]


class StageChange(msgspec.Struct, frozen=True):
    """A change of the list under way."""

    type: ChangeType
    item: StoredObject


class DropStage(msgspec.Struct, frozen=True):
    """The list under way is void."""


class Replace(msgspec.Struct, frozen=True):
    """What is staged is all there is, at this version."""

    resource_version: ResourceVersion


class Apply(msgspec.Struct, frozen=True):
    type: ChangeType
    item: StoredObject


class Advance(msgspec.Struct, frozen=True):
    """Nothing else has changed up to this version."""

    resource_version: ResourceVersion


class Report(msgspec.Struct, frozen=True):
    """Tell the listeners."""

    failure: Failure
    final: bool


Effect: TypeAlias = (
    FetchPage | OpenWatch | CloseWatch | Wait | Stage | StageChange | DropStage | Replace | Apply | Advance | Report
)
Effects: TypeAlias = tuple[Effect, ...]
Next: TypeAlias = tuple[State, Effects]


class UnexpectedEvent(AssertionError):
    """The driver told something that cannot happen in this state: a bug of ours."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in {type(state).__name__}")


def step(state: State, event: Event) -> Next:
    """What follows. Pure."""
    match state:
        case Watching():
            return _watching(state, event)
        case InitialWatch():
            return _initial_watch(state, event)
        case InitPage():
            return _init_page(state, event)
        case InitListed():
            return _init_listed(state, event)
        case BackingOff():
            if isinstance(event, Elapsed):
                return _enter(state.then)
        case Empty():
            if isinstance(event, Started):
                return _enter(state)
        case Failed():
            pass
        case _:
            assert_never(state)
    raise UnexpectedEvent(state, event)


def is_live(state: State) -> bool:
    """Whether what is known is kept up: a watch is open, or being opened in the normal course."""
    return isinstance(state, Watching) or (isinstance(state, InitListed) and state.failures == 0)


# ---- one function a state -------------------------------------------------------------------------------------------


def _enter(state: Empty | InitPage | InitListed) -> Next:
    """Begins what the state has in flight."""
    match state:
        case Empty() if state.traits.streaming:
            return InitialWatch(state.traits, state.failures), (OpenWatch(NO_VERSION),)
        case Empty():
            return InitPage(state.traits), (FetchPage("", PAGE_LIMIT),)
        case InitPage():
            return state, (FetchPage(state.continue_token, state.limit),)
        case InitListed():
            return state, (OpenWatch(state.resource_version),)
        case _:
            assert_never(state)


def _init_page(state: InitPage, event: Event) -> Next:
    match event:
        case PageArrived(continue_token="", resource_version=version):
            listed = InitListed(version, state.traits)
            return listed, (Stage(event.items), Replace(version), OpenWatch(version))
        case PageArrived():
            following = InitPage(state.traits, event.continue_token, state.limit)
            return following, (Stage(event.items), FetchPage(event.continue_token, state.limit))
        case Refused():
            return _page_refused(state, event.failure)
    raise UnexpectedEvent(state, event)


def _page_refused(state: InitPage, failure: Failure) -> Next:
    failures = state.failures + 1
    again = InitPage(state.traits, state.continue_token, state.limit, failures)
    match failure.kind:
        case FailureKind.TOO_LARGE if state.limit > 1:
            return _enter(InitPage(state.traits, state.continue_token, max(1, state.limit // PAGE_SHRINK)))
        case FailureKind.UNREACHABLE | FailureKind.BUSY | FailureKind.SERVER if failures < FAILURES_BEFORE_RELIST:
            return BackingOff(again, failure), (Wait(failure),)
        case FailureKind.DENIED | FailureKind.MISSING:
            return _refused(Empty(state.traits), failure)
        case FailureKind.INVALID:
            return _failed(failure)
        case _:
            return BackingOff(Empty(state.traits), failure), (DropStage(), Wait(failure))


def _initial_watch(state: InitialWatch, event: Event) -> Next:
    match event:
        case Opened():
            return state, ()
        case ObjectArrived():
            return state, (StageChange(event.type, event.item),)
        case BookmarkArrived(ends_initial=True):
            # Heard, yet with no failures forgotten: only what follows the list shows that the watch works.
            return Watching(event.resource_version, state.traits), (Replace(event.resource_version),)
        case BookmarkArrived():
            return state, ()
        case Refused(failure=failure):
            return _initial_watch_refused(state, failure)
        case Ended():
            failure = event.failure or Failure(FailureKind.MALFORMED, "the streamed list ended before its end")
            return _initial_watch_broken(state, failure)
        case Silent():
            following, effects = _pages_instead(state)
            return following, (CloseWatch(), *effects)
    raise UnexpectedEvent(state, event)


def _initial_watch_refused(state: InitialWatch, failure: Failure) -> Next:
    match failure.kind:
        case FailureKind.INVALID:
            return _pages_instead(state)
        case FailureKind.DENIED | FailureKind.MISSING:
            return _refused(Empty(state.traits), failure)
        case FailureKind.UNREACHABLE | FailureKind.BUSY:
            return BackingOff(Empty(state.traits, state.failures), failure), (DropStage(), Wait(failure))
        case _:
            return _initial_watch_broken(state, failure)


def _initial_watch_broken(state: InitialWatch, failure: Failure) -> Next:
    failures = state.failures + 1
    traits = state.traits
    if failure.kind is FailureKind.INVALID or failures >= INITIAL_FAILURES_BEFORE_PAGES:
        traits = msgspec.structs.replace(traits, streaming=False)
    return BackingOff(Empty(traits, failures), failure), (DropStage(), Wait(failure))


def _pages_instead(state: InitialWatch) -> Next:
    traits = msgspec.structs.replace(state.traits, streaming=False)
    following, effects = _enter(InitPage(traits))
    return following, (DropStage(), *effects)


def _init_listed(state: InitListed, event: Event) -> Next:
    match event:
        case Opened():
            return Watching(state.resource_version, state.traits, failures=state.failures), ()
        case Refused(failure=failure):
            return _watch_lost(state, failure)
    raise UnexpectedEvent(state, event)


def _watching(state: Watching, event: Event) -> Next:
    match event:
        case ObjectArrived(item=item):
            if item.resource_version <= state.resource_version:
                return _went_back(state, item.resource_version)
            return Watching(item.resource_version, state.traits, True), (Apply(event.type, item),)
        case BookmarkArrived(resource_version=version):
            if version < state.resource_version:
                return _went_back(state, version)
            traits = state.traits
            if not traits.bookmarks and not event.ends_initial:
                traits = msgspec.structs.replace(traits, bookmarks=True)
            return Watching(version, traits, True), (Advance(version),)
        case Ended(failure=None) if state.heard or event.lived_s >= SHORT_WATCH_S:
            return _enter(InitListed(state.resource_version, state.traits))
        case Ended():
            failure = event.failure or Failure(
                FailureKind.SERVER, f"the watch ended after {event.lived_s:.1f} s without an event"
            )
            return _watch_lost(state, failure)
        case Silent():
            failure = Failure(FailureKind.UNREACHABLE, "the watch has been silent for longer than bookmarks are apart")
            if state.failures + 1 >= SILENCES_BEFORE_RELIST:
                return BackingOff(Empty(state.traits), failure), (CloseWatch(), Wait(failure))
            again = InitListed(state.resource_version, state.traits, state.failures + 1)
            return BackingOff(again, failure), (CloseWatch(), Wait(failure))
    raise UnexpectedEvent(state, event)


def _watch_lost(state: InitListed | Watching, failure: Failure) -> Next:
    """The watch could not be opened, or ended in trouble."""
    failures = state.failures + 1
    again = InitListed(state.resource_version, state.traits, failures)
    match failure.kind:
        case FailureKind.GONE if isinstance(state, Watching) and state.heard:
            return _enter(Empty(state.traits))  # it worked until now, so there is nothing to wait for
        case FailureKind.GONE | FailureKind.FUTURE:
            return BackingOff(Empty(state.traits), failure), (Wait(failure),)
        case FailureKind.UNREACHABLE | FailureKind.BUSY:
            return BackingOff(again, failure), (Wait(failure),)
        case FailureKind.DENIED:
            return _refused(again, failure)
        case FailureKind.MISSING:
            return _refused(Empty(state.traits), failure)
        case FailureKind.INVALID:
            return _failed(failure)
        case FailureKind.SERVER | FailureKind.MALFORMED | FailureKind.TOO_LARGE:
            then = Empty(state.traits) if failures >= FAILURES_BEFORE_RELIST else again
            return BackingOff(then, failure), (Wait(failure),)
        case _:
            assert_never(failure.kind)


def _went_back(state: Watching, version: ResourceVersion) -> Next:
    failure = Failure(
        FailureKind.FUTURE, f"the watch went back from version {state.resource_version} to {version}; listing anew"
    )
    return BackingOff(Empty(state.traits), failure), (CloseWatch(), Wait(failure))


def _refused(then: Empty | InitListed, failure: Failure) -> Next:
    return BackingOff(then, failure), (DropStage(), Report(failure, final=False), Wait(failure, slowly=True))


def _failed(failure: Failure) -> Next:
    return Failed(failure), (DropStage(), Report(failure, final=True))


# ---- what an answer means -------------------------------------------------------------------------------------------


def classify(code: int, status: dict[str, Any], retry_after_s: float | None = None) -> Failure:
    """A Failure of an HTTP status of 400 or more, or of the Status in an ERROR event."""
    message = f"{code} {status.get('reason') or ''}: {status.get('message') or ''}"[:1000]
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    if retry_after_s is None and isinstance(details, dict):
        given = details.get("retryAfterSeconds")
        retry_after_s = float(given) if isinstance(given, int) and 0 < given <= 3600 else None
    kind = _kind_of(code, str(status.get("reason") or ""))
    if _is_future(causes, str(status.get("message") or "")):
        kind = FailureKind.FUTURE
    return Failure(kind, message, status, retry_after_s)


def _kind_of(code: int, reason: str) -> FailureKind:
    if code == 410 or reason in ("Expired", "Gone"):
        return FailureKind.GONE
    match code:
        case 401 | 403:
            return FailureKind.DENIED
        case 404:
            return FailureKind.MISSING
        case 408 | 429:
            return FailureKind.BUSY
    return FailureKind.INVALID if 400 <= code < 500 else FailureKind.SERVER


def _is_future(causes: Any, message: str) -> bool:
    """As apimachinery's IsTooLargeResourceVersion; older servers give the message only."""
    reasons = [cause.get("reason") for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []
    return "ResourceVersionTooLarge" in reasons or "Too large resource version" in message
