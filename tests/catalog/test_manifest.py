"""What a catalogue may look like, and what is said about one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from catalog_builders import COLUMNS, row, write_catalog

from airflow_gpu_provider.catalog.manifest import read_manifest
from airflow_gpu_provider.exceptions import ManifestInvalid


def complaint(path: Path) -> str:
    with pytest.raises(ManifestInvalid) as caught:
        list(read_manifest(path))
    return str(caught.value)


def test_a_good_row_is_read_with_all_its_columns(tmp_path: Path) -> None:
    (read,) = read_manifest(write_catalog(tmp_path, [row("CHAIR-01", price="12.5", daily_views=4)]))
    assert read.sku == "CHAIR-01"
    assert read.value == 50.0
    assert read.version == "20261101T080000Z"
    assert read.row["views"] == "views/CHAIR-01"


def test_times_without_a_zone_are_utc_and_others_are_converted(tmp_path: Path) -> None:
    rows = [
        row("a", updated_at="2026-11-01"),
        row("b", updated_at="2026-11-01T10:00:00+02:00"),
        row("c", updated_at="2026-11-01T08:00:00.250Z"),
    ]
    versions = [read.version for read in read_manifest(write_catalog(tmp_path, rows))]
    assert versions == ["20261101T000000Z", "20261101T080000Z", "20261101T080000.250000Z"]


def test_a_byte_order_mark_and_blank_lines_are_no_fault(tmp_path: Path) -> None:
    path = write_catalog(tmp_path, [row("a"), row("b")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\r\n", b"\r\n\r\n"))
    assert [read.sku for read in read_manifest(path)] == ["a", "b"]


def test_a_missing_file_is_named_with_its_neighbours(tmp_path: Path) -> None:
    write_catalog(tmp_path, [row("a")])
    said = complaint(tmp_path / "catalogue.csv")
    assert "catalogue.csv does not exist" in said
    assert "catalog.csv" in said.partition("CSV files there")[2]
    assert "nor does its folder" in complaint(tmp_path / "nowhere" / "catalog.csv")


def test_a_misspelt_column_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    path = write_catalog(tmp_path, [row("a")])
    path.write_text(path.read_text().replace("daily_views", "dayly_view"))
    said = complaint(path)
    assert "lacks the columns daily_views" in said
    assert "'dayly_view' -> 'daily_views'" in said
    assert "required are sku, title, category, price, daily_views, updated_at" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (",".join(COLUMNS).encode() + b"\n", "no products"),
        (b"sku;title;category\nA;B;C\n", "not separated by commas"),
        (b"PK\x03\x04rest of a workbook", "export it as CSV"),
        (",".join(COLUMNS).encode() + b"\nA,Caf\xe9,c,1,1,2026-11-01,v,\n", "byte 0xe9"),
        (b"sku,sku,title\n", "names columns twice: sku"),
        (",".join(COLUMNS).encode() + b'\nA,"never closed,c,1,1,2026-11-01,v,\n', "is not a CSV file"),
    ],
)
def test_a_file_that_is_no_catalogue_says_why(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "catalog.csv"
    path.write_bytes(content)
    assert said in complaint(path)


def test_a_folder_is_not_a_catalogue(tmp_path: Path) -> None:
    assert "is a folder" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sku": ""}, "sku is empty"),
        ({"sku": "../../etc/passwd"}, "cannot name a folder"),
        ({"sku": "a/b"}, "cannot name a folder"),
        ({"sku": ".hidden"}, "cannot name a folder"),
        ({"sku": "a\nb"}, "cannot name a folder"),
        ({"sku": "x" * 101}, "cannot name a folder"),
        ({"price": "1,200.00"}, "price '1,200.00' is not a number"),
        ({"price": "-1"}, "price '-1'"),
        ({"price": "nan"}, "price 'nan'"),
        ({"daily_views": "many"}, "daily_views 'many'"),
        ({"daily_views": ""}, "daily_views ''"),
        ({"updated_at": "yesterday"}, "updated_at 'yesterday' is not a time"),
        ({"updated_at": "2026-13-01"}, "updated_at '2026-13-01'"),
    ],
)
def test_a_bad_value_is_named_with_its_line(tmp_path: Path, fields: dict[str, str], said: str) -> None:
    bad = {**row("bad"), **fields}
    line = 3 + bad["sku"].count("\n")
    message = complaint(write_catalog(tmp_path, [row("good"), bad]))
    assert f"line {line}: " in message
    assert said in message


def test_a_sku_that_stands_twice_is_refused(tmp_path: Path) -> None:
    assert "line 4: sku 'a' stands in the file twice" in complaint(
        write_catalog(tmp_path, [row("a"), row("b"), row("a")])
    )


def test_a_row_with_a_missing_field_is_named(tmp_path: Path) -> None:
    path = write_catalog(tmp_path, [row("a")])
    path.write_text(path.read_text() + "b,Half a row\n")
    assert "line 3: 2 fields, but the header names 8" in complaint(path)


def test_all_bad_rows_are_told_at_once_and_the_first_twenty_in_words(tmp_path: Path) -> None:
    rows = [row(f"p{number}", price="dear") for number in range(30)]
    said = complaint(write_catalog(tmp_path, rows))
    assert said.count("is not a number") == 20
    assert "30 bad values" in said
    assert "and 10 more" in said


def test_two_bad_values_of_one_row_are_both_told(tmp_path: Path) -> None:
    said = complaint(write_catalog(tmp_path, [row("a", price="x", updated_at="y")]))
    assert "price 'x'" in said and "updated_at 'y'" in said


def test_reading_is_streamed(tmp_path: Path) -> None:
    rows = [row("first"), *(row(f"p{number}", price="bad") for number in range(3))]
    assert next(read_manifest(write_catalog(tmp_path, rows))).sku == "first"


def test_other_columns_can_be_the_value(tmp_path: Path) -> None:
    path = write_catalog(tmp_path, [row("a", price=7, daily_views=100)])
    assert next(read_manifest(path, value_columns=("price",))).value == 7
    with pytest.raises(ManifestInvalid, match="lacks the columns margin"):
        list(read_manifest(path, value_columns=("margin",)))
