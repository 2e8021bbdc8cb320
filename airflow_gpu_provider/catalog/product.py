"""What a stage function gets, and how it says that a product's input is bad.

This is the whole contract between the provider and a workload: ``function(product) -> mapping`` of small
figures. A stage writes scratch to ``work_dir`` and final files to ``output_dir``; only what the last stage
leaves in ``output_dir`` is published, and only after the function returned. Next step: `runner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Product:
    """One product version during one stage."""

    sku: str
    row: Mapping[str, str]  #: the manifest's row, every column as text
    input_dir: Path  #: folder of the manifest; relative paths in ``row`` are relative to it
    work_dir: Path  #: scratch, shared by the stages of this product version
    output_dir: Path  #: final files; renamed into place after the last stage returned
    device: str = "cpu"  #: for torch: "cuda:0" or "cpu"
    device_name: str = "CPU"
    params: Mapping[str, object] = field(default_factory=dict)


class ProductUnusable(Exception):
    """The product's input is bad: it is recorded as unusable with this reason and never retried."""
