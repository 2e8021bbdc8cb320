"""Route for agents: reports of nodes."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.reports import ReportAnswer, ReportBody
from airflow_gpu_provider.server.auth import Role
from airflow_gpu_provider.server.program_route import Call, Forbidden, program_route


async def report(call: Call) -> ReportAnswer:
    """Take a report. A token that is bound to a node may report that node only."""
    body, bound_to = await call.body(ReportBody), call.identity.node
    foreign = sorted(node.name for node in body.nodes if bound_to is not None and node.name != bound_to)
    if foreign:
        raise Forbidden(
            f"This token speaks for node {bound_to}; it reported {', '.join(foreign)}.", reason="foreign_node"
        )
    if call.broker.desk.is_open:  # all in memory
        return call.broker.report(body)
    return await run_in_threadpool(call.broker.report, body)


ROUTES = [program_route("POST", "/v1/agents/report", report, Role.AGENT)]
