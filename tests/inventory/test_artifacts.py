"""What an agent finds on the disks of its machine, and how often it says so."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.inventory import artifacts
from airflow_gpu_provider.inventory.artifacts import EVERY_S, ArtifactShelf


def file(path: Path, text: str = "weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def listed(*patterns: object) -> tuple[str, ...]:
    found = ArtifactShelf([str(each) for each in patterns]).news(0.0)
    assert found is not None
    return found


def until(news: Callable[[], tuple[str, ...] | None]) -> tuple[str, ...]:
    """Return the news of a listing that goes on in its own thread."""
    deadline = time.monotonic() + 10
    while (found := news()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_the_entries_of_a_folder_and_what_a_pattern_matches_are_artifacts(tmp_path: Path) -> None:
    gpt2, wiki = (
        file(tmp_path / "models" / "gpt2" / "weights.bin").parent,
        file(tmp_path / "sets" / "wiki.zip"),
    )
    assert listed(tmp_path / "models", tmp_path / "sets" / "w*") == (str(gpt2), str(wiki))
    assert listed(tmp_path / "nowhere", tmp_path / "no*") == listed() == ()


def test_what_is_empty_hidden_or_still_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (".cache", "gpt2.part", "gpt2.incomplete", "gpt2.tmp"):
        file(tmp_path / name)
    file(tmp_path / "nothing.bin", "")
    assert listed(tmp_path) == ()


def test_an_entry_that_may_not_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused here, since the tests may run as root, which may read all."""
    readable = [file(tmp_path / name / "weights.bin").parent for name in ("a", "lost+found", "z")]
    allowed = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(folder))
        return allowed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert listed(tmp_path) == (str(readable[0]), str(readable[2]))
    assert f"{tmp_path}/lost+found cannot be read" in caplog.text


def test_a_checksum_that_its_writer_left_names_it_too(tmp_path: Path) -> None:
    file(tmp_path / "gpt2" / "weights.bin")
    manifest = file(tmp_path / "gpt2" / "SHA256SUMS", f"{'a' * 64}  weights.bin\n")
    file(tmp_path / "wiki.zip")
    file(tmp_path / "wiki.zip.sha256", f"{'B' * 64}  wiki.zip\n")
    file(tmp_path / "other.zip")
    file(tmp_path / "other.zip.sha256", "no digest")
    assert set(listed(tmp_path)) == {
        str(tmp_path / "gpt2"),
        f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}",
        str(tmp_path / "wiki.zip"),
        f"sha256:{'b' * 64}",
        str(tmp_path / "other.zip"),
    }


def test_it_is_told_once_a_minute_and_again_after_a_report_that_failed(tmp_path: Path) -> None:
    shelf = ArtifactShelf([str(tmp_path)])
    assert shelf.news(0.0) == shelf.news(1.0) == (), "not told yet"
    shelf.told()
    new = file(tmp_path / "gpt2")
    assert shelf.news(2.0) is shelf.news(EVERY_S - 1) is None
    assert until(lambda: shelf.news(EVERY_S)) == (str(new),)
    shelf.told()
    assert shelf.news(EVERY_S + 1) is None


def test_a_file_system_that_hangs_holds_up_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, hangs = threading.Event(), artifacts._artifacts
    monkeypatch.setattr(artifacts, "_FIRST_S", 0.01)
    monkeypatch.setattr(artifacts, "_artifacts", lambda pattern: answers.wait(10) and hangs(pattern))
    found = file(tmp_path / "gpt2")
    shelf = ArtifactShelf([str(tmp_path)])
    assert shelf.news(0.0) is shelf.news(10 * EVERY_S) is None
    answers.set()
    assert until(lambda: shelf.news(10 * EVERY_S)) == (str(found),)


def test_a_folder_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, looks = file(tmp_path / "gpt2"), artifacts._artifacts

    def broken(pattern: str) -> object:
        if pattern == "/broken":
            raise PermissionError(13, "Permission denied")
        return looks(pattern)

    monkeypatch.setattr(artifacts, "_artifacts", broken)
    assert listed("/broken", tmp_path) == (str(found),)
    assert "Artifacts in /broken cannot be listed" in caplog.text


def test_only_so_many_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(artifacts, "MOST_ARTIFACTS", 2)
    for number in range(3):
        file(tmp_path / str(number))
    assert listed(tmp_path) == (str(tmp_path / "0"), str(tmp_path / "1"))
    assert "3 artifacts lie here, 2 are reported" in caplog.text


def test_a_relative_path_is_refused_with_what_to_write() -> None:
    with pytest.raises(InvalidRequest, match=r"'models': give an absolute path"):
        ArtifactShelf(["models"])
