"""Is a file or folder complete, and if not, why.

Complete means: it exists, is not empty, holds no file that is still being written, and either its writer
said so (a ``_SUCCESS`` marker, or a checksum manifest that fits) or it did not change between two looks.
Every "not yet" comes with its reason in words, because a wait that nobody can explain looks like a hang.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SUCCESS_MARKER = "_SUCCESS"
CHECKSUM_MANIFEST = "SHA256SUMS"  #: lines of "<sha256>  <relative path>", as sha256sum writes them
UNFINISHED_SUFFIXES = (".tmp", ".incomplete", ".part")


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at an artifact: why it is not ready, or what it looked like."""

    problem: str | None
    fingerprint: str = ""
    is_vouched: bool = False  #: its writer says that it is complete


class ArtifactWatch:
    """Looks at paths again and again; two equal looks make an unmarked artifact complete."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [Path(path) for path in paths]
        self._seen: dict[Path, str] = {}
        self._verified: dict[Path, str] = {}

    def look(self) -> list[str]:
        """Return why each artifact that is not complete is not; an empty list means that all are."""
        return [problem for path in self._paths if (problem := self._problem(path)) is not None]

    def _problem(self, path: Path) -> str | None:
        try:
            look = self._look(path)
        except OSError as error:  # it may be replaced while it is looked at
            return f"{path} cannot be read: {error.strerror or error}"
        before, self._seen[path] = self._seen.get(path), look.fingerprint
        if look.problem is not None:
            return f"{path} {look.problem}"
        if look.is_vouched or before == look.fingerprint:
            return None
        if not before:
            return f"{path} is there; a second look has to show that it does not change any more"
        return f"{path} is still changing"

    def _look(self, path: Path) -> _Look:
        if not path.exists():
            return _Look(f"does not exist{_nearest(path)}")
        files = _files(path)
        fingerprint = _fingerprint(files)
        unfinished = [file for file in files if file.name.endswith(UNFINISHED_SUFFIXES)]
        if unfinished:
            return _Look(f"is still being written: {unfinished[0]}", fingerprint)
        content = [file for file in files if file.name not in (SUCCESS_MARKER, CHECKSUM_MANIFEST)]
        if not any(file.stat().st_size for file in content):
            return _Look("is empty", fingerprint)
        if path.is_dir() and (path / CHECKSUM_MANIFEST).is_file():
            return _Look(self._checksum_problem(path, fingerprint), fingerprint, is_vouched=True)
        return _Look(None, fingerprint, is_vouched=(path / SUCCESS_MARKER).is_file())

    def _checksum_problem(self, path: Path, fingerprint: str) -> str | None:
        if self._verified.get(path) == fingerprint:
            return None  # large artifacts are read once, not at every look
        for number, line in enumerate((path / CHECKSUM_MANIFEST).read_text().splitlines(), start=1):
            expected, _, name = line.partition(" ")
            file = path / name.strip().lstrip("*")
            if not name.strip():
                return f"has a manifest whose line {number} is no '<sha256>  <path>': {line[:80]!r}"
            if not file.is_file():
                return f"lacks {name.strip()}, which its {CHECKSUM_MANIFEST} lists"
            if _sha256(file) != expected.lower():
                return f"has a {name.strip()} that does not fit its {CHECKSUM_MANIFEST} (yet)"
        self._verified[path] = fingerprint
        return None


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names]
    return sorted(found)


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _nearest(path: Path) -> str:
    """Say how far the path exists, which tells a typing mistake from an artifact that is not made yet."""
    parent = next((parent for parent in path.parents if parent.exists()), None)
    return "" if parent is None or parent == path.parent else f" (only {parent} does)"


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
