"""English in docstrings, comments and pages: rates may only fall, and new files meet the limits."""

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests import prose

pytestmark = pytest.mark.prose


@cache
def measured():
    return prose.measure()


@cache
def record():
    return json.loads(prose.RECORD.read_text())


def rises(rates, limits, recorded):
    """Rates above both the limit and the recorded rate, each paired with the highest allowed rate."""
    allowed = {name: max(limit, recorded.get(name, 0)) for name, limit in limits.items()}
    return {name: (rate, allowed[name]) for name, rate in rates.items() if rate > allowed[name] + 0.005}


def test_no_file_reads_worse_than_recorded():
    files, _ = measured()
    faults = {
        path: found
        for path, counts in files.items()
        if (found := rises(prose.rates_of(counts), prose.limits_of(counts), record()["files"].get(path, {})))
    }
    assert faults == {}, "rates per 1,000 words, with the highest allowed; see `python tests/prose.py --list FILE`"


@pytest.mark.parametrize("group", prose.GROUPS)
def test_no_group_reads_worse_than_recorded(group):
    _, groups = measured()
    assert rises(prose.rates_of(groups[group]), prose.LIMITS, record()["groups"][group]) == {}


def test_the_record_is_up_to_date():
    """Improvements are recorded: `python tests/prose.py --update`."""
    assert prose.new_record(*measured(), record())["files"] == record()["files"]


def test_an_update_never_raises_a_rate():
    counts = Counter(words=1000, pronouns=20, odd=3)
    files, groups = {"lightning_fed/a.py": counts, "lightning_fed/new.py": counts}, {"lightning_fed": counts}
    before = {
        "groups": {"lightning_fed": dict.fromkeys(prose.LIMITS, 1.0)},
        "files": {"lightning_fed/a.py": {"pronouns": 15.0, "odd": 9.0}},
    }
    after = prose.new_record(files, groups, before)
    assert after["files"] == {"lightning_fed/a.py": {"pronouns": 15.0, "odd": 3.0}}
    assert after["groups"]["lightning_fed"]["pronouns"] == 1.0


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
