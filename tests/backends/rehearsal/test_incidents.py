"""Published incidents as deployments, and the result with this package."""

import math
from dataclasses import dataclass

import pytest

from lightning_fed import Faults, Federation
from lightning_fed.backends.rehearsal.profiles import read_sites
from lightning_fed.backends.rehearsal.rehearsal import Plan, rehearse
from tests.breadth import quick


@dataclass(frozen=True)
class Incident:
    """A deployment from a published incident.

    Args:
        link: The report.
        story: What happened there.
        sites: The profiles, as TOML.
        rounds: Planned rounds.
        model_bytes: Model size in bytes.
        finished: Number of finished rounds here.
        excluded: Clients that miss at least one round here.
        reason: Part of every reason for an exclusion.
        failure: Part of the reason for an early end.
        hours: Maximum hours here.
    """

    link: str
    story: str
    sites: str
    rounds: int = 6
    model_bytes: float | None = None
    finished: int = 6
    excluded: frozenset = frozenset()
    reason: str = ""
    failure: str = ""
    hours: float = math.inf


NAMES = ("CAM", "MHA", "RUMC", "UKA", "UMCU", "USZ", "VHIO")
SEVEN = "".join(f"[sites.{name}]\n" for name in NAMES)
VPN = "[sites.defaults]\nseconds_per_step = 18\nbatches = 100\navailability = 0.97\noutage = 360\n"
QUORUM = "[sites.defaults]\nbatches = 1000\n[sites.UKA]\nseconds_per_step = 9\n[sites.RUMC]\nseconds_per_step = 3\n"
OTHERS = "".join(f"[sites.{name}]\n" for name in NAMES if name not in ("UKA", "RUMC"))
PAIR = "[sites.Trust_1]\nbandwidth = 10\n[sites.Trust_2]\nbandwidth = 1000\n"
INCIDENTS = {
    "one node ends a run": Incident(
        "https://github.com/KatherLab/MediSwarm/issues/346",
        "Any failure of one of seven nodes, such as a VPN drop of six minutes, ended runs of 15 and 17.5 hours.",
        f"[deadline]\nseconds = 86400\n{VPN.replace('18', '60')}restarts = 0.5\n{SEVEN}", rounds=20, finished=20,
        excluded=frozenset(NAMES), reason="connect",
    ),
    "a drop costs the round": Incident(
        "https://github.com/KatherLab/MediSwarm/issues/316",
        "Rounds of 30 minutes and VPN drops: with a longer `reconnect` no round is lost.",
        f"[deadline]\nseconds = 7200\nreconnect = 3600\n{VPN}{SEVEN}",
    ),
    "a quorum drops the largest sites": Incident(
        "https://github.com/KatherLab/MediSwarm/pull/511",
        "With a quorum of five of seven, the two slowest sites were left out, and the run reported success.",
        f"[deadline]\nseconds = 20000\nmin_clients = 5\nrest = 60\n{QUORUM}{OTHERS}",
        excluded=frozenset({"UKA", "RUMC"}), reason="did not answer within 60 s after 5 other answers",
    ),
    "a large model over a slow link": Incident(
        "https://github.com/londonaicentre/FLIP/issues/684",
        "The answer of 758 MB over a slow link timed out, and the run died in the second round.",
        f"[deadline]\nseconds = 900\n{PAIR}", model_bytes=758e6,
        excluded=frozenset({"Trust_1"}), reason="did not answer within 900 s",
    ),
    "the server crashes": Incident(
        "https://github.com/londonaicentre/FLIP/issues/727",
        "The server ran out of memory, and the job blocked the queue.",
        f"[server]\nrestarts = 200\n[sites.defaults]\nbatches = 200\n{PAIR}",
    ),
    "a single site": Incident(
        "https://github.com/londonaicentre/FLIP/pull/992",
        "With one participating site no round began: the strategy waited for a second node without a limit.",
        "[sites.Trust_1]\n",
    ),
    "no response from a client": Incident(
        "https://github.com/NVIDIA/NVFlare/issues/249",
        "Clients behind a load balancer registered, but orders never arrived: the server waited.",
        "[deadline]\nseconds = 300\n[sites.a]\n[sites.b]\nloss = 0.9999\n",
        excluded=frozenset("b"), reason="did not answer within 300 s",
    ),
    "a restarted node receives no work": Incident(
        "https://github.com/flwrlabs/flower/issues/4844",
        "A stopped and restarted SuperNode was connected, but no run started there.",
        "[deadline]\nseconds = 3000\nreconnect = 600\n[sites.a]\n[sites.b]\nbatches = 600\nrestarts = 100\n",
    ),
    "a closed connection ends the training": Incident(
        "https://github.com/flwrlabs/flower/issues/4346",
        "After a closed connection of one client in a round, the next round did not start, in spite of"
        " `accept_failures`.",
        "[sites.a]\n[sites.b]\n[sites.c]\nbatches = 40\navailability = 0.3\noutage = 200\n",
        excluded=frozenset("c"), reason="connect",
    ),
    "an offline node delays the round": Incident(
        "https://github.com/flwrlabs/flower/pull/4968",
        "A node went offline, and the server waited for an hour, until the message expired.",
        "[sites.a]\n[sites.b]\navailability = 0.0003\noutage = 1e5\n",
        excluded=frozenset("b"), reason="connect", hours=0.1,
    ),
    "failures of clients": Incident(
        "https://github.com/VectorInstitute/FL4Health/pull/280",
        "After failures of all clients the server waited without end, until an option ended the run.",
        "[sites.a]\nbad = 0.9999\n[sites.b]\nbad = 0.9999\n", finished=3, excluded=frozenset("ab"),
        failure="3 consecutive failed rounds",
    ),
}  # fmt: skip


# The others have the same cause as one of these, or many rounds.
QUICK = (
    "a quorum drops the largest sites", "a single site", "no response from a client",
    "a restarted node receives no work", "a closed connection ends the training", "an offline node delays the round",
    "failures of clients",
)  # fmt: skip


@pytest.mark.parametrize("name", quick(INCIDENTS, QUICK))
def test_an_incident_ends_well(name, tmp_path):
    incident = INCIDENTS[name]
    (tmp_path / "sites.toml").write_text(incident.sites)
    federation = Federation(seed=1, faults=Faults())
    plan = Plan(
        read_sites(tmp_path / "sites.toml"), federation.replace, incident.rounds, model_bytes=incident.model_bytes
    )
    outcome = rehearse(plan, 1)
    assert not outcome.violations
    assert outcome.rounds == incident.finished
    assert outcome.hours < incident.hours
    assert {client for client, _ in outcome.excluded} <= incident.excluded
    assert bool(outcome.excluded) == bool(incident.excluded)
    assert all(incident.reason in reason for _, reason in outcome.excluded)
    assert incident.failure in (outcome.failure or "")
    assert bool(incident.failure) == bool(outcome.failure)
