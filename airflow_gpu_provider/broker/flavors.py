"""What is known about GPU models: memory, speed by precision, and one rating to compare them by.

The rating follows the requirement's own scale, where A100 = 35 and V100 = 15. Others are placed on it by
their dense FP16 tensor speed divided by 8.9 (312 / 35 of the A100), older ones without tensor cores by
their FP32 speed. It orders models roughly; a task can be faster on a "weaker" one. The next step is
`matching.match_degree`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

_TENSOR_TO_RATING = 312 / 35


@dataclass(frozen=True, slots=True)
class Flavor:
    """A class of device. Speeds are the vendor's dense peaks in TFLOPS; what a model lacks is not listed."""

    name: str
    memory_mib: int  #: of its most common version, as NVML reports it (less than the name says)
    tflops: Mapping[str, float]  #: by precision: fp64, fp32, tf32, fp16 (tensor cores where there are any)
    rating: float  #: one figure for matching, on the scale A100 = 35, V100 = 15


def _flavor(
    name: str, memory_mib: int, fp32: float, tensor: float | None, rating: float | None = None, **more: float
) -> Flavor:
    speeds = {**more, "fp32": fp32} if tensor is None else {**more, "fp32": fp32, "fp16": tensor}
    return Flavor(name, memory_mib, speeds, rating or rating_of(fp32, tensor))


def rating_of(fp32: float, tensor: float | None) -> float:
    """Return the rating that follows from speeds; ``tensor`` is FP16 on tensor cores, None without them."""
    return round(fp32 if tensor is None else tensor / _TENSOR_TO_RATING, 1)


#: Speeds from the vendor's data sheets: SXM version where there are several, FP16 with FP32 accumulation.
_KNOWN = (
    _flavor("K80", 11_441, 4.4, None, fp64=1.5),
    _flavor("P4", 7_680, 5.5, None),
    _flavor("P40", 23_040, 11.8, None),
    _flavor("P100", 16_384, 10.6, None, fp64=5.3),
    _flavor("V100", 16_384, 15.7, 125, 15, fp64=7.8),
    _flavor("T4", 15_360, 8.1, 65),
    _flavor("RTX 2080 Ti", 11_264, 13.4, 53.8),
    _flavor("A2", 15_356, 4.5, 18, tf32=9),
    _flavor("A10", 23_028, 31.2, 125, tf32=62.5),
    _flavor("A10G", 23_028, 31.5, 70, tf32=35),
    _flavor("A16", 15_356, 4.5, 17.9, tf32=9),
    _flavor("A30", 24_576, 10.3, 165, fp64=5.2, tf32=82),
    _flavor("A40", 46_068, 37.4, 149.7, tf32=74.8),
    _flavor("A100", 81_920, 19.5, 312, 35, fp64=9.7, tf32=156),
    _flavor("A800", 81_920, 19.5, 312, 35, fp64=9.7, tf32=156),
    _flavor("RTX 3090", 24_576, 35.6, 71),
    _flavor("RTX A4000", 16_376, 19.2, 76.7),
    _flavor("RTX A5000", 24_564, 27.8, 111),
    _flavor("RTX A6000", 49_140, 38.7, 154.8),
    _flavor("RTX 4090", 24_564, 82.6, 165.2),
    _flavor("RTX 6000 Ada", 49_140, 91.1, 364.2),
    _flavor("L4", 23_034, 30.3, 121, tf32=60),
    _flavor("L40", 46_068, 90.5, 181, tf32=90.5),
    _flavor("L40S", 46_068, 91.6, 362, tf32=183),
    _flavor("H20", 97_871, 44, 148, tf32=74),
    _flavor("H100", 81_559, 67, 989, fp64=34, tf32=494),
    _flavor("H800", 81_559, 67, 989, tf32=494),
    _flavor("H200", 143_771, 67, 989, fp64=34, tf32=494),
    _flavor("GH200", 97_871, 67, 989, fp64=34, tf32=494),
    _flavor("B200", 183_359, 75, 2250, fp64=37, tf32=1125),
    _flavor("RTX 5090", 32_607, 104.8, 209.5),
)

FLAVORS: Mapping[str, Flavor] = {flavor.name: flavor for flavor in _KNOWN}

_MIG = "MIG"
_VENDOR_WORDS = frozenset({"NVIDIA", "TESLA", "QUADRO", "GEFORCE", "GRAPHICS", "DEVICE"})


def _folded(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


_BY_FOLDED_NAME = {_folded(name): name for name in FLAVORS}


@lru_cache(maxsize=4096)
def canonical_model(nvml_name: str) -> str:
    """Return the short name of a model: "NVIDIA A100-SXM4-80GB" is an "A100".

    Only whole words count ("A100X" is not an A100). A model that is not in the table keeps its own name in
    capitals, without the vendor's, so that it can be asked for all the same. A MIG slice is a model of its
    own, "A100-MIG-1g.10gb": who asks for an A100 does not mean a seventh of one.
    """
    words = [word for word in re.split(r"[\s_\-]+", nvml_name.strip()) if word]
    if _MIG in words[1:]:
        at = words.index(_MIG, 1)
        return "-".join([canonical_model(" ".join(words[:at])), _MIG, *(w.lower() for w in words[at + 1 :])])
    own = [word for word in words if word.upper() not in _VENDOR_WORDS] or words
    for length in range(len(own), 0, -1):
        known = _BY_FOLDED_NAME.get(_folded("".join(own[:length])))
        if known is not None:
            return known
    return "-".join(own).upper()


def is_slice(model: str) -> bool:
    """Return whether this is the name of a MIG slice."""
    return f"-{_MIG}-" in model


def tflops(model: str, table: Mapping[str, Flavor] = FLAVORS) -> float:
    """Return the rating of a model; 0.0 for an unknown one, which then meets no wish for speed."""
    known = table.get(model) or table.get(canonical_model(model))
    return 0.0 if known is None else known.rating
