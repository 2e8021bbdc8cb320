"""The stages of a catalogue as one mapped task group: a copy of all stages for each chunk.

Within a chunk a stage waits for the one before; chunks do not wait for one another, so chunk 3 may train
while chunk 5 is still prepared. A later stage runs also when the earlier failed for some products: the
ledger knows which ones it may go on with. Next step: `operators.product_batch` for each task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import TriggerRule, chain, task_group

from airflow_gpu_provider.catalog.stage import Stage
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.operators.product_batch import ProductBatchOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions._internal.node import DAGNode


def product_pipeline(
    chunks: Any,
    stages: Sequence[Stage],
    *,
    group_id: str = "products",
    max_failed_ratio: float = 0.0,
    **task_arguments: Any,
) -> DAGNode:
    """Return the mapped group.

    ``chunks`` is the output of the task that planned; ``task_arguments`` (retries, queue, execution_timeout,
    ...) go to every task, ``Stage.lease`` to the tasks of its stage.
    """
    names = [stage.name for stage in stages]
    if not names or len(set(names)) != len(names):
        raise InvalidRequest(f"stages {names}; allowed: one or more, each with its own name")

    @task_group(group_id=group_id)
    def stages_of_a_chunk(chunk: Any) -> None:
        tasks = [
            ProductBatchOperator(
                task_id=stage.name,
                stage=stage.name,
                entrypoint=stage.entrypoint,
                chunk=chunk,
                stage_params=stage.params,
                gpus=stage.gpus,
                max_failed_ratio=max_failed_ratio,
                trigger_rule=TriggerRule.ALL_DONE if position else TriggerRule.ALL_SUCCESS,
                map_index_template="{{ task.chunk['label'] }}",
                **{**task_arguments, **stage.lease},
            )
            for position, stage in enumerate(stages)
        ]
        chain(*tasks)

    return stages_of_a_chunk.expand(chunk=chunks)
