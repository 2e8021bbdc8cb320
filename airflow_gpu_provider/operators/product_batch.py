"""One stage of the catalogue pipeline over one chunk of products, as a mapped Airflow task.

The operator knows Airflow and the lease, `catalog.runner` does the work, so that a retry does only what is
missing whatever ended the try before. A stage without GPUs asks for no lease at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.catalog.chunks import Chunk
from airflow_gpu_provider.catalog.ledger import MAX_ATTEMPTS
from airflow_gpu_provider.catalog.plan import Plan, PlannedProduct, load_plan, read_products
from airflow_gpu_provider.catalog.runner import has_work, run_chunk
from airflow_gpu_provider.catalog.stage import check_entrypoint
from airflow_gpu_provider.catalog.stage_run import ChunkReport, StageRun
from airflow_gpu_provider.exceptions import BatchIncomplete, InvalidRequest
from airflow_gpu_provider.operators.leased import GpuLeasedOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_gpu_provider.operators.held_lease import HeldLease


class ProductBatchOperator(GpuLeasedOperator):
    """
    Run one stage for the products of one chunk, each on its own, the most valuable first.

    All products are tried before the task ends. It fails with `BatchIncomplete` when too many failed; its
    retries then do only those. What is done is never done twice.

    :param stage: name of the stage; the plan says which comes before it and which one publishes
    :param entrypoint: "package.module:function", called with a `Product` for each product
    :param chunk: one element of what the plan returned (`.expand(chunk=...)` or a mapped task group)
    :param stage_params: passed to the function as ``product.params``
    :param max_failed_ratio: share of the chunk's products that may fail without failing the task, 0 to 1
    :param max_attempts: a product that failed so often in this run is left alone
    :param gpus: as in `GpuLeasedOperator`; 0 (the default) runs on the CPU without a lease
    :param value: as in `GpuLeasedOperator`; None: the value of the chunk's best product
    """

    template_fields: Sequence[str] = (*GpuLeasedOperator.template_fields, "chunk", "stage_params")

    def __init__(
        self,
        *,
        stage: str,
        entrypoint: str,
        chunk: Any,
        stage_params: Mapping[str, Any] | None = None,
        max_failed_ratio: float = 0.0,
        max_attempts: int = MAX_ATTEMPTS,
        gpus: int | str = 0,
        **kwargs: Any,
    ) -> None:
        self.stage = stage
        self.entrypoint = check_entrypoint(entrypoint)
        self.chunk = chunk
        self.stage_params = dict(stage_params or {})
        self.max_failed_ratio = _checked_ratio(max_failed_ratio)
        self.max_attempts = max_attempts
        super().__init__(gpus=gpus, **kwargs)

    def build_request(self) -> GpuRequest:
        """Return what is asked of the broker; without GPUs nothing is."""
        return GpuRequest(gpus=0) if self._is_cpu_stage() else super().build_request()

    def execute(self, context: Context) -> Any:
        """Ask for the devices unless nothing is to be done on one."""
        with _fail_the_hopeless():
            chunk = Chunk.from_xcom(self.chunk)
            plan = load_plan(Path(chunk.plan))
            if self._is_cpu_stage() or not has_work(_products(plan, chunk), self._stage_run(plan)):
                with _without_gpus():
                    return self._run(lambda: None)
        if self.value is None:
            self.value = chunk.value
        return super().execute(context)

    def run_leased(self, context: Context, lease: HeldLease) -> dict[str, int]:
        """Run on the leased devices; a lost lease stops the chunk and costs no product an attempt."""
        device = lease.devices[0]
        model = f"{device.model} (simulated)" if device.simulated else device.model

        def check() -> None:
            lease.raise_if_lost()
            lease.raise_if_ending()  # what is done is in the ledger: between products nothing is lost

        return self._run(
            check,
            lease.report_work,
            torch_device=lease.torch_device(),
            device=device.id,
            device_model=model,
        )

    def _run(
        self, check: Callable[[], None], tell: Callable[[float], None] = lambda done: None, **device: str
    ) -> dict[str, int]:
        chunk = Chunk.from_xcom(self.chunk)
        plan = load_plan(Path(chunk.plan))
        report = run_chunk(_products(plan, chunk), self._stage_run(plan, **device), check=check)
        tell(report.done)
        self.log.info("Chunk %d (%s), %s: %s", chunk.index, chunk.label, self.stage, report.as_json())
        self._raise_if_incomplete(report, chunk)
        return report.as_json()

    def _stage_run(self, plan: Plan, **device: str) -> StageRun:
        return StageRun(
            plan=plan,
            stage=self.stage,
            entrypoint=self.entrypoint,
            params=self.stage_params,
            max_attempts=self.max_attempts,
            **device,
        )

    def _raise_if_incomplete(self, report: ChunkReport, chunk: Chunk) -> None:
        failed = len(report.failures)
        if failed <= self.max_failed_ratio * chunk.count:
            return
        named = "; ".join(f"{sku}: {reason}" for sku, reason in report.failures[:5])
        sentence = (
            f"{self.stage}: {failed} of {chunk.count} products failed (allowed: max_failed_ratio="
            f"{self.max_failed_ratio}); the others are kept. {named}{'; ...' if failed > 5 else ''}"
        )
        if report.hopeless == failed:
            raise AirflowFailException(
                f"{sentence} Each failed {self.max_attempts} times, so no retry is made."
            )
        raise BatchIncomplete(sentence)

    def _is_cpu_stage(self) -> bool:
        return str(self.gpus).strip() == "0"


def _products(plan: Plan, chunk: Chunk) -> Iterator[PlannedProduct]:
    return read_products(plan.folders.todo, offset=chunk.offset, count=chunk.count)


def _checked_ratio(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidRequest(f"max_failed_ratio={value!r}; allowed: a number from 0 (none may fail) to 1")
    return float(value)


@contextmanager
def _fail_the_hopeless() -> Iterator[None]:
    """Do not retry what only a change of the DAG can mend."""
    try:
        yield
    except InvalidRequest as error:
        raise AirflowFailException(f"{error.message} [{error.reason}]") from error


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Hide all GPUs: a stage without a lease must not use one by chance."""
    former = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if former is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = former
