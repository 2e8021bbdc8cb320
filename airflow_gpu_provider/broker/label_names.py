"""What labels and taints may look like, for authors, the wire and people alike.

One rule, so that what a DAG file may say is what the broker takes: whoever breaks it is told when the file is
parsed. Free of the wire and of arrays. The next step is `node_labels`, which compares them with nodes.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_NAMES = 100
MOST_CHARACTERS = 250


def wrong_label(text: str) -> str | None:
    """Return what is wrong with a label, NAME=VALUE, and what to write; None = nothing."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals or not value.strip():
        return f"{_shown(text)} is no NAME=VALUE; write a label of nodes such as zone=hall-1"
    return wrong_name(name) or wrong_name(value)


def wrong_name(text: str) -> str | None:
    """Return what is wrong with a name or value, and what to write; None = nothing."""
    if len(text) > MOST_CHARACTERS:
        return f"{_shown(text)} has {len(text)} characters, at most {MOST_CHARACTERS} are allowed; shorten it"
    odd = next((each for each in text if not each.isprintable()), None)
    if odd is not None:
        return f"{_shown(text)} has {odd!r} in it, which no agent says; write printable characters only"
    return None


def checked_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels; raise ValueError that says what is wrong with them."""
    return _checked(labels, wrong_label)


def checked_taints(taints: tuple[str, ...]) -> tuple[str, ...]:
    """Return the taints; raise ValueError that says what is wrong with them."""
    return _checked(taints, wrong_name)


def _checked(names: tuple[str, ...], wrong: Callable[[str], str | None]) -> tuple[str, ...]:
    if len(names) > MOST_NAMES:
        raise ValueError(
            f"{len(names)} are given, at most {MOST_NAMES} are allowed; give such nodes a label of their own"
        )
    trouble = next(filter(None, map(wrong, names)), None)
    if trouble is not None:
        raise ValueError(trouble)
    return names


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
