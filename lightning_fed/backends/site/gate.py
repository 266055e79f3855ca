"""The gate of a site: the last thing that an answer passes before it leaves, on whatever network carries it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_fed.backends.site.policy import (
    Half,
    Order,
    PolicyError,
    Refusal,
    SitePolicy,
    find_kind,
    read_order,
    read_policy,
)
from lightning_fed.backends.site.record import DAY, Record, RecordError
from lightning_fed.backends.site.signatures import split_signature
from lightning_fed.backends.wire.packets import Fault, Packet, PacketError, write_fault
from lightning_fed.console import round_number

_log = logging.getLogger(__name__)

POLICY_FILE = "site_policy.toml"
"""Name of a policy in the folder of what is the clients'."""

_NOT_APPLIED = "its site's policy cannot be applied; the client's log says where"


class SiteGate:
    """Lets answers leave that the site's policy allows, and appends every answer to the site's record.

    The policy is read anew for every message, before the visit and before its answer leaves. If it cannot be read, or
    the record cannot be written or does not verify, nothing leaves but this sentence.

    Args:
        path: The policy's file.
        is_required: Nothing leaves without the file; otherwise everything does, until it is there once.
        half: The client half.

    """

    def __init__(self, path: Path, is_required: bool, half: Half) -> None:
        self._path, self._is_required, self._half = path, is_required, half
        self._record: tuple[Path, Record] | None = None
        if self._is_in_force():
            try:
                read_policy(path)
                _log.info("The site's policy is %s.", path)
            except PolicyError as error:
                _log.error("No answer will leave: %s.", error)

    def guard(self, kind: str, packet: Packet, answer: Callable[[Packet], Packet]) -> Packet:
        """Answers a packet.

        Args:
            kind: The type of the server's message.
            packet: The packet; its text may have a signature.
            answer: Makes the answer to the packet without the signature.

        Raises:
            PacketError: If it is none of ours, or asks who is there and is not told.

        """
        bare = Packet(split_signature(packet.text)[0], packet.data)
        if not self._is_in_force():
            return answer(bare)
        order = read_order(kind, packet.text, packet.data)
        if order is None:
            raise PacketError("it is no message of lightning-fed")
        refused = self._decide(order, None)
        reply = self._decide(order, answer(bare)) if refused is None else refused
        assert reply is not None
        return reply

    def _is_in_force(self) -> bool:
        self._is_required = self._is_required or self._path.exists() or self._path.is_symlink()
        return self._is_required

    def _decide(self, order: Order, reply: Packet | None) -> Packet | None:
        """The reply, or what leaves in its place; of no reply yet ``None``, if one may leave."""
        reason = None
        try:
            policy = read_policy(self._path)
            record = self._open_record(policy)
            with record.open():
                try:
                    rule, names = self._judge(policy, record, order, reply)
                except Refusal as refusal:
                    reason, rule, names = str(refusal), {"refused": refusal.rule}, []
                    reply = write_fault(Fault(order.client or "", reason))
                if reply is not None:
                    self._append(record, policy, order, reply, rule, names)
        except (PolicyError, RecordError, OSError) as error:
            _log.error("No answer leaves: %s.", error)
            reason = _NOT_APPLIED
            reply = write_fault(Fault(order.client or "", reason))
        if reason is not None and order.client is None:  # who asks who is there reads no faults
            raise PacketError(reason)
        return reply

    def _judge(
        self, policy: SitePolicy, record: Record, order: Order, reply: Packet | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Of every rule what allowed the answer, and the names of all that it holds.

        Raises:
            Refusal: If it is not to leave.

        """
        if reply is not None and find_kind(reply.text) == "fault":
            return {"answers": "fault"}, []
        rule = policy.judge_order(order, self._half)
        if order.answer == "clients":
            return rule, []
        now = _now(record)
        lines = [line.content for line in record.recent if line.time > now - DAY]
        counted = [content for content in lines if "rounds_per_day" in content["rule"]]
        same = [content for content in counted if _what(content) == [order.client, order.answer, order.stage]]
        if len(same) >= policy.rounds_per_day:
            raise Refusal("rounds_per_day", f"its site's policy allows {policy.rounds_per_day} rounds in a day")
        if reply is None:
            return rule, []
        allowed, names = policy.judge_answer(order.answer, reply.text)
        size = _size(reply)
        if sum(content["bytes"] for content in counted) + size > policy.bytes_per_day:
            raise Refusal("bytes_per_day", f"its site's policy allows {policy.bytes_per_day} bytes in a day")
        limits = {"rounds_per_day": policy.rounds_per_day, "bytes_per_day": policy.bytes_per_day}
        return rule | allowed | limits, names

    def _append(
        self, record: Record, policy: SitePolicy, order: Order, reply: Packet, rule: dict[str, Any], names: list[str]
    ) -> None:
        now, clock = _now(record), time.time()
        content = {
            "time": datetime.fromtimestamp(now, UTC).isoformat(),
            "client": order.client,
            "run": order.run,
            "round": order.round,
            "answer": order.answer,
            "stage": order.stage,
            "entries": names,
            "bytes": _size(reply),
            "digest": hashlib.sha256(reply.text.encode() + b"\0" + reply.data).hexdigest(),
            "policy": policy.digest,
            "rule": rule,
        }
        if now - clock > 1:
            content["clock_behind"] = round(now - clock)
        line = record.append(content)
        _log.info(
            "Line %d of the site's record: %s of client %r, round %s, %d bytes, %s; head %s.",
            line.number,
            order.answer,
            order.client,
            order.round if order.round is None else round_number(order.round),
            content["bytes"],
            f"refused by {rule['refused']}" if "refused" in rule else "left",
            line.digest,
        )

    def _open_record(self, policy: SitePolicy) -> Record:
        path = self._path.parent / policy.record
        if self._record is None or self._record[0] != path:
            self._record = path, Record(path)
        return self._record[1]


def _now(record: Record) -> float:
    """The time, which does not go back where the clock does."""
    return max(time.time(), record.last.time)


def _what(content: dict[str, Any]) -> list[Any]:
    return [content["client"], content["answer"], content["stage"]]


def _size(packet: Packet) -> int:
    return len(packet.text.encode()) + len(packet.data)
