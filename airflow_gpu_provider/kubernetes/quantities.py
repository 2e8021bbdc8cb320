"""Quantities of Kubernetes ("500m", "2Gi") in our units."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache

_MIB = 2**20


@lru_cache(maxsize=4096)
def _parsed(quantity: str) -> Decimal:
    from kubernetes.utils.quantity import parse_quantity

    parsed: Decimal = parse_quantity(quantity)
    return parsed


def cores(quantity: object) -> float:
    """Return CPU cores."""
    return float(_parsed(str(quantity)))


def mib(quantity: object) -> int:
    """Return memory in whole MiB."""
    return int(_parsed(str(quantity)) / _MIB)


def count(quantity: object) -> int:
    """Return a number of devices."""
    return int(_parsed(str(quantity)))
