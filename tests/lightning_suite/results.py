"""Results of Lightning's tests: lines of JSON, and the table that counts them."""

import collections
import json
import re


def read(path):
    """Results by test; the last line of a test counts."""
    lines = path.read_text().splitlines() if path.exists() else ()
    return {result["test"]: result for result in map(json.loads, lines)}


def kind(result):
    """What became of a test that passes plain: same, refused or different; ``no round`` where nothing was federated."""
    if result["outcome"] == "passed":
        return "same" if result["rounds"] else "no round"
    return "refused" if result.get("refused") else "different"


def table(folder):
    """The results of a folder as Markdown: counts, sentences of refusals with theirs, and every test that differs."""
    plain = read(folder / "plain.jsonl")
    passed = [test for test, result in plain.items() if result["outcome"] == "passed"]
    lines = [f"{len(passed)} tests pass plain, of {len(plain)}.", ""]
    lines += ["| door | tests run | with rounds | of these passed | refused | different |", "|---|---|---|---|---|---|"]
    details = []
    for door in ("callback", "trainer"):
        results = read(folder / f"{door}.jsonl")
        by_kind = collections.Counter(map(kind, results.values()))
        rounds = [result for result in results.values() if result.get("rounds")]
        same = sum(result["outcome"] == "passed" for result in rounds)
        counts = len(results), len(rounds), same, by_kind["refused"], by_kind["different"]
        lines.append(f"| {door} | {' | '.join(map(str, counts))} |")
        sentences = collections.Counter(
            re.sub(r"\d+", "N", result["refused"])[:160] for result in results.values() if kind(result) == "refused"
        )
        details += ["", f"## {door}: refused", "", *(f"- {count}: {text}" for text, count in sentences.most_common())]
        details += ["", f"## {door}: different", ""]
        for test, result in results.items():
            if kind(result) == "different":
                error = " ".join(result.get("error", "the process ended").split())[:300]
                details.append(f"- `{test}` ({result.get('rounds', '?')} rounds): {error}")
    return "\n".join([*lines, *details, ""])
