"""Read a product catalogue (CSV) row by row, strictly.

Bad rows do not stop the reading: all are gathered and reported together (the first 20 in words), so that a
file is corrected once. A caller must read to the end before it trusts what it read: `ManifestInvalid` for
rows is raised there. Memory is constant but for one small mark per sku. Next step: `plan`.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from airflow_gpu_provider.catalog.layout import SKU_PATTERN, SKU_RULE, version_name
from airflow_gpu_provider.exceptions import ManifestInvalid

REQUIRED_COLUMNS = ("sku", "title", "category", "price", "daily_views", "updated_at")

#: The business value of a product is the product of these columns: money at stake a day.
VALUE_COLUMNS = ("daily_views", "price")

#: More would bury the first; the total is always told.
REPORTED_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class ManifestRow:
    """One checked row: what the provider needs, and all columns as they stood."""

    line: int
    sku: str
    updated_at: datetime
    value: float
    row: Mapping[str, str]

    @property
    def version(self) -> str:
        """Name of this product version."""
        return version_name(self.updated_at)


@dataclass
class _Reading:
    """The state of one pass over a file."""

    path: Path
    value_columns: Sequence[str]
    seen: set[bytes] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0
    products: int = 0

    def complain(self, line: int, sentence: str) -> None:
        """Remember that a row is bad."""
        self.problem_count += 1
        if len(self.problems) < REPORTED_PROBLEMS:
            self.problems.append(f"line {line}: {sentence}")

    def finish(self) -> None:
        """Raise when a row was bad or there was none."""
        if self.problem_count:
            more = self.problem_count - len(self.problems)
            tail = f"\n  ... and {more} more" if more else ""
            listing = "\n  ".join(self.problems)
            raise ManifestInvalid(
                f"{self.path}: {self.problem_count} bad values; correct them and start again:"
                f"\n  {listing}{tail}"
            )
        if not self.products:
            raise ManifestInvalid(
                f"{self.path} has a header and no products; allowed: 1 product or more; was the export cut?"
            )


def read_manifest(path: Path, *, value_columns: Sequence[str] = VALUE_COLUMNS) -> Iterator[ManifestRow]:
    """Yield the products in file order; raise `ManifestInvalid` at once for the file, at the end for rows."""
    reading = _Reading(path, value_columns)
    with _opened(path) as lines:
        reader = csv.reader(lines, strict=True)
        header = _checked_header(path, next(reader, []), (*REQUIRED_COLUMNS, *value_columns))
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            row = _checked_row(reading, reader.line_num, header, cells)
            if row is not None:
                reading.products += 1
                yield row
    reading.finish()


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[str]]:
    """Open the file as text; turn what can go wrong on the way into sentences."""
    if not path.exists():
        raise ManifestInvalid(_missing_sentence(path))
    if not path.is_file():
        raise ManifestInvalid(f"catalogue {path} is a folder; give the path of the CSV file in it")
    with path.open("rb") as raw:
        if raw.read(4) == b"PK\x03\x04":
            raise ManifestInvalid(f"{path} is a zip or Excel workbook; export it as CSV (UTF-8)")
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield lines
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ManifestInvalid(
            f"{path} is not UTF-8: byte 0x{byte:02x} cannot be read; save the file with encoding UTF-8"
        ) from error
    except csv.Error as error:
        raise ManifestInvalid(
            f"{path} is not a CSV file: {error}; put fields with commas, quotes or line breaks in double "
            "quotes"
        ) from error
    except OSError as error:
        raise ManifestInvalid(f"{path} cannot be read: {error.strerror}; check its owner and mode") from error


def _missing_sentence(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return (
            f"catalogue {path} does not exist, nor does its folder {folder}; correct the parameter `catalog`"
        )
    found = sorted(item.name for item in folder.glob("*.csv"))[:5]
    hint = f"; CSV files there: {', '.join(found)}" if found else "; there is no CSV file in that folder"
    return f"catalogue {path} does not exist{hint}; correct the parameter `catalog`"


def _checked_header(path: Path, cells: Sequence[str], required: Sequence[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    if not any(header):
        raise ManifestInvalid(
            f"{path} is empty; its first line must name the columns {', '.join(REQUIRED_COLUMNS)}"
        )
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        raise ManifestInvalid(f"{path} is not separated by commas: it begins {header[0]!r:.200}; use commas")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise ManifestInvalid(f"{path} names columns twice: {', '.join(twice)}; rename one of each")
    missing = [name for name in dict.fromkeys(required) if name not in header]
    if missing:
        near = [
            f"{match[0]!r} -> {name!r}"
            for name in missing
            if (match := difflib.get_close_matches(name, header, n=1, cutoff=0.6))
        ]
        hint = f"; rename perhaps {', '.join(near)}" if near else "; add them"
        raise ManifestInvalid(
            f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(header)}; required are "
            f"{', '.join(dict.fromkeys(required))}{hint}"
        )
    return header


def _checked_row(
    reading: _Reading, line: int, header: Sequence[str], cells: Sequence[str]
) -> ManifestRow | None:
    """Check one row; complain about each bad value of it and return None when there is one."""
    if len(cells) != len(header):
        reading.complain(line, f"{len(cells)} fields, but the header names {len(header)}")
        return None
    before = reading.problem_count
    row = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
    _check_sku(reading, line, row["sku"])
    numbers = {
        name: _checked_number(reading, line, name, row[name])
        for name in dict.fromkeys(("price", "daily_views", *reading.value_columns))
    }
    updated_at = _checked_time(reading, line, row["updated_at"])
    if reading.problem_count > before or updated_at is None:
        return None
    value = math.prod(numbers[name] for name in reading.value_columns)
    return ManifestRow(line=line, sku=row["sku"], updated_at=updated_at, value=value, row=row)


def _check_sku(reading: _Reading, line: int, sku: str) -> None:
    if not sku:
        reading.complain(line, "sku is empty; every product needs its own")
        return
    if not SKU_PATTERN.fullmatch(sku):
        reading.complain(line, f"sku {sku[:120]!r} cannot name a folder; allowed: {SKU_RULE}")
        return
    mark = hashlib.blake2b(sku.encode(), digest_size=8).digest()
    if mark in reading.seen:
        reading.complain(line, f"sku {sku!r} stands in the file twice; keep one row")
    reading.seen.add(mark)


def _checked_number(reading: _Reading, line: int, column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or "_" in text:
        reading.complain(line, f"{column} {text[:80]!r} is not a number >= 0; write it like 1299.90")
        return 0.0
    return number


def _checked_time(reading: _Reading, line: int, text: str) -> datetime | None:
    # Python 3.10 does not read the suffix Z.
    plain = text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text
    try:
        moment = datetime.fromisoformat(plain)
        aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return aware.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        reading.complain(line, f"updated_at {text[:80]!r} is not a time; write it like 2026-11-30T12:00:00Z")
        return None
