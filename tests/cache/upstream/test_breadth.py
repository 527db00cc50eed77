"""Whether a kind is watched whole or in the scopes asked for: what is asked of the API server, and what follows."""

from __future__ import annotations

import asyncio

import pytest
from torpor_cache.apiserver import ApiUnavailable
from torpor_cache.breadth import Breadths
from torpor_cache.informers import WatchScope
from torpor_cache.resources import Resource

CONFIG_MAPS = Resource.parse("v1/configmaps")
WHOLE = WatchScope(CONFIG_MAPS)
ASKED = WatchScope(CONFIG_MAPS, "ns", "app=x")


@pytest.fixture
def breadths(kit):
    return Breadths(kit.server, kit.informers, 100)


def counted(remaining=None, token="", items=1):
    metadata = {"resourceVersion": "10"} | ({"continue": token} if token else {})
    if remaining is not None:
        metadata["remainingItemCount"] = remaining
    return {"kind": "ConfigMapList", "apiVersion": "v1", "metadata": metadata, "items": [{}] * items}


async def _asked(kit, breadths, code, body, scope=ASKED):
    """What is chosen after one count that is answered so."""
    choosing = asyncio.ensure_future(breadths.scope_for(scope))
    exchange = await kit.api.next_list()
    assert (exchange.path, exchange.query) == ("/api/v1/configmaps", {"limit": "1"})
    exchange.reply(code, body)
    return await choosing


@pytest.mark.parametrize(
    ("code", "body", "watched", "reason"),
    [
        (200, counted(items=0), WHOLE, "0 objects"),
        (200, counted(99, "t"), WHOLE, "100 objects"),
        (200, counted(100, "t"), ASKED, "101 objects, of 100 at most"),
        (200, counted(None, "t"), ASKED, "does not say how many"),
        (200, [], ASKED, "does not say how many"),
        (403, {"kind": "Status", "message": "no list of configmaps"}, ASKED, "(403): no list of configmaps"),
        (404, {"kind": "Status"}, WHOLE, "not served yet"),
        (400, {"kind": "Status"}, ASKED, "(400)"),
    ],
)
async def test_what_is_watched_follows_from_the_count(kit, breadths, code, body, watched, reason):
    scope, why = await _asked(kit, breadths, code, body)
    assert scope == watched
    assert reason in why


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_an_api_server_in_trouble_is_asked_again_later(kit, breadths, code):
    with pytest.raises(ApiUnavailable):
        await _asked(kit, breadths, code, {"kind": "Status"})
    assert (await _asked(kit, breadths, 200, counted()))[0] == WHOLE


async def test_many_first_subscribers_make_one_count(kit, breadths):
    choosing = [
        asyncio.ensure_future(breadths.scope_for(WatchScope(CONFIG_MAPS, f"ns-{n}", f"app=x{n}"))) for n in range(20)
    ]
    await kit.api.settle()
    choosing[0].cancel()  # the one who asked first gives up
    (await kit.api.next_list()).reply(200, counted())
    assert {scope for scope, _ in await asyncio.gather(*choosing[1:])} == {WHOLE}
    await kit.api.settle()
    assert kit.api.requests.empty()


async def test_a_kind_that_is_watched_whole_is_not_counted_again(kit, breadths):
    await kit.synced(10)
    assert (await breadths.scope_for(ASKED))[0] == WHOLE


async def test_a_kind_too_large_is_not_counted_again_while_it_is_watched(kit, breadths):
    assert (await _asked(kit, breadths, 200, counted(5_000, "t")))[0] == ASKED
    kit.acquire(ASKED)
    await kit.api.next_watch()
    other = WatchScope(CONFIG_MAPS, "other")
    assert (await breadths.scope_for(other))[0] == other
    await kit.api.settle()
    assert kit.api.requests.empty()


async def test_a_whole_watch_that_is_refused_is_no_reason_to_wait_for_it(kit, breadths):
    assert (await _asked(kit, breadths, 200, counted()))[0] == WHOLE
    _, notes = kit.acquire(WHOLE)
    (await kit.api.next_watch()).reply(403, kit.status(403, "Forbidden"))
    await notes.until(("error", 403, False))
    assert (await _asked(kit, breadths, 403, {"kind": "Status"}))[0] == ASKED


@pytest.mark.parametrize("scope", [WHOLE, WatchScope(CONFIG_MAPS, "ns", "", "spec.odd=1")])
async def test_where_there_is_no_choice_nothing_is_counted(kit, breadths, scope):
    assert (await breadths.scope_for(scope))[0] == scope
    assert kit.api.requests.empty()


async def test_zero_is_never_whole(kit):
    scope, reason = await Breadths(kit.server, kit.informers, 0).scope_for(ASKED)
    assert scope == ASKED and "TORPOR_CACHE_WIDE_OBJECTS_MAX" in reason
