"""What is checked and filled in before an object is stored.

Names and labels by the rules of the API, defaults of pods as far as clients rely on them, and the schema of
one Kubernetes version (package `kubernetes-validate`), strict: a misspelt field is refused. Webhooks of a
real cluster refuse more than that.
"""

from __future__ import annotations

import copy
import re
import secrets
from typing import Any

from tests.kubernetes import schemas
from tests.kubernetes.errors import bad_request, invalid
from tests.kubernetes.resources import ResourceType

Object = dict[str, Any]

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_TOLERATES_UNREACHABLE = [
    {
        "key": f"node.kubernetes.io/{key}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 300,
    }
    for key in ("not-ready", "unreachable")
]


class Admission:
    """Refuses or completes new objects. ``schemas`` names a Kubernetes version, None checks no schema."""

    def __init__(self, schemas: str | None = None) -> None:
        self.schemas = schemas

    def admitted(self, resource: ResourceType, namespace: str, body: Object) -> Object:
        """Return the object to store, or raise what the API answers."""
        new = copy.deepcopy(body)
        self._check_type(resource, new)
        metadata = new.setdefault("metadata", {})
        self._name(resource, namespace, metadata)
        for key, value in (metadata.get("labels") or {}).items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(str(value)):
                raise invalid(
                    resource.kind, metadata["name"], f"metadata.labels: Invalid value: {key}={value!r}"
                )
        self.check_schema(resource, new)
        if resource.plural == "pods":
            _complete_pod(new)
        elif resource.has_status and resource.plural != "nodes":
            new["status"] = {}
        return new

    def check_schema(self, resource: ResourceType, each: Object) -> None:
        if self.schemas is not None and resource.is_builtin:
            schemas.check(each, self.schemas)

    def _check_type(self, resource: ResourceType, new: Object) -> None:
        new.setdefault("apiVersion", resource.api_version)
        new.setdefault("kind", resource.kind)
        if (new["apiVersion"], new["kind"]) != (resource.api_version, resource.kind):
            raise bad_request(
                f"{new['kind']} in version {new['apiVersion']} cannot be handled as a {resource.kind}"
            )

    def _name(self, resource: ResourceType, namespace: str, metadata: Object) -> None:
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise invalid(
                    resource.kind, "", "metadata.name: Required value: name or generateName is required"
                )
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        name, is_service = metadata["name"], resource.kind == "Service"
        rule, longest = (_DNS_LABEL, 63) if is_service else (_SUBDOMAIN, 253)
        if len(name) > longest or not rule.fullmatch(name):
            raise invalid(resource.kind, name, f"metadata.name: Invalid value: {name!r}")
        if resource.is_namespaced:
            if metadata.setdefault("namespace", namespace) != namespace:
                raise bad_request("the namespace of the provided object does not match the namespace sent")
        elif metadata.get("namespace"):
            raise bad_request("namespace is not allowed on this type")


def _complete_pod(pod: Object) -> None:
    spec = pod["spec"]
    for name, default in (
        ("restartPolicy", "Always"),
        ("schedulerName", "default-scheduler"),
        ("terminationGracePeriodSeconds", 30),
        ("serviceAccountName", "default"),
        ("priority", 0),
    ):
        spec.setdefault(name, default)
    tolerations = spec.setdefault("tolerations", [])
    tolerated = {each.get("key") for each in tolerations}
    tolerations += [each for each in _TOLERATES_UNREACHABLE if each["key"] not in tolerated]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        _complete_container(pod["metadata"]["name"], container)
    if spec.get("hostname") and len(spec["hostname"]) > 63:
        raise invalid("Pod", pod["metadata"]["name"], "spec.hostname: must be no more than 63 characters")
    pod["status"] = {"phase": "Pending", "qosClass": "Burstable"}


def _complete_container(pod: str, container: Object) -> None:
    container.setdefault("imagePullPolicy", "IfNotPresent")
    resources = container.setdefault("resources", {})
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, value in limits.items():
        if "/" in name and str(requests.get(name, value)) != str(value):
            raise invalid("Pod", pod, f"{name}: Invalid value: must be equal to {name} limit of {value}")
    for name in requests:
        if "/" in name and name not in limits:
            raise invalid(
                "Pod", pod, f"{name}: Required value: Limit must be set for non overcommitable resources"
            )
    if limits:
        resources["requests"] = {**limits, **requests}
