"""The chain: construction does not start a round."""

import torch

from lightning_fed import Federation
from lightning_fed.algorithms import FedAvg
from lightning_fed.rule import RoundInfo
from lightning_fed.steps import Chain, UpdateStep


class Starts(UpdateStep):
    def __init__(self):
        self.rounds = []

    def start(self, info, state):
        self.rounds.append((info.round, sorted(state)))


def test_a_step_starts_with_the_first_round():
    """Starting needs a model, because a step may read entries."""
    chains = [Chain(FedAvg(), [Starts()]), Federation(FedAvg(), steps=[Starts()]).server.chain]
    for chain in chains:
        (step,) = chain.steps
        assert step.rounds == []
        chain.start(RoundInfo(0), {"w": torch.zeros(1)})
        assert step.rounds == [(0, ["w"])]
