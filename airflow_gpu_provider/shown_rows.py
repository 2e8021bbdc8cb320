"""The rows that the commands of `airflow gpu` print, from the rows that the broker tells.

Text for people in every column; what is not known is shown as N/A. The next step is `commands.print_rows`.
"""

from __future__ import annotations

from typing import Any

from airflow_gpu_provider.rows import (
    DrainRow,
    HolderRow,
    LeaseRow,
    NodeRow,
    QueueRow,
    RedundancyRow,
    ThroughputRow,
)


def _shown(value: object) -> object:
    """Return `value` for people: what is not known is not 0."""
    return "N/A" if value is None else value


def device_rows(node: NodeRow) -> list[dict[str, Any]]:
    """Return a row for each device of a node."""
    return [
        {
            "node": node.name,
            "host": node.host,
            "device": device.id,
            "model": device.model + (" (simulated)" if device.simulated else ""),
            "memory_gib": round(device.memory_mib / 1024, 1),
            "state": device.state,
            "utilisation": _shown(None if device.utilisation is None else f"{device.utilisation:.0%}"),
            "holder_or_reason": "; ".join([*map(_holder, device.holders), *filter(None, [device.why])]),
            "report_age_s": node.report_age_s,
            "latency_ms": _latency(node),
        }
        for device in node.devices
    ]


def _latency(node: NodeRow) -> str:
    """Return the range of what was measured to other nodes, and the way that loses most."""
    known = sorted(node.latency_ms.values())
    if not known:
        return "N/A"
    text = f"{known[0]:g} to {known[-1]:g} ({len(known)})" if len(known) > 1 else f"{known[0]:g} (1)"
    worst = max(node.loss, key=node.loss.__getitem__, default=None)
    return text if worst is None else f"{text}, {node.loss[worst]:.0%} lost to {worst}"


def queue_row(row: QueueRow) -> dict[str, Any]:
    """Return a waiting claim."""
    return {
        "position": _shown(row.position),
        "task": f"{row.key.dag_id}.{row.key.task_id}",
        "run": row.key.run_id,
        "map_index": row.key.map_index,
        "team": row.team or "",
        "asked": row.asked,
        "value": row.value,
        "score": row.score_why,
        "waiting_s": row.waiting_s,
        "starts_in_s": _shown(row.starts_in_s),
        "preemptions": row.preemptions,
        "reason": _shown(row.reason),
        "claim": row.claim_id,
    }


def throughput_row(row: ThroughputRow) -> dict[str, Any]:
    """Return how fast a class of tasks was on a model."""
    return {
        "task_class": row.task_class,
        "model": row.model,
        "runs": row.runs,
        "units_per_s": f"{row.units_per_s:.4g}",
        "rating": _shown(row.rating),
        "speed": _shown(None if row.speed is None else round(row.speed, 1)),
        "counts": "yes" if row.counts else f"no: {row.why_not}",
    }


def redundancy_row(row: RedundancyRow) -> dict[str, Any]:
    """Return how many redundant shards trainings get, and why."""
    return {
        "task_class": row.task_class or "(all)",
        "model": row.model or "(all)",
        "redundant": f"{row.share:.1%}",
        "failure_rate": f"{row.failure_rate:.1%}",
        "reason": row.reason,
    }


def until(row: DrainRow) -> str:
    """Return until when, where there is an end."""
    return "" if row.until is None else f" until {row.until.isoformat(timespec='seconds')}"


def drain_row(row: DrainRow) -> dict[str, Any]:
    """Return what is drained."""
    return {
        "scope": row.scope,
        "target": row.target,
        "reason": row.reason,
        "by": row.by,
        "since": row.since.isoformat(timespec="seconds"),
        "until": "undrained" if row.until is None else row.until.isoformat(timespec="seconds"),
    }


def _holder(row: HolderRow) -> str:
    return _part(row.task, row.share)


def _part(name: str, share: float) -> str:
    return name if share == 1 else f"{name} ({share:g} of it)"


def lease_row(row: LeaseRow) -> dict[str, Any]:
    """Return a live lease."""
    return {
        "task": f"{row.key.dag_id}.{row.key.task_id}",
        "run": row.key.run_id,
        "map_index": row.key.map_index,
        "try": row.key.try_number,
        "owner": _shown(row.owner),
        "team": row.team or "",
        "devices": ", ".join(map(_part, row.devices, row.shares)),
        "nodes": ", ".join(row.nodes),
        "granted_at": row.granted_at.isoformat(timespec="seconds"),
        "expires_in_s": row.expires_in_s,
        "move": row.move or "",
        "taken_back": row.taken_back or "",
        "lease": row.lease_id,
    }
