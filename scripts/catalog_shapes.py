"""The sample shop: fourteen products in eight categories.

Invariant: what a product looks like is decided in ``catalog_furniture`` and ``catalog_goods``; here is only
what a shop knows about it. The next step is ``catalog_photos``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scripts import catalog_furniture as furniture
from scripts import catalog_goods as goods
from scripts.catalog_model import Model


@dataclass(frozen=True)
class Sample:
    """A row of the sample catalogue and how to build what it sells."""

    sku: str
    title: str
    category: str
    price: float
    daily_views: int
    build: Callable[[], Model]


SAMPLES: tuple[Sample, ...] = (
    Sample("CH-001", "Oak dining chair", "chairs", 129.0, 940, furniture.chair),
    Sample("CH-002", "Bar stool, red seat", "chairs", 79.0, 410, furniture.stool),
    Sample("TB-001", "Round coffee table", "tables", 249.0, 520, furniture.coffee_table),
    Sample("ST-001", "Bookshelf with books", "storage", 189.0, 275, furniture.bookshelf),
    Sample("SF-001", "Two-seat sofa, green", "sofas", 899.0, 1310, furniture.sofa),
    Sample("LT-001", "Table lamp, brass foot", "lighting", 95.0, 365, furniture.table_lamp),
    Sample("KT-001", "Mug with white band", "kitchen", 14.5, 2150, goods.mug),
    Sample("KT-002", "Salad bowl, zigzag", "kitchen", 32.0, 610, goods.bowl),
    Sample("KT-003", "Teapot, teal", "kitchen", 48.0, 780, goods.teapot),
    Sample("KT-004", "Green bottle with label", "kitchen", 19.0, 150, goods.bottle),
    Sample("DC-001", "Vase, three glazes", "decoration", 59.0, 330, goods.vase),
    Sample("DC-002", "Mantel clock", "decoration", 119.0, 90, goods.mantel_clock),
    Sample("FW-001", "Sneaker, blue", "footwear", 84.0, 1720, goods.shoe),
    Sample("TY-001", "Ring stacker", "toys", 22.0, 205, goods.ring_stacker),
)
