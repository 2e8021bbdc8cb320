"""Keep a collection of a cluster up to date: one list, then a watch, for ever.

A watch that ends goes on from its last version. When that is too old (410) all is listed again; other
failures are tried again after a pause that grows up to `MAX_PAUSE_S`, with chance in it, so that a thousand
watchers do not come back at once to an API server that restarts. The official client's informer has no pause,
so a server that is away would be asked without end.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from airflow_gpu_provider.kubernetes.api import ClusterApi, Watch

MAX_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.5
#: The server ends a watch after that; with chance, so that not all of a cluster's watches end together.
_LASTS_S = (240, 480)
#: Bookmarks come about once a minute: a watch that is silent for longer may hang on a dead connection.
_SILENT_S = 90.0
_GONE = 410

log = logging.getLogger(__name__)


class Collection(Protocol):
    """What is kept up to date."""

    def replace(self, objects: list[dict[str, Any]]) -> None:
        """Take the whole collection."""

    def put(self, each: dict[str, Any]) -> None:
        """Take an object that is new or has changed."""

    def remove(self, each: dict[str, Any]) -> None:
        """Forget an object."""


class Watcher:
    """Watches one collection in a thread of its own."""

    def __init__(
        self,
        api: ClusterApi,
        path: str,
        collection: Collection,
        *,
        fields: str = "",
        labels: str = "",
        chance: random.Random | None = None,
        pause_s: float = _FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.api = api
        self._path = path
        self._collection = collection
        self._selectors = {"fields": fields, "labels": labels}
        self._chance = chance or random.Random()
        self._pause_s = pause_s
        self._clock = clock
        self._version = ""
        self._stopping = threading.Event()
        self._watch: Watch | None = None
        self._failures = 0
        self._current_at: float | None = None
        self._is_connected = False
        self.listed = threading.Event()  #: set once the whole collection was listed
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; return when the thread has ended."""
        self._stopping.set()
        if (watch := self._watch) is not None:
            watch.close()
        if self._thread.is_alive():  # else it was never started
            self._thread.join()

    @property
    def version(self) -> str:
        """The version of the cluster that the collection is at; empty before it was listed."""
        return self._version

    def behind_s(self) -> float | None:
        """Return for how long the collection may have been out of date; None before the first list."""
        if self._current_at is None:
            return None
        return 0.0 if self._is_connected else self._clock() - self._current_at

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self._version:
                    self._list()
                self._follow()
            except Exception as error:  # whatever a cluster answers, the watch must outlive it
                pause_s = self._failed(error)
                self._stopping.wait(pause_s)

    def _list(self) -> None:
        objects: list[dict[str, Any]] = []
        version = ""
        for page, at in self.api.pages(self._path, **self._selectors):
            objects += page
            version = at
        self._collection.replace(objects)
        self._version = version
        self._is_current()
        self.listed.set()

    def _follow(self) -> None:
        lasts_s = self._chance.randint(*_LASTS_S)
        watch = self.api.open_watch(
            self._path, self._version, lasts_s=lasts_s, silent_s=_SILENT_S, **self._selectors
        )
        self._watch = watch
        if self._stopping.is_set():
            watch.close()
            return
        self._is_connected = True
        try:
            for event in watch.events():
                self._take(event)
        finally:
            self._is_connected, self._watch = False, None
            self._current_at = self._clock()
            watch.close()

    def _take(self, event: dict[str, Any]) -> None:
        kind, each = event["type"], event["object"]
        if kind == "ERROR":
            raise WatchRefused(each.get("code", 0), each.get("message", ""))
        if kind in ("ADDED", "MODIFIED"):
            self._collection.put(each)
        elif kind == "DELETED":
            self._collection.remove(each)
        self._version = each["metadata"]["resourceVersion"]
        self._is_current()

    def _is_current(self) -> None:
        self._current_at = self._clock()
        if self._failures:
            log.info("Watching %s again after %d failed tries", self._path, self._failures)
        self._failures = 0

    def _failed(self, error: Exception) -> float:
        """Note a failure; return how long to pause."""
        if self._stopping.is_set():
            return 0.0
        if getattr(error, "status", None) == _GONE:
            log.info("The version of %s is too old to go on from; listing it again", self._path)
            self._version = ""
            # The first time at once; a server that says so again and again is left in peace.
            pause_s = 0.0 if not self._failures else self._pause_s
        else:
            if not self._failures:
                log.warning("Watching %s failed: %s; trying until it works", self._path, _words(error))
            pause_s = min(self._pause_s * 2 ** min(self._failures, 10), MAX_PAUSE_S)
        self._failures += 1
        return max(pause_s * self._chance.uniform(0.5, 1.0), _asked_pause_s(error))


class WatchRefused(Exception):
    """The server ended a watch with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status


def _asked_pause_s(error: Exception) -> float:
    """Return how long the server asks to wait."""
    asked = (getattr(error, "headers", None) or {}).get("Retry-After", "")
    return min(float(asked), MAX_PAUSE_S) if asked.isdecimal() else 0.0


def _words(error: Exception) -> str:
    status = getattr(error, "status", None)
    reason = getattr(error, "reason", None) or error
    return f"HTTP {status} {reason}" if status else f"{type(error).__name__}: {error}"[:300]
