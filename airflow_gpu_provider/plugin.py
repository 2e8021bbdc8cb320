"""What the provider adds to Airflow itself: the broker, mounted on the API server under `/gpu`.

Loaded by the entry point `airflow.plugins` in every Airflow process, so it imports nothing heavy: the web
application is built only where Airflow asks for it, in the API server.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_gpu_provider.wire import API_PREFIX


class GpuPlugin(AirflowPlugin):
    """The provider's plugin."""

    name = "gpu"

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the broker's app."""
        from airflow_gpu_provider.server.app import airflow_app

        return [{"app": airflow_app(), "url_prefix": API_PREFIX, "name": "GPU broker"}]
