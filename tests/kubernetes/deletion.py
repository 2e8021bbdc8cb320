"""What it takes until an object is gone: grace, finalizers, owners.

A pod on a node is removed by its kubelet, or at once with grace 0; an object with finalizers when the last of
them is taken off; what is owned when all its owners are gone (`collect_garbage`). Orphaning is not imitated.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from tests.kubernetes.errors import ApiError, conflict
from tests.kubernetes.object_store import Change, Name, ObjectStore, name_of, timestamp
from tests.kubernetes.resources import ResourceType, ResourceTypes

Object = dict[str, Any]

_FOREGROUND = "foregroundDeletion"
_OVER = frozenset({"Succeeded", "Failed"})


class Deletion:
    """Deletes objects of a store."""

    def __init__(self, store: ObjectStore, types: ResourceTypes) -> None:
        self._store = store
        self._types = types

    def delete(self, resource: ResourceType, name: Name, options: Object) -> Object:
        """Begin a deletion; return the object as it is then."""
        found = self._store.get(resource, name)
        self._check_preconditions(resource, found, options)
        policy = options.get("propagationPolicy", "Background")
        if policy == "Orphan":
            raise ApiError(501, "NotImplemented", "orphaning is not imitated")
        metadata = dict(found["metadata"])
        if policy == "Foreground" and _FOREGROUND not in metadata.get("finalizers", []):
            metadata["finalizers"] = [*metadata.get("finalizers", []), _FOREGROUND]
        grace = self._grace(resource, found, options.get("gracePeriodSeconds"))
        if grace == 0 and not metadata.get("finalizers"):
            return self._store.remove(resource, name)
        held = metadata.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" not in metadata or (held is not None and grace < held):
            at = datetime.now(timezone.utc) + timedelta(seconds=grace)
            metadata |= {"deletionTimestamp": timestamp(at), "deletionGracePeriodSeconds": grace}
        return self._store.replace(resource, {**found, "metadata": metadata})

    def finish(self, resource: ResourceType, each: Object) -> Object:
        """Remove what waits for nothing any more; return the object as it is then."""
        metadata = each["metadata"]
        if "deletionTimestamp" not in metadata or metadata.get("finalizers"):
            return each
        if metadata.get("deletionGracePeriodSeconds", 0) > 0:
            return each
        return self._store.remove(resource, name_of(each))

    def on_change(self, change: Change) -> None:
        """Delete what belongs to what was removed, or is being removed with all that belongs to it."""
        if change.after is None:
            gone = change.before or {}
            self._delete_dependents(gone["metadata"]["uid"])
            for owner in gone["metadata"].get("ownerReferences", []):
                self._end_foreground(owner["uid"])
        elif _FOREGROUND in change.after["metadata"].get("finalizers", []):
            self._delete_dependents(change.after["metadata"]["uid"])
            self._end_foreground(change.after["metadata"]["uid"])

    def _delete_dependents(self, owner: str) -> None:
        for resource, each in self._owned_by(owner):
            others = (one for one in each["metadata"]["ownerReferences"] if one["uid"] != owner)
            if self._store.find(resource, name_of(each)) and not any(
                self._lives(each, one) for one in others
            ):
                self.delete(resource, name_of(each), {})

    def _owned_by(self, owner: str) -> list[tuple[ResourceType, Object]]:
        return [
            (resource, each)
            for resource, each in self._store.everything()
            if any(one["uid"] == owner for one in each["metadata"].get("ownerReferences", []))
        ]

    def _end_foreground(self, uid: str) -> None:
        """Let an owner go whose deletion waited for what belongs to it."""
        owners = [(of, each) for of, each in self._store.everything() if each["metadata"]["uid"] == uid]
        for resource, owner in owners:
            finalizers = owner["metadata"].get("finalizers", [])
            if _FOREGROUND in finalizers and not self._owned_by(uid):
                kept = [one for one in finalizers if one != _FOREGROUND]
                freed = {**owner, "metadata": {**owner["metadata"], "finalizers": kept}}
                self.finish(resource, self._store.replace(resource, freed))

    def _lives(self, owned: Object, owner: Object) -> bool:
        resource = self._types.of_kind(owner["apiVersion"], owner["kind"])
        if resource is None:
            return False
        namespace = owned["metadata"].get("namespace", "") if resource.is_namespaced else ""
        found = self._store.find(resource, (namespace, owner["name"]))
        return found is not None and found["metadata"]["uid"] == owner["uid"]

    def _grace(self, resource: ResourceType, found: Object, asked: int | None) -> int:
        if resource.plural != "pods":
            return 0
        is_waiting = not found["spec"].get("nodeName")
        if is_waiting or found["status"]["phase"] in _OVER:
            return 0
        return int(found["spec"]["terminationGracePeriodSeconds"]) if asked is None else int(asked)

    def _check_preconditions(self, resource: ResourceType, found: Object, options: Object) -> None:
        for field, wanted in (options.get("preconditions") or {}).items():
            held = found["metadata"].get(field)
            if wanted is not None and held != wanted:
                raise conflict(
                    resource.qualified,
                    found["metadata"]["name"],
                    f"Precondition failed: {field} in precondition: {wanted}, in object meta: {held}",
                )
