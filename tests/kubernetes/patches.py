"""The patch types of the API: JSON patch, merge patch, strategic merge patch.

The strategic one joins lists by the key that the API's types name; what is not in `_MERGE_KEYS` is replaced.
Server-side apply is refused.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes.errors import ApiError, bad_request, unsupported_media

Object = dict[str, Any]

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "conditions": "type",
    "containerStatuses": "name",
    "ownerReferences": "uid",
}
_SETS = frozenset({"finalizers"})


def patched(before: Object, patch: Any, content_type: str, *, is_builtin: bool) -> Object:
    """Return ``before`` with ``patch``; neither is changed."""
    match content_type:
        case "application/json-patch+json":
            return _json_patched(before, patch)
        case "application/merge-patch+json":
            return _merged(before, patch, strategic=False)
        case "application/strategic-merge-patch+json" if is_builtin:
            return _merged(before, patch, strategic=True)
    raise unsupported_media(f"the body of the request was in an unknown format: {content_type}")


def _merged(before: Any, patch: Any, *, strategic: bool) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif strategic and isinstance(value, list) and isinstance(merged.get(name), list):
            merged[name] = _joined(name, merged[name], value)
        else:
            merged[name] = _merged(merged.get(name), value, strategic=strategic)
    return merged


def _joined(name: str, before: list[Any], patch: list[Any]) -> list[Any]:
    if name in _SETS:
        return [*before, *(value for value in patch if value not in before)]
    key = _MERGE_KEYS.get(name)
    if key is None:
        return copy.deepcopy(patch)
    by_key = {each.get(key): each for each in before}
    for each in patch:
        if each.get("$patch") == "delete":
            by_key.pop(each.get(key), None)
        else:
            by_key[each.get(key)] = _merged(by_key.get(each.get(key)), each, strategic=True)
    return list(by_key.values())


def _json_patched(before: Object, operations: list[Object]) -> Object:
    after = copy.deepcopy(before)
    for operation in operations:
        path = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        try:
            parent: Any = after
            for part in path[:-1]:
                parent = parent[int(part)] if isinstance(parent, list) else parent[part]
            _apply(operation, parent, path[-1])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ApiError(422, "Invalid", f"jsonpatch {operation['op']} operation does not apply") from error
    return after


def _apply(operation: Object, parent: Any, last: str) -> None:
    at: Any = last
    if isinstance(parent, list):
        at = len(parent) if last == "-" else int(last)
    match operation["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(at, operation["value"])
        case "replace" if isinstance(parent, list) or at in parent:
            parent[at] = operation["value"]
        case "add":
            parent[at] = operation["value"]
        case "remove":
            del parent[at]
        case "test":
            if parent[at] != operation["value"]:
                raise ValueError("test failed")
        case other:
            raise bad_request(f"jsonpatch: {other} is not imitated or does not apply")
