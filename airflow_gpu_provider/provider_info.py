"""What Airflow lists of this provider: `airflow providers get airflow-gpu-provider`."""

from __future__ import annotations

from typing import Any

from airflow_gpu_provider.config import config_section

_INTEGRATION = "GPU leases"


def get_provider_info() -> dict[str, Any]:
    """Return the provider's description (entry point `apache_airflow_provider`)."""
    return {
        "package-name": "airflow-gpu-provider",
        "name": "GPU leases",
        "description": "Lease GPUs to tasks: placement, queue, gangs, training that survives a dead shard.",
        "integrations": [
            {
                "integration-name": _INTEGRATION,
                "external-doc-url": "https://airflow.apache.org/",
                "tags": ["software"],
            }
        ],
        "operators": [
            _modules(
                "operators.asking",
                "operators.gpu_pods",
                "operators.leased",
                "operators.product_batch",
                "operators.training",
            )
        ],
        "sensors": [_modules("sensors.artifacts")],
        "hooks": [_modules("hooks.broker")],
        "triggers": [_modules("triggers.lease", "triggers.artifacts")],
        "connection-types": [_connection_type()],
        "task-decorators": [{"class-name": "airflow_gpu_provider.decorators.gpu.gpu_task", "name": "gpu"}],
        "config": config_section(),
        "cli": ["airflow_gpu_provider.cli.get_cli_commands"],
        "db-managers": ["airflow_gpu_provider.store.db_manager.GpuDBManager"],
    }


def _modules(*names: str) -> dict[str, Any]:
    return {
        "integration-name": _INTEGRATION,
        "python-modules": [f"airflow_gpu_provider.{name}" for name in names],
    }


def _connection_type() -> dict[str, Any]:
    return {
        "connection-type": "gpu",
        "hook-class-name": "airflow_gpu_provider.hooks.broker.GpuBrokerHook",
        "hook-name": "GPU broker",
        "ui-field-behaviour": {
            "hidden-fields": ["schema", "login", "extra"],
            "relabeling": {"host": "Broker URL", "password": "Broker token"},
            "placeholders": {
                "host": "http://localhost:8080 (the Airflow API server)",
                "password": "from: airflow gpu token --role task",
            },
        },
    }
