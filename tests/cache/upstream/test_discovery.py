"""Kinds from discovery: what a refusal means."""

from __future__ import annotations

import asyncio

import pytest
from torpor_cache.apiserver import ApiUnavailable
from torpor_cache.kinds import Kinds, UnknownResource
from torpor_cache.resources import Resource

DATABASES = Resource("example.com", "v1", "databases")


async def _asked(kit, kinds, code, body, resource=DATABASES):
    asking = asyncio.ensure_future(kinds.kind_of(resource))
    (await kit.api.next_list()).reply(code, body)
    return await asking


async def test_only_a_404_says_that_a_kind_is_not_served(kit):
    kinds = Kinds(kit.server)
    for code, error in ((503, ApiUnavailable), (429, ApiUnavailable), (403, ApiUnavailable), (404, UnknownResource)):
        with pytest.raises(error):
            await _asked(kit, kinds, code, {"kind": "Status"})
    found = {"resources": [{"name": "databases", "kind": "Database"}, {"name": "databases/status", "kind": "Database"}]}
    assert await _asked(kit, kinds, 200, found) == "Database"
    assert await kinds.kind_of(DATABASES) == "Database"  # not asked again


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}"])
async def test_an_answer_that_makes_no_sense_is_asked_for_again(kit, body):
    with pytest.raises(ApiUnavailable, match="no discovery"):
        await _asked(kit, Kinds(kit.server), 200, body)
