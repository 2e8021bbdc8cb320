"""What teams own of the fleet, as the setting `[gpu] quotas` says it.

Each team owns a number of devices or a part of the fleet, has a weight for what it borrows, and perhaps a
limit. The next step is `fair_share`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from airflow_gpu_provider.exceptions import InvalidRequest

#: None = the claims and leases of no team; they own nothing and share as one team of weight 1.
Team: TypeAlias = str | None

_EXAMPLE = '{"vision": {"devices": 8, "weight": 2}, "text": {"share": 0.25, "limit": 16}}'
_FIELDS = frozenset({"devices", "share", "weight", "limit"})


@dataclass(frozen=True, slots=True)
class Quota:
    """What a team owns: ``devices``, or a ``share`` 0..1 of the fleet; and how it may borrow."""

    devices: float = 0.0
    share: float | None = None
    weight: float = 1.0  #: of its claim to what is borrowed
    limit: float | None = None  #: most devices it may hold, borrowed ones included


_NOTHING = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quotas by team; empty = no quotas."""

    by_team: Mapping[str, Quota] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Quotas:
        """Return the quotas written as JSON; raise InvalidRequest that names the team and what to write."""
        if not text.strip():
            return cls()
        try:
            teams = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"quotas are no JSON ({error}): write such as {_EXAMPLE}") from None
        if not isinstance(teams, dict):
            raise InvalidRequest(f"quotas are no JSON object by team: write such as {_EXAMPLE}")
        quotas = cls({team: _quota(team, fields) for team, fields in teams.items()})
        given = sum(each.share or 0.0 for each in quotas.by_team.values())
        if given > 1 + 1e-9:
            raise InvalidRequest(f"the shares of all teams add up to {given:g}: at most 1 can be given")
        return quotas

    def of(self, team: Team) -> Quota:
        """Return a team's quota; one that nobody set owns nothing."""
        return _NOTHING if team is None else self.by_team.get(team, _NOTHING)


NO_QUOTAS = Quotas()


def _quota(team: str, fields: object) -> Quota:
    if not isinstance(fields, dict) or not fields or fields.keys() - _FIELDS:
        raise InvalidRequest(
            f"quota of team {team!r} is {fields!r}: write an object of {', '.join(sorted(_FIELDS))}, "
            f"such as {_EXAMPLE}"
        )
    for name, value in fields.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or (name == "weight" and value == 0):
            raise InvalidRequest(
                f"{name} of team {team!r} is {value!r}: write 0 or more, and a weight above 0"
            )
    quota = Quota(**{name: float(value) for name, value in fields.items()})
    if quota.share is not None and (quota.share > 1 or "devices" in fields):
        raise InvalidRequest(
            f"team {team!r} has share={quota.share:g}"
            + (" and devices: give one of them" if "devices" in fields else ": the whole fleet is 1")
        )
    return quota
