"""English in docstrings, comments and pages: every file and every group meets the limits."""

from collections import Counter
from pathlib import Path

import pytest

from tests import prose

pytestmark = pytest.mark.prose


def rates_above(rates, limits):
    """Rates above the limit, each paired with the limit."""
    return {name: (rate, limits[name]) for name, rate in rates.items() if rate > limits[name]}


def test_every_file_and_group_meets_the_limits():
    files, groups = prose.measure()
    above = {path: rates_above(prose.rates_of(counts), prose.limits_of(counts)) for path, counts in files.items()}
    above |= {group: rates_above(prose.rates_of(counts), prose.LIMITS) for group, counts in groups.items()}
    faults = {path: rates for path, rates in above.items() if rates}
    assert faults == {}, "rates per 1,000 words, with the limit; see `python tests/prose.py --list FILE`"


def test_docstrings_comments_and_pages_are_measured_but_neither_code_nor_examples(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    source = '"""Sends what is left.\n\nExample:\n    >>> it = "it"\n"""\n\nit = "it"  # nobody knows `what is it`\n'
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "a.md").write_text("# What they say\n\n```python\nit = it\n```\n")
    assert [kind for _, kind, _ in prose.odd_constructions(Path("a.py"))] == ["free relative", "nobody"]
    assert prose.counts_of(Path("a.py")) == Counter(words=7, relatives=1, odd=2, pronouns=0, that=0, of=0)
    page = prose.counts_of(Path("a.md"))
    assert (page["words"], page["pronouns"], page["relatives"]) == (3, 1, 1)


def test_a_file_of_few_words_has_twice_the_limit():
    assert prose.limits_of(Counter(words=299))["pronouns"] == 2 * prose.LIMITS["pronouns"]
    assert prose.limits_of(Counter(words=300))["pronouns"] == prose.LIMITS["pronouns"]
