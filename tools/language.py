"""Report words to avoid and long sentences in the documentation, docstrings, comments and messages.

    python tools/language.py                     # counts for each package and folder of docs
    python tools/language.py --list src/penstock/buffer docs/how-to
    python tools/language.py --check             # exit code 1 if a word is found that is never right

A word "to look at" may be right in its place: read the sentence. A word that is never right has a better one.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PLACES: Final = ("src/penstock", "docs", "examples", "tools", "tests", "benchmarks", "deploy")
PAGES: Final = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
WORDS_MAX: Final = 35
"""A sentence with more words is reported as long."""

NEVER: Final = {
    r"anew": "again",
    r"for ever": "indefinitely, or the reason why it never ends",
    r"also if": "even if",
    r"the way (?:in|out)\b(?! of)": "ingest path, export path",
    r"is pressed|are pressed": "is overloaded",
    r"(?:is|are|was|were|be|been) told": "is reported, is given",
    r"told of": "reported",
    r"tells? of": "report",
    r"one's own": "its own",
    r"goes on\b(?! to\b)": "continues",
    r"of a sudden": "suddenly",
}
LOOK: Final = {
    r"behind": "after (unless something lags behind)",
    r"at once": "immediately, in one step",
    r"by itself": "automatically, alone",
    r"of its own": "its own, separate",
    r"(?:no|some)body": "no client, another process",
    r"\bwho (?:is|has|wants|waits|comes|gets|asks|reads|writes|sends|needs)": "a client that ...",
    r"what (?:is|was|are|were) (?:asked|wanted|said|told)": "the request, the value",
    r"tells": "reports, returns",
    r"told": "reported, given",
    r"go on": "continue",
    r"hands? (?:it |them )?on": "pass on",
    r"stands? (?:in|at|for)": "is in, is at",
    r"words (?:an?|the|every|its)": "formats the message",
}
_NEVER: Final = re.compile(r"\b(?:" + "|".join(f"(?:{word})" for word in NEVER) + r")\b", re.IGNORECASE)
_LOOK: Final = re.compile(r"(?:\b(?:" + "|".join(f"(?:{word})" for word in LOOK) + r"))\b", re.IGNORECASE)
_FENCE: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_SENTENCE: Final = re.compile(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[-*|\d]|\|")
_CODE: Final = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of prose and the line where it begins."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Something to look at, and why."""

    file: str
    line: int
    kind: str
    """`never`, `look` or `long`."""
    text: str


def files_of(places: Iterable[str]) -> Iterator[Path]:
    """Every file with prose of ours at or below `places`."""
    for place in places:
        path = ROOT / place
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for one in found:
            hidden = any(part in ("vendor", "__pycache__", "golden") for part in one.parts)
            if one.suffix in (".py", ".md", ".js", ".html") and not hidden and one != Path(__file__):
                yield one


def passages_of(path: Path) -> Iterator[Passage]:
    """The prose of a file: all of a page; docstrings, comments and messages of a program."""
    name = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _of_python(name, text)
    elif path.suffix == ".md":
        prose = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
        line = 1
        for part in re.split(r"(\n\s*\n)", prose):
            if part.strip():
                yield Passage(file=name, line=line, text=part)
            line += part.count("\n")
    else:
        for number, row in enumerate(text.splitlines(), 1):
            for found in re.findall(r"\"([^\"]* [^\"]*)\"|`([^`]* [^`]*)`|>([^<>]* [^<>]*)<|//\s(.*)", row):
                yield Passage(file=name, line=number, text=" ".join(found))


def _of_python(name: str, text: str) -> Iterator[Passage]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(file=name, line=token.start[0], text=token.string.lstrip("# "))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield Passage(file=name, line=node.lineno, text=node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Passage(file=name, line=node.lineno, text=node.name.replace("_", " "))


def remarks_on(passage: Passage, words_max: int = WORDS_MAX) -> Iterator[Remark]:
    """What a reader should look at in a passage."""
    text = _CODE.sub(lambda found: "\n" * found[0].count("\n") or "code", passage.text)

    def remark(kind: str, start: int, shown: str) -> Remark:
        line = passage.line + text.count("\n", 0, start)
        return Remark(file=passage.file, line=line, kind=kind, text=" ".join(shown.split()))

    for kind, pattern in (("never", _NEVER), ("look", _LOOK)):
        for found in pattern.finditer(text):
            near = text[max(0, found.start() - 40) : found.end() + 40]
            yield remark(kind, found.start(), f"{found[0]!r} in: {near}")
    start = 0
    for sentence in _SENTENCE.split(text):
        start = max(text.find(sentence, start), 0)
        if len(sentence.split()) > words_max:
            yield remark("long", start, f"{len(sentence.split())} words: {sentence[:100]}")


def group_of(file: str) -> str:
    """The package or folder that a file counts for."""
    parts = Path(file).parts
    depth = 3 if parts[0] == "src" else 2
    return "/".join(parts[: min(depth, len(parts) - 1)]) or file


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. 1 if `--check` finds a word that is never right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("places", nargs="*", help="files or folders; all prose of the project by default")
    add("--list", action="store_true", dest="listed", help="print every remark with its place")
    add("--check", action="store_true", help="only words that are never right; 1 if there is one")
    add("--json", action="store_true", dest="as_json", help="print every remark as a JSON line")
    add("--words", type=int, default=WORDS_MAX, help="the longest sentence (default: %(default)s)")
    options = parser.parse_args(arguments)
    remarks = [
        remark
        for path in files_of(options.places or (*PLACES, *PAGES))
        for passage in passages_of(path)
        for remark in remarks_on(passage, options.words)
        if not options.check or remark.kind == "never"
    ]
    if options.as_json:
        for one in remarks:
            print(json.dumps({"file": one.file, "line": one.line, "kind": one.kind, "text": one.text}))
    elif options.listed or options.check:
        for one in remarks:
            print(f"{one.file}:{one.line}: {one.kind}: {one.text}")
    else:
        _print_counts(remarks)
    return int(options.check and bool(remarks))


def _print_counts(remarks: Iterable[Remark]) -> None:
    counts: dict[str, Counter[str]] = {}
    for one in remarks:
        counts.setdefault(group_of(one.file), Counter())[one.kind] += 1
    print(f"{'place':32} {'never':>7} {'look':>7} {'long':>7}")
    total: Counter[str] = Counter()
    for place, found in sorted(counts.items()):
        print(f"{place:32} {found['never']:7} {found['look']:7} {found['long']:7}")
        total += found
    print(f"{'all':32} {total['never']:7} {total['look']:7} {total['long']:7}")


if __name__ == "__main__":
    sys.exit(main())
