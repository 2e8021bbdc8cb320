"""Route for agents: reports of nodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, status
from starlette.concurrency import run_in_threadpool

from airflow_gpu_provider.server.auth import Identity, Role, requires
from airflow_gpu_provider.server.claims_api import BrokerDep
from airflow_gpu_provider.wire import ReportAnswer, ReportBody

router = APIRouter(prefix="/v1/agents")

AgentDep = Annotated[Identity, Depends(requires(Role.AGENT))]


@router.post("/report")
async def report(body: ReportBody, agent: AgentDep, broker: BrokerDep) -> ReportAnswer:
    """Take a report. A token that is bound to a node may report that node only."""
    foreign = sorted(node.name for node in body.nodes if agent.node is not None and node.name != agent.node)
    if foreign:
        raise HTTPException(
            status.HTTP_403_FORBIDDEN,
            {
                "reason": "foreign_node",
                "message": f"This token speaks for node {agent.node}; it reported {', '.join(foreign)}.",
            },
        )
    return await run_in_threadpool(broker.report, body)
