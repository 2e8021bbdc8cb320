"""`@task.gpu`: a plain Python function that holds GPUs while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    DecoratedOperator,
    context_merge,
    determine_kwargs,
    task_decorator_factory,
)

from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.operators.leased import GpuLeasedOperator

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.decorator import TaskDecorator


class _GpuDecoratedOperator(DecoratedOperator, GpuLeasedOperator):
    """Calls the function with the devices leased; `gpu_lease` among its arguments gets the lease."""

    custom_operator_name = "@task.gpu"
    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *GpuLeasedOperator.template_fields)
    template_fields_renderers = DecoratedOperator.template_fields_renderers

    def execute(self, context: Context) -> Any:
        """Run the lease lifecycle around the function."""
        return GpuLeasedOperator.execute(self, context)

    def run_leased(self, context: Context, lease: HeldLease) -> Any:
        """Call the function."""
        context_merge(context, self.op_kwargs, gpu_lease=lease)
        kwargs = determine_kwargs(self.python_callable, self.op_args, context)
        return self.python_callable(*self.op_args, **kwargs)


def gpu_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """
    Wrap a function into a task that holds GPUs while it runs.

    The arguments are those of `GpuLeasedOperator`, e.g. ``@task.gpu(gpus=1, memory="8GiB")``. Only the
    leased devices are visible to CUDA, so ``cuda:0`` is the first of them. A parameter named ``gpu_lease``
    (give it the default None) receives the lease.

    :param python_callable: function to decorate
    """
    return task_decorator_factory(
        python_callable=python_callable, decorated_operator_class=_GpuDecoratedOperator, **kwargs
    )
