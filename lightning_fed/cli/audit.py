"""``lightning-fed audit``: prints and verifies a site's message log."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_fed.backends.site.record import (
    CLOCK,
    HEAD_FILE,
    ROTATION,
    START,
    Line,
    Record,
    RecordError,
    read_record,
)
from lightning_fed.console import round_number


def run(args: Sequence[str]) -> None:
    """Prints a site's message log and verifies the log's hash chain. Exits with status 1 if the log was changed."""
    options = _parser().parse_args(args)
    shown: deque[Line] = deque(maxlen=options.last)
    number, head, is_there = 0, START, options.head in (None, START)
    fault, head_file = "", options.head_file or options.record.parent / HEAD_FILE
    try:
        if options.set_clock:
            _append(options.record, head_file, {"event": CLOCK})
        if options.rotate:
            _rotate(options.record, head_file)
        for line in read_record(options.record):
            shown.append(line)
            number, head, is_there = line.number, line.digest, is_there or line.digest == options.head
    except RecordError as error:
        foreign = ", or the file is not `site_record.jsonl`, the record next to a site's policy: correct the path"
        fault = f"{error}{f': lines after line {number} are unverified' if number else foreign}"
    if not fault and not is_there:
        fault = f"no line has the digest {options.head}: the record was truncated or rewritten"
    for line in shown:
        sys.stdout.write(describe_line(line, options.full) + "\n")
    sys.stdout.write(f"{number} lines verified; head {head}\n")
    if fault:
        sys.stderr.write(f"error: {options.record}: {fault}\n")
        raise SystemExit(1)
    if options.head is None:
        sys.stdout.write("To detect lines removed from the end, pass an earlier head kept elsewhere: --head DIGEST\n")


def _append(path: Path, head: Path, content: dict[str, Any]) -> None:
    record = Record(path, head)  # the daily limits start anew at the new line
    with record.open():
        record.append({**content, "time": datetime.now(UTC).isoformat()})


def _rotate(path: Path, head: Path) -> None:
    last = max(read_record(path), key=lambda line: line.number, default=Line(0, START, {}))
    if head.exists():  # a record of an earlier release has no head
        with Record(path, head).open():
            pass
    archive = path.with_name(f"{path.name}.{last.number}")
    path.rename(archive)
    head.unlink(missing_ok=True)
    _append(path, head, {"event": ROTATION, "line": last.number, "digest": last.digest})
    sys.stdout.write(f"The old record is {archive}: store the file elsewhere.\n")


def describe_line(line: Line, is_full: bool = False) -> str:
    """Formats one line of a client's message log as text, or with ``is_full`` as JSON.

    Example:
        >>> content = {"event": "answer", "time": "2026-11-24T12:00:00.5+00:00", "client": "ann", "run": "3f9a77c0",
        ...     "round": 4, "answer": "update", "entries": ["w", "b"], "bytes": 812, "digest": "9c0d11e5aa",
        ...     "rule": {"entries": ["*"]}}
        >>> describe_line(Line(7, "0a", content))
        '     7 2026-11-24T12:00:00 ann run 3f9a77c0 round 5 update: sent, 2 names, 812 bytes, digest 9c0d11e5'
    """
    content = line.content
    if is_full:
        return f"{line.number} {line.digest} {json.dumps(content, sort_keys=True)}"
    if content["event"] == CLOCK:
        return f"{line.number:6d} {content['time'][:19]} the operator set the record's clock"
    if content["event"] == ROTATION:
        return f"{line.number:6d} {content['time'][:19]} the operator archived the record up to line {content['line']}"
    refused = content["rule"].get("refused")
    is_fault = content["rule"].get("answers") == "fault"
    begun = "begun" if content["event"] == "order" else "sent"
    outcome = f"refused by {refused}" if refused else "fault sent" if is_fault else begun
    whose = ""
    if content["client"] is not None:
        whose = f" {content['client']} run {content['run'][:8]} round {round_number(content['round'])}"
    torn = "; a crash truncated the line before" if "torn" in content else ""
    behind = f"; the clock was {content['clock_behind']} s behind" if "clock_behind" in content else ""
    return (
        f"{line.number:6d} {content['time'][:19]}{whose} {content['answer']}: {outcome},"
        f" {len(content['entries'])} names, {content['bytes']} bytes, digest {content['digest'][:8]}{torn}{behind}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fed audit",
        description="Show the last lines of a site's record, verify all lines, and print the head: the digest of"
        " the last line. Store the head on another machine: --head also finds lines removed later.",
    )
    parser.add_argument("record", type=Path, help="the record, site_record.jsonl next to the policy")
    parser.add_argument(
        "--head", metavar="DIGEST", help="an earlier head: verify that the record still contains this line"
    )
    parser.add_argument(
        "--head-file", type=Path, metavar="FILE", help=f"path of {HEAD_FILE} (default: next to the record)"
    )
    parser.add_argument(
        "--set-clock",
        action="store_true",
        help="append a line with the current time, to correct a wrong clock; the daily limits restart",
    )
    parser.add_argument(
        "--last", type=int, default=20, metavar="N", help="number of lines to show (default: %(default)s)"
    )
    parser.add_argument(
        "--rotate", action="store_true", help="archive the record, and begin a new one with the head of the old record"
    )
    parser.add_argument("--full", action="store_true", help="show complete lines as JSON")
    return parser
