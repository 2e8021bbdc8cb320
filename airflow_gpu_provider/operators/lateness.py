"""Which arguments are only known when the task runs: templates, other tasks' results, however deep they lie.

Airflow renders them inside lists and mappings too. What is known is checked when the DAG is read, the rest
when it is rendered; so a late one must not be taken for a value. Used by `asking` and `training`.
"""

from __future__ import annotations

from collections.abc import Mapping


def is_late(value: object) -> bool:
    """Say whether a value, or one within it, is only known when the task runs."""
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, Mapping):
        return any(is_late(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(is_late, value))
    return hasattr(value, "resolve")
