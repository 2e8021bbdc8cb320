"""Checkpoints on object storage: what counts there, who copies, and where the credentials are."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.operators.checkpoint_storage import CheckpointStorage, _handed_over
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.training.checkpoint import CheckpointFolder
from airflow_gpu_provider.training.checkpoint_files import CheckpointFiles
from airflow_gpu_provider.training.mirror import Mirror, RemoteFolder, RunWatch
from airflow_gpu_provider.training.run_file import RunRecord, RunState, read_mirror, read_record, write_record
from tests.training.running import make_plan
from tests.training.test_checkpoints import FACTS
from tests.training.test_training_state import new_state

LOG = logging.getLogger(__name__)


class BrokenStore(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
    """An object store whose connection breaks."""

    protocol = "broken"
    cachable = False
    breaks_at = ""

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        if self.breaks_at and path.endswith(self.breaks_at):
            raise ConnectionResetError("the storage is gone")
        super().pipe_file(path, value, **kwargs)


@pytest.fixture
def remote() -> Any:
    store = BrokenStore()
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    return RemoteFolder(store, "/bucket/run/checkpoints"), store


def local(folder: Path, *steps: int) -> CheckpointFiles:
    for step in steps:
        CheckpointFolder(folder, FACTS, keep=9).save(new_state(), step)
    return CheckpointFiles(folder)


def test_an_upload_counts_once_its_record_is_there_and_damage_falls_back_to_the_one_before(
    remote: Any, tmp_path: Path
) -> None:
    place, store = remote
    files = local(tmp_path / "here", 1, 2, 3)
    for record in reversed(files.record_files()):
        store.breaks_at = "3.json"
        if record.name.endswith("3.json"):
            with pytest.raises(ConnectionResetError):
                place.upload(record)
        else:
            place.upload(record)
    assert [name[-6:] for name in place.records()] == ["2.json", "1.json"], "the data alone do not count"

    data = f"{place.root}/step-000000000002.pt"
    store.pipe_file(data, store.cat_file(data)[:-9])
    told: list[str] = []
    there = tmp_path / "another host"
    assert place.download_newest(there, after=-1, tell=told.append) == 1
    assert "step-000000000002.json is damaged" in told[0] and "trying the one before" in told[0]
    (whole,) = CheckpointFiles(there).whole()
    assert whole.step == 1 and Path(whole.path).parent == there
    assert place.download_newest(there, after=2, tell=told.append) is None, "what is here is newer"

    store.breaks_at = ""
    place.upload(files.record_files()[0])
    place.keep_newest(1, written="step-000000000003.json")
    assert sorted(Path(path).name[-6:] for path in store.ls(place.root, detail=False)) == ["003.pt", "3.json"]


def test_a_storage_that_breaks_is_told_and_tried_again(remote: Any, tmp_path: Path) -> None:
    place, store = remote
    plan = make_plan(tmp_path)
    plan.paths.create()
    mirror = Mirror(plan, place)
    local(plan.checkpoint_dir, 10)
    store.breaks_at = ".json"
    mirror.copy_newest()
    said = read_mirror(plan.paths.mirror)
    assert said is not None and said.step is None
    assert "step-000000000010 could not be copied to /bucket/run/checkpoints (ConnectionReset" in str(
        said.error
    )
    store.breaks_at = ""
    local(plan.checkpoint_dir, 20)
    mirror.copy_newest()
    said = read_mirror(plan.paths.mirror)
    assert said is not None and (said.step, said.error) == (20, None)


def test_what_is_damaged_there_keeps_no_mirror_from_copying_however_new_it_is(
    remote: Any, tmp_path: Path
) -> None:
    place, store = remote
    plan = make_plan(tmp_path)
    plan.paths.create()
    for record in reversed(local(plan.checkpoint_dir, 1, 2).record_files()):
        place.upload(record)
    data = f"{place.root}/step-000000000002.pt"
    whole = store.cat_file(data)
    Mirror(plan, place).copy_newest()
    assert read_mirror(plan.paths.mirror) is None, "nothing to copy"
    store.pipe_file(data, whole[:-9])
    store.pipe_file(f"{place.root}/step-000000000009.json", b"{")
    Mirror(plan, place).copy_newest()
    assert store.cat_file(data) == whole and place.records()[0] == "step-000000000002.json"


def test_another_process_with_the_supervisors_number_is_not_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path)
    plan.paths.create()
    now = datetime.now(timezone.utc)
    record = RunRecord(run_id="r", pid=os.getpid(), started_at=now, updated_at=now)
    write_record(plan.paths.run, record)
    watch = RunWatch(plan)
    monkeypatch.setattr("airflow_gpu_provider.training.mirror._REPLACING_S", 0.2)
    assert not watch.is_over()
    time.sleep(0.3)
    assert not watch.is_over(), "it lives"
    monkeypatch.setattr("airflow_gpu_provider.training.mirror.started_at", lambda pid: "later")
    time.sleep(0.3)
    assert watch.is_over()


def test_copying_goes_on_when_the_worker_is_killed_and_nobody_can_read_the_credentials(
    tmp_path: Path,
) -> None:
    plan = make_plan(tmp_path, params={"steps": 100_000}, checkpoint_every_s=3600)
    code = (
        "import sys, time, logging; from pathlib import Path\n"
        "from fsspec.implementations.local import LocalFileSystem\n"
        "from airflow_gpu_provider.operators.checkpoint_storage import CheckpointStorage\n"
        "from airflow_gpu_provider.launchers.local import LocalLauncher\n"
        "from airflow_gpu_provider.training.plan import RunPlan\n"
        "plan = RunPlan.model_validate_json(sys.argv[1])\n"
        "files = LocalFileSystem(auto_mkdir=True, token=sys.stdin.readline().strip())\n"
        f"CheckpointStorage('file://{tmp_path}/bucket', files, logging.getLogger()).mirror(plan)\n"
        "LocalLauncher().start(plan); time.sleep(600)"
    )
    secret = "the-secret-of-the-storage"
    worker = subprocess.Popen([sys.executable, "-c", code, plan.model_dump_json()], stdin=subprocess.PIPE)
    assert worker.stdin is not None
    with worker.stdin as pipe:
        pipe.write(f"{secret}\n".encode())
    try:
        until(lambda: (record := read_record(plan.paths.run)) is not None and record.step > 0)
        (mirror,) = mirrors(plan.paths.log("mirror"))
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{mirror}/{name}").read_text()
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    until(lambda: (record := read_record(plan.paths.run)) is not None and record.state is RunState.STOPPED)
    until(lambda: mirrors(plan.paths.log("mirror")) == [])
    record = read_record(plan.paths.run)
    assert record is not None and record.checkpoint is not None
    (copied,) = CheckpointFiles(tmp_path / "bucket" / "checkpoints").whole()
    assert copied.step == record.checkpoint.step and copied.sha256 == record.checkpoint.sha256
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_the_final_checkpoint_is_there_before_the_task_ends_and_a_cleared_task_starts_anew(
    tmp_path: Path,
) -> None:
    storage = CheckpointStorage.of(f"file://{tmp_path}/bucket", LOG)
    assert storage is not None
    plan = make_plan(tmp_path / "here")
    local(plan.checkpoint_dir, 60)
    address = storage.deliver(plan, 60, result="{}", tries="first")
    assert address == f"file://{tmp_path}/bucket/checkpoints/step-000000000060.pt"

    retry = tmp_path / "retry"
    storage.fetch(retry, "first")
    assert [record.step for record in CheckpointFiles(retry).whole()] == [60], "Airflow did not store it"
    storage.fetch(tmp_path / "cleared", "second")
    assert CheckpointFiles(tmp_path / "cleared").record_files() == []
    assert [record.step for record in CheckpointFiles(tmp_path / "bucket" / "previous").whole()] == [60]


@pytest.mark.parametrize("call", range(10))
def test_a_task_that_is_killed_while_checkpoints_are_put_aside_loses_none_of_them(
    remote: Any, tmp_path: Path, call: int
) -> None:
    class Killed(BaseException):
        pass

    _, store = remote
    storage = CheckpointStorage("/bucket/run", store, LOG)
    plan = make_plan(tmp_path / "here")
    local(plan.checkpoint_dir, 50, 60)
    for record in CheckpointFiles(plan.checkpoint_dir).record_files():
        storage._remote.upload(record)
    storage.deliver(plan, 60, result="{}", tries="first")
    store.pipe_file("/bucket/run/previous/step-000000000001.json", b"an older one")
    calls = iter(range(99))

    def until_killed(done: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> None:
            if next(calls) == call:
                raise Killed
            done(*args, **kwargs)

        return change

    for name in ("cp_file", "rm_file"):
        setattr(store, name, until_killed(getattr(store, name)))
    with pytest.raises(Killed):
        storage.fetch(tmp_path / "killed", "second")
    storage.fetch(tmp_path / "cleared", "second")
    names = {Path(path).stem[-2:] for path in store.ls("/bucket/run/previous", detail=False)}
    assert names == {"50", "60", "ed"}, "both, and the note of their delivery"
    assert storage._remote.records() == []


def test_a_session_travels_as_its_keys_and_what_cannot_travel_is_refused() -> None:
    class Keys:
        access_key, secret_key, token = "key", "secret", None

    class Session:
        async def get_credentials(self) -> Any:
            return self

        async def get_frozen_credentials(self) -> Keys:
            return Keys()

    files = fsspec.filesystem("file", session=Session(), endpoint_url="http://s3", skip_instance_cache=True)
    handed = json.loads(json.dumps(_handed_over(files)))
    assert (handed["key"], handed["secret"], handed["endpoint_url"]) == ("key", "secret", "http://s3")
    assert "session" not in handed
    with pytest.raises(TypeError, match="not JSON serializable"):
        _handed_over(fsspec.filesystem("file", client=object(), skip_instance_cache=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"script": "-m a.b", "entrypoint": None, "checkpoint_dir": "s3://bucket/x"}, "with a script"),
    ],
)
def test_what_can_never_be_is_refused_when_the_dag_is_read(arguments: dict[str, Any], words: str) -> None:
    usual = {"task_id": "train", "entrypoint": "a.b:train", "gpus": 1}
    with pytest.raises(InvalidRequest, match=words):
        DistributedTrainingOperator(**{**usual, **arguments})


def test_a_storage_without_a_client_says_what_to_install() -> None:
    with pytest.raises(InvalidRequest, match=r"nosuch://a/b.*cannot be reached.*install the provider"):
        CheckpointStorage.of("nosuch://a/b", LOG)


def mirrors(output: Path) -> list[int]:
    """Return the mirror processes that print to a file."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "fd/1").readlink() == output:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def until(condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
