"""Measures the English in docstrings, comments and documentation pages.

    python tests/prose.py                    rates by group
    python tests/prose.py --list FILE ...    all odd constructions in these files, with line numbers

``tests/test_prose.py`` compares all files with the limits. Rates are per 1,000 words. The limits exceed the measured
rates of optax, fedjax, torchmetrics and Lightning.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

WORDS = {
    "pronouns": {"it", "its", "them", "they", "their", "theirs", "those", "itself", "themselves", "ones"},
    "relatives": {"what", "who", "whose", "whom", "which", "where", "whatever", "whoever"},
    "that": {"that"},
    "of": {"of"},
}
LIMITS = {"pronouns": 9.0, "relatives": 7.0, "that": 9.0, "of": 34.0, "odd": 1.0}

# Below this many words a single sentence moves a rate, so the limits are twice as high.
FEW_WORDS = 300

# Each compared library has at most one of these constructions per 1,000 words.
ODD = {
    "free relative": r"\bwhat (?:is|was|are|were|has|have|it|they|a|the|there|each|of|clients?|comes?|travels?|came"
    r"|goes|can|does|did|else)\b",
    "there is/are at the end": r"\b(?:that|as|where|if|which) there (?:is|are|was|were)(?: any| one| none)?\b",
    "'of' at the start": r"(?:^|[.;:] )Of (?:a|an|the|clients|several|such|these|those|what|one)\b",
    "likewise": r"\b(?:likewise|the same holds|as ever|just so)\b",
    "beside, meanwhile": r"\b(?:beside|meanwhile)\b",
    "go on": r"\bgo(?:es|ing)? on\b|\bwent on\b",
    "told, says so": r"\b(?:is|are|was) (?:told|said)\b|\bsays (?:it|so|which|why|that)\b|\btells of\b",
    "'Has X do'": r"(?:^|\. )Has (?:the|a|clients|callbacks|all|another|Lightning|rounds)\b",
    "of its own": r"\b(?:of (?:its|their) own|theirs)\b",
    "those of": r"\b(?:those|that|one|ones) of (?:the|a|an|its|their|every|all)\b",
    "but for": r"\bbut for\b",
    "come of": r"\bcomes? of\b|\bcame of\b",
    "nobody": r"\b(?:nobody|somebody|anybody|everybody)\b",
    "'is no X'": r"\b(?:is|are) no (?:client|text|class|tensor|model|number|name|file|local|other|whole)\w*\b",
    "as X have it": r"\bas (?:it|they|the \w+|\w+) (?:has|have) it\b",
    "left out": r"\b(?:is|are|be|was|were) left out\b",
    "out of its range": r"\bout of its range\b",
    "is none": r"\bthere (?:is|are) none\b|\bis none\b",
    "alone after a noun": r"\b(?:names?|rows?|one|classes|rounds?|training|process) alone\b",
}

GROUPS = ("lightning_fed", "tests", "examples", "benchmarks", "docs")


def group_of(path):
    """Group name for a repository path, or ``None`` for an unmeasured file."""
    top = path.parts[0]
    if path.suffix == ".md":
        return "docs" if top in ("docs", "README.md") else None
    if path.suffix in (".py", ".pyi"):
        return top if top in GROUPS else None
    return None


def measured_files():
    """Repository paths to measure. Ignored files are skipped."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, check=True, text=True).stdout.split("\0")
    paths = sorted({Path(name) for name in names if name})
    return [path for path in paths if group_of(path) and (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


def python_texts(source):
    """Yields line number and text for docstrings (without examples) and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                example = r"(?s)Examples?:.*?(?=\n\s*(References|Args|Raises|Returns):|\Z)"
                yield node.body[0].lineno, re.sub(example, " ", text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
            yield token.start[0], token.string.lstrip("# ")


def markdown_texts(source):
    """Yields line number and text for lines outside code blocks."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def texts_of(path):
    """Yields line number and text for all prose in a file. Code between backticks counts as one word."""
    source = (ROOT / path).read_text()
    for line, text in (markdown_texts if path.suffix == ".md" else python_texts)(source):
        yield line, re.sub(r"\s+", " ", re.sub(r"`+[^`]*`+", " X ", text))


def odd_constructions(path):
    """Yields line number, kind and context for every match with ``ODD``."""
    for line, text in texts_of(path):
        for kind, pattern in ODD.items():
            for match in re.finditer(pattern, text):
                yield line, kind, text[max(0, match.start() - 30) : match.end() + 30]


def counts_of(path):
    """Counts ``words`` and, for each key in ``LIMITS``, the occurrences."""
    counts = Counter(words=0)
    for _, text in texts_of(path):
        words = re.findall(r"[a-z']+", text.lower())
        counts["words"] += len(words)
        for name, group in WORDS.items():
            counts[name] += sum(word in group for word in words)
    counts["odd"] = sum(1 for _ in odd_constructions(path))
    return counts


def rates_of(counts):
    """Occurrences per 1,000 words, rounded to two digits."""
    return {name: round(1000 * counts[name] / max(counts["words"], 1), 2) for name in LIMITS}


def limits_of(counts):
    """Limits for one file, doubled for a short file."""
    return {name: (2 if counts["words"] < FEW_WORDS else 1) * limit for name, limit in LIMITS.items()}


def measure():
    """Counts by file and by group."""
    files = {str(path): counts_of(path) for path in measured_files()}
    groups = {group: Counter() for group in GROUPS}
    for path, counts in files.items():
        groups[group_of(Path(path))].update(counts)
    return files, groups


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="+", type=Path, metavar="FILE", help="print the odd constructions of files")
    options = parser.parse_args()
    if options.list:
        for path in options.list:
            for line, kind, text in odd_constructions(path.resolve().relative_to(ROOT)):
                print(f"{path}:{line}: {kind}: ...{text}...")
            print(f"{path}: {rates_of(counts_of(path.resolve().relative_to(ROOT)))}")
        return
    for group, counts in measure()[1].items():
        print(f"{group:14} {counts['words']:7} words ", rates_of(counts))


if __name__ == "__main__":
    main()
