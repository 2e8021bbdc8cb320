"""Label and field selectors, as strict as a real server: a field that it cannot select by is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.kubernetes.errors import bad_request

Object = dict[str, Any]
Matches = Callable[[Object], bool]

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")
_COMPARED = re.compile(r"^([^=!\s]+)\s*(==|=|!=)\s*(\S*)$")
_COMMA_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")

_EVERY = frozenset({"metadata.name", "metadata.namespace"})
_FIELDS: Mapping[str, frozenset[str]] = {
    "Pod": _EVERY
    | {
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    },
    "Node": _EVERY | {"spec.unschedulable"},
    "Event": _EVERY
    | {
        "involvedObject.kind",
        "involvedObject.namespace",
        "involvedObject.name",
        "involvedObject.uid",
        "reason",
        "type",
    },
}


def matcher(kind: str, labels: str, fields: str) -> Matches:
    """Return whether an object of ``kind`` is selected; raise for a selector that cannot be read."""
    terms = [*_label_terms(labels), *_field_terms(kind, fields)]
    return lambda each: all(term(each) for term in terms)


def _label_terms(selector: str) -> list[Matches]:
    parts = (part.strip() for part in _COMMA_OUTSIDE_PARENTHESES.split(selector))
    return [_label_term(part) for part in parts if part]


def _label_term(part: str) -> Matches:
    if found := _SET.match(part):
        name, verb, values = found[1], found[2], {value.strip() for value in found[3].split(",")}
        wanted = verb == "in"
        return lambda each: (_labels(each).get(name) in values) is wanted
    if found := _COMPARED.match(part):
        name, sign, value = found[1], found[2], found[3]
        wanted = sign != "!="
        return lambda each: (_labels(each).get(name) == value) is wanted
    if re.fullmatch(r"!?[^\s=!]+", part):
        name, wanted = part.lstrip("!"), not part.startswith("!")
        return lambda each: (name in _labels(each)) is wanted
    raise bad_request(f"unable to parse requirement: {part!r}")


def _field_terms(kind: str, selector: str) -> list[Matches]:
    terms: list[Matches] = []
    for part in filter(None, selector.split(",")):
        found = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", part)
        if found is None:
            raise bad_request(f"invalid field selector: {part!r}")
        if found[1] not in _FIELDS.get(kind, _EVERY):
            raise bad_request(f"field label not supported: {found[1]}")
        terms.append(_field_term(found[1].split("."), found[3], wanted=found[2] != "!="))
    return terms


def _field_term(path: list[str], value: str, *, wanted: bool) -> Matches:
    return lambda each: (_field(each, path) == value) is wanted


def _field(each: Object, path: list[str]) -> str:
    found: Any = each
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return str(found).lower() if isinstance(found, bool) else str(found or "")


def _labels(each: Object) -> Mapping[str, str]:
    return each["metadata"].get("labels") or {}
