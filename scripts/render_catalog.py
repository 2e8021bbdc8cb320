#!/usr/bin/env python
"""Write a product catalogue with photos: the sample shop, or any models you have.

    python scripts/render_catalog.py --output dags/sample_catalog
    python scripts/render_catalog.py --models FOLDER --output my_catalog [--limit 30]

The output holds ``catalog.csv`` and per product a folder of turntable photos with ``cameras.json``.
Invariant: the same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import sys
import zlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "dags")]

from scripts.catalog_import import Found, ModelUnreadable, find_models  # noqa: E402
from scripts.catalog_photos import Shot, photograph  # noqa: E402
from scripts.catalog_shapes import SAMPLES  # noqa: E402

COLUMNS = ("sku", "title", "category", "price", "daily_views", "updated_at", "views")

#: The sample shop was stocked at this moment; a fixed one, so that rendering again changes nothing.
SAMPLE_UPDATED_AT = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    shot = Shot(views=options.views, size=options.size)
    try:
        found = _samples() if options.models is None else _imports(options.models, options.limit)
    except OSError as error:
        print(f"{options.models}: {error.strerror or error}; give a folder that can be read", file=sys.stderr)
        return 2
    if not found:
        print(
            f"no models in {options.models}: looked for .obj .glb .gltf .stl .ply .sh3f; name another folder",
            file=sys.stderr,
        )
        return 2
    rows = []
    for number, model in enumerate(found, start=1):
        try:
            row = _product(model, options.output, options.seed, shot)
        except ModelUnreadable as error:
            print(f"[{number}/{len(found)}] left out: {error}", file=sys.stderr)
            continue
        rows.append(row)
        print(f"[{number}/{len(found)}] {model.sku}: {model.title}", flush=True)
    if not rows:
        print("no model could be photographed; see the reasons above", file=sys.stderr)
        return 2
    write_manifest(options.output / "catalog.csv", rows)
    print(f"{len(rows)} products in {options.output / 'catalog.csv'}")
    return 0


def write_manifest(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write ``catalog.csv``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _product(model: Found, output: Path, seed: int, shot: Shot) -> dict[str, str]:
    """Photograph one model; return its row of the manifest."""
    # Each product has its own generator, so that adding one leaves the photos of the others alone.
    random = np.random.default_rng([seed, zlib.crc32(model.sku.encode())])
    photograph(model.load(), output / "views" / model.sku, random, shot)
    price, daily_views = _PRICES.get(model.sku) or (
        float(np.round(random.lognormal(4.2, 0.8), 2)),
        int(random.lognormal(5.5, 1.0)),
    )
    return {
        "sku": model.sku,
        "title": model.title,
        "category": model.category,
        "price": f"{price:.2f}",
        "daily_views": str(daily_views),
        "updated_at": model.updated_at.isoformat(),
        "views": f"views/{model.sku}",
    }


_PRICES = {sample.sku: (sample.price, sample.daily_views) for sample in SAMPLES}


def _samples() -> list[Found]:
    return [
        Found(sample.sku, sample.title, sample.category, SAMPLE_UPDATED_AT, sample.build)
        for sample in SAMPLES
    ]


def _imports(source: Path, limit: int | None) -> list[Found]:
    if not source.exists():
        raise FileNotFoundError(2, "does not exist", str(source))
    found = find_models(source)
    if limit is None or limit >= len(found):
        return found
    # Spread over the whole list, so that a small number still shows every kind.
    return [found[index] for index in np.linspace(0, len(found) - 1, limit).round().astype(int)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a product catalogue with turntable photos.")
    parser.add_argument(
        "--models", type=Path, help="folder of .obj .glb .gltf .stl .ply .sh3f; default: the sample shop"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to write catalog.csv and views/ into"
    )
    parser.add_argument("--limit", type=_positive, help="at most this many models, spread over all found")
    parser.add_argument("--seed", type=int, default=0, help="names the noise and the camera positions")
    parser.add_argument(
        "--views", type=_positive, default=Shot.views, help="photos a product (default %(default)s)"
    )
    parser.add_argument(
        "--size", type=_positive, default=Shot.size, help="side of a photo in pixels (default %(default)s)"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
