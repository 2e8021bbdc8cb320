"""The schemas of Kubernetes versions, strict, as the package `kubernetes-validate` has them.

Its own function reads megabytes of JSON for each object; here a validator is made once a type.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from tests.kubernetes.errors import bad_request


def check(each: dict[str, Any], version: str) -> None:
    """Raise what the API answers to an object that its schema does not allow."""
    errors = _validator(each["kind"], each["apiVersion"], version).iter_errors(each)
    if (first := next(errors, None)) is not None:
        where = ".".join(map(str, first.path))
        raise bad_request(f"strict decoding error: {where}: {first.message[:300]}")


@lru_cache(maxsize=64)
def _validator(kind: str, api_version: str, version: str) -> Any:
    from jsonschema import Draft202012Validator
    from kubernetes_validate.utils import all_versions, schema_contents
    from referencing import Registry, Resource

    full = next(each for each in all_versions() if f"{each}.".startswith(f"{version}."))
    folder = f"kubernetes-json-schema/v{full}-local-strict"
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_contents(f"{folder}/{kind.lower()}-{name}.json", version)
    definitions = schema_contents(f"{folder}/_definitions.json", version)
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return Draft202012Validator(schema, registry=registry)
