"""Results of Lightning's tests: JSON lines, and a table of counts."""

import collections
import json
import re


def read(path):
    """Results by test; the last line for a test counts."""
    lines = path.read_text().splitlines() if path.exists() else ()
    return {result["test"]: result for result in map(json.loads, lines)}


def kind(result):
    """Class of a test that passes plain: same, refused or different; ``no round`` without any federated round."""
    if result["outcome"] == "passed":
        return "same" if result["rounds"] else "no round"
    return "refused" if result.get("refused") else "different"


def differs(result):
    """Whether a test has federated rounds, is not refused and does not pass."""
    return kind(result) == "different" and result.get("rounds") != 0


def table(folder):
    """Results in a folder as Markdown: counts, refusals with their tests, and every different test."""
    plain = read(folder / "plain.jsonl")
    passed = [test for test, result in plain.items() if result["outcome"] == "passed"]
    lines = [
        f"{len(passed)} tests pass plain, of {len(plain)}.",
        "",
        "| door | tests run | refused | with rounds, not refused | of these pass | also with hidden numbers |",
        "|---|---|---|---|---|---|",
    ]
    details = []
    for door in ("callback", "trainer"):
        results, hidden = read(folder / f"{door}.jsonl"), read(folder / f"{door}-hidden.jsonl")
        by_kind = collections.Counter(map(kind, results.values()))
        compared = by_kind["same"] + sum(map(differs, results.values()))
        also = by_kind["same"] + sum(result["outcome"] == "passed" for result in hidden.values())
        lines.append(f"| {door} | {len(results)} | {by_kind['refused']} | {compared} | {by_kind['same']} | {also} |")
        sentences = collections.Counter(
            re.sub(r"\d+", "N", result["refused"])[:160] for result in results.values() if kind(result) == "refused"
        )
        details += ["", f"## {door}: refused", "", *(f"- {count}: {text}" for text, count in sentences.most_common())]
        details += ["", f"## {door}: different", ""]
        for test, result in results.items():
            if kind(result) == "different":
                error = " ".join(result.get("error", "the process ended").split())[:300]
                by_numbers = ", the same with hidden numbers" if hidden.get(test, {}).get("outcome") == "passed" else ""
                details.append(f"- `{test}` ({result.get('rounds', '?')} rounds{by_numbers}): {error}")
    return "\n".join([*lines, *details, ""])
