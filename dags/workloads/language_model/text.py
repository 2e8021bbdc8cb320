"""Text that every machine has: the sources of Python's own standard library, as bytes.

One set of packages makes the pretrained model, another one the data set for fine-tuning, so that fine-tuning
has something to learn. A folder appears whole, under its final name, with a checksum manifest. Without
torch.
"""

from __future__ import annotations

import hashlib
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

PRETRAINING_PACKAGES = ("collections", "email", "json", "logging")
FINE_TUNING_PACKAGES = ("asyncio", "concurrent", "multiprocessing", "unittest")

_VALIDATION_SHARE = 0.1


def library_text(packages: Sequence[str]) -> bytes:
    """Return the sources of these standard library packages, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for package in packages for file in (library / package).rglob("*.py"))
    if not files:
        raise FileNotFoundError(f"No Python sources of {', '.join(packages)} below {library}")
    return b"\n".join(file.read_bytes() for file in files)


def make_dataset(folder: Path, packages: Sequence[str] = FINE_TUNING_PACKAGES) -> dict[str, int]:
    """Write train.bin and valid.bin into a new ``folder``; return their sizes in bytes."""
    text = library_text(packages)
    cut = int(len(text) * (1 - _VALIDATION_SHARE))
    parts = {"train.bin": text[:cut], "valid.bin": text[cut:]}

    def write(target: Path) -> None:
        for name, content in parts.items():
            (target / name).write_bytes(content)

    publish_folder(folder, write)
    return {name: len(content) for name, content in parts.items()}


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder aside, add SHA256SUMS, and give it its name at once.

    Whoever waits for ``folder`` never sees a part of it. A folder of that name is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    write(aside)
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(aside.iterdir())
    ]
    (aside / "SHA256SUMS").write_text("".join(lines))
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
