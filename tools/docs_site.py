"""Build the documentation site into `build/site`: `make docs`.

The table in `docs/README.md` is the navigation. Pages about the project, whole examples and the help of every
command are made from the files and the code they describe, and links to them lead there. A link that leads
nowhere fails the build.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import yaml

from penstock.cli.main import cli

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
SETTINGS = Path(__file__).with_name("docs_site.yml")
PROJECT = {
    "ARCHITECTURE.md": "Architecture",
    "CHANGELOG.md": "Changes",
    "CONTRIBUTING.md": "Contributing",
    "SECURITY.md": "Security",
}
ROOMS = ("buffer", "topics", "quiver", "coordinator", "timeseries", "vector", "spark", "testing")
LANGUAGES = {
    ".html": "html",
    ".js": "javascript",
    ".md": "",
    ".py": "python",
    ".service": "ini",
    ".sh": "bash",
    ".sql": "sql",
    ".yaml": "yaml",
    "Containerfile": "docker",
}
FOLDERS = {"examples": "Examples", "deploy": "Deployment"}
"""Folders whose files are pages, too."""
_ROW = re.compile(r"^\| ([^|]+) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_MARK = re.compile(r"^(```\w+) \w+$", re.MULTILINE)
"""What our tests read behind the language of a block; the builder of the site does not know it."""
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Write the sources and have the site made from them. 1 when a link is broken or the build fails."""
    pages = dict(site_pages())
    sources = BUILD / "site-source"
    shutil.rmtree(sources, ignore_errors=True)
    broken = []
    for path, text in pages.items():
        linked, lost = with_links(path, text, pages)
        broken += [f"{path}: {link}" for link in lost]
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        (sources / path).write_text(linked, encoding="utf-8")
    for picture in (ROOT / "docs").rglob("*.png"):
        place = sources / picture.relative_to(ROOT / "docs")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, place)
    if broken:
        print("links that lead nowhere:", *broken, sep="\n  ", file=sys.stderr)
        return 1
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8")) | {"nav": navigation()}
    configured = BUILD / "mkdocs.yml"
    configured.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(configured)]
    return subprocess.run(build, check=False).returncode


# What there is to read


def site_pages() -> Iterator[tuple[str, str]]:
    """(path, text) of every page, links as in the files."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        yield "index.md" if name == "README.md" else name, path.read_text(encoding="utf-8")
    for room in ROOMS:
        yield f"python/{room}.md", f"# penstock.{room}\n\n::: penstock.{room}\n"
    for title, place, text in command_pages():
        yield place, f"# {title}\n\n{text}"
    for folder in FOLDERS:
        yield from file_pages(folder)
    for name in PROJECT:
        yield f"project/{name.lower()}", (ROOT / name).read_text(encoding="utf-8")


def command_pages() -> Iterator[tuple[str, str, str]]:
    """(title, path, help) of every verb, with all its own verbs on one page."""
    context = click.Context(cli, info_name="penstock")
    for verb in cli.list_commands(context):
        command = cli.get_command(context, verb)
        assert command is not None
        yield f"penstock {verb}", f"commands/{verb}.md", "\n".join(help_texts(command, verb, context))


def help_texts(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """The help of a command and of all below it."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=100)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            inner = command.get_command(context, verb)
            assert inner is not None
            yield from help_texts(inner, verb, context)


def file_pages(folder: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every file below a folder that people read."""
    for path in sorted((ROOT / folder).rglob("*")):
        language = LANGUAGES.get(path.suffix or path.name)
        if path.is_file() and language is not None:
            name = path.relative_to(ROOT).as_posix()
            text = path.read_text(encoding="utf-8")
            yield page_name(name), text if not language else f"# {name}\n\n````{language}\n{text}\n````\n"


def page_name(file: str) -> str:
    return file if file.endswith(".md") else f"{file}.md"


# How they hang together


def navigation() -> list[object]:
    """The sections and links of the index, then what is made here."""
    return [{"Contents": "index.md"}, *_written_sections(), *_made_sections()]


def _written_sections() -> Iterator[dict[str, object]]:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for kind, links in _ROW.findall(text):
        pages: list[object] = [{_title(name): path} for name, path in _LINK.findall(links)]
        if kind.strip() == "decisions":
            pages += sorted(f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("0*.md"))
        if pages:
            yield {_title(kind.strip()): pages}


def _made_sections() -> Iterator[dict[str, object]]:
    yield {"Python": [{f"penstock.{room}": f"python/{room}.md"} for room in ROOMS]}
    yield {"Commands": [{title: path} for title, path, _ in command_pages()]}
    for folder, title in FOLDERS.items():
        pages = [path for path, _ in file_pages(folder)]
        yield {title: [{path.removeprefix(f"{folder}/").removesuffix(".md"): path} for path in pages]}
    yield {"Project": [{title: f"project/{name.lower()}"} for name, title in PROJECT.items()]}


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_links(page: str, text: str, pages: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text with links as they are on the site, and those that lead nowhere. Code stays as it is."""
    lost: list[str] = []

    def moved(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = site_path(source_folder(page), path)
        if target is None:
            lost.append(match[2])
            return match[0]
        return f"[{match[1]}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{mark}{anchor})"

    def site_path(folder: str, link: str) -> str | None:
        target = posixpath.normpath(posixpath.join(folder, link))
        for candidate in candidates(target):
            is_picture = candidate.endswith(".png") and (ROOT / "docs" / candidate).is_file()
            if candidate in pages or is_picture:
                return candidate
        return None

    parts = _CODE.split(_MARK.sub(r"\1", text))
    parts[::2] = [_LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts), lost


def source_folder(page: str) -> str:
    """Where the file that this page is made from stands, from the root of the repository."""
    if page.startswith("project/"):
        return ""
    if page.partition("/")[0] in FOLDERS:
        return posixpath.dirname(page)
    return posixpath.join("docs", posixpath.dirname(page))


def candidates(target: str) -> Iterator[str]:
    """The pages that may stand for a file or folder of the repository, the best first."""
    if target in PROJECT:
        yield f"project/{target.lower()}"
    elif target in ("README.md", "docs/README.md", "docs"):
        yield "index.md"
    elif target.startswith("docs/"):
        yield target.removeprefix("docs/")
        yield f"{target.removeprefix('docs/')}/README.md"
    elif (ROOT / target).is_dir():
        inside = [
            found for kind in ("*.md", "*.py", "*.yaml") for found in sorted((ROOT / target).rglob(kind))
        ]
        yield from (page_name(path.relative_to(ROOT).as_posix()) for path in inside)
    else:
        yield page_name(target)


if __name__ == "__main__":
    sys.exit(main())
