"""Which pretrained models and data sets lie on this machine, for claims that are better off where they are.

A folder's entries are artifacts, and so is whatever a pattern matches; each is named by its path and, where
its writer left a checksum, by digest. Listed once a minute in a thread of its own, since a network file
system that hangs must not make the node look dead. What is hidden, empty or still being written is left out.
The next step is the node's report.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.reports import MOST_ARTIFACTS

EVERY_S = 60.0
#: Of a folder, as `sha256sum` writes it: its own digest names all that is in the folder.
MANIFEST = "SHA256SUMS"
_UNFINISHED = (".tmp", ".incomplete", ".part")
_LARGEST_MANIFEST = 64 * 2**20
_SHA256 = re.compile(r"\s*([0-9a-fA-F]{64})\b")
#: How long the first listing may take before the node is reported without it.
_FIRST_S = 2.0

log = logging.getLogger(__name__)


class ArtifactShelf:
    """The artifacts of these folders and patterns, and when they were told last."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        for pattern in patterns:
            if not pattern.startswith("/"):
                raise InvalidRequest(
                    f"--artifacts {pattern!r}: give an absolute path, since tasks name artifacts by it: a "
                    "folder whose entries are artifacts, such as /data/models, or a pattern, such as "
                    "'/data/*/model'."
                )
        self._patterns = tuple(patterns)
        self._listing: threading.Thread | None = None
        self._listed: tuple[str, ...] = ()
        self._due: float | None = None
        self._is_news = False

    def news(self, now: float) -> tuple[str, ...] | None:
        """Return what lies here when it was listed anew and not yet told, else None."""
        if self._listing is None and (self._due is None or now >= self._due):
            is_first, self._due = self._due is None, now + EVERY_S
            self._listing = threading.Thread(target=self._list, name="gpu-agent-artifacts", daemon=True)
            self._listing.start()
            if is_first:
                self._listing.join(_FIRST_S)
        if self._listing is not None and not self._listing.is_alive():
            self._listing, self._is_news = None, True
        return self._listed if self._is_news else None

    def told(self) -> None:
        """Note that the broker has heard of the last news."""
        self._is_news = False

    def _list(self) -> None:
        found: set[str] = set()
        for pattern in self._patterns:
            try:
                found.update(_artifacts(pattern))
            except OSError as error:
                log.warning("Artifacts in %s cannot be listed: %s", pattern, error)
        if len(found) > MOST_ARTIFACTS:
            log.warning("%d artifacts lie here, %d are reported", len(found), MOST_ARTIFACTS)
        self._listed = tuple(sorted(found)[:MOST_ARTIFACTS])


def _artifacts(pattern: str) -> Iterator[str]:
    folder = Path(pattern)
    paths = folder.iterdir() if folder.is_dir() else map(Path, glob.iglob(pattern))
    for path in paths:
        if not path.name.startswith(".") and not path.name.endswith((*_UNFINISHED, ".sha256")):
            try:
                yield from _names(path)
            except OSError as error:  # such as lost+found, which only root may read
                log.warning("Artifact %s cannot be read: %s", path, error)


def _names(path: Path) -> Iterator[str]:
    """Yield the path and the digest of an artifact that is whole."""
    if path.is_dir():
        if not any(path.iterdir()):
            return
        yield str(path)
        manifest = path / MANIFEST
        if manifest.is_file() and manifest.stat().st_size <= _LARGEST_MANIFEST:
            yield f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}"
    elif path.is_file() and path.stat().st_size:
        yield str(path)
        digest = path.with_name(path.name + ".sha256")
        found = _SHA256.match(digest.read_text(errors="replace")) if digest.is_file() else None
        if found is not None:
            yield f"sha256:{found[1].lower()}"
