"""How a local stack gets its GPUs: tokens, the connection, the agent and what it reports.

Invariant: a machine without a GPU gets a simulated fleet and people are told so; real and simulated devices
are never mixed (the agent chooses). Next step: `scripts.stack` starts the agent with the command made here.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scripts.airflow_home import AirflowHome, write_private

TOKEN_TTL_S = 30 * 24 * 3600.0  # a stack left running by `make up` for a month
REAL_OR_DEFAULT = "auto"  # the agent: real devices where there are any, else two classes of two


def token(home: AirflowHome, role: str) -> str:
    """Mint a broker token of this role."""
    from airflow_gpu_provider.server.auth import mint_token

    return mint_token(home.secrets().broker, role=role, subject=f"local-{role}", ttl_s=TOKEN_TTL_S)


def connection(home: AirflowHome, url: str) -> str:
    """Return the value of AIRFLOW_CONN_GPU_DEFAULT: how tasks and triggers reach the broker."""
    return json.dumps({"conn_type": "gpu", "host": url, "password": token(home, "task")})


def agent_command(home: AirflowHome, url: str, simulated: str) -> list[str]:
    """Return the command of the agent that reports this machine's devices."""
    file = home.path / "agent.token"
    write_private(file, token(home, "agent"))
    command = [sys.executable, "-m", "airflow_gpu_provider.inventory.agent", "--url", url]
    return [*command, "--token-file", str(file), "--simulated", simulated]


def announcement(nodes: Sequence[dict[str, Any]]) -> str:
    """Say what the fleet is, and plainly when it is none."""
    devices = [device for node in nodes for device in node["devices"]]
    simulated = any(device["simulated"] for device in devices)
    models = Counter(device["model"] for device in devices)
    like = "-class" if simulated else ""
    listed = ", ".join(f"{count} x {model}{like}" for model, count in sorted(models.items()))
    return f"SIMULATED fleet: {listed}; work runs on the CPU" if simulated else f"Fleet: {listed}"
