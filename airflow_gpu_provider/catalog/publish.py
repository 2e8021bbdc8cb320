"""Put a product version's final files in place, and move the pointer to the newest version.

A reader sees the old folder or the new one, whole, whenever the process dies. Where the file system can
exchange two names at once (Linux: ext4, xfs, btrfs, tmpfs) that is one step; elsewhere (NFS) the old folder
is set aside first and `recover` brings it back after a crash in between. The pointer never moves to an older
version. Next step: `summary`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
from datetime import datetime
from pathlib import Path

from airflow_gpu_provider.catalog.atomic import flush, guarded, write_json
from airflow_gpu_provider.catalog.layout import ProductFolders

log = logging.getLogger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def publish(folders: ProductFolders, sku: str, version: str, *, staged: Path) -> Path:
    """Make ``staged`` the final folder of this version; an older good one is replaced, not mixed."""
    final = folders.version(sku, version)
    for path in staged.rglob("*"):
        if path.is_file():
            flush(path)
    with guarded(_guard(folders, sku)):
        recover(final)
        if final.exists():
            _replace(staged, final)
        else:
            os.rename(staged, final)
    return final


def recover(final: Path) -> None:
    """Bring back a version that a crash left set aside (see the module's docstring)."""
    aside = _aside(final)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside)
    else:
        log.warning("%s was being replaced when its process died; the former version is back", final)
        os.rename(aside, final)


def point_latest(
    folders: ProductFolders, sku: str, version: str, *, updated_at: datetime, run_id: str
) -> bool:
    """Move the pointer to this version unless it already points to a newer one; tell whether it does."""
    path = folders.latest(sku)
    with guarded(_guard(folders, sku)):
        current = _pointed_time(path)
        if current is not None and current > updated_at:
            log.info("%s: latest stays at %s, which is newer than %s", sku, current, updated_at)
            return False
        write_json(
            path,
            {
                "sku": sku,
                "version": version,
                "updated_at": updated_at.isoformat(),
                "path": version,
                "run_id": run_id,
            },
        )
    return True


def _pointed_time(path: Path) -> datetime | None:
    try:
        return datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["updated_at"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("pointer %s is damaged (%s); it is written anew", path, error)
        return None


def _replace(staged: Path, final: Path) -> None:
    if _exchange(staged, final):
        shutil.rmtree(staged)  # now the former version
        return
    aside = _aside(final)
    os.rename(final, aside)
    os.rename(staged, final)
    shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.former")


def _guard(folders: ProductFolders, sku: str) -> Path:
    return folders.product(sku) / ".guard"
