"""Checks of the words in code and documents, and of links, which `make lint` runs.

CONTRIBUTING.md has the words. Each problem is reported with its place and what to write instead.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".sh")
# A refused expression, and what to write instead.
WORDS = {
    r"told|tells|telling": "log, report, state, name",
    r"besides?": "next to, against, in addition to, apart from",
    r"cannot be had": "is unavailable",
    r"(?<!here )(is|are) no (?!longer|more|less|other|such|slower|later)[a-z]+": "is not a, has no",
    # But for the prompt of an evaluation.
    r"(no|some)body(?! had lived)": "another user, another process, or the agent itself",
    r"hears|heard": "receives, reads",
    r"(go|goes|going|went) on": "continue, resume, run",
    r"are there": "exist",
    r"by (itself|themselves)": "alone, separately, without ...",
    r"whom": "the user, the rank, the server",
    r"(?<!max_)(?<!max-)lanes?": "slot",
    r"few.rows.product": "GEMV",
    r"programs? who|process(es)? who|servers? who|ranks? who": "that",
}
PATTERN = re.compile(
    "|".join(rf"(?P<w{i}>(?<![\w/])(?:{word})(?![\w/]))" for i, word in enumerate(WORDS)),
    re.IGNORECASE,
)
# Beginnings of docstrings and comments that name no subject. A comment may begin with a clause
# ("Where ...,").
DOCSTRING = re.compile(r"(Of|What|How|Where|Which|Who|Whom|Whose)\b")
COMMENT = re.compile(r"(Of|What|Which|Who|Whom|Whose)\b")


FOLDERS = (
    "benchmarks",
    "conf",
    "docs",
    "export_scripts",
    "foundations",
    "inference",
    "launcher_scripts",
)
README_LINES = 165


def main() -> int:
    """Print every problem; return the exit status."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines()
    problems = [*dead_links(), *gaps_of_indexes(names)]
    for name in names:
        path = ROOT / name
        is_text = path.suffix in SUFFIXES or name == "Makefile"
        if is_text and path.is_file() and path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            problems += [f"{name}:{problem}" for problem in refused_words(text)]
            if path.suffix == ".py":
                problems += [f"{name}:{problem}" for problem in refused_openings(text)]
    print("\n".join(problems), file=sys.stderr)
    return int(bool(problems))


def refused_words(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for match in PATTERN.finditer(line):
            instead = list(WORDS.values())[int(str(match.lastgroup)[1:])]
            yield f"{number}: {match[0]!r}; write: {instead}"


def refused_openings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and DOCSTRING.match(text):
                line = getattr(node, "lineno", 1)
                yield f"{line}: {text.splitlines()[0]!r}; begin with the subject or a verb"
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            # A comment of several lines begins at the first.
            if line != before + 1 and COMMENT.match(token.string.lstrip("#: ")):
                yield f"{line}: {token.string!r}; begin with the subject or a verb"
            before = line


def dead_links() -> Iterator[str]:
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]):
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)", text):
            if not link.startswith("http") and not (path.parent / link).exists():
                yield f"{path.relative_to(ROOT)}: the link {link} leads nowhere"
        for named in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]+\.\w+)`", text):
            if not (ROOT / named).exists():
                yield f"{path.relative_to(ROOT)}: there is no file {named}"


def gaps_of_indexes(names: list[str]) -> Iterator[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in sorted({name.split("/")[0] for name in names if "/" in name}):
        if not folder.startswith(".") and f"\n{folder}/" not in readme:
            yield f"README.md: does not explain {folder}/"
    if len(readme.splitlines()) > README_LINES:
        yield f"README.md: has more than {README_LINES} lines"
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        if path.name != "README.md" and f"]({path.name})" not in index:
            yield f"docs/README.md: does not list {path.name}"


if __name__ == "__main__":
    sys.exit(main())
