"""Routes that tell what history says: speeds of task classes, redundant shards for trainings."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.rows import RedundancyRow, ThroughputRow
from airflow_gpu_provider.server.auth import Role
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.program_route import Answer, Call, program_route

_OFF = "[gpu] measured_throughput is off"


async def throughput(call: Call) -> Answer:
    """Return how fast each class was on each model."""
    return await run_in_threadpool(_throughput, call.broker)


async def redundancy(call: Call) -> RedundancyRow:
    """Return the share for the next run of a class, on a model and on nodes where these are named."""
    task_class, model = call.word("task_class"), call.word("model")
    nodes = {name for name in (call.word("nodes") or "").split(",") if name}
    if host := call.word("host"):
        nodes |= {each.report.name for each in call.broker.mirror.stored() if each.report.host == host}
    return await run_in_threadpool(
        _redundancy, call.broker, task_class, canonical_model(model) if model else None, sorted(nodes)
    )


async def redundancies(call: Call) -> Answer:
    """Return that of the fleet, and of every class and model of which runs are known."""
    return await run_in_threadpool(_redundancies, call.broker)


def _throughput(broker: Broker) -> list[ThroughputRow]:
    is_on = broker.settings.measured_throughput
    return [
        ThroughputRow(
            task_class=each.task_class,
            model=each.model,
            runs=each.runs,
            units_per_s=each.units_per_s,
            rating=each.rating,
            speed=each.speed,
            counts=is_on and each.why_not is None,
            why_not=each.why_not if is_on else _OFF,
        )
        for each in broker.history.measured()
    ]


def _redundancies(broker: Broker) -> list[RedundancyRow]:
    known = broker.history.kinds_of_runs() or [(None, None)]
    return [_redundancy(broker, task_class, model, []) for task_class, model in known]


def _redundancy(broker: Broker, task_class: str | None, model: str | None, nodes: list[str]) -> RedundancyRow:
    found = broker.history.redundancy(task_class, model, nodes)
    return RedundancyRow(
        task_class=task_class,
        model=model,
        share=found.share,
        failure_rate=found.failure_rate,
        reason=found.reason,
    )


ROUTES = [
    program_route("GET", "/v1/throughput", throughput, Role.TASK),
    program_route("GET", "/v1/redundancy", redundancy, Role.TASK),
    program_route("GET", "/v1/redundancies", redundancies, Role.TASK),
]
