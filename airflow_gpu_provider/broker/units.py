"""Read and show sizes of memory.

Inside the broker a size is a whole number of MiB. People write "8GiB", "512MiB" or "8GB"; GiB are powers of
1024, GB powers of 1000. A number without unit is refused: nobody can know which unit was meant. The next
step of an author's request is `request.build_request`.
"""

from __future__ import annotations

import math
import re

from airflow_gpu_provider.exceptions import InvalidRequest

_BYTES = {
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
#: Kubernetes writes "64Gi"; a lone "64G" means GB to some and GiB to others, hence refused.
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[MGT]iB?|[MGT]B)", re.IGNORECASE)
_HOW = 'write it with its unit, such as "8GiB", "512MiB" or "8GB"'


def parse_mib(text: object) -> int:
    """Return the MiB that ``text`` means, rounded up; raise InvalidRequest that says how to write it."""
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InvalidRequest(f"{text!r} is no size of memory: {_HOW}")
    size = float(match["number"]) * _BYTES[match["unit"].upper().removesuffix("B")]
    mib = math.ceil(size / 2**20)
    if mib < 1:
        raise InvalidRequest(f"{text!r} is less than 1MiB: {_HOW}, or leave it out")
    return mib


def show(mib: int) -> str:
    """Return ``mib`` for people: "64GiB", "79.6GiB", "512MiB"; never more than there is."""
    if mib < 1024:
        return f"{mib}MiB"
    # Cut, not rounded: 81559 MiB shown as 80GiB would hide why a request for 80GiB does not fit.
    return f"{math.floor(mib / 1024 * 10) / 10:g}GiB"
