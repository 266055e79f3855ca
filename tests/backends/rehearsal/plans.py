"""Rehearsed deployments with all faults."""

from dataclasses import replace
from importlib.util import find_spec

from lightning_fed import Faults, Federation
from lightning_fed.algorithms import FedAsync, FedBuff
from lightning_fed.backends.rehearsal.profiles import Profile, Sites
from lightning_fed.backends.rehearsal.rehearsal import Plan
from lightning_fed.backends.wire import Deadline
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.steps import MaxSamples

ROUGH = Profile(
    seconds_per_step=6.0, availability=0.97, outage=120.0, restarts=20.0, downtime=60.0, loss=0.03, delay=0.05,
    duplicate=0.05, cut=0.03, bad=0.03, disk_faults=300.0, clock_jumps=3.0,
)  # fmt: skip
SERVER = Profile(restarts=20.0, downtime=30.0, disk_faults=40.0)
POLICY = """
servers = ["*"]
runs = ["*"]
methods = ["fedavg"]
answers = ["update"]
entries = ["*"]
rounds_per_day = 6
bytes_per_day = 20000
"""
DEADLINE = Deadline(600)
NO_FAILED_ROUNDS = Faults(max_failed_rounds=None)


def build_sites(profile=ROUGH, deadline=DEADLINE, count=4, server=SERVER):
    speeds = (1.0, 0.5, 2.0, 4.0)
    sites = {
        f"site-{index}": replace(profile, seconds_per_step=profile.seconds_per_step * speeds[index % 4])
        for index in range(count)
    }
    return Sites(server, sites, deadline)


def build_plans():
    def federation(**options):
        return lambda: Federation(**{"seed": 3, "faults": NO_FAILED_ROUNDS, **options})

    quorum = Deadline(600, min_clients=2, rest=30.0, reconnect=20.0)
    quiet = replace(ROUGH, restarts=5.0, disk_faults=30.0, bad=0.0, cut=0.0, loss=0.01)
    unsafe = replace(quiet, seconds_per_step=3.0, restarts=100.0, write_cache=0.5, loss=0.1)
    unsafe_server = Profile(restarts=500.0, downtime=10.0, write_cache=0.9)
    plans = {
        "rough": Plan(build_sites(), federation(), 6),
        "subset": Plan(build_sites(count=5), federation(clients_per_round=2, method="fedavgm"), 6),
        "quorum": Plan(
            build_sites(deadline=quorum), federation(faults=Faults(min_clients=3, max_failed_rounds=None)), 6
        ),
        "asynchronous": Plan(build_sites(), federation(method=FedBuff(2)), 8),
        "late": Plan(
            build_sites(count=5, deadline=Deadline(90, reconnect=20.0)),
            federation(method=FedAsync(), clients_per_round=3),
            12,
        ),
        "policy": Plan(build_sites(replace(quiet, policy=POLICY)), federation(), 8),
        "restarts": Plan(build_sites(quiet, server=Profile(restarts=600.0, downtime=30.0)), federation(), 6),
        "write cache": Plan(build_sites(unsafe, count=5, server=unsafe_server), federation(clients_per_round=2), 8),
        "secure sum": Plan(build_sites(quiet), federation(steps=[MaxSamples(40), SecureSum(5.0)]), 4),
    }
    if find_spec("dp_accounting"):
        private = {"steps": [CentralDP(0.5, 1e-3, noise_multiplier=0.5)], "clients_per_round": 2}
        plans["private"] = Plan(build_sites(quiet), federation(**private), 5)
    return plans
