"""Every example in the documents runs as it is printed.

A document's `python runnable` blocks, one after the other, are one program. It runs in a process and a
directory of its own, with warnings as errors.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

import penstock

ROOT = Path(__file__).parents[2]
SOURCE = Path(penstock.__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(path: Path) -> list[tuple[str, str]]:
    """(what stands behind `python`, code) of every Python block."""
    return [(found[1].strip(), found[2]) for found in _BLOCK.finditer(path.read_text(encoding="utf-8"))]


WITH_EXAMPLES = [path for path in DOCUMENTS if examples(path)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name)
def test_every_python_example_is_marked_runnable(path: Path) -> None:
    assert {mark for mark, _ in examples(path)} == {"runnable"}


def tiered(path: Path) -> ParameterSet:
    """What starts Spark takes its time, and is left to `make long`."""
    starts_spark = any("penstock.spark" in code or "pyspark" in code for _, code in examples(path))
    return pytest.param(path, id=name(path), marks=pytest.mark.long if starts_spark else ())


@pytest.mark.timeout(250)
@pytest.mark.parametrize("path", [tiered(path) for path in WITH_EXAMPLES])
def test_the_examples_of_a_document_run(path: Path, tmp_path: Path) -> None:
    program = "\n\n".join(code for _, code in examples(path))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{name(path)}\n{done.stdout}\n{done.stderr}"


def test_the_documents_that_teach_have_examples() -> None:
    taught = {name(path) for path in WITH_EXAMPLES}
    assert {
        "README.md",
        "docs/how-to/consume-exactly-once.md",
        "docs/how-to/produce.md",
        "docs/how-to/shard-a-queue.md",
        "docs/how-to/test-your-code.md",
    } <= taught
