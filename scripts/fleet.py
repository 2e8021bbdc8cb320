"""How a local stack gets its GPUs: tokens, the connection, the agent and what it reports.

Invariant: a machine without a GPU gets a simulated fleet and is told so; real and simulated are never mixed.
Next step: `scripts.stack` starts the agent with the command made here.
"""

from __future__ import annotations

import json
import sys

from scripts.airflow_home import AirflowHome, write_private

TOKEN_TTL_S = 30 * 24 * 3600.0  # a stack left running by `make up` for a month
DEFAULT_FLEET = "2xA100,2xV100"
ANNOUNCEMENT = "SIMULATED fleet: 2 x A100-class, 2 x V100-class; work runs on the CPU"


def simulated_if_no_gpu() -> str | None:
    """Return None when this machine has an NVIDIA GPU, else the fleet to simulate."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DEFAULT_FLEET
    try:
        return None if pynvml.nvmlDeviceGetCount() else DEFAULT_FLEET
    finally:
        pynvml.nvmlShutdown()


def token(home: AirflowHome, role: str) -> str:
    """Mint a broker token of this role."""
    from airflow_gpu_provider.server.auth import mint_token

    return mint_token(home.secrets().broker, role=role, subject=f"local-{role}", ttl_s=TOKEN_TTL_S)


def connection(home: AirflowHome, url: str) -> str:
    """Return the value of AIRFLOW_CONN_GPU_DEFAULT: how tasks and triggers reach the broker."""
    return json.dumps({"conn_type": "gpu", "host": url, "password": token(home, "task")})


def agent_command(home: AirflowHome, url: str, simulated: str | None) -> list[str]:
    """Return the command of the agent that reports this machine's devices."""
    file = home.path / "agent.token"
    write_private(file, token(home, "agent"))
    command = [sys.executable, "-m", "airflow_gpu_provider.inventory.agent", "--url", url]
    command += ["--token-file", str(file)]
    return [*command, "--simulated", simulated] if simulated else command
