"""Sentences of docstrings, comments and pages: at most 25 words, and no opening that hides the subject.

``python tests/test_sentences.py engine/moe`` prints those below a folder that break a rule.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 25
FOLDERS = ("engine", "rollout", "conf", "recipes", "benchmarks", "tests", "docs", "README.md", "AGENTS.md")
# A relative clause in place of a noun, an inverted order, a verb that the field does not use for this.
OPENINGS = re.compile(r"(What|Of|That of|Those of|Which|Tell|Say|Have|Hand|Take what|How) ")
# A paragraph, an item of a list and a row of a table end a sentence too.
_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z`*(\[\"'0-9])")
_CODE = re.compile(r"``[^`]*``|`[^`]*`|https?://\S+|\[([^\]]*)\]\([^)]*\)")


def sentences(text: str) -> Iterator[str]:
    """Yield sentences of prose, without code blocks (indented or fenced) and tables."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. |\w+(?: \([^)]*\))?: )", text):
        lines = [line for line in paragraph.splitlines() if not line.lstrip().startswith(("|", "#", ">>>", "!["))]
        if lines and not all(line.startswith("    ") for line in lines if line):
            yield from _END.split(" ".join(" ".join(lines).split()))


def words(sentence: str) -> int:
    """Count words; code in backticks is one, signs are none."""
    plain = _CODE.sub(lambda found: found[1] or "code", sentence)
    return sum(any(sign.isalnum() for sign in word) for word in plain.split())


def broken(text: str) -> list[str]:
    """Return the sentences of a text that break a rule, with their number of words."""
    return [f"({words(one)}) {one}" for one in sentences(text) if words(one) > MOST_WORDS or OPENINGS.match(one)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of a page, or of each docstring and comment of a Python file."""
    text = path.read_text()
    if path.suffix == ".md":
        yield 1, text
        return
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, doc
    for found in re.finditer(r"(?:^[ \t]*# .*\n)+", text, flags=re.M):
        yield text[: found.start()].count("\n") + 1, re.sub(r"^[ \t]*# ?", "", found[0], flags=re.M)


def broken_below(folder: str) -> list[str]:
    """Return ``path:line: sentence`` of all that break a rule below a folder; results of benchmarks are left out."""
    below = ROOT / folder
    files = [below] if below.is_file() else sorted([*below.rglob("*.py"), *below.rglob("*.md")])
    return [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in files
        if not {"__pycache__", "results"} & set(path.parts)
        for line, text in texts(path)
        for sentence in broken(text)
    ]


def test_sentences_of_every_file_are_short_and_begin_with_their_subject():
    assert [line for folder in FOLDERS for line in broken_below(folder)] == []


def test_sentence_that_is_long_or_begins_with_a_clause_is_found():
    long = "A rank sends " + "and sends " * 12 + "rows."
    assert broken(f"Short one. {long}\n\nWhat it holds.\n") == [f"(28) {long}", "(3) What it holds."]


if __name__ == "__main__":
    found = [line for folder in sys.argv[1:] or FOLDERS for line in broken_below(folder)]
    print(*found, f"{len(found)} sentences", sep="\n")
