"""Checks and records every message between a site (a client's machine) and the server."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_fed.backends.site.policy import (
    Half,
    Order,
    PolicyError,
    Refusal,
    SitePolicy,
    change_update,
    find_kind,
    read_order,
    read_policy,
)
from lightning_fed.backends.site.record import DAY, HEAD_FILE, Record, RecordError
from lightning_fed.backends.site.signatures import digest_order, split_signature
from lightning_fed.backends.wire.packets import NOT_HELD, NOT_HERE, Fault, Packet, PacketError, write_fault
from lightning_fed.console import round_number

_log = logging.getLogger(__name__)

POLICY_FILE = "site_policy.toml"
"""Default file name of the policy, in the client state folder."""

_MOST_LINES = 200  # a day, for refusals by one rule and for lists of clients: a server must not fill the disk

NOT_ANSWERED = "the site does not answer this order; the site's log states the reason"
"""Text of every refusal and fault under a policy. A text with details could leak data."""

_TRACES = ("site_record", HEAD_FILE)  # prefixes of file names that indicate a policy

_PROTOCOL = (NOT_HELD, NOT_HERE)  # texts on which the server acts; neither text depends on data


class SiteGate:
    """Checks messages by the site's policy, and writes each message to the site's log (record).

    The policy is read before a server's message is handled, and again before the answer is sent. If the policy is
    unreadable or the log is damaged, the server receives only a constant text. With ``is_required=False``, checks begin
    as soon as a policy or log exists.
    """

    def __init__(self, path: Path, is_required: bool, half: Half, store: Path) -> None:
        self._path, self._is_required, self._half, self._store = path, is_required, half, store
        self._record: tuple[Path, Record] | None = None
        if self.is_in_force():
            try:
                read_policy(path)
                _log.info("The site policy is %s.", path)
            except PolicyError as error:
                _log.error("No answers will be sent: %s.", error)
        else:
            _log.info("No policy at %s: every answer is sent.", path)

    def guard(self, kind: str, packet: Packet, answer: Callable[[Packet], Packet]) -> Packet:
        bare, order = Packet(split_signature(packet.text)[0], packet.data), read_order(kind, packet.text, packet.data)
        # The order names a line of a record: the site had a policy.
        if not self.is_in_force() and (order is None or order.head is None):
            return answer(bare)
        try:
            return self._guard(order, bare, answer)
        except PacketError:
            raise
        except Exception:  # the class of an exception may depend on data
            _log.exception("The gate failed: no answer is sent.")
            raise PacketError(NOT_ANSWERED) from None

    def _guard(self, order: Order | None, bare: Packet, answer: Callable[[Packet], Packet]) -> Packet:
        if order is None:
            raise PacketError("the message is not from lightning-fed")
        refused = self._decide(order, None)
        if refused is not None:
            return refused
        try:
            reply: Packet | Refusal = answer(bare)
        except Refusal as refusal:
            reply = refusal
        except Exception as error:
            if not isinstance(error, PacketError):
                _log.exception("The order could not be answered.")
            reply = write_fault(Fault(order.client or "", str(error) if isinstance(error, PacketError) else ""))
        left = self._decide(order, reply)
        assert left is not None
        return left

    def judge_entries(self, names: Iterable[str]) -> None:
        if self.is_in_force():
            try:
                read_policy(self._path).judge_entries(names)
            except PolicyError as error:
                raise Refusal("entries", str(error)) from error

    def is_in_force(self) -> bool:
        self._is_required = self._is_required or self._path.is_symlink() or self._path.exists() or self._has_traces()
        return self._is_required

    def _has_traces(self) -> bool:
        # A deleted or misspelt policy must not open the site. A record, a head or a similar file name indicates a
        # policy.
        for folder in {self._path.parent, self._store}:
            for file in folder.iterdir() if folder.is_dir() else ():
                if file.suffix in (".toml", ".tml") or file.name.startswith(_TRACES) or "policy" in file.name.lower():
                    _log.error(
                        "%s suggests that the site has a policy, but the policy file %s is missing: restore the policy."
                        " If the site needs no policy, move the first file to another folder, and restart.",
                        file,
                        self._path,
                    )
                    return True
        return False

    def _decide(self, order: Order, reply: Packet | Refusal | None) -> Packet | None:
        try:
            policy = read_policy(self._path)
            record = self._open_record(policy)
            with record.open():
                if isinstance(reply, Packet) and "steps" not in policy.counts:
                    reply = change_update(reply, steps=0)
                try:
                    rule, names = self._judge(policy, record, order, reply)
                except Refusal as refusal:
                    rule, names = {"refused": refusal.rule}, []
                    reply = write_fault(Fault(order.client or "", str(refusal)))
                assert not isinstance(reply, Refusal)
                if reply is not None and find_kind(reply.text) == "fault":
                    reply = _without_reason(policy, order, reply)
                if (reply is not None or order.answer != "clients") and not _is_flood(record, order, rule):
                    self._append(record, policy, order, reply, rule, names)
                if reply is not None:
                    reply = change_update(reply, head=[record.last.number, record.last.digest])
        except (PolicyError, RecordError, OSError) as error:
            _log.error("No answer is sent: %s.", error)
            reply = write_fault(Fault(order.client or "", NOT_ANSWERED))
        if reply is not None and order.client is None and find_kind(reply.text) == "fault":
            raise PacketError(_reason_of(reply))
        return reply

    def _judge(
        self, policy: SitePolicy, record: Record, order: Order, reply: Packet | Refusal | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Checks a server's message, and the client's ``reply`` if given, by the policy.

        Raises ``Refusal`` if forbidden. Returns, for each policy rule, the setting that allowed the message or reply.
        Also returns the names of all tensors and metrics in the reply.
        """
        if isinstance(reply, Refusal):
            raise reply
        if reply is not None and find_kind(reply.text) == "fault":
            return {"answers": "fault"}, []
        rule = policy.judge_order(order, self._half)
        if order.answer == "clients":
            return rule, []
        if order.head is not None and not record.has_line(*order.head):
            raise Refusal(
                "record", f"the record lacks line {order.head[0]}, but the server has received the line's digest"
            )
        if (
            reply is None
            and order.signature
            and _digest(order) in {line.content.get("digest") for line in record.recent}
        ):
            raise Refusal("servers", "the server's order is a copy of an earlier order")
        now = _now(record)
        lines = [line.content for line in record.recent if line.time > now - DAY and "client" in line.content]
        size = 0 if reply is None else _size(reply)
        if reply is None:  # an order counts towards the limits even if the visit fails
            same = [content for content in lines if _is_order(content) and _subject(content) == _subject(vars(order))]
            if len(same) >= policy.rounds_per_day:
                ahead = (now - time.time()) / DAY
                if ahead > 1:
                    _log.error(
                        "The record's clock is %.1f days ahead: correct the clock with `lightning-fed audit "
                        "--set-clock`.",
                        ahead,
                    )
                raise Refusal("rounds_per_day", f"the site policy allows {policy.rounds_per_day} rounds per day")
            allowed, names = dict[str, Any](), list[str]()
        else:
            allowed, names = policy.judge_answer(order.answer, reply.text)
        spent = sum(content["bytes"] for content in lines if content["client"] is not None)
        if spent + size > policy.bytes_per_day or spent >= policy.bytes_per_day:
            raise Refusal("bytes_per_day", f"the site policy allows {policy.bytes_per_day} bytes per day")
        limits = {"rounds_per_day": policy.rounds_per_day, "bytes_per_day": policy.bytes_per_day}
        return rule | allowed | limits, names

    def _append(
        self,
        record: Record,
        policy: SitePolicy,
        order: Order,
        reply: Packet | None,
        rule: dict[str, Any],
        names: list[str],
    ) -> None:
        now, clock = _now(record), time.time()
        content = {
            "event": "order" if reply is None else "answer",
            "time": datetime.fromtimestamp(now, UTC).isoformat(),
            "client": order.client,
            "run": order.run,
            "round": order.round,
            "answer": order.answer,
            "stage": order.stage,
            "entries": names,
            "bytes": 0 if reply is None else _size(reply),
            "digest": _digest(order if reply is None else reply),
            "policy": policy.digest,
            "rule": rule,
        }
        if now - clock > 1:
            content["clock_behind"] = round(now - clock)
        line = record.append(content)
        _log.info(
            "Line %d of the site's record: answer %r of client %r, round %s, %d bytes, %s. Digest of the line: %s.",
            line.number,
            order.answer,
            order.client,
            order.round if order.round is None else round_number(order.round),
            content["bytes"],
            f"refused by {rule['refused']}" if "refused" in rule else "begun" if reply is None else "sent",
            line.digest,
        )

    def _open_record(self, policy: SitePolicy) -> Record:
        path = self._path.parent / policy.record
        if self._record is None or self._record[0] != path:
            self._record = path, Record(path, self._store / HEAD_FILE)
        return self._record[1]


def _now(record: Record) -> float:
    # Times in the record never decrease, so a changed system clock cannot reset the daily limits.
    return max(time.time(), record.last.time)


def _is_flood(record: Record, order: Order, rule: dict[str, Any]) -> bool:
    kind = rule.get("refused", order.answer)
    if "refused" not in rule and kind != "clients":  # other answers have daily limits
        return False
    same = [
        line
        for line in record.recent
        if line.content.get("rule", {}).get("refused", line.content.get("answer")) == kind
    ]
    return len(same) >= _MOST_LINES


def _is_order(content: dict[str, Any]) -> bool:
    return bool(content["event"] == "order" and "refused" not in content["rule"])


def _subject(content: dict[str, Any]) -> list[Any]:
    return [content["client"], content["answer"], content["stage"]]


def _size(packet: Packet) -> int:
    return len(packet.text.encode()) + len(packet.data)


def _digest(packet: Packet | Order) -> str:
    if isinstance(packet, Order):
        return digest_order(packet.answer, packet.text, packet.data, packet.signature)
    return hashlib.sha256(f"{packet.text}\0".encode() + packet.data).hexdigest()


def _reason_of(fault: Packet) -> str:
    return str(json.loads(fault.text)["header"]["reason"])


def _without_reason(policy: SitePolicy, order: Order, fault: Packet) -> Packet:
    reason = _reason_of(fault)
    # The site's log always states the reason. The server receives the reason only with `faults = "text"`.
    if reason in _PROTOCOL:
        return fault
    _log.warning("The site does not answer the request (%s) for client %r: %s.", order.answer, order.client, reason)
    return write_fault(Fault(order.client or "", (policy.faults == "text" and reason) or NOT_ANSWERED))
