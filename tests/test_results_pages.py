"""Numbers in the text of results pages appear in a generated table."""

import random
import re
from importlib import import_module
from pathlib import Path
from statistics import mean, stdev

import pytest

pytestmark = pytest.mark.prose

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")

SECTION = re.compile(r"<!-- (?P<name>[^/].*?) -->.*?<!-- /(?P=name) -->", re.S)
SCORE = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.]*\d)")
# differences and ratios computed from table values, and values from other sources
DERIVED = re.compile(r"\s*(?:±\s*[\d.]+\s*)?(?:(?:and|to)\s+-?[\d.]+\s*)?(?:%|points?\b|times\b|seconds\b)")
OF_OTHERS = re.compile(r"(?:published|paper)[^()]*\)", re.S)

# Other pages with scores in the text; excludes settings, versions and values for removed code.
ELSEWHERE = {
    "README.md": ("3.11", "0.98", "1.4"),  # 1 / 1.02 and 1 / 0.70
    "benchmarks/results/performance.md": (),
    "benchmarks/results/method_costs.md": (),
    "docs/performance.md": ("11.6",),  # load average
    "docs/guides/asynchronous.md": ("0.5",),
    "docs/guides/baselines.md": ("0.1",),
    "docs/guides/segmentation.md": (),
    "docs/guides/merging.md": (),
    "benchmarks/results/merging.md": (),
    "docs/guides/cli.md": ("0.3",),
    "docs/guides/deploy.md": ("0.1",),
    "docs/guides/fedfusion.md": (),
    "docs/guides/fedma.md": ("1.25",),
    "docs/guides/fedmargin.md": (),
    "docs/guides/fedss.md": (),
    "docs/guides/privacy.md": ("0.01", "0.001", "1.8", "4.0", "44.4", "4.34", "40.6", "3.71"),
    "docs/guides/robust.md": (),
    "docs/guides/speed.md": ("2.7",),
    "benchmarks/results/projects.md": ("2.7", "4.46"),
    "benchmarks/results/sites.md": ("0.024",),
    "docs/dev/testing.md": ("3.11",),
    "docs/guides/rehearsal.md": ("17.5",),
}
PAIR = re.compile(r"(\d+\.\d+) ± (\d+\.\d+)")
LINK = re.compile(r"\]\(([\w./-]+\.md)")
ON_GITHUB = re.compile(r"blob/main/([\w./-]+\.md)")  # pages outside the site
CODE = re.compile(r"```.*?```|`[^`]*`", re.S)


def written(text):
    sections = [match.group() for match in SECTION.finditer(text)]
    rows = [line for section in sections for line in section.splitlines() if line.startswith("|")]
    return [float(number) for row in rows for number in re.findall(r"\d+\.\d+", row)]


def tables_of(path):
    """Numbers in a page's tables and in linked result files."""
    linked = re.findall(r"benchmarks/results/(\w+\.md)", path.read_text()) if path.parent == FOLDER else []
    pages = [path, *(ROOT / "benchmarks" / "results" / name for name in dict.fromkeys(linked))]
    return [number for page in pages for number in written(page.read_text())]


def is_among(number, numbers):
    """Whether a number equals another number after rounding to the same digits."""
    digits = len(number.partition(".")[2])
    return any(abs(round(other, digits) - float(number)) < 1e-9 for other in numbers)


def scores(text):
    """Decimals in a text, except differences, ratios, shares and external values."""
    text = OF_OTHERS.sub("", text)
    return [match.group() for match in SCORE.finditer(text) if not DERIVED.match(text[match.end() :])]


def test_what_is_a_score():
    text = "From 0.447 to 0.420 ± 0.002, 1.5 points more, 2.6 times as large (published: 26.5 for 43.1), 41.8 of 9."
    assert scores(text) == ["0.447", "0.420", "0.002", "41.8"]
    assert is_among("41.8", [41.79])
    assert not is_among("41.8", [41.74, 4.18])


@pytest.mark.parametrize("page", PAGES)
def test_scores_in_sentences_are_in_a_table_of_the_page(page):
    path = FOLDER / f"{page}.md"
    numbers = tables_of(path)
    assert numbers
    for part in re.split(r"\n\n|\n(?=- )", SECTION.sub("", path.read_text())):
        assert [score for score in scores(part) if not is_among(score, numbers)] == [], part


def test_scores_of_the_first_page_are_in_tables_of_the_pages_it_names():
    """For the third column of both tables; a row without a page belongs to the page above."""
    count, names = 0, list[str]()
    for line in (FOLDER / "index.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"\((\w+)\.md[#)]", line) or (names if cells[0] == "" else [])
        if not line.startswith("|") or not names:
            continue
        numbers = [number for name in names for number in tables_of(FOLDER / f"{name}.md")]
        found = re.findall(r"\d+\.\d+ ± \d+\.\d+", cells[2]) + [score for score in scores(cells[2])]
        for value in found:
            count += 1
            assert all(is_among(number, numbers) for number in value.split(" ± ")), (cells[0], value)
    assert count > 40


def test_verdicts_are_those_of_the_rule():
    """The last column starts with an explained verdict, or contains a verdict after a colon."""
    text = (FOLDER / "index.md").read_text()
    words = re.findall(r"\*\*([a-z ]+)\*\*", text.partition("## How a difference")[2].partition("\n## ")[0])
    claims = text.partition("## Published claims")[2].partition("\n## ")[0].splitlines()
    claims = [line for line in claims if line.startswith("| ")][1:]
    assert len(words) == 6
    assert len(claims) > 15
    for claim in claims:
        assert any(word in claim.rpartition("|")[0].rpartition("|")[2] for word in words), claim


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        ([], ""),
        ([0.5], "0.500"),
        ([1.0, 2.0, 3.0], "2.000 (-0.484 to 4.484)"),
        ([3.0, 3.1, 2.9, 3.0], "3.000 (2.870 to 3.130)"),  # four seeds give no significant result
        ([3.0, 3.1, 2.9, 3.0, 3.0], "**3.000 (2.912 to 3.088)**"),
        ([3.0, -3.1, 2.9, 3.0, 3.0], "1.760 (-1.614 to 5.134)"),
    ],
)
def test_how_tables_tell_a_difference(monkeypatch, differences, text):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert import_module("common").paired(differences) == text


def test_tables_equal_the_stored_runs(monkeypatch):
    """Also with a changed digit, a missing row and an additional row."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    checks = import_module("check_results")
    texts = {
        match["name"]: f"{match['text']}\n"
        for path in checks.PAGES
        for match in checks.SECTION.finditer(path.read_text())
    }
    assert [fault for name in checks.TABLES for fault in checks.differences(name, texts[name])] == []
    text = texts["label_skew"]
    row = next(line for line in text.splitlines() if line.startswith("| Dirichlet 0.1"))
    other = row.replace("0.776", "0.777")
    assert checks.differences("label_skew", text.replace(row, other)) == [f"- {other}", f"+ {row}"]
    assert checks.differences("label_skew", text.replace(f"{row}\n", "")) == [f"+ {row}"]
    assert checks.differences("label_skew", text.replace(row, f"{row}\n{other}")) == [f"- {other}"]


def test_the_widest_interval_contains_the_paired_interval(monkeypatch):
    """For every pairing, also the worst: opposite orders of the values."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    widest, interval = import_module("unpaired").widest, import_module("common").interval
    draw = random.Random(0)
    for seeds in (2, 3, 5):
        for turn in range(50):
            first, second = (sorted(draw.gauss(0.7, 0.05) for _ in range(seeds)) for _ in range(2))
            second = second[::-1] if turn % 2 else second
            cells = [f"{mean(values):.3f} ± {stdev(values):.3f}" for values in (first, second)]
            value, low, high = widest(*cells, seeds)
            found = interval([one - two for one, two in zip(first, second, strict=True)])
            assert low <= found[0] <= value + 0.001
            assert value - 0.001 <= found[1] <= high
    linear = [0.5, 0.6, 0.7]
    _, low, high = widest("0.600 ± 0.100", "0.600 ± 0.100", 3)
    found = interval([one - two for one, two in zip(linear, linear[::-1], strict=True)])
    assert (low, high) == pytest.approx(found, abs=0.005)  # reached, up to rounding


@pytest.mark.parametrize("page", ELSEWHERE)
def test_scores_elsewhere_are_in_tables_of_the_pages_that_are_linked(page):
    path = ROOT / page
    text = path.read_text()
    linked = {path, *((path.parent / link).resolve() for link in LINK.findall(text))}
    linked |= {ROOT / link for page in linked for link in ON_GITHUB.findall(page.read_text())}
    numbers = [number for each in sorted(linked) for number in tables_of(each)]
    sentences = CODE.sub("", SECTION.sub("", text))
    found = scores(sentences) + [part for pair in PAIR.findall(sentences) for part in pair]
    known = ELSEWHERE[page]
    assert [score for score in found if score not in known and not is_among(score, numbers)] == []
    assert set(known) <= set(found)


def test_every_page_with_a_table_of_a_script_is_held_to_it():
    """Every page with results tables or links, and scores in the text, is covered by these tests."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text()
        about = written(text) or [link for link in LINK.findall(text) if "results/" in link or "performance" in link]
        if path.parent != FOLDER and about and scores(CODE.sub("", SECTION.sub("", text))):
            assert str(path.relative_to(ROOT)) in ELSEWHERE
