"""Create the virtual environment and install the pinned dependencies; needs nothing but Python itself.

Invariant: the stamp in the environment is written last and says what is in it, so a finished installation
whose pins are unchanged costs nothing. One that was cut short is thrown away: pip may have left a package
half written that it would later take for whole. Next step: `scripts.demo` or pytest, run by this environment.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed.json"
UNDER_WAY = VENV / "installation-under-way"
CONSTRAINTS = ROOT / "constraints.txt"

OLDEST, NEWEST = (3, 11), (3, 14)  # pins are made on 3.11; torch has no wheels above 3.14
PIP_TRIES = (
    2  # a half-read archive or a dropped connection is worth one more try, a wrong pin is not worth more
)
FREE_GIB = 5  # the environment takes 2 GiB with the CPU build of torch; pip unpacks beside it


class InstallError(Exception):
    """The installation cannot go on; the sentence says what to change."""


def pins_digest() -> str:
    """Return the digest of everything but the groups that decides what gets installed."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(path.read_bytes())
    digest.update(f"{ROOT} {sys.version_info[:2]}".encode())
    return digest.hexdigest()


def installed_groups(pins: str) -> set[str]:
    """Return the groups already installed with these pins; none when the pins have changed."""
    if not (PYTHON.exists() and STAMP.exists()):
        return set()
    stamp = json.loads(STAMP.read_text())
    return set(stamp["groups"]) if stamp["pins"] == pins else set()


def check_machine() -> None:
    """Refuse early what would fail late: another system, a wrong Python, a full disk."""
    if not sys.platform.startswith("linux"):
        raise InstallError(f"this project runs on Linux (it uses /proc and prctl); this is {sys.platform}")
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        have = ".".join(map(str, sys.version_info[:3]))
        raise InstallError(
            f"Python {have} at {sys.executable} cannot be used; install Python {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]} (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name one: "
            "make demo PYTHON=/path/to/python3.11"
        )
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    if free_gib < FREE_GIB:
        raise InstallError(
            f"the disk of {ROOT} has {free_gib:.1f} GiB free, {FREE_GIB} are needed; free some space"
        )


def create_environment() -> None:
    """Make `.venv`; replace one without a working pip or whose installation was cut short."""
    if not UNDER_WAY.exists() and _succeeds([str(PYTHON), "-m", "pip", "--version"]):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    print(f"making {VENV.name} with Python {sys.version.split()[0]}", flush=True)
    if not _succeeds([sys.executable, "-m", "venv", str(VENV)]):
        raise InstallError(
            f"{sys.executable} -m venv failed; its venv module is missing or broken "
            f"(Debian, Ubuntu: apt install python3.{sys.version_info[1]}-venv)"
        )


def install(groups: set[str], pins: str) -> None:
    """Install pip as pinned, then this project, editable, with ``groups``; pip compiles what it installs."""
    pip = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "-qq",  # errors only
        "--disable-pip-version-check",
        "-c",
        str(CONSTRAINTS),
    ]
    chosen = [part for group in sorted(groups) for part in ("--group", group)]
    print("installing the pinned dependencies (some minutes the first time)", flush=True)
    UNDER_WAY.touch()
    STAMP.unlink(missing_ok=True)
    _run([*pip, "--upgrade", "pip"])  # --group needs pip >= 25.1
    _run([*pip, "--editable", ".", *chosen])
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps({"pins": pins, "groups": sorted(groups)}))
    os.replace(partial, STAMP)
    UNDER_WAY.unlink()


def _run(command: list[str]) -> None:
    for attempt in range(1, PIP_TRIES + 1):
        result = subprocess.run(command, cwd=ROOT, check=False)
        if result.returncode == 0:
            return
        if attempt < PIP_TRIES:
            print("pip failed; trying once more", file=sys.stderr, flush=True)
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    raise InstallError(
        f"pip ended with code {result.returncode} (its words are above; {free_gib:.1f} GiB disk free); "
        "check the network or the package index and run the same command again"
    )


def _succeeds(command: list[str]) -> bool:
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


@contextmanager
def alone() -> Iterator[None]:
    """Let one installation run at a time: a second one would remove what the first is writing."""
    with open(ROOT / ".install.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another installation is under way here; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Install when needed; return the exit code."""
    parser = argparse.ArgumentParser(description="Create .venv and install the pinned dependencies.")
    parser.add_argument("groups", nargs="+", help="dependency groups of pyproject.toml")
    wanted = set(parser.parse_args().groups)
    try:
        pins = pins_digest()
        if wanted <= installed_groups(pins) and not UNDER_WAY.exists():
            return 0
        with alone():
            present = installed_groups(pins)
            if wanted <= present and not UNDER_WAY.exists():
                return 0
            check_machine()
            create_environment()
            install(wanted | present, pins)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("install: interrupted; run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
