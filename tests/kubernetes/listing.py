"""Lists in pages: a list is of one moment, however many requests it takes and whatever changes meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from tests.kubernetes.errors import ApiError, bad_request, gone
from tests.kubernetes.object_store import Object, ObjectStore
from tests.kubernetes.resources import ResourceType
from tests.kubernetes.selectors import Matches


class Lists:
    """Answers list requests; remembers what the next pages hold until `expire`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._rest: dict[str, tuple[int, list[Object]]] = {}

    def page(self, resource: ResourceType, matches: Matches, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of what matches, and how to get the next."""
        limit = int(query.get("limit") or 0)
        if token := query.get("continue"):
            if token not in self._rest:
                raise gone("The provided continue parameter is too old to display a consistent list result.")
            version, found = self._rest.pop(token)
        else:
            version = self._version(query)
            found = [each for each in self._store.all(resource) if matches(each)]
        page, rest = (found[:limit], found[limit:]) if limit else (found, [])
        metadata: dict[str, Any] = {"resourceVersion": str(version)}
        if rest:
            metadata |= {"continue": self._remembered(version, rest), "remainingItemCount": len(rest)}
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": page,
        }

    def expire(self) -> None:
        """Forget the pages that were not fetched yet: asking for them is answered with 410."""
        self._rest.clear()

    def _remembered(self, version: int, rest: list[Object]) -> str:
        token = secrets.token_urlsafe(12)
        self._rest[token] = (version, rest)
        return token

    def _version(self, query: Mapping[str, str]) -> int:
        asked = query.get("resourceVersion") or "0"
        if not asked.isdecimal():
            raise bad_request(f"invalid resource version: {asked!r}")
        if int(asked) > self._store.version:
            raise ApiError(504, "Timeout", f"Too large resource version: {asked}", retry_after_s=1)
        return self._store.version
