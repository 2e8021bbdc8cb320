"""Watches: what happened since a version, then what happens, one JSON line each.

An object that begins or ceases to match a selector is added or deleted for that watch. A version older than
the history is answered by an ERROR event with code 410, as the API server's cache does. Faults act here: a
drop closes the connection in the middle of a line, a delay holds events back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tests.kubernetes.errors import bad_request, gone
from tests.kubernetes.faults import Faults
from tests.kubernetes.object_store import Change, ObjectStore
from tests.kubernetes.resources import ResourceType
from tests.kubernetes.selectors import Matches

_LONGEST_S = 1800.0


class Watches:
    """Serves watches of a store."""

    def __init__(self, store: ObjectStore, faults: Faults, *, bookmark_every_s: float) -> None:
        self._store = store
        self._faults = faults
        self._bookmark_every_s = bookmark_every_s
        self.open = 0

    async def serve(
        self, request: web.Request, resource: ResourceType, matches: Matches
    ) -> web.StreamResponse:
        """Stream until the asked time is over or the client leaves."""
        query = request.query
        asked = query.get("resourceVersion") or "0"
        if not asked.isdecimal():
            raise bad_request(f"invalid resource version: {asked!r}")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self.open += 1
        try:
            await self._stream(request, response, resource, matches, int(asked), query)
        except ConnectionError:
            return response  # the client left
        finally:
            self.open -= 1
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        resource: ResourceType,
        matches: Matches,
        since: int,
        query: Mapping[str, str],
    ) -> None:
        ends = time.monotonic() + float(query.get("timeoutSeconds") or _LONGEST_S)
        wants_bookmarks = query.get("allowWatchBookmarks", "").lower() in ("1", "true")
        if since and since < self._store.oldest:
            await response.write(_expired(since))
            return
        if not since:
            since = self._store.version
            for each in filter(matches, self._store.all(resource)):
                await response.write(_line("ADDED", json.dumps(each).encode()))
        bookmark_at, drops = time.monotonic() + self._bookmark_every_s, self._faults.drops
        while (left := ends - time.monotonic()) > 0:
            changes = self._store.changes_since(since)
            since = max(since, self._store.version)
            lines = [line for change in changes if (line := _event(change, resource, matches))]
            if lines:
                await asyncio.sleep(self._faults.watch_delay_s)
                await response.write(b"".join(lines))
            if self._faults.drops != drops:
                await self._drop(request, response)
                return
            if wants_bookmarks and time.monotonic() >= bookmark_at:
                bookmark_at = time.monotonic() + self._bookmark_every_s
                await response.write(_bookmark(resource, since))
            if self._store.version == since:
                await self._store.wait(min(left, self._bookmark_every_s))

    async def _drop(self, request: web.Request, response: web.StreamResponse) -> None:
        await response.write(b'{"type":"MODIFIED","object":{"kind":"Po')
        if request.transport is not None:
            request.transport.abort()


def _event(change: Change, resource: ResourceType, matches: Matches) -> bytes | None:
    if change.resource is not resource:
        return None
    was = change.before is not None and matches(change.before)
    is_now = change.after is not None and matches(change.after)
    if is_now:
        return _line("MODIFIED" if was else "ADDED", change.content())
    return _line("DELETED", change.content()) if was else None


def _line(kind: str, encoded: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), encoded)


def _bookmark(resource: ResourceType, version: int) -> bytes:
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    content: dict[str, Any] = {
        "kind": resource.kind,
        "apiVersion": resource.api_version,
        "metadata": metadata,
    }
    return _line("BOOKMARK", json.dumps(content).encode())


def _expired(since: int) -> bytes:
    return _line("ERROR", json.dumps(gone(f"too old resource version: {since}").status()).encode())
