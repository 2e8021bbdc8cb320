"""The objects of a cluster and the history of their changes, like etcd behind a real server.

Invariant: every change has a version of its own, and an object in the store is never changed in place, so
that a reader may keep it. What is older than the kept history can no longer be watched from (410).
`watching` reads the history; `deletion` decides what is removed when.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from tests.kubernetes.errors import already_exists, conflict, not_found
from tests.kubernetes.resources import ResourceType

Object = dict[str, Any]
Name = tuple[str, str]  #: namespace and name


def timestamp(at: datetime | None = None) -> str:
    return (at or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(each: Object) -> Name:
    return each["metadata"].get("namespace", ""), each["metadata"]["name"]


@dataclass(slots=True)
class Change:
    """One version: what became of an object."""

    version: int
    resource: ResourceType
    before: Object | None
    after: Object | None  #: None = removed
    encoded: bytes = field(default=b"")

    def content(self) -> bytes:
        """The object as JSON, encoded once for all watches."""
        if not self.encoded:
            self.encoded = json.dumps(self.after if self.after is not None else self.before).encode()
        return self.encoded


class ObjectStore:
    """All objects by type and name."""

    def __init__(self, *, history: int = 20_000) -> None:
        self.version = 100
        self.oldest = 100  #: watches may begin here or later
        self._objects: defaultdict[ResourceType, dict[Name, Object]] = defaultdict(dict)
        self._history: deque[Change] = deque(maxlen=history)
        self._changed = asyncio.Event()
        self.listeners: list[Callable[[Change], None]] = []

    def get(self, resource: ResourceType, name: Name) -> Object:
        found = self._objects[resource].get(name)
        if found is None:
            raise not_found(f'{resource.qualified} "{name[1]}" not found')
        return found

    def find(self, resource: ResourceType, name: Name) -> Object | None:
        return self._objects[resource].get(name)

    def all(self, resource: ResourceType) -> list[Object]:
        return list(self._objects[resource].values())

    def everything(self) -> Iterator[tuple[ResourceType, Object]]:
        for resource, objects in list(self._objects.items()):
            for each in list(objects.values()):
                yield resource, each

    def add(self, resource: ResourceType, new: Object) -> Object:
        name = name_of(new)
        if name in self._objects[resource]:
            raise already_exists(resource.qualified, name[1])
        metadata = {**new["metadata"], "uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
        metadata["generation"] = 1
        return self._put(resource, None, {**new, "metadata": metadata})

    def replace(self, resource: ResourceType, new: Object, *, expected: str | None = None) -> Object:
        """Store a new state; 409 when it was made from another version than ``expected``."""
        before = self.get(resource, name_of(new))
        held = before["metadata"]["resourceVersion"]
        if expected and expected != held:
            raise conflict(resource.qualified, name_of(new)[1], "the object has been modified")
        if {**new, "metadata": {**new["metadata"], "resourceVersion": held}} == before:
            return before  # a real server makes no version of nothing
        return self._put(resource, before, new)

    def remove(self, resource: ResourceType, name: Name) -> Object:
        before = self.get(resource, name)
        del self._objects[resource][name]
        self.version += 1
        last = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.version)}}
        self._record(Change(self.version, resource, last, None))
        return last

    def changes_since(self, version: int) -> list[Change]:
        """Return what happened after ``version``, the oldest first."""
        found: list[Change] = []
        for change in reversed(self._history):
            if change.version <= version:
                break
            found.append(change)
        return found[::-1]

    async def wait(self, seconds: float) -> None:
        """Return at the next change, or after ``seconds``."""
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # not wait_for, which may swallow a cancellation
                await changed.wait()

    def compact(self) -> None:
        """Forget the history: watches from here on need a newer list."""
        self.oldest = self.version
        self._history.clear()

    def _put(self, resource: ResourceType, before: Object | None, new: Object) -> Object:
        self.version += 1
        stored = copy.deepcopy(new)
        stored["metadata"]["resourceVersion"] = str(self.version)
        if before is not None and stored.get("spec") != before.get("spec"):
            stored["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        self._objects[resource][name_of(stored)] = stored
        self._record(Change(self.version, resource, before, stored))
        return stored

    def _record(self, change: Change) -> None:
        if self._history.maxlen == len(self._history):
            self.oldest = self._history[0].version
        self._history.append(change)
        for listener in self.listeners:
            listener(change)
        self._changed.set()
        self._changed = asyncio.Event()
