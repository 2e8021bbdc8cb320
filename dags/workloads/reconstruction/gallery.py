"""Make a page of a run: every product with its photo, its model and its figures, or the reason it has none.

``write_gallery(summary, folder)`` writes ``index.html``, which needs no server and nothing from the network,
and copies the pictures beside it. Products that failed or were unusable are shown like the others.

Invariant: whatever stands in the catalogue is text to the page, never markup.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

STAGES = ("preprocess", "train", "postprocess")

#: status in the summary -> (label, tone); tones are classes of the page
STATUSES = {
    "done": ("done", "good"),
    "below_threshold": ("below threshold", "warn"),
    "unusable": ("unusable", "bad"),
    "failed": ("failed", "bad"),
    "missing": ("missing", "mute"),
}


@dataclass(frozen=True)
class Card:
    """One product as the page shows it."""

    sku: str
    title: str
    category: str
    value: float | None
    label: str
    tone: str
    reason: str
    photo: str | None
    thumbnail: str | None
    model: str | None
    iou: float | None
    psnr: float | None
    vertices: int | None
    seconds: float | None
    stages: Sequence[tuple[str, float]]
    device: str
    device_model: str


def write_gallery(summary: Mapping[str, Any], output: Path) -> Path:
    """Write ``index.html`` and its pictures into ``output``; return the page's path."""
    images = output / "images"
    images.mkdir(parents=True, exist_ok=True)
    cards = [_card(product, output, images) for product in summary.get("products", ())]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("gallery.html.j2").render(
        run_id=str(summary.get("run_id") or ""),
        catalog="/".join(Path(str(summary.get("catalog") or "")).parts[-2:]),
        started_at=_moment(summary.get("started_at")),
        finished_at=_moment(summary.get("finished_at")),
        cards=cards,
        counts=_counts(cards),
        means=_means(cards),
    )
    path = output / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _card(product: Mapping[str, Any], output: Path, images: Path) -> Card:
    sku = str(product.get("sku") or "?")
    label, tone = STATUSES.get(str(product.get("status")), (str(product.get("status")), "mute"))
    figures = product.get("figures") or {}
    stages = [(name, _number((product.get("seconds") or {}).get(name))) for name in STAGES]
    known = [(name, seconds) for name, seconds in stages if seconds is not None]
    folder = Path(product["output_dir"]) if product.get("output_dir") else None
    vertices = _number(figures.get("vertices"))
    return Card(
        sku=sku,
        title=str(product.get("title") or sku),
        category=str(product.get("category") or ""),
        value=_number(product.get("value")),
        label=label,
        tone=tone,
        reason=str(product.get("reason") or figures.get("shortfall") or ""),
        photo=_copied(product.get("photo"), images, f"{sku}-photo"),
        thumbnail=_copied(folder / "thumbnail.png" if folder else None, images, f"{sku}-model"),
        model=_link(folder / "model.glb" if folder else None, output),
        iou=_number(figures.get("iou")),
        psnr=_number(figures.get("psnr")),
        vertices=None if vertices is None else int(vertices),
        seconds=sum(seconds for _, seconds in known) if known else None,
        stages=known,
        device=str(product.get("device") or ""),
        device_model=str(product.get("device_model") or ""),
    )


def _copied(source: object, images: Path, name: str) -> str | None:
    """Copy a picture beside the page; return its relative link, or None if there is no such file."""
    if not source or not Path(str(source)).is_file():
        return None
    # A sku may hold anything; the digest keeps names apart that look alike once they are safe.
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    target = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}-{digest}{Path(str(source)).suffix.lower()}"
    shutil.copyfile(str(source), images / target)
    return f"{images.name}/{target}"


def _link(target: Path | None, output: Path) -> str | None:
    if target is None or not target.is_file():
        return None
    return Path(os.path.relpath(target, output)).as_posix()


def _number(value: object) -> float | None:
    """Return a figure as a number; what is not one is unknown."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _moment(value: object) -> str:
    """Return a time to the second, as people read it."""
    return re.sub(r"\.\d+", "", str(value or "")).replace("T", " ").replace("+00:00", " UTC")


def _counts(cards: Sequence[Card]) -> list[tuple[str, str, int]]:
    """Return (label, tone, number) for each status that occurs, in the order of ``STATUSES``."""
    tones = {card.label: card.tone for card in cards}
    known = [label for label, _ in STATUSES.values()]
    found = Counter(card.label for card in cards)
    order = sorted(found, key=lambda label: known.index(label) if label in known else len(known))
    return [(label, tones[label], found[label]) for label in order]


def _means(cards: Sequence[Card]) -> list[tuple[str, str]]:
    """Return the run's mean figures, over products that have them."""
    rows = (
        ("mean IoU", "{:.3f}", [card.iou for card in cards if card.iou is not None]),
        ("mean PSNR", "{:.1f} dB", [card.psnr for card in cards if card.psnr is not None]),
        ("mean time", "{:.1f} s", [card.seconds for card in cards if card.seconds is not None]),
    )
    return [(name, form.format(fmean(values))) for name, form, values in rows if values]
