"""Links in the documents lead somewhere: to files that exist and to headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the fragment that each heading gets, as code hosts make it."""
    headings = re.findall(r"^#{1,6}\s+(.*)$", _CODE_BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(document: Path, text: str) -> list[str]:
    """Return the links of a document's text that lead nowhere; other sites are not asked."""
    broken = []
    for link in _LINK.findall(_CODE_BLOCK.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (
            fragment and fragment not in anchors(text if target == document else target.read_text())
        ):
            broken.append(link)
    return broken


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, here\n")
    text = "[a](there.md) [b](there.md#a-heading-here) [c](gone.md) [d](there.md#gone) [e](https://x.org/y)"
    assert broken_links(tmp_path / "it.md", text) == ["gone.md", "there.md#gone"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_the_documents_lead_somewhere(document: Path) -> None:
    assert not broken_links(document, document.read_text())


def test_there_is_a_readme() -> None:
    assert ROOT / "README.md" in DOCUMENTS
