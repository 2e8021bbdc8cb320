"""Checkpoints on object storage: ``checkpoint_dir="s3://connection@bucket/path"``, or any fsspec URL.

Runs where Airflow is, so it alone turns a connection into a file system. Shards know nothing of that: they
write locally, and `training.mirror` copies. That process gets the file system through a pipe, so that copying
goes on when the worker is killed; where a file system cannot be handed over, a thread of the task copies,
and what was missed is copied by the retry. Used by `operators.training`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.operators.program_environment import program_environment
from airflow_gpu_provider.operators.training_root import is_url
from airflow_gpu_provider.training.checkpoint_files import RECORD_SUFFIX, CheckpointFiles
from airflow_gpu_provider.training.mirror import Mirror, RemoteFolder, RunWatch
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import read_mirror
from airflow_gpu_provider.training.run_folder import DELIVERED, delivered_to, delivery

if TYPE_CHECKING:
    from airflow.sdk.types import Logger
    from fsspec import AbstractFileSystem

_MIRROR = "airflow_gpu_provider.training.mirror"
#: a mirror that is still copying when the run has ended gets this long before the task copies itself
_PATIENCE_S = 60.0


class CheckpointStorage:
    """The remote place of one training's checkpoints."""

    def __init__(self, url: str, filesystem: AbstractFileSystem, log: Logger) -> None:
        self.url = url
        self._filesystem = filesystem
        self._log = log
        self._root = str(filesystem._strip_protocol(url)).rstrip("/")
        self._remote = RemoteFolder(filesystem, f"{self._root}/checkpoints")
        self._previous = RemoteFolder(filesystem, f"{self._root}/previous")

    @classmethod
    def of(cls, checkpoint_dir: str | None, log: Logger) -> CheckpointStorage | None:
        """Return the storage that a ``checkpoint_dir`` names, None for a folder. Raise InvalidRequest."""
        if not is_url(checkpoint_dir):
            return None
        parts = urlsplit(checkpoint_dir)
        conn_id, _, host = parts.netloc.rpartition("@")
        url = parts._replace(netloc=host).geturl()
        try:
            return cls(url, _filesystem(parts.scheme, conn_id or None), log)
        except Exception as error:  # connections, clients and their settings fail in ways of their own
            raise InvalidRequest(
                f"checkpoint_dir={checkpoint_dir!r} cannot be reached ({type(error).__name__}: {error}); "
                "write it as 's3://connection_id@bucket/path', install the provider and client of that "
                "storage, and check the connection."
            ) from error

    def fetch(self, folder: Path, tries: str) -> None:
        """Bring the newest whole checkpoint here, unless the folder has it or a newer one."""
        self._put_aside_what_was_delivered(tries)
        newest = next(CheckpointFiles(folder).whole(), None)
        step = self._remote.download_newest(
            folder,
            after=-1 if newest is None else newest.step,
            tell=lambda sentence: self._log.warning("%s", sentence),
        )
        if step is not None:
            self._log.info("The checkpoint of step %d was copied from %s", step, self.url)

    def mirror(self, plan: RunPlan) -> None:
        """Copy checkpoints while the run lasts."""
        plan.paths.create()
        try:
            filesystem = _handed_over(self._filesystem)
        except TypeError as error:
            self._log.info("Checkpoints are copied to %s by this task: %s", self.url, error)
            mirror, watch = Mirror(plan, self._remote), RunWatch(plan)
            threading.Thread(target=mirror.run, args=(watch.is_over,), name="mirror", daemon=True).start()
            return
        handed: dict[str, object] = {
            "filesystem": filesystem,
            "root": self._remote.root,
            "plan": plan.model_dump(mode="json"),
        }
        with plan.paths.log("mirror").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", _MIRROR],
                env=program_environment(CUDA_VISIBLE_DEVICES=""),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(handed).encode())

    def deliver(self, plan: RunPlan, step: int, *, result: str, tries: str) -> str:
        """Make sure that the final checkpoint is there; return its address. Raise what the storage raises."""
        local = CheckpointFiles(plan.checkpoint_dir).data_file(step)
        record = local.with_suffix(RECORD_SUFFIX)
        self._await_mirror(plan, record.name)
        if not self._remote.holds(record):
            self._log.info("Copying the final checkpoint to %s", self.url)
            self._remote.upload(record)
            self._remote.keep_newest(plan.keep_checkpoints, written=record.name)
        self._filesystem.pipe_file(f"{self._root}/{DELIVERED}", delivery(result, tries).encode())
        return str(self._filesystem.unstrip_protocol(f"{self._remote.root}/{local.name}"))

    def _await_mirror(self, plan: RunPlan, record: str) -> None:
        """Let a mirror end what it does; one that fails, or that is gone, is not waited for long."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and record not in self._remote.records():
            said = read_mirror(plan.paths.mirror)
            if said is None or said.error is not None:
                return
            time.sleep(1.0)

    def _put_aside_what_was_delivered(self, tries: str) -> None:
        """Let a task that is cleared after its success start anew, as it does with a folder.

        Storages cannot rename: all is copied before anything is removed, and the note of the delivery, copied
        last and removed last, tells a try after one that was killed in between how far that came.
        """
        note, copied = f"{self._root}/{DELIVERED}", f"{self._previous.root}/{DELIVERED}"
        delivered = self._content(note)
        if delivered is None or delivered_to(delivered) == tries:
            return
        if self._content(copied) != delivered:
            self._previous.clear()
            self._remote.copy_to(self._previous)
            self._filesystem.pipe_file(copied, delivered)
        self._remote.clear()
        self._filesystem.rm_file(note)
        self._log.info("The checkpoints of an earlier run, which has delivered, are in %s", copied)

    def _content(self, path: str) -> bytes | None:
        self._filesystem.invalidate_cache()
        try:
            return bytes(self._filesystem.cat_file(path))
        except FileNotFoundError:
            return None


def _filesystem(scheme: str, conn_id: str | None) -> AbstractFileSystem:
    """Return Airflow's file system for a scheme, or fsspec's own where Airflow has none and needs none."""
    from airflow.sdk.io import get_fs, has_fs

    if scheme == "file":
        return get_fs(scheme, conn_id, {"auto_mkdir": True})  # type: ignore[dict-item]
    if has_fs(scheme):
        return get_fs(scheme, conn_id)
    if conn_id is not None:
        raise ValueError(f"no installed provider has a file system for {scheme}://")
    import fsspec

    return fsspec.filesystem(scheme)


def _handed_over(filesystem: AbstractFileSystem) -> dict[str, Any]:
    """Return a file system as JSON, with its credentials. Raise TypeError where that is not possible."""
    kind = type(filesystem)
    options = dict(filesystem.storage_options)
    session = options.pop("session", None)
    described = {
        "cls": f"{kind.__module__}:{kind.__name__}",
        "protocol": kind.protocol if isinstance(kind.protocol, str) else kind.protocol[0],
        "args": filesystem.storage_args,
        **options,
        # The client of an AWS session is another one in another process; its keys are the same.
        **(asyncio.run(_keys_of(session)) if session is not None else {}),
    }
    handed: dict[str, Any] = json.loads(json.dumps(described))
    return handed


async def _keys_of(session: Any) -> dict[str, str | None]:
    credentials = session.get_credentials()
    credentials = await credentials if inspect.isawaitable(credentials) else credentials
    if credentials is None:
        return {}
    frozen = credentials.get_frozen_credentials()
    frozen = await frozen if inspect.isawaitable(frozen) else frozen
    return {"key": frozen.access_key, "secret": frozen.secret_key, "token": frozen.token}


def bring_and_mirror(checkpoint_dir: str | None, plan: RunPlan, tries: str, log: Logger) -> None:
    """Before a run starts: bring the newest checkpoint from its storage, if it has one, and begin to copy."""
    storage = CheckpointStorage.of(checkpoint_dir, log)
    if storage is not None:
        storage.fetch(plan.checkpoint_dir, tries)
        storage.mirror(plan)


def with_remote_checkpoint(
    result: dict[str, Any], checkpoint_dir: str | None, plan: RunPlan, tries: str, log: Logger
) -> dict[str, Any]:
    """After a run: return its result with the address of the final checkpoint, once that is safe there."""
    storage = CheckpointStorage.of(checkpoint_dir, log)
    if storage is None:
        return result
    address = storage.deliver(plan, result["steps"], result=json.dumps(result), tries=tries)
    return {**result, "checkpoint": address}
