"""Numbers in the sentences of the results stand in a table that a script has written."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "results"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")

SECTION = re.compile(r"<!-- (?P<name>[^/].*?) -->.*?<!-- /(?P=name) -->", re.S)
SCORE = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.]*\d)")
# what is computed from two numbers of a table, and what is another's
DERIVED = re.compile(r"\s*(?:±\s*[\d.]+\s*)?(?:(?:and|to)\s+[\d.]+\s*)?(?:%|points?\b|times\b|seconds\b)")
OF_OTHERS = re.compile(r"(?:published|paper)[^()]*\)", re.S)


def written(text):
    """The numbers in the sections that scripts write, as numbers."""
    return [float(number) for match in SECTION.finditer(text) for number in re.findall(r"\d+\.\d+", match.group())]


def is_among(number, numbers):
    """Whether a number is one of others, rounded as it is."""
    digits = len(number.partition(".")[2])
    return any(abs(round(other, digits) - float(number)) < 1e-9 for other in numbers)


def scores(text):
    """The decimals of a text that are no difference, ratio or share, and nobody else's."""
    text = OF_OTHERS.sub("", text)
    return [match.group() for match in SCORE.finditer(text) if not DERIVED.match(text[match.end() :])]


def test_what_is_a_score():
    text = "From 0.447 to 0.420 ± 0.002, 1.5 points more, 2.6 times as large (published: 26.5 for 43.1), 41.8 of 9."
    assert scores(text) == ["0.447", "0.420", "0.002", "41.8"]
    assert is_among("41.8", [41.79])
    assert not is_among("41.8", [41.74, 4.18])


@pytest.mark.parametrize("page", PAGES)
def test_scores_in_sentences_are_in_a_table_of_the_page(page):
    text = (FOLDER / f"{page}.md").read_text()
    numbers = written(text)
    assert numbers
    assert [score for score in scores(SECTION.sub("", text)) if not is_among(score, numbers)] == []


def test_scores_of_the_first_page_are_in_tables_of_the_pages_it_names():
    """In the column of the first table that tells differences, and of the second that tells what was found here."""
    claims = {
        "FedMargin": "fedmargin", "FedFusion": "fedfusion", "FedSS": "fedss", "FedMA": "fedma", "SCAFFOLD": "drift",
    }  # fmt: skip
    count = 0
    for line in (FOLDER / "index.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"\((\w+)\.md[#)]", line) or [name for paper, name in claims.items() if paper == cells[0]]
        if not line.startswith("|") or not names or len(cells) < 4:
            continue
        numbers = [number for name in names for number in written((FOLDER / f"{name}.md").read_text())]
        found = re.findall(r"\d+\.\d+ ± \d+\.\d+", cells[2]) + [score for score in scores(cells[2])]
        for value in found:
            count += 1
            assert all(is_among(number, numbers) for number in value.split(" ± ")), (cells[0], value)
    assert count > 20
