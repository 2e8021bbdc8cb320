"""Final files change whole or not at all, and the pointer never goes back in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from airflow_gpu_provider.catalog import publish as publish_module
from airflow_gpu_provider.catalog.atomic import guarded, replacing, write_json, write_text
from airflow_gpu_provider.catalog.layout import ProductFolders
from airflow_gpu_provider.catalog.publish import point_latest, publish, recover


def stage(folder: Path, content: str, name: str = "staged") -> Path:
    staged = folder / name
    staged.mkdir(parents=True)
    (staged / "model.txt").write_text(content)
    (staged / f"only-in-{content}.txt").write_text(content)
    return staged


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(params=["exchange", "no exchange"])
def either_file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no exchange":
        monkeypatch.setattr(publish_module, "_NO_EXCHANGE", range(200))
        monkeypatch.setattr(publish_module, "_RENAME_EXCHANGE", 1 << 10)  # a flag that no kernel knows


def test_a_version_is_replaced_whole(tmp_path: Path, either_file_system: None) -> None:
    folders = ProductFolders(tmp_path / "out")
    for content in ("old", "new"):
        folders.product("a").mkdir(parents=True, exist_ok=True)
        final = publish(folders, "a", "v1", staged=stage(tmp_path / "out", content))
    assert names(final) == {"model.txt", "only-in-new.txt"}
    assert not (tmp_path / "out" / "staged").exists()
    assert names(folders.product("a")) == {"v1", ".guard"}


def test_a_crash_between_two_renames_is_mended(tmp_path: Path) -> None:
    final = tmp_path / "v1"
    stage(tmp_path, "old", ".v1.former")
    recover(final)
    assert (final / "model.txt").read_text() == "old"


def test_what_a_crash_after_both_renames_left_is_removed(tmp_path: Path) -> None:
    stage(tmp_path, "old", ".v1.former")
    final = stage(tmp_path, "new", "v1")
    recover(final)
    assert (final / "model.txt").read_text() == "new"
    assert not (tmp_path / ".v1.former").exists()


def at(day: int) -> datetime:
    return datetime(2026, 11, day, tzinfo=timezone.utc)


def test_the_pointer_follows_newer_versions_only(tmp_path: Path) -> None:
    folders = ProductFolders(tmp_path)
    for day, moves in ((2, True), (3, True), (1, False), (3, True)):
        assert point_latest(folders, "a", f"v{day}", updated_at=at(day), run_id="r") is moves
    assert json.loads(folders.latest("a").read_text())["version"] == "v3"


def test_a_damaged_pointer_is_written_anew(tmp_path: Path) -> None:
    folders = ProductFolders(tmp_path)
    write_text(folders.latest("a"), "{not json")
    assert point_latest(folders, "a", "v1", updated_at=at(1), run_id="r")


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"n": 1})
    with pytest.raises(ValueError):
        write_json(path, {"n": float("nan")})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stopped half-way")
    assert json.loads(path.read_text()) == {"n": 1}
    assert names(tmp_path) == {"x.json"}


REPLACE_FOR_EVER = """
import itertools, sys
from pathlib import Path
from airflow_gpu_provider.catalog.atomic import write_text
from airflow_gpu_provider.catalog.layout import ProductFolders
from airflow_gpu_provider.catalog.publish import publish

out = Path(sys.argv[1])
folders = ProductFolders(out)
folders.product("a").mkdir(parents=True, exist_ok=True)
for number in itertools.count():
    staged = out / f"staged-{number}"
    staged.mkdir()
    for name in ("one.txt", "two.txt"):
        (staged / name).write_text(str(number))
    publish(folders, "a", "v1", staged=staged)
    write_text(out / "whole.txt", str(number) * 1000)
    print(number, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_whole_version(tmp_path: Path) -> None:
    for trial in range(4):
        out = tmp_path / str(trial)
        process = subprocess.Popen(
            [sys.executable, "-c", REPLACE_FOR_EVER, str(out)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(3 + trial * 7):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        final = ProductFolders(out).version("a", "v1")
        recover(final)
        assert (final / "one.txt").read_text() == (final / "two.txt").read_text() != ""
        assert len((out / "whole.txt").read_text()) % 1000 == 0


def test_a_reader_never_finds_the_version_gone_or_half(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    if not publish_module._exchange(tmp_path / "x", tmp_path / "y"):
        pytest.skip("this file system cannot exchange two names; a short gap is documented")
    out = tmp_path / "out"
    command = [sys.executable, "-c", REPLACE_FOR_EVER, str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    model = ProductFolders(out).version("a", "v1") / "one.txt"
    seen: set[str] = set()
    try:
        while len(seen) < 40:  # versions, that is: as many replacements happen meanwhile
            seen.add(model.read_text())
    finally:
        process.kill()
        process.communicate()
    assert "" not in seen


def test_a_guard_is_held_alone_and_the_waiting_one_may_give_up(tmp_path: Path) -> None:
    class Lost(Exception):
        pass

    def check() -> None:
        raise Lost

    with guarded(tmp_path / "g"), pytest.raises(Lost), guarded(tmp_path / "g", check):
        pytest.fail("two hold the guard")
    with guarded(tmp_path / "g", check):
        pass
