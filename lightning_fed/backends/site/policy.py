"""Site policy: a TOML file with rules for outgoing data. Data not allowed by a rule stays on the site."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from lightning_fed.backends.site.owned_files import check_owner, check_parents
from lightning_fed.backends.site.signatures import is_signed, read_public_key, split_signature
from lightning_fed.backends.wire.packets import Packet, find_bad_place, is_head
from lightning_fed.backends.wire.secure_sum_packets import Stage
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Client
from lightning_fed.privacy.secure_sum import SecureSum
from lightning_fed.steps.update_step import UpdateStep

ANSWERS = {"query": "clients", "train": "update", "query.request": "request", "evaluate": "statistics",
           "query.sum": "sum", "evaluate.question": "evaluation"}  # fmt: skip
"""Message type to answer kind. Other types are refused; a new kind also needs an entry in ``_CONTENTS``."""

_CONTENTS: dict[str, tuple[set[str], dict[str, str | None]]] = {
    "hello": ({"clients"}, {}),
    "fault": ({"client", "reason"}, {}),
    "request": ({"client", "same"}, {"rows": None, "extras": "extras"}),  # "same" means: as for the row names
    "sum": ({"client", "stage"}, {"rows": None}),
    "update": (
        {"client", "num_samples", "metrics", "steps", "after", "keeps", "unsent", "head"},
        {"state": "entries", "extras": "extras"},
    ),
}
"""Allowed content by packet kind: header fields, and tensor groups with the rule for the names in the group."""

COUNTS = ("num_samples", "steps")
"""Integers in an answer for the rule ``counts``."""

_NAMED_FIELDS = {"same": "entries", "metrics": "metrics"}
"""Header fields with a mapping, and the rule for the mapping's keys."""

_NAMES = {"update": ("entries", "extras"), "statistics": ("extras",), "evaluation": ("metrics",)}
"""Rules for names by kind of answer. At least one rule must allow a name."""

_NEEDS = ("record", "steps", "clients_per_sum")
"""Restricting rules, and the record for the daily limits. These rules come first in the file, so a truncated policy
never allows more than the complete policy."""

_LARGEST = 2**20  # bytes; limit for the policy file


class PolicyError(Exception):
    """Raised for an unreadable site policy. The site then refuses all messages from the server."""


class Refusal(ClientFault):
    """Raised if the site policy forbids a message. Contains the violated rule, and a reason for the site's log."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule = rule


@dataclass(frozen=True)
class Half:
    """The client's half of a federation, checked by the site policy: method name, update steps and callbacks."""

    method: str
    steps: Sequence[UpdateStep] = ()
    callbacks: Sequence[Any] = ()


@dataclass(frozen=True)
class Order:
    """Server's request to a site, such as for an update.

    ``answer`` is the kind of the requested answer, and ``text`` the message without signature. ``client`` is ``None``
    if the server asks for the clients' names. ``sum_size`` is the number of clients in a secure sum, if known.
    ``stage`` is the sum's step, such as ``"keys"``. ``head``: number and digest of the site's last reported log line.
    """

    answer: str
    text: str
    data: bytes
    signature: str = ""
    client: Client | None = None
    run: str = ""
    round: int | None = None
    stage: str = ""
    sum_size: int | None = None
    head: Sequence[Any] | None = None


@dataclass(frozen=True)
class RequiredStep:
    """Policy rule for a required update step or callback, with bounds for numeric attributes."""

    name: str
    at_least: Mapping[str, float] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)

    def find_fault(self, half: Half) -> str | None:
        """Returns the reason why a client program breaks this rule, or ``None``."""
        reason: str | None = f"the federation has no {self.name}"
        for index, step in enumerate(half.steps):
            if type(step).__name__ == self.name:
                is_here = type(step).on_client is not UpdateStep.on_client or any(
                    outer.reveals != "update" for outer in half.steps[index + 1 :]
                )
                reason = self._find_excess(step) if is_here else f"the server executes {self.name}"
                if reason is None:
                    return None
        for callback in half.callbacks:
            if type(callback).__name__ == self.name:
                reason = self._find_excess(callback)
                if reason is None:
                    return None
        return reason

    def _find_excess(self, step: Any) -> str | None:
        for bounds, word in ((self.at_least, "at least"), (self.at_most, "at most")):
            for name, bound in bounds.items():
                value: Any = getattr(step, name, None)
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if not is_number or not (value >= bound if word == "at least" else value <= bound):
                    return f"{self.name} has {name}={value!r:.50}, but the policy requires {word} {bound:g}"
        return None


@dataclass(frozen=True)
class SitePolicy:
    """A site's rules for servers and for outgoing data.

    Allowed names are patterns, as in :mod:`fnmatch`. An empty list allows no name.

    Args:
        digest: Hash of the policy file.
        servers: Public keys, as lines from ``.pub`` files. ``"*"`` allows all servers, also without a signature.
        runs: Allowed run names.
        methods: Allowed method names, case-insensitive.
        answers: Allowed answer kinds: ``"update"``, ``"request"``, ``"statistics"``, ``"sum"`` and ``"evaluation"``.
            Every allowed server receives the client names.
        entries: Allowed names of parameters and buffers.
        extras: Allowed names of the method's additional tensors and of BatchNorm statistics.
        metrics: Allowed names of logged values and evaluation results.
        counts: Allowed counts: ``"num_samples"`` (examples), ``"steps"`` (optimizer steps).
        rounds_per_day: Maximum requests per answer kind and client in any 24 hours.
        bytes_per_day: Maximum bytes in all answers in any 24 hours.
        clients_per_sum: Minimum clients in a secure sum. If set, a secure sum is mandatory.
        steps: Update steps or callbacks that the client's program must contain.
        faults: Text sent to the server for refusals and faults: ``"constant"`` hides the reason, ``"text"`` sends it.
        record: Path of the site's message log, relative to the policy's folder.

    Example:
        >>> policy = SitePolicy("0a", servers=("*",), runs=("*",), methods=("fed*",), answers=("update",),
        ...     entries=("net.*",), rounds_per_day=10, bytes_per_day=10**6)
        >>> policy.judge_order(Order("update", "", b"", run="3f"), Half("FedAvg"))
        {'servers': '*', 'runs': '*', 'methods': 'fed*', 'answers': 'update'}
        >>> policy.judge_order(Order("statistics", "", b"", run="3f"), Half("FedAvg"))
        Traceback (most recent call last):
        ...
        lightning_fed.backends.site.policy.Refusal: the site policy does not allow the answer 'statistics'
    """

    digest: str
    servers: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("num_samples", "steps")
    rounds_per_day: int = 0
    bytes_per_day: int = 0
    clients_per_sum: int | None = None
    steps: tuple[RequiredStep, ...] = ()
    faults: str = "constant"
    record: str = "site_record.jsonl"

    def judge_order(self, order: Order, half: Half) -> dict[str, Any]:
        """Checks a server's request by this policy. Raises ``Refusal`` if forbidden.

        ``half`` describes the client's program. Returns, for each policy rule, the setting that allowed the request.
        """
        allowed = {"servers": self._find_server(order)}
        if order.answer == "clients":
            return allowed
        allowed["runs"] = _find_pattern("runs", [order.run], self.runs)[0]
        methods = [pattern.lower() for pattern in self.methods]
        allowed["methods"] = _find_pattern("methods", [half.method.lower()], methods)[0]
        if order.answer not in self.answers:
            raise Refusal("answers", f"the site policy does not allow the answer {order.answer!r}")
        allowed["answers"] = order.answer
        rules = _NAMES.get(order.answer, ())
        if rules and not any(getattr(self, rule) for rule in rules):
            raise Refusal(rules[0], f"the site policy does not allow any name in {' or '.join(rules)}")
        for required in self.steps:
            fault = required.find_fault(half)
            if fault is not None:
                raise Refusal("steps", f"the site policy requires other update steps: {fault}")
        if self.clients_per_sum is not None:
            if not any(isinstance(step, SecureSum) for step in half.steps):
                raise Refusal("clients_per_sum", "the site policy requires a secure sum, but the federation has none")
            if order.sum_size is not None and order.sum_size < self.clients_per_sum:
                raise Refusal(
                    "clients_per_sum",
                    f"the secure sum has {order.sum_size} clients, but the site policy requires at least "
                    f"{self.clients_per_sum}",
                )
        return allowed

    def judge_entries(self, names: Iterable[str]) -> None:
        _find_pattern("entries", names, self.entries)

    def judge_answer(self, answer: str, text: str) -> tuple[dict[str, Any], list[str]]:
        """Checks a client's answer before sending. Raises ``Refusal`` if forbidden.

        ``answer`` is the requested kind, such as ``"update"``, and ``text`` the JSON message. Returns a dictionary with
        the matched patterns of each policy rule, and a list of all tensor names and metric names in the answer.
        """
        packet = json.loads(text)
        kind, header, tensors = packet["kind"], packet["header"], packet["tensors"]
        if kind not in _CONTENTS:
            raise Refusal("answers", f"the site policy has no rule for answers of the kind {kind!r}")
        known_fields, known_groups = _CONTENTS[kind]
        unknown = sorted((header.keys() - known_fields) | (tensors.keys() - known_groups.keys()))
        if unknown:
            raise Refusal("answers", f"the site policy has no rule for {unknown[0]!r} in answers of the kind {kind!r}")
        for name in COUNTS:
            if name not in self.counts and header.get(name, 0) not in (0, 1):
                raise Refusal("counts", f"the site policy does not allow the number {name!r} in an answer")
        if "steps" not in self.counts and header.get("after") is not None:
            raise Refusal("counts", "the site policy does not allow the schedulers' number of steps in an answer")
        names: dict[str, list[str]] = {"entries": [], "extras": [], "metrics": []}
        for group, rows in tensors.items():
            rule = known_groups[group]
            if answer == "evaluation" and rule == "extras":
                rule = "metrics"  # values that are sums or states
            if rule is not None:
                names[rule] += [row[0] for row in rows]
        for name, rule in _NAMED_FIELDS.items():
            names[rule] += list(header.get(name, ()))
        allowed = {
            rule: _find_pattern(rule, names_by_rule, getattr(self, rule))
            for rule, names_by_rule in names.items()
            if len(names_by_rule) > 0
        }
        return allowed, [name for names_by_rule in names.values() for name in names_by_rule]

    def _find_server(self, order: Order) -> str:
        if "*" in self.servers:
            return "*"
        for line in self.servers:
            kind = next(kind for kind, answer in ANSWERS.items() if answer == order.answer)
            if order.signature and is_signed(kind, order.text, order.data, order.signature, read_public_key(line)):
                return line
        raise Refusal("servers", "the site policy does not list the server's key, or the order has expired")


def read_policy(path: Path) -> SitePolicy:
    """Reads a policy file. Raises ``PolicyError`` if the file is invalid or unprotected.

    Only root and the current user may own or change the file and its folder.
    """
    try:
        content = _read_own_file(path)
        values = tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: thousands of nested brackets
        raise PolicyError(f"{str(path)!r} cannot be read: {error}") from error
    try:
        return _make_policy(hashlib.sha256(content).hexdigest(), values)
    except (TypeError, ValueError, AttributeError) as error:
        raise PolicyError(f"{str(path)!r} is not a valid policy: {error}") from error


def _read_own_file(path: Path) -> bytes:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if path.is_symlink():
        raise OSError("the policy is a symbolic link, but must be a regular file")
    with os.fdopen(os.open(path, flags), "rb") as file:
        opened = os.fstat(file.fileno())
        check_owner(opened)
        check_parents(path)
        if not stat.S_ISREG(opened.st_mode):
            raise OSError("the policy is not a regular file, but for example a pipe or a device")
        content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise OSError(f"the file has more than {_LARGEST} bytes")
        return content


def _make_policy(digest: str, values: dict[str, Any]) -> SitePolicy:
    known = [item.name for item in fields(SitePolicy) if item.name != "digest"]
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise ValueError(f"expected rules from {known}, but got {unknown[0]!r}")
    needs = [name for name in values if name in _NEEDS]
    if list(values)[: len(needs)] != needs:  # a partially written file lacks the end
        raise ValueError(
            f"expected the rules {', '.join(_NEEDS)} before all other rules: move these rules to the top of the file, "
            "and write `steps = [...]` instead of `[[steps]]`"
        )
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name == "steps":
            read[name] = tuple(_make_step(step) for step in value)
            continue
        if name in ("record", "faults"):
            what, fits = "a non-empty string", isinstance(value, str) and value != ""
        elif name in ("rounds_per_day", "bytes_per_day", "clients_per_sum"):
            what, fits = "an integer of at least 0", type(value) is int and value >= 0
        else:
            what, fits = "a list of strings", isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not fits:
            raise ValueError(f"expected `{name}` to be {what}, but got {value!r}")
        read[name] = tuple(value) if isinstance(value, list) else value
    kinds = [kind for kind in ANSWERS.values() if kind != "clients"]
    for name, allowed in (("answers", kinds), ("counts", [*COUNTS]), ("faults", ["constant", "text"])):
        values = read.get(name, ())
        strange = [value for value in ([values] if isinstance(values, str) else values) if value not in allowed]
        if strange:
            raise ValueError(f"expected values of `{name}` to be among {allowed}, but got {strange[0]!r}")
    for line in read.get("servers", ()):
        if line != "*":
            read_public_key(line)
    return SitePolicy(digest, **read)


def _make_step(value: Any) -> RequiredStep:
    step = RequiredStep(**value)
    bounds = [*step.at_least.values(), *step.at_most.values()]
    if not isinstance(step.name, str) or not all(type(bound) in (int, float) for bound in bounds):
        raise ValueError(f"expected steps with a `name`, and numbers in `at_least` and `at_most`, but got {value!r}")
    return step


def _find_pattern(rule: str, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    used: dict[str, None] = {}
    for name in names:
        simple = _simple_name(name)
        pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern) or simple == pattern), None)
        if pattern is None:
            raise Refusal(rule, f"the site policy does not allow {name[:200]!r} in {rule}")
        used[pattern] = None
    return list(used)


def _simple_name(name: str) -> str:
    kind, _, rest = name.partition("|")
    if kind in ("state", "updates"):
        key = rest.partition("|")[0]
        return key.split("@", 2)[-1] if key.startswith("@") else key
    return rest.partition("|")[2] if kind in ("logged", "value", "metric", "stays") else name


def change_update(reply: Packet, **header: Any) -> Packet:
    """Sets fields in the JSON header of an update message. Other messages are returned unchanged."""
    packet = json.loads(reply.text)
    if packet["kind"] == "update":
        packet["header"] |= header
    return Packet(json.dumps(packet), reply.data)


def find_kind(text: str) -> str:
    """Returns the packet kind (such as ``"update"``) in the JSON text of an answer."""
    return str(json.loads(text)["kind"])


def read_order(kind: str, text: str, data: bytes) -> Order | None:
    """Parses a server's message without checking the signature. Returns ``None`` if invalid."""
    text, signature = split_signature(text)
    try:
        header = json.loads(text)["header"]
        if kind not in ANSWERS:
            return None
        if ANSWERS[kind] == "clients":
            return Order(ANSWERS[kind], text, data, signature)
        place = header if kind == "query.sum" else header["visit"]
        stage = header["stage"] if kind == "query.sum" else ""
        size = None
        if kind == "train" or (kind == "evaluate.question" and header["peers"]):
            size = len(set(header["peers"] or ()))
        elif stage in ("shares", "open"):
            size = len(set(header["peers"]))
        elif stage == "unmask":
            size = sum(map(bool, header["survivors"]))
        client, run, round, head = place["client"], header["run"], place["round"], header.get("head")
        if find_bad_place(run, client, round) is not None or stage not in ("", *get_args(Stage)) or not is_head(head):
            return None  # the visit would not begin either, so the record needs no line
        return Order(ANSWERS[kind], text, data, signature, client, run, round, stage, size, head)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
