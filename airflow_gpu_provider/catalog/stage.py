"""A stage of the pipeline and the fingerprint of what it would do to a product.

A result may be reused only when its fingerprint is the same: entry point, parameters, product version, source
row, and the fingerprint of the stage before (so that a change upstream redoes what is downstream). The code
behind an entry point is not part of it: after changing code, ask for a redo. Next step: `runner`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from airflow_gpu_provider.catalog.product import Product
from airflow_gpu_provider.exceptions import InvalidRequest

StageFunction = Callable[[Product], Mapping[str, object]]

_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class Stage:
    """One step that every product goes through.

    ``lease`` are arguments of `GpuLeasedOperator` (memory, model, min_tflops, ...); with ``gpus=0`` the stage
    runs on the CPU and asks for no lease.
    """

    name: str
    entrypoint: str
    params: Mapping[str, object] = field(default_factory=dict)
    gpus: int | str = 0
    lease: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _STAGE_NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"stage name {self.name!r}; allowed: lower-case letters, digits and '_', like 'train'"
            )
        check_entrypoint(self.entrypoint)


def check_entrypoint(entrypoint: str) -> str:
    """Refuse what cannot be an entry point, without importing anything."""
    if not isinstance(entrypoint, str) or not _ENTRYPOINT.fullmatch(entrypoint):
        raise InvalidRequest(f"entrypoint {entrypoint!r}; allowed: 'package.module:function'")
    return entrypoint


def load_entrypoint(entrypoint: str) -> StageFunction:
    """Import the function; say what was found when it is not there."""
    module_name, _, attribute = check_entrypoint(entrypoint).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidRequest(
            f"entrypoint {entrypoint!r} cannot be imported: {error}; put the module beside the DAG file or "
            "install its package where tasks run"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = sorted(name for name, item in vars(module).items() if callable(item) and name[0] != "_")
        raise InvalidRequest(
            f"entrypoint {entrypoint!r}: {module_name} has no function {attribute!r}; it has "
            f"{', '.join(names[:10]) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def fingerprint(
    *,
    entrypoint: str,
    params: Mapping[str, object],
    version: str,
    row: Mapping[str, str],
    before: str = "",
) -> str:
    """Return the identity of a result. ``before`` is the fingerprint of the stage before."""
    content = json.dumps(
        [entrypoint, _as_text(params), version, dict(row), before], sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def chained_fingerprint(stages: Sequence[Stage], *, version: str, row: Mapping[str, str]) -> str:
    """Return the identity of a product's final result: the last stage's fingerprint."""
    result = ""
    for stage in stages:
        result = fingerprint(
            entrypoint=stage.entrypoint, params=stage.params, version=version, row=row, before=result
        )
    return result


def _as_text(value: object) -> object:
    """Make 800 and "800" the same: templates render numbers to text."""
    if isinstance(value, Mapping):
        return {str(key): _as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    return str(value)
