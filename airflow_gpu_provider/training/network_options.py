"""What the author of a training says of the network: thresholds, interfaces, a schedule to repeat.

Read by `DistributedTrainingOperator(network=...)` when the DAG is read, and part of the plan. Without torch.
Next: `network_watch` acts on latencies, `interfaces` on the interfaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from airflow_gpu_provider.exceptions import InvalidRequest

#: A longer interval than this multiple of the author's is a choice for the author.
_USUAL_FACTOR = 4
_INTERFACE = re.compile(r"[^\s,/=^:]{1,15}")

_Interval = Annotated[int, Field(ge=1)]


class NetworkOptions(BaseModel):
    """How a run meets its network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: the slowest hop between shards may take this long before the interval becomes longer; None = any
    latency_threshold_ms: float | None = Field(default=50.0, gt=0)
    #: steps between two synchronisations at most; None = four times `sync_interval`
    sync_interval_max: int | None = Field(default=None, ge=1)
    #: network interfaces to talk over, several = several paths
    interfaces: Literal["auto"] | tuple[str, ...] = "auto"
    #: InfiniBand adapters for NCCL, in NCCL's words; None = as installed
    ib_hca: str | None = Field(default=None, min_length=1)
    #: (step, interval) pairs of an earlier run's run.json: repeats it, whatever the latency; None = none
    sync_schedule: tuple[tuple[Annotated[int, Field(ge=0)], _Interval], ...] | None = None

    @field_validator("interfaces", mode="before")
    @classmethod
    def _interfaces_have_names(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) and value != "auto" else value
        if isinstance(names, list | tuple):
            wrong = [name for name in names if not _INTERFACE.fullmatch(str(name))]
            if wrong or not names:
                raise ValueError(f"{wrong or names!r}: give names as `ip link` shows them, such as ['eth0']")
        return names

    @field_validator("sync_schedule")
    @classmethod
    def _steps_grow(cls, value: tuple[tuple[int, int], ...] | None) -> tuple[tuple[int, int], ...] | None:
        if any(later[0] <= earlier[0] for earlier, later in pairwise(value or ())):
            raise ValueError("its steps must grow")
        return value

    def longest(self, sync_interval: int) -> int:
        """Return the longest interval that is allowed."""
        return self.sync_interval_max or _USUAL_FACTOR * sync_interval


def network_options(value: NetworkOptions | Mapping[str, Any] | None) -> NetworkOptions:
    """Return what the author means. Raise InvalidRequest that says what is wrong."""
    if isinstance(value, NetworkOptions):
        return value
    try:
        return NetworkOptions.model_validate(value or {})
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'network'}: {each['msg']}" for each in error.errors()
        )
        known = ", ".join(NetworkOptions.model_fields)
        raise InvalidRequest(f"network={value!r}: {wrong}. Its fields are {known}.") from error
