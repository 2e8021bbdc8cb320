"""Turn a product catalogue into 3D models: preprocess, train on leased GPUs, post-process, show.

The plan cuts the catalogue into chunks, the most valuable products first; each chunk goes through its stages
on its own. Bad products are reported and never stop the others; a new run does only what is missing.
The 3D work itself is in ``workloads/reconstruction``; to make anything else of a catalogue, name other
functions.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from airflow.sdk import Param, TriggerRule, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.catalog.chunks import positive_int, positive_number
from airflow_gpu_provider.catalog.layout import RunFolders
from airflow_gpu_provider.catalog.pipeline import product_pipeline
from airflow_gpu_provider.catalog.plan import Selection, load_plan, write_plan
from airflow_gpu_provider.catalog.stage import Stage
from airflow_gpu_provider.catalog.summary import broken_sentence, write_summary
from airflow_gpu_provider.exceptions import InvalidRequest, ManifestInvalid

SAMPLE = Path(__file__).parent / "sample_catalog" / "catalog.csv"

PARAMS = {
    "catalog": Param(
        str(SAMPLE),
        type="string",
        minLength=1,
        title="Catalogue",
        description="CSV file with the columns sku, title, category, price, daily_views, updated_at and "
        "others that the stages read; paths in it are relative to its folder.",
        section="Catalogue",
    ),
    "categories": Param(
        None,
        type=["null", "array"],
        items={"type": "string"},
        title="Categories",
        description="Only products of these categories, one a line; empty: all.",
        section="Catalogue",
    ),
    "limit": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        maximum=100_000_000,
        title="Limit",
        description="Only so many products, the most valuable first; empty: all.",
        section="Catalogue",
    ),
    "redo": Param(
        False,
        type="boolean",
        title="Redo",
        description="Make products again whose result is already there; needed after a change of code.",
        section="Catalogue",
    ),
    "steps": Param(
        150,
        type="integer",
        minimum=1,
        maximum=100_000,
        title="Training steps",
        description="Steps of the optimisation for each product; more are slower and finer.",
        section="Quality",
    ),
    "resolution": Param(
        64,
        type="integer",
        minimum=16,
        maximum=512,
        title="Resolution",
        description="Cells of the volume along each side.",
        section="Quality",
    ),
    "min_iou": Param(
        0.90,
        type="number",
        minimum=0,
        maximum=1,
        title="Least IoU",
        description="Products whose silhouettes overlap less on held-out photos are marked, not hidden.",
        section="Quality",
    ),
    "min_psnr": Param(
        20.0,
        type="number",
        minimum=0,
        maximum=200,
        title="Least PSNR",
        description="Likewise for colours on held-out photos, in decibel.",
        section="Quality",
    ),
    "chunk_size": Param(
        3,
        type="integer",
        minimum=1,
        maximum=1_000_000,
        title="Chunk size",
        description="Products a task works on, one after the other, with one lease; raised when there would "
        "be more than 256 tasks a stage.",
        section="Running",
    ),
    "priority": Param(
        1.0,
        type="number",
        exclusiveMinimum=0,
        maximum=1000,
        title="Priority",
        description="Multiplies the business value (daily views x price) with which this run's chunks queue "
        "for GPUs.",
        section="Running",
    ),
    "gpu_memory": Param(
        "8GiB",
        type="string",
        pattern=r"^[0-9.]+ *[MGT]i?B$",
        title="GPU memory",
        description="Memory that a training task needs on its GPU, like 8GiB.",
        section="Running",
    ),
    "min_tflops": Param(
        35,
        type="number",
        minimum=0,
        maximum=1_000_000,
        title="GPU compute",
        description="TFLOPS that a training task prefers; a weaker GPU is a fallback.",
        section="Running",
    ),
    "output": Param(
        None,
        type=["null", "string"],
        title="Output folder",
        description="Where results go; empty: the variable PRODUCT_MODELS_OUTPUT of the workers, else "
        "product_models in Airflow's home. All workers must see it.",
        section="Running",
    ),
}


def stages(value_of: Callable[[str], object]) -> list[Stage]:
    """Name the stages; the plan passes the parameters' values, the tasks get templates of them."""
    return [
        Stage("preprocess", "workloads.reconstruction.preprocess:preprocess"),
        Stage(
            "train",
            "workloads.reconstruction.train:train",
            params={name: value_of(name) for name in ("steps", "resolution")},
            gpus=1,
            lease={"memory": "{{ params.gpu_memory }}", "min_tflops": "{{ params.min_tflops }}"},
        ),
        Stage(
            "postprocess",
            "workloads.reconstruction.postprocess:postprocess",
            params={name: value_of(name) for name in ("min_iou", "min_psnr")},
        ),
    ]


def run_folders(params: Mapping[str, Any], run_id: str) -> RunFolders:
    """Return the run's folders."""
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()
    default = os.environ.get("PRODUCT_MODELS_OUTPUT") or home / "product_models"
    return RunFolders(Path(params["output"] or default).expanduser().absolute(), run_id)


def refuse_unknown(conf: Mapping[str, Any]) -> None:
    """Fail on a misspelt parameter: Airflow would ignore it and run on the default."""
    for name in conf:
        if name not in PARAMS:
            near = difflib.get_close_matches(name, PARAMS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise AirflowFailException(
                f"{name!r} is no parameter{hint} The parameters are {', '.join(PARAMS)}."
            )


@task
def plan() -> list[dict[str, Any]]:
    """Check the catalogue and cut it into chunks; what is wrong with it fails at once, without retries."""
    context = get_current_context()
    params, run = context["params"], context["dag_run"]
    refuse_unknown(run.conf or {})
    try:
        _, chunks = write_plan(
            Path(params["catalog"]).expanduser(),
            run_folders(params, run.run_id),
            stages(params.__getitem__),
            chunk_size=positive_int("chunk_size", params["chunk_size"]),
            started_at=run.start_date or datetime.now(timezone.utc),
            selection=Selection(
                limit=None if params["limit"] is None else positive_int("limit", params["limit"]),
                categories=tuple(params["categories"] or ()),
                redo=params["redo"],
            ),
            weight=positive_number("priority", params["priority"]),
        )
    except (ManifestInvalid, InvalidRequest) as error:
        raise AirflowFailException(f"{error.message} [{error.reason}]") from error
    except (OSError, ValueError, RuntimeError) as error:
        # Only paths are left to be wrong: no retry mends them.
        raise AirflowFailException(
            f"catalog={params['catalog']!r} or output={params['output']!r} cannot be used: {error}. Name a "
            "readable CSV file and a folder in which the workers may write."
        ) from error
    return [chunk.as_xcom() for chunk in chunks]


@task(trigger_rule=TriggerRule.ALL_DONE, retries=0)
def summarise() -> dict[str, Any]:
    """Say what became of every product and make the gallery; fail if one that should work did not."""
    from workloads.reconstruction.gallery import write_gallery

    context = get_current_context()
    folders = run_folders(context["params"], context["dag_run"].run_id)
    if not folders.plan.exists():
        raise AirflowFailException("nothing was planned, so nothing was done: see the log of the task `plan`")
    summary = write_summary(load_plan(folders.plan), finished_at=datetime.now(timezone.utc))
    gallery = write_gallery(summary, folders.gallery)
    products: Any = summary["products"]
    if sentence := broken_sentence(products):
        raise AirflowFailException(f"{sentence}. Gallery: {gallery}")
    return {"counts": summary["counts"], "summary": str(folders.summary), "gallery": str(gallery)}


@dag(
    schedule=None,
    catchup=False,
    tags=["gpu", "catalogue", "3d"],
    default_args={"owner": "catalogue", "retries": 2, "retry_delay": timedelta(seconds=10)},
    params=PARAMS,
    render_template_as_native_obj=True,
    max_active_tasks=16,
    doc_md=__doc__,
    description="A 3D model for every product of a catalogue, trained on leased GPUs",
)
def product_catalog_models() -> None:
    """Wire the tasks."""
    pipeline = product_pipeline(plan(), stages("{{{{ params.{} }}}}".format))
    pipeline >> summarise()


product_catalog_models()
