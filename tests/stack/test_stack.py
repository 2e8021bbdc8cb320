"""The stack is a whole Airflow with the provider in it, and lets nobody in without an identity."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from scripts.fleet import announcement
from scripts.rest import BrokerApi
from scripts.stack import COMPONENTS, Stack

pytestmark = pytest.mark.stack


def test_all_components_are_healthy_and_the_fleet_is_announced_as_simulated(
    stack: Stack, broker: Callable[[str], BrokerApi]
) -> None:
    assert stack.api.unhealthy() == []
    words = announcement(broker("admin").nodes())
    assert words == "SIMULATED fleet: 2 x A100-class, 2 x V100-class; work runs on the CPU"


def test_every_component_is_a_process_of_the_warden(stack: Stack) -> None:
    assert len(stack.state["processes"]) >= len(COMPONENTS) + 1
    for name in (*COMPONENTS, "gpu-agent"):
        assert (stack.home.logs / f"{name}.log").exists()


def test_commands_reach_the_stack_with_its_environment(stack: Stack) -> None:
    file = stack.home.shell_file
    assert file.stat().st_mode & 0o077 == 0, "it holds tokens"
    airflow = Path(sys.executable).with_name("airflow")
    done = subprocess.run(
        ["bash", "-c", f". {file} && {airflow} gpu nodes -o json"], capture_output=True, text=True, check=True
    )
    assert "GPU-sim-" in done.stdout


def test_a_running_stack_is_not_started_twice(stack: Stack) -> None:
    from scripts.errors import StackError

    second = Stack(stack.options)
    with pytest.raises(StackError, match=r"already runs .*make down"):
        second.start()
    assert not second.is_ours


@pytest.mark.parametrize("path", ["/gpu/v1/status", "/gpu/v1/nodes", "/gpu/ui/status", "/gpu/docs"])
def test_no_route_answers_without_an_identity(stack: Stack, path: str) -> None:
    answer = httpx.get(stack.url + path, trust_env=False)
    assert answer.status_code in (401, 404), answer.text


def test_the_provider_and_its_connection_are_listed(stack: Stack) -> None:
    providers = stack.api.request("GET", "/api/v2/providers?limit=100")["providers"]
    assert "airflow-gpu-provider" in {provider["package_name"] for provider in providers}
    plugins = stack.api.request("GET", "/api/v2/plugins?limit=100")["plugins"]
    assert "gpu" in {plugin["name"] for plugin in plugins}
