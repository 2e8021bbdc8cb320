"""Every path below the output folder; nobody else joins paths.

``products/`` holds results, kept over runs; ``runs/<run>/`` holds what belongs to one run. Names that come
from outside (run ids, skus) are made or checked safe before they reach a path. Staged and final folders
lie in one file system, so that publishing is a rename.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

#: What a sku may look like: it names files and folders, so no separators, spaces or leading dots.
SKU_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SKU_RULE = "1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"

#: Written into every published folder: the outcome that made it, so that a later run can reuse it.
RECORD_NAME = ".outcome.json"


def path_name(text: str) -> str:
    """Turn a run id into one safe path component; different ids stay different by a short hash."""
    cleaned = _UNSAFE.sub("_", text).lstrip(".")[:120]
    if cleaned and cleaned == text:
        return cleaned
    return f"{cleaned or 'run'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def version_name(updated_at: datetime) -> str:
    """Name a product version by its time, e.g. ``20261130T120000Z``."""
    moment = updated_at.astimezone(timezone.utc)
    fraction = f".{moment.microsecond:06d}" if moment.microsecond else ""
    return f"{moment:%Y%m%dT%H%M%S}{fraction}Z"


@dataclass(frozen=True, slots=True)
class ProductFolders:
    """Where the results of products lie, over all runs."""

    output: Path

    def product(self, sku: str) -> Path:
        """Return the folder of all versions of a product."""
        return self.output / "products" / sku

    def version(self, sku: str, version: str) -> Path:
        """Return the folder of one version's final files."""
        return self.product(sku) / version

    def record(self, sku: str, version: str) -> Path:
        """Return the outcome that made this version's files."""
        return self.version(sku, version) / RECORD_NAME

    def latest(self, sku: str) -> Path:
        """Return the pointer to the newest version."""
        return self.product(sku) / "latest.json"


@dataclass(frozen=True, slots=True)
class RunFolders:
    """Where one run keeps its plan, ledger, scratch and summary."""

    output: Path
    run_id: str

    @property
    def root(self) -> Path:
        """The run's own folder."""
        return self.output / "runs" / path_name(self.run_id)

    @property
    def plan(self) -> Path:
        """The plan's header."""
        return self.root / "plan.json"

    @property
    def todo(self) -> Path:
        """The products to do, one JSON line each, highest value first."""
        return self.root / "products.jsonl"

    @property
    def reused(self) -> Path:
        """The products whose published version already fits, one JSON line each."""
        return self.root / "reused.jsonl"

    @property
    def summary(self) -> Path:
        """The run's summary."""
        return self.root / "summary.json"

    @property
    def gallery(self) -> Path:
        """The folder for pages made from the summary."""
        return self.root / "gallery"

    def outcome(self, stage: str, sku: str) -> Path:
        """Return the ledger's file for a product's stage."""
        return self.root / "ledger" / stage / f"{sku}.json"

    def work(self, sku: str, version: str) -> Path:
        """Return the scratch shared by the stages of a product version."""
        return self.root / "work" / sku / version

    def staged(self, sku: str, version: str) -> Path:
        """Return where final files are gathered before they are published."""
        return self.root / "staged" / sku / version

    def guard(self, sku: str) -> Path:
        """Return the file that keeps two processes off one product."""
        return self.root / "guards" / f"{sku}.guard"
