"""Profiles of sites and network for a rehearsal, from a TOML file."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.messages import Client

DAY = 24 * 3600.0  # seconds


@dataclass(frozen=True)
class Profile:
    """Speed, network and faults for one machine. Rates of faults are probabilities per message or events per day.

    Args:
        seconds_per_step: Seconds for a training step.
        batches: Batches in one pass over the local data; also the example count for the client's weight.
        bandwidth: Megabits per second, in each direction.
        latency: Seconds for a message's first byte.
        availability: Time share with a connection.
        outage: Mean outage duration in seconds.
        restarts: Restarts per day; half of the restarts lose all bytes that were not synchronised with the disk.
        downtime: Mean seconds between the end and the next start.
        memory: Memory for the process in gigabytes.
        disk: Disk space for the process's folder in gigabytes.
        clock_skew: Seconds by which the clock is ahead.
        clock_jumps: Clock jumps per day, by up to one hour in both directions.
        loss: Probability that a message is lost.
        delay: Probability that a message is delayed by up to ``outage`` seconds, possibly after later messages.
        duplicate: Probability that a message arrives twice.
        cut: Probability that the end is missing in an answer.
        bad: Probability for an unreadable or invalid answer.
        disk_faults: Failed file operations per working day, because the disk is full or the process is killed.
        policy: Site policy; an empty text means no policy.

    Example:
        >>> Profile(seconds_per_step=0.5, batches=10).restarts
        0.0
    """

    seconds_per_step: float = 1.0
    batches: int = 10
    bandwidth: float = 100.0
    latency: float = 0.05
    availability: float = 1.0
    outage: float = 300.0
    restarts: float = 0.0
    downtime: float = 60.0
    memory: float = math.inf
    disk: float = math.inf
    clock_skew: float = 0.0
    clock_jumps: float = 0.0
    loss: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    cut: float = 0.0
    bad: float = 0.0
    disk_faults: float = 0.0
    policy: str = ""

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "batches", "bandwidth", "outage", "downtime", "memory", "disk"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Expected `{name}` to be positive, but got {getattr(self, name)}.")
        for name in ("latency", "restarts", "clock_jumps", "disk_faults"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Expected `{name}` to be at least 0, but got {getattr(self, name)}.")
        for name in ("loss", "delay", "duplicate", "cut", "bad"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Expected `{name}` to be in [0, 1), but got {getattr(self, name)}.")
        if not 0 < self.availability <= 1:
            raise ValueError(f"Expected `availability` to be in (0, 1], but got {self.availability}.")


@dataclass(frozen=True)
class Sites:
    """A deployment's machines.

    Args:
        server: Profile for the server. Only ``restarts``, ``downtime``, ``disk`` and ``disk_faults`` are used.
        sites: Maps clients to profiles.
        deadline: Time limit of a round.
        patience: Seconds to wait for the clients when the server starts.
    """

    server: Profile
    sites: Mapping[Client, Profile]
    deadline: Deadline = field(default_factory=Deadline)
    patience: float = 600.0


def read_sites(path: str | os.PathLike[str]) -> Sites:
    """Reads a TOML file with the tables ``server``, ``deadline``, ``sites.defaults`` and one table per site.

    Raises ``ValueError`` or ``TypeError`` for unknown names and values outside the allowed range.
    """
    content = tomllib.loads(Path(path).read_text())
    unknown = sorted(content.keys() - {"server", "deadline", "patience", "sites"})
    tables = dict(content.get("sites", {}))
    if unknown or not tables.keys() - {"defaults"}:
        raise ValueError(
            f"Expected the tables `server`, `deadline`, `sites.defaults`, `sites.NAME` and the number `patience` in "
            f"{os.fspath(path)}, with at least one site, but got {unknown or 'no site'}."
        )
    defaults = tables.pop("defaults", {})
    sites = {name: _read_profile(f"sites.{name}", {**defaults, **table}, path) for name, table in tables.items()}
    server = _read_profile("server", content.get("server", {}), path)
    return Sites(server, sites, Deadline(**content.get("deadline", {})), float(content.get("patience", 600.0)))


def _read_profile(name: str, table: Mapping[str, Any], path: str | os.PathLike[str]) -> Profile:
    known = {one.name: type(one.default) for one in fields(Profile)}
    for key, value in table.items():
        kinds = (int, float) if known.get(key) is float else known.get(key, ())
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(
                f"Expected values of a profile in table `{name}` of {os.fspath(path)}, but got {key} = {value!r}: the "
                f"names are {', '.join(known)}."
            )
    return Profile(**table)
