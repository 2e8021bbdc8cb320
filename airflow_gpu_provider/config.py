"""The settings of the provider; the only reader of Airflow's `[gpu]` section.

Each option is one field with its default, range and the sentence that documents it, so that the reference
in the docs and Airflow's own configuration listing are generated from here and cannot drift.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from airflow_gpu_provider.broker.flavor_table import EXAMPLE, parse_flavors
from airflow_gpu_provider.broker.flavors import Flavor
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, CyclePolicy
from airflow_gpu_provider.broker.preemption_policy import PreemptionPolicy
from airflow_gpu_provider.broker.quota import Quotas
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.option_names import refuse_unknown

SECTION = "gpu"
_SECRETS = ("token_secret", "sql_alchemy_conn")
_TYPES: dict[type, str] = {float: "float", int: "integer", bool: "boolean", str: "string"}


class Settings(BaseModel):
    """Options of section `[gpu]`; lengths of time are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_secret: str = Field(
        "",
        description="Key that signs broker tokens and lease secrets; the same on every API server. "
        "Empty: derived from `[api_auth] jwt_secret`.",
    )
    sql_alchemy_conn: str = Field(
        "",
        description="Database of the broker as an SQLAlchemy URL (SQLite or PostgreSQL). Empty: Airflow's "
        "metadata database.",
    )
    lease_ttl_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="A lease that is not renewed for this long ends; its holder renews it every sixth of it. "
        "60: work goes on through 37 s without a broker, such as a restart of the only API server.",
    )
    collect_within_s: float = Field(
        120.0, ge=1, le=3600, description="A granted lease that its task has not collected by then ends."
    )
    stale_after_s: float = Field(
        10.0,
        ge=2,
        le=600,
        description="Devices of a node that has not reported for this long are not offered.",
    )
    forget_nodes_after_s: float = Field(
        86_400.0,
        ge=60,
        le=3660 * 86_400,
        description="A node that has not reported for this long no longer belongs to the fleet.",
    )
    impossible_for_s: float = Field(
        3600.0,
        ge=0,
        le=366 * 86_400,
        description="A waiting claim that became impossible, since devices left the fleet, is rejected after "
        "this long; it is told so, and queued again as soon as they are back. What the fleet never had is "
        "rejected at once.",
    )
    history_days: float = Field(
        30.0,
        gt=0,
        le=36_600,
        description="Claims and leases that ended this long ago are deleted, and what was learned of "
        "them is, in days.",
    )
    measured_throughput: bool = Field(
        True,
        description="Prefer GPU models by how fast finished runs of the same task class were on them, as "
        "soon as there are a few on two models. False: by their ratings only.",
    )
    report_interval_s: float = Field(
        1.0, ge=0.1, le=60, description="How often an agent reports its devices."
    )
    leader_ttl_s: float = Field(
        1.0, ge=0.5, le=60, description="A replica takes over when the leader has been silent this long."
    )
    standby_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description="A deferred task resumes this long before its expected start, so that a device does not "
        "idle while Airflow brings the task back. 0: resume only when granted.",
    )
    max_load: float = Field(
        0.5, gt=0, le=1, description="Nodes with a CPU load above this share are not offered."
    )
    ageing_per_min: float = Field(
        0.02,
        ge=0,
        description="Points of value a waiting claim gains a minute, so that nobody starves. 0.02: whoever "
        "waits 50 minutes longer is ahead of one more point.",
    )
    small_first: float = Field(
        1.0,
        ge=0,
        description="Points of value a claim loses each time its work (devices times `max_runtime`, 4 hours "
        "if not given) doubles, so that among equals short work goes first. 0: in order of arrival.",
    )
    readiness_boost: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Points of value that a claim gains at most by being ready: half for the part of its "
        "`artifacts` that a node holds, half for how much of its DAG run is done with it. Below 1, so it "
        "never outweighs value. 0: none.",
    )
    backfill_penalty: float = Field(
        1000.0,
        ge=0,
        description="Points of value a claim of a backfill run loses, so that live work goes first.",
    )
    most_sharers: int = Field(
        8,
        ge=1,
        le=30,
        description="At most so many tasks share a device: each counts with at least such a part. 1: who "
        "asks for a share gets a whole device.",
    )
    reservation_notice_s: float = Field(
        3600.0,
        ge=0,
        le=366 * 86_400,
        description="So long before a reservation starts, claims of others that promise no `max_runtime` are "
        "kept off its devices. Claims with a promise are let in if they end in time.",
    )
    preemption_grace_s: float = Field(
        30.0,
        ge=1,
        le=3600,
        description="How long work has to save itself when its devices are taken back for other work.",
    )
    preemption_least_runtime_s: float = Field(
        300.0, ge=0, le=366 * 86_400, description="No lease is taken back before it has lasted so long."
    )
    preemption_budget: int = Field(
        3,
        ge=0,
        description="Work that was preempted so often runs on. 0: nobody is ever preempted.",
    )
    preemption_least_gain: float = Field(
        0.0,
        ge=0,
        description="A claim must be worth more than what it preempts by so many points of value.",
    )
    priority_hook: bool = Field(
        True,
        description="Set the priority weight of this provider's tasks from the DAG run's `priority` and "
        "type. Airflow then creates task instances one by one instead of in bulk, for all DAGs.",
    )
    quotas: str = Field(
        "",
        description="What teams own, as JSON: for each team `devices` or a `share` 0..1 of the fleet, the "
        "`weight` with which it borrows what others leave, and the `limit` of what it may hold, such as "
        '{"vision": {"devices": 8, "weight": 2}, "text": {"share": 0.25, "limit": 16}}. '
        "Empty: no team owns anything, and order is by value alone.",
    )
    flavors: str = Field(
        "",
        description="GPU models that the built-in table lacks, or has otherwise, as JSON: memory and TFLOPS "
        f"by precision, or a rating on the scale A100 = 35, V100 = 15. For example {EXAMPLE}.",
    )
    cost_band: float = Field(
        50.0,
        ge=0,
        description="Among placements whose cost is within this many milli-GPU of the best, the least loaded "
        "node is taken.",
    )

    @field_validator("quotas")
    @classmethod
    def _check_quotas(cls, text: str) -> str:
        Quotas.parse(text)
        return text

    @field_validator("flavors")
    @classmethod
    def _check_flavors(cls, text: str) -> str:
        parse_flavors(text)
        return text

    def own_flavors(self) -> Mapping[str, Flavor]:
        """Return the models of the option `flavors`."""
        return parse_flavors(self.flavors)

    @classmethod
    def load(cls) -> Settings:
        """Read `[gpu]` of Airflow's configuration. Raise InvalidRequest that names the wrong option."""
        from airflow.configuration import conf

        given = {}
        refuse_unknown(conf.getsection(SECTION) or (), cls.model_fields)
        for name in cls.model_fields:
            value = conf.get(SECTION, name, fallback=None)
            if value not in (None, ""):
                given[name] = value.strip() if isinstance(value, str) else value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            option = ".".join(str(part) for part in first["loc"])
            shown = "***" if option in _SECRETS else repr(first.get("input"))
            raise InvalidRequest(
                f"[gpu] {option} = {shown}: {first['msg']}. {cls.model_fields[option].description}",
                reason="invalid_setting",
            ) from None

    def signing_key(self) -> str:
        """Return the key for tokens and lease secrets; raise InvalidRequest when there is none."""
        if self.token_secret:
            return self.token_secret
        from airflow.configuration import conf

        jwt_secret = conf.get("api_auth", "jwt_secret", fallback="")
        if not jwt_secret:
            raise InvalidRequest(
                "The broker has no key to sign tokens with: set [gpu] token_secret or [api_auth] jwt_secret "
                "to one long random value on every API server.",
                reason="no_signing_key",
            )
        # A key of its own, so that a leaked broker token key does not sign Airflow users in.
        return hmac.new(
            jwt_secret.encode(), b"airflow-gpu-provider broker tokens", hashlib.sha256
        ).hexdigest()

    def database_url(self) -> str:
        """Return the SQLAlchemy URL of the broker's tables."""
        if self.sql_alchemy_conn:
            return self.sql_alchemy_conn
        from airflow.configuration import conf

        return str(conf.get("database", "sql_alchemy_conn"))

    @property
    def least_milli(self) -> int:
        """The smallest share of a device, in milli-GPU."""
        return WHOLE_DEVICE // self.most_sharers

    def team_quotas(self) -> Quotas:
        """Return what teams own."""
        return Quotas.parse(self.quotas)

    def preemption_policy(self) -> PreemptionPolicy:
        """Return when leases may be taken back."""
        return PreemptionPolicy(
            grace=timedelta(seconds=self.preemption_grace_s),
            least_runtime=timedelta(seconds=self.preemption_least_runtime_s),
            budget=self.preemption_budget,
            least_gain=self.preemption_least_gain,
            backfill_penalty=self.backfill_penalty,
        )

    def cycle_policy(self) -> CyclePolicy:
        """Return what the pure core needs of these settings."""
        return CyclePolicy(
            max_load=self.max_load,
            ageing_per_min=self.ageing_per_min,
            small_first=self.small_first,
            readiness_boost=self.readiness_boost,
            backfill_penalty=self.backfill_penalty,
            cost_band=self.cost_band,
            impossible_for=timedelta(seconds=self.impossible_for_s),
            reservation_notice=timedelta(seconds=self.reservation_notice_s),
        )


def config_section() -> dict[str, object]:
    """Return `[gpu]` as Airflow's provider info describes configuration."""
    options = {
        name: {
            "description": field.description,
            "version_added": "0.1.0",
            "type": _TYPES[type(field.default)],
            "example": None,
            "default": str(field.default),
            **({"sensitive": True} if name in _SECRETS else {}),
        }
        for name, field in Settings.model_fields.items()
    }
    return {SECTION: {"description": "Settings of the GPU broker.", "options": options}}
