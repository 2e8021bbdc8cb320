"""How artifacts are named: by path or by digest, each in one way, so that equal ones are found to be equal.

Applied where names come in (requests, reports of nodes); the core only compares. The next step is
`artifact_affinity`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable


def artifact_name(text: str) -> str:
    """Return the one way to write a path ("/data/models//gpt2/" is "/data/models/gpt2"); digests stay."""
    return posixpath.normpath(text) if text.startswith("/") else text


def artifact_names(texts: Iterable[str]) -> frozenset[str]:
    """Return the names of these artifacts."""
    return frozenset(map(artifact_name, texts))
