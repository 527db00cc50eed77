"""Who shares which watch, and when it ends."""

from __future__ import annotations

import asyncio

import pytest
from torpor_cache.informers import InformerState, NotFresh, NotSynced, WatchScope
from torpor_cache.resources import Resource, ResourceVersion
from torpor_cache.selectors import InvalidSelector

CONFIG_MAPS = Resource.parse("v1/configmaps")
PODS = Resource.parse("v1/pods")
LINGER = (9.9, 10.1)


async def _is_quiet(kit) -> bool:
    await kit.api.settle()
    return kit.api.requests.empty()


async def test_many_first_subscribers_make_one_upstream_watch(kit):
    informers = {id(kit.acquire()[0]) for _ in range(60)}
    assert len(informers) == 1
    await kit.api.next_watch()
    assert await _is_quiet(kit)


async def test_equal_selectors_written_otherwise_are_one_watch(kit):
    one, _ = kit.acquire(WatchScope(CONFIG_MAPS, "", "b=2,a in (1)"))
    two, _ = kit.acquire(WatchScope(CONFIG_MAPS, "", "a=1,b==2"))
    assert one is two


async def test_200_selectors_under_a_live_wide_watch_add_none(kit):
    wide, _, _ = await kit.synced(10)
    for number in range(200):
        informer, _ = kit.acquire(WatchScope(CONFIG_MAPS, f"ns-{number % 7}", f"app=x{number}"))
        assert informer is wide
    named, _ = kit.acquire(WatchScope(CONFIG_MAPS, field_selector="metadata.name=a"))
    assert named is wide and len(kit.informers) == 1
    assert await _is_quiet(kit)


async def test_a_wider_or_other_scope_gets_a_watch_of_its_own(kit):
    narrow, _ = kit.acquire(WatchScope(CONFIG_MAPS, "ns"))
    wide, _ = kit.acquire(WatchScope(CONFIG_MAPS))
    other, _ = kit.acquire(WatchScope(PODS, "ns"))
    assert len({id(narrow), id(wide), id(other)}) == 3
    assert wide.reason.startswith("none of the 1 other watches")


async def test_fields_that_the_cache_cannot_judge_get_a_watch_of_their_own(kit):
    wide, _ = kit.acquire(WatchScope(CONFIG_MAPS))
    own, _ = kit.acquire(WatchScope(CONFIG_MAPS, field_selector="spec.secretField=1"))
    assert own is not wide
    pods, _ = kit.acquire(WatchScope(PODS))
    on_node, _ = kit.acquire(WatchScope(PODS, field_selector="spec.nodeName=n1"))
    assert on_node is pods


async def test_a_refused_wide_watch_carries_nobody(kit):
    wide, notes = kit.acquire()
    (await kit.api.next_watch()).reply(403, kit.status(403, "Forbidden"))
    await notes.until(("error", 403, False))
    narrow, _ = kit.acquire(WatchScope(CONFIG_MAPS, "ns"))
    assert narrow is not wide
    assert kit.informers.covering(WatchScope(CONFIG_MAPS, "ns")) is None


async def test_reads_are_covered_only_by_what_is_live(kit):
    informer, _, watch = await kit.synced(10)
    scope = WatchScope(CONFIG_MAPS, "ns", "a=1")
    assert kit.informers.covering(scope) is informer and kit.informers.ready
    watch.cut()
    await kit.clock.asked(0.6, 1.0)
    assert informer.state is InformerState.STALE
    assert kit.informers.covering(scope) is None and not kit.informers.ready


async def test_after_the_last_release_the_watch_lingers_and_then_ends(kit):
    informer, notes, watch = await kit.synced(10)
    informer.release(notes)
    await kit.clock.asked(*LINGER)
    assert len(kit.informers) == 1
    await kit.clock.advance(10)
    assert len(kit.informers) == 0
    await watch.closed_by_client()


async def test_a_subscriber_within_the_linger_keeps_the_watch(kit):
    informer, notes, _ = await kit.synced(10)
    informer.release(notes)
    await kit.clock.asked(*LINGER)
    await kit.clock.advance(9.5)
    again, _ = kit.acquire()
    await kit.clock.advance(60)
    assert again is informer and len(kit.informers) == 1 and informer.state is InformerState.SYNCED


async def test_a_subscriber_at_the_very_moment_of_the_end_has_a_watch(kit):
    informer, notes, _ = await kit.synced(10)
    for _ in range(5):
        informer.release(notes)
        await kit.clock.asked(*LINGER)
        await asyncio.gather(kit.clock.advance(10), _acquire_soon(kit, notes))
        (found,) = kit.informers
        assert any(each is notes for each in found.listeners)
        if found is not informer:
            break
        await kit.clock.advance(30)
        assert list(kit.informers) == [informer]


async def _acquire_soon(kit, notes) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    kit.informers.acquire(kit.scope, notes)


async def test_the_end_of_one_and_a_new_beginning_do_not_share_a_store(kit):
    informer, notes, _ = await kit.synced(10, kit.config_map("a", 5))
    informer.release(notes)
    await kit.clock.asked(*LINGER)
    await kit.clock.advance(10)
    fresh, _ = kit.acquire()
    assert fresh is not informer and not fresh.synced and len(fresh.store) == 0


async def test_attaching_to_what_is_synced_calls_nothing(kit):
    informer, _, _ = await kit.synced(10)
    _, late = kit.acquire()
    await kit.api.settle()
    assert late.told == [] and informer.synced


async def test_a_listener_that_raises_harms_no_other(kit):
    class Broken(kit.Notes):
        def on_change(self, change):
            raise RuntimeError("broken")

    broken = Broken()
    kit.informers.acquire(kit.scope, broken)
    _, notes, watch = await kit.synced(10)
    watch.send(kit.event("ADDED", kit.config_map("a", 11)), kit.event("ADDED", kit.config_map("b", 12)))
    await notes.until_told(2)


async def test_a_listener_released_by_another_is_not_called(kit):
    informer, notes, watch = await kit.synced(10)
    victim = kit.Notes()

    class Releasing(kit.Notes):
        def on_change(self, change):
            informer.release(victim)

    informer.attach(Releasing())
    informer.attach(victim)
    watch.send(kit.event("ADDED", kit.config_map("a", 11)))
    await notes.until_told(1)
    assert victim.told == []


async def test_waiting_for_a_version_ends_with_it_or_in_time(kit):
    informer, _, watch = await kit.synced(10)
    await informer.wait_at_least(ResourceVersion(10), 1)
    waiting = asyncio.ensure_future(informer.wait_at_least(ResourceVersion(12), 3))
    late = asyncio.ensure_future(informer.wait_at_least(ResourceVersion(99), 3))
    await kit.clock.asked(2.9, 3.1)
    watch.send(kit.event("ADDED", kit.config_map("a", 12)))
    await waiting
    await kit.clock.advance(3)
    with pytest.raises(NotFresh, match="at version 12, 99 is asked for"):
        await late


async def test_waiting_for_the_first_list_ends_in_time(kit):
    informer, _ = kit.acquire()
    waiting = asyncio.ensure_future(informer.wait_synced(3))
    await kit.clock.asked(2.9, 3.1)
    await kit.clock.advance(3)
    with pytest.raises(NotSynced):
        await waiting
    with pytest.raises(NotSynced):
        await informer.wait_at_least(ResourceVersion(1), 1)


async def test_a_final_refusal_ends_the_wait_for_a_list(kit):
    informer, _ = kit.acquire()
    waiting = asyncio.ensure_future(informer.wait_synced(60))
    await kit.refuse_streaming()
    (await kit.api.next_list()).reply(405, kit.status(405, "MethodNotAllowed"))
    with pytest.raises(NotSynced):
        await waiting


async def test_lag_is_the_time_since_the_server_was_heard_while_not_live(kit):
    informer, _, watch = await kit.synced(10)
    assert informer.lag_s() == 0
    watch.cut()
    await kit.clock.asked(0.6, 1.0)
    await kit.clock.advance(0.5)
    assert informer.lag_s() == pytest.approx(0.5, abs=0.01)


async def test_a_wrong_selector_is_refused_before_anything_is_asked(kit):
    with pytest.raises(InvalidSelector):
        kit.acquire(WatchScope(CONFIG_MAPS, label_selector="a in"))
    assert await _is_quiet(kit)
