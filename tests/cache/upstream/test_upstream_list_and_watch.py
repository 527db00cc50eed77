"""LIST then WATCH, against a scripted server that speaks real HTTP."""

from __future__ import annotations

import asyncio
import json

from torpor_cache.informers import InformerLimits, InformerState, WatchScope
from torpor_cache.resources import ObjectKey, Resource, ResourceVersion
from torpor_cache.watcher import WatchLimits

A = ObjectKey("default", "a")
REFUSED_FIRST = (0.14, 0.26)
BACKOFF_FIRST = (0.6, 1.0)  # 0.8 s ± 25 %
BACKOFF_SECOND = (1.2, 2.0)
SILENCE = (74.9, 75.1)


async def test_a_watch_begins_at_the_version_of_the_list_not_of_its_items(kit):
    _, notes = kit.acquire()
    await kit.refuse_streaming()
    first = await kit.api.next_list()
    assert first.query["limit"] == "500"
    assert "resourceVersion" not in first.query
    first.reply(200, kit.listing(50, kit.config_map("a", 99)))
    watch = await kit.api.next_watch()
    assert watch.query["resourceVersion"] == "50"
    assert watch.query["allowWatchBookmarks"] == "true"
    assert 300 <= int(watch.query["timeoutSeconds"]) <= 600
    await notes.until("synced")


async def test_pages_are_joined_and_the_watch_begins_at_the_version_of_the_last(kit):
    informer, _ = kit.acquire()
    await kit.refuse_streaming()
    (await kit.api.next_list()).reply(200, kit.listing(50, kit.config_map("a", 5), token="next"))
    second = await kit.api.next_list()
    assert second.query["continue"] == "next"
    assert "resourceVersion" not in second.query
    assert not informer.synced
    second.reply(200, kit.listing(51, kit.config_map("b", 6)))
    assert (await kit.api.next_watch()).query["resourceVersion"] == "51"
    assert len(informer.store) == 2


async def test_items_of_a_built_in_list_get_their_kind_and_api_version(kit):
    informer, _, _ = await kit.synced(10, kit.config_map("a", 5))
    stored = json.loads(informer.store.get(A).json)
    assert (stored["kind"], stored["apiVersion"]) == ("ConfigMap", "v1")
    assert (informer.kind, informer.list_kind) == ("ConfigMap", "ConfigMapList")


async def test_a_streamed_list_is_shown_only_when_its_bookmark_has_come(kit):
    informer, notes = kit.acquire()
    watch = (await kit.api.next_watch()).begin()
    assert watch.query["resourceVersionMatch"] == "NotOlderThan"
    assert "resourceVersion" not in watch.query
    watch.send(kit.event("ADDED", kit.config_map("a", 99)), kit.event("ADDED", kit.config_map("b", 7)))
    await kit.api.settle()
    assert not informer.synced and notes.told == []
    watch.send(kit.event("DELETED", kit.config_map("b", 100)), kit.bookmark(120, ends_initial=True))
    await notes.until("synced")
    assert [item.key.name for item in informer.store] == ["a"]
    assert informer.position.resource_version == 120
    assert informer.kind == "ConfigMap"
    watch.send(kit.event("MODIFIED", kit.config_map("a", 121)))
    await notes.until(("MODIFIED", "a", 121))


async def test_a_streamed_list_that_breaks_off_never_lends_its_versions_to_a_watch(kit):
    kit.acquire()
    watch = (await kit.api.next_watch()).begin()
    watch.send(kit.event("ADDED", kit.config_map("a", 99)))
    watch.end()
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    again = await kit.api.next_watch()
    assert again.query["sendInitialEvents"] == "true"
    assert "resourceVersion" not in again.query


async def test_a_server_that_ignores_streaming_lists_is_listed_in_pages(kit):
    informer, _ = kit.acquire()
    watch = (await kit.api.next_watch()).begin()
    watch.send(kit.event("ADDED", kit.config_map("a", 99)))
    await kit.clock.pass_wait(10, 10)
    await kit.api.settle()
    await kit.clock.advance(10)
    page = await kit.api.next_list()
    page.reply(200, kit.listing(100, kit.config_map("a", 99)))
    assert (await kit.api.next_watch()).query["resourceVersion"] == "100"
    assert informer.synced


async def test_selectors_and_namespace_are_sent_upstream(kit):
    kit.acquire(WatchScope(Resource.parse("apps/v1/deployments"), "ns", "b=2,a=1", "metadata.name=x"))
    watch = await kit.api.next_watch()
    assert watch.path == "/apis/apps/v1/namespaces/ns/deployments"
    assert (watch.query["labelSelector"], watch.query["fieldSelector"]) == ("a=1,b=2", "metadata.name=x")


async def test_410_as_an_http_status_relists_without_a_version(kit):
    informer, _, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.event("MODIFIED", kit.config_map("a", 11)))
    watch.end()
    (await kit.api.next_watch()).reply(410, kit.status(410, "Expired"))
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    page = await kit.api.next_list()
    assert "resourceVersion" not in page.query
    page.reply(200, kit.listing(30, kit.config_map("a", 11)))
    assert (await kit.api.next_watch()).query["resourceVersion"] == "30"
    assert informer.relists == 1


async def test_410_as_an_event_of_the_stream_relists_without_a_version(kit):
    _, notes, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.event("MODIFIED", kit.config_map("a", 11)), kit.event("ERROR", kit.status(410, "Expired")))
    page = await kit.api.next_list()  # at once: the watch had worked until then
    assert "resourceVersion" not in page.query
    page.reply(200, kit.listing(30))
    await kit.api.next_watch()
    assert notes.changes[-1].type.value == "DELETED" and notes.changes[-1].final_state_unknown


async def test_too_large_a_version_relists_without_one(kit):
    _, _, watch = await kit.synced(10)
    watch.send(kit.bookmark(11))
    watch.end()
    causes = {"causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]}
    (await kit.api.next_watch()).reply(504, kit.status(504, "Timeout", details=causes))
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    assert "resourceVersion" not in (await kit.api.next_list()).query


async def test_a_refused_connection_retries_the_watch_and_does_not_relist(kit):
    informer, _, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.event("MODIFIED", kit.config_map("a", 11)))
    await kit.api.settle()
    again = await kit.api.stop_listening()
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    assert informer.state is InformerState.STALE
    await kit.clock.pass_wait(*BACKOFF_SECOND)
    await again()
    await kit.clock.pass_wait(2.4, 4.0)
    watch = await kit.api.next_watch()
    assert watch.query["resourceVersion"] == "11"
    watch.begin()
    await kit.api.settle()
    assert informer.state is InformerState.SYNCED


async def test_429_retries_the_watch_after_what_the_server_asks_for(kit):
    _, _, watch = await kit.synced(10)
    watch.send(kit.bookmark(12))
    watch.end()
    (await kit.api.next_watch()).reply(429, kit.status(429, "TooManyRequests"), {"Retry-After": "17"})
    assert await kit.clock.pass_wait(16, 18) == 17
    assert (await kit.api.next_watch()).query["resourceVersion"] == "12"


async def test_a_watch_that_ends_at_once_without_an_event_is_not_asked_for_again_in_a_loop(kit):
    _, _, watch = await kit.synced(10)
    watch.end()
    await kit.clock.asked(*BACKOFF_FIRST)
    await kit.api.settle()
    assert kit.api.requests.empty()
    await kit.clock.advance(1)
    assert (await kit.api.next_watch()).query["resourceVersion"] == "10"


async def test_empty_watches_without_end_lead_to_a_relist(kit):
    _, _, watch = await kit.synced(10)
    for low_s, high_s in (BACKOFF_FIRST, BACKOFF_SECOND):
        watch.end()
        await kit.clock.pass_wait(low_s, high_s)
        watch = (await kit.api.next_watch()).begin()
    watch.end()
    await kit.clock.pass_wait(2.4, 4.0)
    await kit.api.next_list()


async def test_a_watch_that_ended_as_agreed_goes_on_at_once_where_it_was(kit):
    informer, _, watch = await kit.synced(10)
    watch.send(kit.event("ADDED", kit.config_map("a", 11)), kit.bookmark(20))
    watch.end()
    assert (await kit.api.next_watch()).query["resourceVersion"] == "20"
    assert informer.state is InformerState.SYNCED


async def test_a_bookmark_moves_the_version_and_nothing_else(kit):
    informer, notes, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.bookmark(40))
    await notes.until(("bookmark", 40))
    assert notes.changes == [] and len(informer.store) == 1
    assert list(informer.history.since(ResourceVersion(10))) == []


async def test_silence_ends_a_watch_only_where_bookmarks_were_seen(kit):
    informer, _, watch = await kit.synced(10)
    await kit.clock.advance(1000)
    await kit.api.settle()
    assert informer.state is InformerState.SYNCED and kit.api.requests.empty()
    watch.send(kit.bookmark(11))
    await kit.clock.pass_wait(*SILENCE)
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    assert informer.state is InformerState.STALE
    again = await kit.api.next_watch()
    assert again.query["resourceVersion"] == "11"
    await watch.closed_by_client()


async def test_a_watch_that_stays_silent_twice_is_listed_anew(kit):
    """An API server over a restored etcd accepts a watch from the future and says nothing."""
    _, _, watch = await kit.synced(10)
    watch.send(kit.bookmark(11))
    await kit.clock.pass_wait(*SILENCE)
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    (await kit.api.next_watch()).begin()
    await kit.clock.pass_wait(*SILENCE)
    await kit.clock.pass_wait(*BACKOFF_SECOND)
    await kit.api.next_list()


async def test_half_a_last_line_is_dropped_and_told_whole_by_the_next_watch(kit):
    _, notes, watch = await kit.synced(10)
    line = json.dumps(kit.event("ADDED", kit.config_map("a", 11))).encode() + b"\n"
    watch.send(kit.event("ADDED", kit.config_map("b", 11)))
    watch.send_bytes(line[:40])
    await notes.until(("ADDED", "b", 11))
    watch.cut()
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    watch = (await kit.api.next_watch()).begin()
    assert watch.query["resourceVersion"] == "11"
    watch.send(kit.event("ADDED", kit.config_map("a", 12)))
    await notes.until(("ADDED", "a", 12))
    assert len(notes.changes) == 2


async def test_a_line_may_come_in_pieces_and_be_larger_than_4_mib(kit):
    _, notes, watch = await kit.synced(10)
    item = kit.config_map("a", 11) | {"data": {"x": "y" * (5 * 1024 * 1024)}}
    line = json.dumps(kit.event("ADDED", item), separators=(",", ":")).encode() + b"\n"
    for start in range(0, len(line), 1_000_003):
        watch.send_bytes(line[start : start + 1_000_003])
    await notes.until(("ADDED", "a", 11))
    assert json.loads(notes.changes[0].new.json) == item


async def test_a_malformed_line_is_an_error_and_the_watch_goes_on_before_it(kit):
    informer, notes, watch = await kit.synced(10)
    watch.send(kit.event("ADDED", kit.config_map("a", 11)))
    watch.send_bytes(b'{"type":"ADDED","object":{"metadata":{"name":"b"}}}\n')
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    assert "without name or uid" in informer.trouble
    assert (await kit.api.next_watch()).query["resourceVersion"] == "11"
    assert len(notes.changes) == 1


async def test_403_is_told_to_listeners_as_an_error_and_never_as_deletions(kit):
    informer, notes, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.bookmark(11))
    watch.end()
    (await kit.api.next_watch()).reply(403, kit.status(403, "Forbidden"))
    await notes.until(("error", 403, False))
    assert informer.state is InformerState.FAILED
    assert json.loads(informer.error)["reason"] == "Forbidden"
    assert len(informer.store) == 1 and notes.changes == []
    await kit.clock.pass_wait(*REFUSED_FIRST)
    watch = (await kit.api.next_watch()).begin()
    assert watch.query["resourceVersion"] == "11"
    await kit.api.settle()
    assert informer.state is InformerState.SYNCED and informer.error == b""


async def test_a_removed_crd_is_an_error_and_its_return_a_difference(kit):
    informer, notes, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.bookmark(11))
    watch.end()
    (await kit.api.next_watch()).reply(404, b"404 page not found\n")
    await notes.until(("error", 404, False))
    assert informer.state is InformerState.FAILED and notes.changes == []
    await kit.clock.asked(*REFUSED_FIRST)
    informer.hurry()  # the CRD is back, somebody saw it
    (await kit.api.next_list()).reply(200, kit.listing(20, kit.config_map("b", 15)))
    (await kit.api.next_watch()).begin()
    await notes.until(("ADDED", "b", 15))
    assert [change.type.value for change in notes.changes] == ["DELETED", "ADDED"]


async def test_a_kind_that_is_not_served_yet_is_asked_for_again_soon_and_then_ever_more_rarely(kit):
    """At start-up it is often made a moment later; some are never made."""
    kit.acquire()
    waits = []
    for failures in range(11):
        (await kit.api.next_watch()).reply(404, b"404 page not found\n")
        expected_s = 0.2 * 1.5**failures
        waits.append(await kit.clock.pass_wait(0.74 * expected_s, 1.26 * expected_s))
    assert sum(waits[:6]) <= 6 and waits[-1] >= 8


async def test_a_selector_that_the_server_does_not_know_is_final(kit):
    informer, notes = kit.acquire(WatchScope(kit.scope.resource, field_selector="spec.nope=1"))
    await kit.refuse_streaming()
    (await kit.api.next_list()).reply(400, kit.status(400, "BadRequest", message="field label not supported"))
    await notes.until(("error", 400, True))
    assert informer.state is InformerState.FAILED and informer.final
    again, _ = kit.acquire(informer.scope)
    assert again is not informer


async def test_a_page_that_is_too_large_is_asked_for_with_fewer_objects(kit):
    kit.informers.limits = InformerLimits(watch=WatchLimits(page_bytes_max=2000))
    informer, _ = kit.acquire()
    await kit.refuse_streaming()
    big = kit.config_map("a", 5) | {"data": {"x": "y" * 3000}}
    (await kit.api.next_list()).reply(200, kit.listing(10, big))
    smaller = await kit.api.next_list()
    assert smaller.query["limit"] == "62"
    smaller.reply(200, kit.listing(10, kit.config_map("a", 5)))
    await kit.api.next_watch()
    assert informer.synced


async def test_a_version_that_is_no_number_is_refused_in_words(kit):
    informer, _ = kit.acquire()
    await kit.refuse_streaming()
    page = kit.listing(10) | {"metadata": {"resourceVersion": "abc"}}
    (await kit.api.next_list()).reply(200, page)
    await kit.clock.asked(*BACKOFF_FIRST)
    assert "'abc' is no resourceVersion" in informer.trouble


async def test_the_back_off_begins_anew_after_two_minutes_of_health(kit):
    _, _, watch = await kit.synced(10)
    watch.cut()
    await kit.clock.pass_wait(*BACKOFF_FIRST)
    watch = (await kit.api.next_watch()).begin()
    await kit.api.settle()
    watch.cut()
    await kit.clock.pass_wait(*BACKOFF_SECOND)
    watch = (await kit.api.next_watch()).begin()
    await kit.api.settle()
    await kit.clock.advance(121)
    watch.cut()
    await kit.clock.pass_wait(*BACKOFF_FIRST)


async def test_a_list_lower_than_what_was_seen_is_another_history(kit):
    informer, notes, watch = await kit.synced(1000, kit.config_map("a", 500))
    watch.send(kit.event("MODIFIED", kit.config_map("a", 1001)), kit.event("ERROR", kit.status(410, "Expired")))
    kit.api.history = "history-2"  # another replica has seen it first
    await notes.until("resync")
    assert not informer.synced and len(informer.store) == 0
    watch = await kit.api.next_watch()
    watch.reply(422, kit.status(422, "Invalid"))
    (await kit.api.next_list()).reply(200, kit.listing(900, kit.config_map("a", 500)))
    (await kit.api.next_watch()).begin()
    await notes.until(("bookmark", 900))
    assert notes.told[-3:] == ["resync", "synced", ("bookmark", 900)]
    assert informer.position.history == "history-2"
    assert notes.changes[-1].resource_version == 1001


async def test_many_events_of_one_chunk_are_each_told_in_order(kit):
    informer, notes, watch = await kit.synced(10)
    watch.send(*(kit.event("ADDED", kit.config_map(f"c{i}", 11 + i)) for i in range(300)))
    await notes.until_told(300)
    assert [change.resource_version for change in notes.changes] == list(range(11, 311))
    assert len(informer.history.since(ResourceVersion(100))) == 210


async def test_cancelling_the_informers_leaves_no_task_behind(kit):
    await kit.synced(10)
    before = {task for task in asyncio.all_tasks() if "Informer" in repr(task)}
    assert before
    await kit.informers.__aexit__(None, None, None)
    assert not any(not task.done() for task in before)
    await kit.informers.__aenter__()


async def test_an_event_beyond_the_bound_is_an_error_and_in_the_end_a_relist(kit):
    kit.informers.limits = InformerLimits(watch=WatchLimits(line_bytes_max=1000))
    informer, _, watch = await kit.synced(10)
    for low_s, high_s in (BACKOFF_FIRST, BACKOFF_SECOND, (2.4, 4.0)):
        watch.send(kit.event("ADDED", kit.config_map("big", 11) | {"data": {"x": "y" * 300_000}}))
        await kit.clock.asked(low_s, high_s)
        assert "longer than 1000 bytes" in informer.trouble
        await kit.clock.advance(high_s)
        if high_s < 4:
            watch = (await kit.api.next_watch()).begin()
    await kit.api.next_list()


async def test_a_resource_that_counts_for_itself_gets_a_history_of_its_own(kit):
    """An aggregated API server that keeps its state in memory begins again at 1 when it restarts."""
    kit.api.newest = 5000
    informer, notes, watch = await kit.synced(1000)
    watch.send(kit.bookmark(1001), kit.event("ERROR", kit.status(410, "Expired")))
    (await kit.api.next_list()).reply(200, kit.listing(3, kit.config_map("a", 2)))
    await notes.until("resync")
    await kit.refuse_streaming()
    (await kit.api.next_list()).reply(200, kit.listing(3, kit.config_map("a", 2)))
    (await kit.api.next_watch()).begin()
    await notes.until(("bookmark", 3))
    assert kit.informers.history_id == "history-1"
    assert informer.position.history.startswith("history-1/") and informer.position.resource_version == 3


async def test_after_a_long_outage_a_refused_connection_is_tried_again_within_five_seconds(kit):
    _, _, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.event("MODIFIED", kit.config_map("a", 11)))
    await kit.api.settle()
    again = await kit.api.stop_listening()
    for _ in range(8):
        await kit.clock.pass_wait(0.0, 5.0)
    await again()
    await kit.clock.pass_wait(0.0, 5.0)
    assert (await kit.api.next_watch()).query["resourceVersion"] == "11"


async def test_a_server_that_is_busy_is_given_longer_than_one_where_nobody_listens(kit):
    _, _, watch = await kit.synced(10, kit.config_map("a", 5))
    watch.send(kit.event("MODIFIED", kit.config_map("a", 11)))
    watch.end()
    for low_s, high_s in (BACKOFF_FIRST, BACKOFF_SECOND, (2.4, 4.0), (4.8, 8.0), (9.6, 16.0)):
        (await kit.api.next_watch()).reply(429, kit.status(429, "TooManyRequests"))
        await kit.clock.pass_wait(low_s, high_s)
