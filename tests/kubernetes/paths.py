"""What a path of the API asks for: `/api/v1/namespaces/NS/pods/NAME/status`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kubernetes.errors import not_found
from tests.kubernetes.object_store import Name
from tests.kubernetes.resources import ResourceType, ResourceTypes


@dataclass(frozen=True, slots=True)
class Target:
    """An object, a part of it, or with an empty name all of a type."""

    resource: ResourceType
    namespace: str
    name: str
    subresource: str

    @property
    def key(self) -> Name:
        return self.namespace, self.name


def parsed(path: str, types: ResourceTypes) -> Target:
    """Return what a path asks for; 404 when nothing is there."""
    match path.strip("/").split("/"):
        case ["api", version, *rest] if rest:
            group = ""
        case ["apis", group, version, *rest] if rest:
            pass
        case _:
            raise not_found("the server could not find the requested resource")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] != "status":
        namespace, rest = rest[1], rest[2:]
    resource = types.find(group, version, rest[0])
    name, subresource = [*rest[1:], "", ""][:2]
    is_known = not subresource or subresource in resource.subresources or (
        subresource == "status" and resource.has_status
    )  # fmt: skip
    if len(rest) > 3 or not is_known:
        raise not_found("the server could not find the requested resource")
    return Target(resource, namespace if resource.is_namespaced else "", name, subresource)
