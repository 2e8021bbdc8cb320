"""What NVIDIA's DCGM exporter measures, read from its text, or from Prometheus in the same words.

A metric that is not there is unknown, never 0. `DCGM_FI_DEV_XID_ERRORS` tells the last error's number, and
goes on telling it until the exporter restarts. The next step is `slots`, which matches readings with slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_UTILISATION = "DCGM_FI_DEV_GPU_UTIL"  #: percent
_ACTIVE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"  #: 0..1; for MIG slices, which have no utilisation
_MEMORY_USED = "DCGM_FI_DEV_FB_USED"  #: MiB
_TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
_POWER = "DCGM_FI_DEV_POWER_USAGE"
_XID = "DCGM_FI_DEV_XID_ERRORS"
METRICS = (_UTILISATION, _ACTIVE, _MEMORY_USED, _TEMPERATURE, _POWER, _XID)

#: the names that labels had in one version or another, and those that Prometheus gives them
_POD = ("exported_pod", "pod", "pod_name")
_NAMESPACE = ("exported_namespace", "namespace", "pod_namespace")
_NODE = ("Hostname", "hostname", "node", "kubernetes_node")


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU or MIG slice as it was measured."""

    uuid: str
    index: int
    node: str = ""  #: empty where the text does not tell
    profile: str | None = None  #: of a MIG slice
    slice_id: str | None = None
    pod: tuple[str, str] | None = None  #: namespace and name of the pod that has it
    utilisation: float | None = None  #: 0..1
    memory_used_mib: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    xid: int | None = None  #: the last error, None when there was none


def readings(text: str) -> tuple[Reading, ...]:
    """Return what a text of metrics tells, in the order of the GPUs."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, str, str], dict[str, float]] = {}
    labels: dict[tuple[str, str, str], Mapping[str, str]] = {}
    for family in text_string_to_metric_families(_relevant(text)):
        for sample in family.samples:
            key = (
                _first(sample.labels, _NODE),
                sample.labels.get("UUID", ""),
                sample.labels.get("GPU_I_ID", ""),
            )
            if key[1] and not math.isnan(sample.value):
                values.setdefault(key, {})[sample.name] = sample.value
                labels[key] = sample.labels
    found = (_reading(key, labels[key], values[key]) for key in values)
    return tuple(sorted(found, key=lambda each: (each.node, each.index, each.slice_id or "")))


def _relevant(text: str) -> str:
    """Return the lines that are read: the exporter tells several times more."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith(METRICS))


def _reading(key: tuple[str, str, str], labels: Mapping[str, str], values: Mapping[str, float]) -> Reading:
    pod, xid = _first(labels, _POD), values.get(_XID)
    index = labels.get("gpu", "")
    return Reading(
        uuid=key[1],
        index=int(index) if index.isdecimal() else 0,
        node=key[0],
        profile=labels.get("GPU_I_PROFILE") or None,
        slice_id=key[2] or None,
        pod=(_first(labels, _NAMESPACE), pod) if pod else None,
        utilisation=_utilisation(values),
        memory_used_mib=None if _MEMORY_USED not in values else int(values[_MEMORY_USED]),
        temperature_c=values.get(_TEMPERATURE),
        power_w=values.get(_POWER),
        xid=int(xid) if xid else None,
    )


def _utilisation(values: Mapping[str, float]) -> float | None:
    percent = values.get(_UTILISATION)
    return values.get(_ACTIVE) if percent is None else percent / 100


def _first(labels: Mapping[str, str], names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")
