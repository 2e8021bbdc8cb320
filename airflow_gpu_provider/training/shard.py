"""One shard process: ``python -m airflow_gpu_provider.training.shard PLAN.json UID``.

Ends with its supervisor, whatever happens to that. Runs the author's function and tells the supervisor how
it ended: ``done``, or a report of the error with its step. It leaves through ``os._exit``, since the
destructors of abandoned process groups may block. Started by `children`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from pydantic import JsonValue

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.failures import REPORTED_EXIT, ShardReport
from airflow_gpu_provider.training.parenthood import end_with_parent, name_process
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import write_json

STORE_VARIABLE = "AGP_STORE"
PREFIX_VARIABLE = "AGP_STORE_PREFIX"
DEVICE_VARIABLE = "AGP_TORCH_DEVICE"
PARENT_VARIABLE = "AGP_PARENT_PID"
#: before the uid, in what a shard's process is called
SHARD_NAME = "shard-"

#: a result goes through run.json and XCom
_MAX_RESULT_BYTES = 32 * 1024
#: functions of a module that a wrong entrypoint is answered with, the likest first
_NAMED = 10


def main(plan_file: Path, uid: str) -> int:
    """Run the shard and return its exit code."""
    end_with_parent(int(os.environ[PARENT_VARIABLE]))
    name_process(f"{SHARD_NAME}{uid}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    plan = RunPlan.model_validate_json(plan_file.read_text())
    sys.path += [entry for entry in plan.python_path if entry not in sys.path]
    try:
        return _train(plan, uid)
    except Exception as error:
        _write_report(plan, uid, error, step=None, shard=None)
        return REPORTED_EXIT


def _train(plan: RunPlan, uid: str) -> int:
    # Imported after end_with_parent: torch takes seconds, during which the supervisor may die.
    import torch

    from airflow_gpu_provider.training.context import TrainContext
    from airflow_gpu_provider.training.coordination import RunStore
    from airflow_gpu_provider.training.memory_limit import limit_torch_memory
    from airflow_gpu_provider.training.pulse import Pulse
    from airflow_gpu_provider.training.randomness import seed_everything
    from airflow_gpu_provider.training.step_loop import Leaving
    from airflow_gpu_provider.training.stream_priority import prioritised_stream
    from airflow_gpu_provider.training.telemetry import Telemetry

    torch.set_num_threads(plan.threads_per_shard)
    address, prefix = os.environ[STORE_VARIABLE], os.environ[PREFIX_VARIABLE]
    store = RunStore.connect(address, prefix)
    device = torch.device(os.environ[DEVICE_VARIABLE])
    pulse_store = RunStore.connect(address, prefix)
    pulse = Pulse(uid, pulse_store, interval_s=plan.heartbeat_s, torch_device=device.type)
    pulse.start()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        limit_torch_memory()
    telemetry = Telemetry(plan.paths.shard_telemetry(uid), uid, device=device, shards=plan.shard_count)
    pulse.counters = lambda: telemetry.meter.counters
    context = TrainContext(plan, uid, store, pulse, telemetry=telemetry, device=device)
    try:
        assert plan.entrypoint is not None, "a script has no shards of ours"
        train = load_entrypoint(plan.entrypoint)
        seed_everything(plan.seed, 0, 0)  # equal initial weights everywhere
        with prioritised_stream(plan.stream_priority, torch_device=str(device)) as priority:
            context.stream_priority = priority
            result = train(context)
        if not context.is_complete:
            raise InvalidRequest(_left_early(context.step_now))
        store.put(f"done/{uid}", {"result": _checked_result(result) if context.shard == 0 else None})
    except Leaving as leaving:
        logging.getLogger(__name__).info("Leaving: %s", leaving)
        store.put(f"left/{uid}", True)
    except (Exception, SystemExit) as error:
        shard = None if context._loop is None else context._loop.rank
        _write_report(plan, uid, _explained(error), step=context.step_now, shard=shard)
        return REPORTED_EXIT
    finally:
        telemetry.flush()
    return 0


def _left_early(step: int | None) -> str:
    if step is None:
        return (
            "train(ctx) returned without `for step in ctx.steps(n)`: register the model and the optimizer, "
            "then do the training in that loop."
        )
    return (
        "train(ctx) returned before its loop was through; do not break out of `for step in "
        "ctx.steps(n)`: the other shards would wait. Give ctx.steps() the right number instead."
    )


def _explained(error: Exception | SystemExit) -> Exception:
    """Return an error of the author's code that says what is wrong with it."""
    if isinstance(error, Exception):
        return error
    explained = InvalidRequest(
        f"train(ctx) called sys.exit({error.code!r}), which ends one shard and leaves the others waiting; "
        "return when ctx.steps() is through, or raise an exception that says what is wrong."
    )
    return explained.with_traceback(error.__traceback__)


def load_entrypoint(entrypoint: str) -> Callable[..., object]:
    """Import ``package.module:function``. Raise InvalidRequest that says what was found instead."""
    module_name, function_name = entrypoint.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise InvalidRequest(
            f"entrypoint={entrypoint!r}: {error}; the module must lie in the Dags folder or be installed "
            "where the training runs."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [name for name, value in vars(module).items() if name[0] != "_" and callable(value)]
        likest = get_close_matches(function_name, public, n=_NAMED, cutoff=0.0)
        raise InvalidRequest(
            f"entrypoint={entrypoint!r}: {module.__file__} has no function {function_name!r}; it has "
            f"{', '.join(likest) or 'none'}."
        )
    return function  # type: ignore[no-any-return]


def _checked_result(result: object) -> JsonValue:
    try:
        size = len(json.dumps(result, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"train(ctx) returned {type(result).__name__} that is not plain JSON ({error}); return numbers, "
            "text, lists and dicts, for example {'loss': float(loss)}. The final checkpoint is written: a "
            "task that is cleared goes on from it."
        ) from error
    if size > _MAX_RESULT_BYTES:
        raise InvalidRequest(
            f"train(ctx) returned {size} bytes, allowed are {_MAX_RESULT_BYTES}; save large results to a "
            "file and return its path."
        )
    return result  # type: ignore[return-value]


def _write_report(plan: RunPlan, uid: str, error: Exception, *, step: int | None, shard: int | None) -> None:
    traceback.print_exception(error)
    text = "".join(traceback.format_exception(error))
    report = ShardReport(
        error_type=type(error).__name__,
        message=str(error)[:4000],
        traceback=text[-8000:],
        step=step,
        shard=shard,
        non_finite=type(error).__name__ == "NonFiniteLoss",
        at=time.time(),
    )
    write_json(plan.paths.failure(uid), report.model_dump_json(indent=1))


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
