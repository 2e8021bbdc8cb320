"""Binds pods to nodes, as far as GPU pods need it: cordons, taints, selectors, node affinity, sums.

Not imitated: preferences, pod affinity, priorities and preemption, DRA. What it counts as used is written
independently of the provider's own count, so that tests can compare the two.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.kubernetes.object_store import Object, ObjectStore, name_of, timestamp
from tests.kubernetes.resources import BUILTIN

_PODS, _NODES = BUILTIN[0], BUILTIN[1]
_OVER = frozenset({"Succeeded", "Failed"})
_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity(text: object) -> float:
    """Return "500m" as 0.5 and "2Gi" as 2**31."""
    value = str(text)
    for unit in sorted(_UNITS, key=len, reverse=True):
        if value.endswith(unit):
            return float(value[: -len(unit)]) * _UNITS[unit]
    return float(value)


class Scheduler:
    """Looks at all pods without a node whenever something changed."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.is_on = True

    async def run(self) -> None:
        seen = -1
        while True:
            if self._store.version == seen:
                await self._store.wait(1.0)
            await asyncio.sleep(0)
            seen = self._store.version
            if self.is_on:
                self._schedule_all()

    def _schedule_all(self) -> None:
        pods = self._store.all(_PODS)
        waiting = [pod for pod in pods if _is_waiting(pod)]
        if not waiting:
            return
        used: dict[str, Counter[str]] = {}
        for pod in pods:
            if pod["spec"].get("nodeName") and pod["status"]["phase"] not in _OVER:
                used.setdefault(pod["spec"]["nodeName"], Counter()).update(needs(pod))
        nodes = self._store.all(_NODES)
        for pod in waiting:
            self._schedule(pod, nodes, used)

    def _schedule(self, pod: Object, nodes: list[Object], used: dict[str, Counter[str]]) -> None:
        why: Counter[str] = Counter()
        for node in nodes:
            name = node["metadata"]["name"]
            reason = unfit(pod, node, used.setdefault(name, Counter()))
            if reason is None:
                used[name].update(needs(pod))
                bound = {**pod, "spec": {**pod["spec"], "nodeName": name}}
                self._store.replace(_PODS, with_condition(bound, "PodScheduled", "True"))
                return
            why[reason] += 1
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items()))
        message = f"0/{len(nodes)} nodes are available: {told}."
        current = self._store.get(_PODS, name_of(pod))
        self._store.replace(
            _PODS, with_condition(current, "PodScheduled", "False", reason="Unschedulable", message=message)
        )


def _is_waiting(pod: Object) -> bool:
    spec = pod["spec"]
    is_free = not spec.get("nodeName") and not spec.get("schedulingGates")
    return is_free and pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]


def with_condition(each: Object, kind: str, status: str, **more: Any) -> Object:
    """Return an object with a condition set; the time changes only with its status."""
    before = each.get("status", {}).get("conditions", [])
    found = next((one for one in before if one["type"] == kind), None)
    same = found is not None and found["status"] == status
    at = found["lastTransitionTime"] if found is not None and same else timestamp()
    new = {"type": kind, "status": status, "lastTransitionTime": at, **more}
    kept = [one for one in before if one["type"] != kind]
    return {**each, "status": {**each.get("status", {}), "conditions": [*kept, new]}}


def needs(pod: Object) -> Counter[str]:
    """Return what a pod takes of its node: its containers together, or its largest init container."""
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        total.update(_requests(container))
    for container in pod["spec"].get("initContainers", []):
        for name, value in _requests(container).items():
            total[name] = max(total[name], value)  # type: ignore[assignment]
    return total


def _requests(container: Object) -> dict[str, Any]:
    resources = container.get("resources", {})
    asked = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {name: quantity(value) for name, value in asked.items()}


def unfit(pod: Object, node: Object, used: Counter[str]) -> str | None:
    """Return why a pod cannot run on a node, in the scheduler's words."""
    spec, labels = node.get("spec", {}), node["metadata"].get("labels", {})
    if spec.get("unschedulable"):
        return "node(s) were unschedulable"
    tolerations = pod["spec"].get("tolerations", [])
    for taint in spec.get("taints", []):
        is_hard = taint["effect"] != "PreferNoSchedule"
        if is_hard and not any(_tolerates(each, taint) for each in tolerations):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    wanted = pod["spec"].get("nodeSelector", {})
    if any(labels.get(name) != value for name, value in wanted.items()) or not _has_affinity(pod, node):
        return "node(s) didn't match Pod's node affinity/selector"
    allocatable = node.get("status", {}).get("allocatable", {})
    for name, value in needs(pod).items():
        if used[name] + value > quantity(allocatable.get(name, 0)):
            return f"Insufficient {name}"
    return None


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _has_affinity(pod: Object, node: Object) -> bool:
    rule = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = rule.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    fields = {"metadata.name": node["metadata"]["name"]}
    labels = node["metadata"].get("labels", {})
    return not terms or any(
        all(_meets(each, fields) for each in term.get("matchFields", []))
        and all(_meets(each, labels) for each in term.get("matchExpressions", []))
        for term in terms
    )


def _meets(expression: Object, have: dict[str, str]) -> bool:
    value = have.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise NotImplementedError(f"operator {expression['operator']}")
