"""Draw runs: how full the fleet was over time, and how long tasks waited, one line a policy.

Needs matplotlib, which is the extra ``plot`` and no dependency; it is imported when something is drawn. PNG
and SVG are pictures; HTML is one file that needs no other: the picture as SVG and the table beneath.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.simulation.report import load_curve
from airflow_gpu_provider.simulation.simulator import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
_HOUR_S = 3600.0
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222 }}
svg {{ width: 100%; height: auto }} table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #ddd }}
td:first-child, th:first-child {{ text-align: left }}
</style></head><body><h1>{title}</h1>{picture}{table}</body></html>
"""


def check(path: Path) -> None:
    """Refuse early what `save` could not write: another format, no such folder, no matplotlib."""
    if path.suffix not in FORMATS:
        raise InvalidRequest(
            f"A plot cannot be {path.suffix or 'without an ending'!r}; write a name that "
            f"ends in {', '.join(FORMATS)}",
            reason="unknown_format",
        )
    if not path.parent.is_dir():
        raise InvalidRequest(
            f"The plot cannot be saved: there is no folder {str(path.parent)!r}; make it first"
        )
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            "A plot needs matplotlib, which is not installed here: pip install 'airflow-gpu-provider[plot]'",
            reason="matplotlib_missing",
        ) from error


def save(path: Path, runs: Mapping[str, Run], rows: Sequence[Mapping[str, object]], *, title: str) -> None:
    """Write the picture, by the ending of the name; ``rows`` is the table of an HTML page."""
    check(path)
    figure = _figure(runs, title)
    if path.suffix == ".html":
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        picture = drawn.getvalue()
        page = _PAGE.format(
            title=html.escape(title), picture=picture[picture.index("<svg") :], table=_table(rows)
        )
        path.write_text(page, encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)


def _figure(runs: Mapping[str, Run], title: str) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: no display and no global state
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9.5, 6.5), layout="constrained")
    load, waits = figure.subplots(2, 1)
    for name, run in runs.items():
        curve = load_curve(run, points=160)
        load.plot([x / _HOUR_S for x, _ in curve], [100 * y for _, y in curve], label=name, linewidth=1.4)
        waited = sorted(max(0.0, outcome.waited_s) / 60 for outcome in run.outcomes)
        share = [100 * (number + 1) / len(waited) for number in range(len(waited))]
        waits.step(waited, share, where="post", label=name, linewidth=1.4)
    _label(load, x="hours", y="GPUs leased, %")
    _label(waits, x="waited at most, minutes", y="tasks, %")
    # Most tasks wait not at all and some for hours: linear up to a minute, then powers of ten.
    waits.set_xscale("symlog", linthresh=1.0)
    waits.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g}"))
    waits.set_xlim(left=0)
    load.set_xlim(left=0)
    waits.legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    return figure


def _label(axes: Any, *, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
