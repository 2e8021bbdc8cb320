from __future__ import annotations

import pytest

from airflow_gpu_provider.broker.units import parse_mib, show
from airflow_gpu_provider.exceptions import InvalidRequest


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("64GiB", 65_536),
        ("512MiB", 512),
        ("1TiB", 1_048_576),
        ("8GB", 7_630),  # powers of 1000, rounded up
        ("80GB", 76_294),
        (" 1.5 gib ", 1_536),
        ("64Gi", 65_536),
    ],
)
def test_a_size_with_a_unit_is_read(text: str, mib: int) -> None:
    assert parse_mib(text) == mib


@pytest.mark.parametrize(
    "text", ["64", 64, "64G", "GiB", "-1GiB", "", "8 gigs", None, "nan GiB", "1e3GiB", "64Gb/s"]
)
def test_a_size_without_a_clear_unit_is_refused_with_the_way_to_write_it(text: object) -> None:
    with pytest.raises(InvalidRequest, match='write it with its unit, such as "8GiB"'):
        parse_mib(text)


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="less than 1MiB"):
        parse_mib("0GiB")


@pytest.mark.parametrize(
    ("mib", "text"), [(512, "512MiB"), (65_536, "64GiB"), (81_559, "79.6GiB"), (1536, "1.5GiB")]
)
def test_a_size_is_shown_as_no_more_than_it_is(mib: int, text: str) -> None:
    assert show(mib) == text
