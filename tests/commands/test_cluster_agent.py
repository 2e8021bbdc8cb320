"""`airflow gpu cluster-agent`: clusters named by Airflow's connections, told to a served broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.broker import Broker
from tests.commands.test_commands import airflow
from tests.kubernetes.builders import gpu_node
from tests.kubernetes.imitation import running
from tests.server.conftest import SECRET


def test_clusters_of_two_connections_are_part_of_the_fleet(
    broker: Broker, base_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with running() as east, running() as west:
        for name, cluster in (("east", east), ("west", west)):
            cluster.create(gpu_node("gpu-0", gpus=2))
            config = cluster.write_kubeconfig(tmp_path / name)
            connection = {"conn_type": "kubernetes", "extra": {"kube_config_path": str(config)}}
            monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(connection))
        monkeypatch.setenv("GPU_AGENT_TOKEN", mint_token(SECRET, role="agent", subject="t", ttl_s=60))
        with pytest.raises(SystemExit) as ended:
            airflow(
                *("gpu", "cluster-agent", "--kubernetes-conn-id", "east", "west", "--url", base_url),
                *("--dcgm", "none", "--once"),
            )
    assert ended.value.code == 0
    nodes = {node.report.name: node.report for node in broker.mirror.stored()}
    assert {"east/gpu-0", "west/gpu-0"} < set(nodes)
    assert [device.model for device in nodes["west/gpu-0"].devices] == ["H100", "H100"]
