"""The guides show what the frameworks' tests run, and the table of lines of user code counts it.

In tests, a user's own lines stand between the comments `[label]` and `[/label]`, in one piece or several. A guide shows them
after `<!-- snippet: label -->`; docs/integrate.md has their numbers. Write both anew with
`python tests/repository/test_framework_snippets.py`.
"""

from __future__ import annotations

import re
import textwrap
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "integration"
TABLE = ROOT / "docs" / "integrate.md"
GUIDES = sorted(
    p for p in (ROOT / "docs" / "guides").glob("*.md") if re.search("^<!-- snippet: ", p.read_text(), re.MULTILINE)
)

_PIECE = re.compile(r"^ *# \[([\w ]+)\]\n(.*?)^ *# \[/\1\]$", flags=re.DOTALL | re.MULTILINE)
_SHOWN = re.compile(r"^<!-- snippet: ([\w ]+) -->\n(?:\n```python\n.*?^```\n)?", flags=re.DOTALL | re.MULTILINE)
_ROWS = re.compile(r"(?<=<!-- lines -->\n).*?(?=<!-- /lines -->)", flags=re.DOTALL)

# What a user writes in addition to what the framework asks for anyway: (framework, labels, what the lines are).
COUNTED = [
    (
        "torchrun, Slurm",
        ("launch trainer", "launch engine"),
        "both sides, whatever the model: group, place, adapter, poll",
    ),
    ("Ray actors", ("ray driver", "ray trainer", "ray engine"), "driver, trainer's actor, engine worker's actor"),
    ("TRL AsyncGRPOTrainer", ("trl async",), "`weight_transfer`"),
    ("TRL AsyncGRPOTrainer, shards", ("trl sharded",), "a sender on every rank"),
    ("TRL VLLMGeneration", ("trl generation",), "`GRPOTrainer` and others with vLLM servers"),
    ("verl", ("verl config",), "configuration; both sides"),
    ("DeepSpeed ZeRO-3", ("deepspeed trainer",), "a sender on every rank"),
]
# Engines that need no code but a line at their start: (name, guide, file of a test, what its line has, what the line is).
STARTED = [
    (
        "vLLM",
        "vllm",
        "vllm_engines/engine.py",
        'WeightTransferConfig(backend="weightbridge")',
        "an argument, and variables",
    ),
    ("SGLang", "sglang", "engines/sglang_scheduler.py", "ReceiverAdapter(", "variables"),
]
GUIDE_OF = {"torchrun": "launch", "Ray": "ray", "TRL": "trl", "verl": "verl", "DeepSpeed": "trainers"}


@cache
def pieces() -> dict[str, str]:
    """label -> the code of all its pieces, each dedented, in the order of the file."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("*.py")):
        for label, code in _PIECE.findall(file.read_text()):
            found.setdefault(label, []).append(textwrap.dedent(code).strip("\n") + "\n")
    return {label: "".join(code) for label, code in found.items()}


def num_lines(labels: tuple[str, ...]) -> int:
    """Lines of code; empty ones, comments and lines of marks do not count."""
    lines = [line.strip() for label in labels for line in pieces()[label].splitlines()]
    return sum(1 for line in lines if line and not line.startswith("#"))


def shown(page: str) -> str:
    """The page with its snippets as the tests have them."""

    def block(match: re.Match[str]) -> str:
        code = pieces()[match[1]].replace("  # fmt: skip", "")
        return f"<!-- snippet: {match[1]} -->\n\n```python\n{code}```\n"

    return _SHOWN.sub(block, page)


def table() -> str:
    rows = ["| framework | lines of user code | which |", "|---|---|---|"]
    for name, labels, what in COUNTED:
        guide = GUIDE_OF[re.split(r"[ ,]", name)[0]]
        rows.append(f"| [{name}](guides/{guide}.md) | {num_lines(labels)} | {what} |")
    for name, guide, file, having, what in STARTED:
        lines = (TESTS / file).read_text().splitlines()
        rows.append(f"| [{name}](guides/{guide}.md) | {sum(having in line for line in lines)} | {what} |")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)
def test_guides_show_what_the_tests_run(page: Path) -> None:
    assert page.read_text() == shown(page.read_text())


def test_the_table_counts_the_lines_that_the_tests_run() -> None:
    assert _ROWS.search(TABLE.read_text())[0] == table()  # type: ignore[index]


def test_every_piece_is_shown_or_counted() -> None:
    labels = {label for page in GUIDES for label in _SHOWN.findall(page.read_text())}
    assert set(pieces()) == labels | {label for _, some, _ in COUNTED for label in some}


if __name__ == "__main__":
    for guide in GUIDES:
        guide.write_text(shown(guide.read_text()))
    TABLE.write_text(_ROWS.sub(lambda _: table(), TABLE.read_text()))
