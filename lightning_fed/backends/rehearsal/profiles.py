"""Profiles for machines in a simulated deployment, from a TOML file."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_fed.argument_checks import check_count, check_nonnegative, check_positive, check_share
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.messages import Client

DAY = 24 * 3600.0  # seconds


@dataclass(frozen=True)
class Profile:
    """Simulated speed, network and faults of one machine, as in the guide "Rehearse a deployment before it runs".

    Raises ``ValueError`` for a value outside the allowed range.
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
    write_cache: float = 0.0
    policy: str = ""

    def __post_init__(self) -> None:
        for check, names in (
            (check_count, ("batches",)),
            (check_positive, ("seconds_per_step", "bandwidth", "outage", "downtime")),
            (check_nonnegative, ("latency", "restarts", "clock_jumps", "disk_faults")),
            (check_share, ("loss", "delay", "duplicate", "cut", "bad", "write_cache")),
        ):
            for name in names:
                check(name, getattr(self, name))
        if not 0 < self.availability <= 1 or not min(self.memory, self.disk) > 0:
            raise ValueError(
                f"Expected `availability` in (0, 1], and positive `memory` and `disk`, but got {self.availability}, "
                f"{self.memory} and {self.disk}."
            )


@dataclass(frozen=True)
class Sites:
    """Speed, network and faults of simulated machines. The server waits ``patience`` seconds for sites to connect."""

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
            f"Expected {os.fspath(path)} to contain only the tables `server`, `deadline` and `sites` and the number "
            f"`patience`, with a table for at least one site (such as `[sites.north]`), but got {unknown or 'no site'}."
        )
    defaults = tables.pop("defaults", {})
    sites = {name: _read_profile(f"sites.{name}", {**defaults, **table}, path) for name, table in tables.items()}
    server = _read_profile("server", content.get("server", {}), path)
    return Sites(server, sites, Deadline(**content.get("deadline", {})), float(content.get("patience", 600.0)))


def _read_profile(name: str, table: Mapping[str, Any], path: str | os.PathLike[str]) -> Profile:
    try:
        return Profile(**table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The table `{name}` in {os.fspath(path)} is invalid: {error}") from error
