"""The tool that reports words to avoid finds what it promises, and nothing in code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.language import PAGES, PLACES, Passage, Remark, files_of, main, passages_of, remarks_on


def remarks(text: str, words_max: int = 35) -> list[Remark]:
    return list(remarks_on(Passage(file="page.md", line=1, text=text), words_max))


@pytest.mark.parametrize(
    "text", ["It is made anew.", "It waits\nfor ever.", "A write goes on later.", "The client is told."]
)
def test_words_that_are_never_right_are_reported(text: str) -> None:
    assert [remark.kind for remark in remarks(text) if remark.kind == "never"] == ["never"]


def test_a_remark_names_the_line() -> None:
    (remark,) = remarks("One line.\nThen it is made anew.")
    assert (remark.line, remark.kind) == (2, "never")
    assert "made anew" in remark.text


def test_words_in_code_and_links_are_not_prose() -> None:
    assert remarks("Call `anew()` or read [the page](pages/anew.md).") == []


def test_a_long_sentence_is_reported_and_two_short_ones_are_not() -> None:
    assert [remark.kind for remark in remarks("word " * 6, words_max=5)] == ["long"]
    assert remarks("One two three. Four five six.", words_max=5) == []


def test_prose_of_a_program_is_its_docstrings_comments_messages_and_test_names(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""Of a module."""\n# a comment\nanew = 1\nprint("a message")\ndef test_it_goes_on():\n    pass\n',
        encoding="utf-8",
    )
    found = {(passage.line, passage.text) for passage in passages_of(path)}
    assert found == {(1, "Of a module."), (2, "a comment"), (4, "a message"), (5, "test it goes on")}


def test_the_report_can_be_read_by_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    path.write_text("It is made anew.\n", encoding="utf-8")
    assert main(["--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "never"
    assert main(["--check", str(path)]) == 1


def test_every_page_and_package_is_read() -> None:
    names = {path.name for path in files_of((*PLACES, *PAGES))}
    assert {"README.md", "CHANGELOG.md", "producer.py", "glossary.md", "app.js"} <= names


@pytest.mark.parametrize("place", ["src/penstock", "docs", "examples", "deploy", "tools", *PAGES])
def test_no_word_that_is_never_right_is_left(place: str) -> None:
    found = [
        f"{remark.file}:{remark.line}: {remark.text}"
        for path in files_of([place])
        for passage in passages_of(path)
        for remark in remarks_on(passage)
        if remark.kind == "never"
    ]
    assert not found, "\n".join(found)
