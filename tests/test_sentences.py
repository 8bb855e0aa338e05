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
FOLDERS = ("engine", "rollout", "conf", "recipes", "benchmarks", "tests", "docs")
# A relative clause in place of a noun, an inverted order, a verb that the field does not use for this.
OPENINGS = re.compile(r"(What|Of|That of|Those of|Which|Tell|Say|Have|Hand|Take what|How) ")
# Ends of sentences. A paragraph, an item of a list and a row of a table end one too.
_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*(\[\"'0-9])")
_NOT_PROSE = re.compile(r"``[^`]*``|`[^`]*`|https?://\S+|\[([^\]]*)\]\([^)]*\)")


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose; code blocks (indented or fenced) and tables are left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. |\w+(?: \([^)]*\))?: )", text):
        lines = [line for line in paragraph.splitlines() if not line.lstrip().startswith(("|", "#", ">>>", "!["))]
        if lines and not all(line.startswith("    ") for line in lines if line):
            yield from _END.split(" ".join(" ".join(lines).split()))


def words(sentence: str) -> int:
    """Words of a sentence; code in backticks counts as one, signs count as none."""
    plain = _NOT_PROSE.sub(lambda found: found[1] or "code", sentence)
    return sum(any(sign.isalnum() for sign in word) for word in plain.split())


def broken(path: Path) -> Iterator[str]:
    """Sentences of a file that break a rule, as ``path:line: sentence``."""
    for line, text in _texts(path):
        for sentence in sentences(text):
            if words(sentence) > MOST_WORDS or OPENINGS.match(sentence):
                yield f"{path.relative_to(ROOT)}:{line}: ({words(sentence)}) {sentence}"


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix == ".md":
        yield 1, path.read_text()
        return
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (doc := ast.get_docstring(node)) is not None:
                yield node.body[0].lineno, doc
    for found in re.finditer(r"(?:^[ \t]*# .*\n)+", text, flags=re.M):
        yield text[: found.start()].count("\n") + 1, re.sub(r"^[ \t]*# ?", "", found[0], flags=re.M)


def files(folder: str) -> list[Path]:
    below = ROOT / folder
    found = [below] if below.is_file() else [*below.rglob("*.py"), *below.rglob("*.md")]
    return sorted(path for path in found if "__pycache__" not in path.parts and "results" not in path.parts)


if __name__ == "__main__":
    found = [line for folder in sys.argv[1:] or FOLDERS for path in files(folder) for line in broken(path)]
    print(*found, f"{len(found)} sentences", sep="\n")
