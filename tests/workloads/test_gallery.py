from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from workloads.reconstruction.gallery import write_gallery


class Page(HTMLParser):
    """Collect what a browser would see: cards, pictures, links, scripts, text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.cards: list[dict[str, str | None]] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.scripts = 0
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "article":
            self.cards.append(values)
        if tag == "img":
            self.images.append(values["src"] or "")
        if tag == "a":
            self.links.append(values["href"] or "")
        self.scripts += tag == "script"

    def handle_data(self, data: str) -> None:
        self.text += data


def picture(path: Path, colour: tuple[int, int, int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), colour, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    """Return a run with one product of each status."""
    done = tmp_path / "products" / "A-1" / "v1"
    picture(done / "thumbnail.png", (200, 10, 10))
    (done / "model.glb").write_bytes(b"glTF")
    products: list[dict[str, Any]] = [
        {
            "sku": "A-1",
            "title": "Chair",
            "category": "chairs",
            "value": 1200.0,
            "status": "done",
            "reason": "",
            "photo": str(picture(tmp_path / "photos" / "a.png", (10, 10, 200))),
            "output_dir": str(done),
            "figures": {"iou": 0.9712, "psnr": 27.31, "vertices": 8123},
            "seconds": {"preprocess": 0.8, "train": 6.1, "postprocess": 1.1},
            "device": "cuda:0",
            "device_model": "A100",
        }
    ]
    for status, reason in (
        ("below_threshold", "IoU 0.71 is below 0.90"),
        ("unusable", "too few views: 9 of 16"),
        ("failed", "worker died"),
        ("missing", "not run"),
    ):
        products.append(
            {
                "sku": status.upper(),
                "title": f"The {status} one",
                "status": status,
                "reason": reason,
                "output_dir": None,
            }
        )
    return {"run_id": "manual__1", "catalog": "/data/catalog.csv", "products": products}


def test_every_product_is_on_the_page_with_its_status_and_reason(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    page = Page(write_gallery(summary, tmp_path / "gallery"))
    assert [card["data-title"] for card in page.cards] == [
        product["title"] for product in summary["products"]
    ]
    for product in summary["products"]:
        assert product["sku"] in page.text
        assert product["reason"] in page.text
    for label in ("1 done", "1 below threshold", "1 unusable", "1 failed", "1 missing"):
        assert label in page.text
    assert "0.971" in page.text
    assert "27.3 dB" in page.text
    assert "8.0 s" in page.text


def test_pictures_are_copied_and_every_link_resolves_from_the_page(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    path = write_gallery(summary, tmp_path / "gallery")
    page = Page(path)
    assert len(page.images) == 2
    assert len(page.links) == 1
    for link in page.images + page.links:
        assert (path.parent / link).resolve().is_file()
        assert not link.startswith(("/", "http", "file:"))


def test_catalogue_text_is_never_markup(summary: dict[str, Any], tmp_path: Path) -> None:
    attack = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    product = summary["products"][0]
    product.update(title=attack, category=attack, reason=attack, sku=f"../../{attack}", device=attack)
    summary["run_id"] = attack
    page = Page(write_gallery(summary, tmp_path / "gallery"))
    assert page.scripts == 1
    assert "x" not in page.images
    assert page.cards[0]["data-title"] == attack
    assert all(
        image.startswith("images/") and (tmp_path / "gallery" / image).is_file() for image in page.images
    )


def test_the_page_needs_nothing_from_the_network(summary: dict[str, Any], tmp_path: Path) -> None:
    text = write_gallery(summary, tmp_path / "gallery").read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text


def test_a_marked_product_says_what_it_misses_when_the_run_gives_no_reason(tmp_path: Path) -> None:
    product = {"sku": "X", "status": "below_threshold", "figures": {"shortfall": "iou 0.7 on held-out views"}}
    assert "iou 0.7 on held-out views" in Page(write_gallery({"products": [product]}, tmp_path)).text


def test_an_empty_run_and_half_known_figures_still_make_a_page(tmp_path: Path) -> None:
    assert Page(write_gallery({"products": []}, tmp_path / "empty")).cards == []
    odd = {"sku": "X", "status": "strange", "figures": {"iou": None, "psnr": "nan?"}, "seconds": None}
    page = Page(write_gallery({"products": [odd]}, tmp_path / "odd"))
    assert page.cards[0]["data-status"] == "strange"
    assert page.cards[0]["data-iou"] == ""


def test_writing_twice_gives_the_same_page(summary: dict[str, Any], tmp_path: Path) -> None:
    first = write_gallery(summary, tmp_path / "gallery").read_text()
    assert write_gallery(summary, tmp_path / "gallery").read_text() == first
    assert len(list((tmp_path / "gallery" / "images").iterdir())) == 2
