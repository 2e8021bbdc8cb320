"""Which kinds of objects the imitated API server knows, and how it tells clients (discovery).

Invariant: nothing is served that is not in the table, as on a real server without that custom resource. The
next step is `api_server`, which finds the type of a path here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.errors import not_found

_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class ResourceType:
    """A kind of object, and the part of a path that stands for it."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    is_namespaced: bool = True
    short: tuple[str, ...] = ()
    has_status: bool = False  #: its status is written by itself, under /status
    subresources: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The name in errors: "pods", "jobs.batch"."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def is_builtin(self) -> bool:
        return "." not in self.group or (self.group.endswith(".k8s.io") and "x-k8s" not in self.group)


BUILTIN = (
    ResourceType(
        "pods", "Pod", short=("po",), has_status=True, subresources=("binding", "eviction", "log", "status")
    ),
    ResourceType("nodes", "Node", is_namespaced=False, short=("no",), has_status=True),
    ResourceType("namespaces", "Namespace", is_namespaced=False, short=("ns",), has_status=True),
    ResourceType("services", "Service", short=("svc",), has_status=True),
    ResourceType("events", "Event", short=("ev",)),
    ResourceType("configmaps", "ConfigMap", short=("cm",)),
    ResourceType("secrets", "Secret"),
    ResourceType("serviceaccounts", "ServiceAccount", short=("sa",)),
    ResourceType("leases", "Lease", "coordination.k8s.io"),
    ResourceType("jobs", "Job", "batch", has_status=True),
)


class ResourceTypes:
    """The table of one server; custom resources are added to it."""

    def __init__(self, more: Iterable[ResourceType] = ()) -> None:
        self.all = [*BUILTIN, *more]

    def find(self, group: str, version: str, plural: str) -> ResourceType:
        for each in self.all:
            if (each.group, each.version, each.plural) == (group, version, plural):
                return each
        raise not_found("the server could not find the requested resource")

    def of_kind(self, api_version: str, kind: str) -> ResourceType | None:
        found = (each for each in self.all if (each.api_version, each.kind) == (api_version, kind))
        return next(found, None)

    def core_versions(self) -> dict[str, Any]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}

    def groups(self) -> dict[str, Any]:
        versions: dict[str, list[str]] = {}
        for each in self.all:
            if each.group and each.version not in versions.setdefault(each.group, []):
                versions[each.group].append(each.version)
        groups = [
            {
                "name": group,
                "versions": [{"groupVersion": f"{group}/{one}", "version": one} for one in found],
                "preferredVersion": {"groupVersion": f"{group}/{found[0]}", "version": found[0]},
            }
            for group, found in versions.items()
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def resources(self, group: str, version: str) -> dict[str, Any]:
        found = [each for each in self.all if (each.group, each.version) == (group, version)]
        if not found:
            raise not_found("the server could not find the requested resource")
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": found[0].api_version,
            "resources": [entry for each in found for entry in _entries(each)],
        }


def _entries(resource: ResourceType) -> list[dict[str, Any]]:
    common = {"namespaced": resource.is_namespaced, "kind": resource.kind}
    main = {
        **common,
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "verbs": list(_VERBS),
        "shortNames": list(resource.short),
    }
    below = resource.subresources or (("status",) if resource.has_status else ())
    subs = [
        {
            **common,
            "name": f"{resource.plural}/{sub}",
            "singularName": "",
            "verbs": ["get", "patch", "update"],
        }
        for sub in below
    ]
    return [main, *subs]
