"""Which launcher a name stands for; a name that cannot be meant is refused when the DAG is read.

"auto" is the worker's own host, since a lease is always of devices there, and the only one that `keeper`
starts on. Used by `operators.training`.
"""

from __future__ import annotations

from airflow_gpu_provider.exceptions import InvalidRequest

_LOCAL = ("auto", "local")


def check_launcher(name: str) -> str:
    """Return ``name`` when there is such a launcher, else raise InvalidRequest."""
    if name == "kubernetes":
        raise InvalidRequest(
            "launcher='kubernetes' does not exist yet; use launcher='auto' or 'local': the training then "
            "runs on the worker's own host. GpuPodsOperator runs an image, say with torchrun, in pods."
        )
    if name not in _LOCAL:
        raise InvalidRequest(f"launcher={name!r}: allowed are 'auto' and 'local'.")
    return name
