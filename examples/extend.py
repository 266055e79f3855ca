"""A federation with parts of one's own: a rule of the server, and two update steps.

Two of ten clients send poison. The mean follows them, the median does not. Every honest change is clipped and gets a
little noise before it is sent.
"""

import argparse

import lightning as L
import torch
from lightning_fed import Aggregator, Broadcast, FederatedTrainer
from lightning_fed.algorithms import FedAvg
from lightning_fed.data import IID
from lightning_fed.steps import UpdateStep, trained_entries

from classifier import Classifier, DigitsDataModule  # the plain project beside this file


class ClipAndNoise(UpdateStep):
    """Clips each client's change to the Euclidean norm ``clip`` and adds Gaussian noise of deviation ``noise * clip``.

    It works on the entries that train; running statistics of BatchNorm travel as they are.
    McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018.
    """

    def __init__(self, clip: float, noise: float = 0.0):
        self.clip = clip
        self.noise = noise

    def on_client(self, update, sent, memory):
        start = sent.state
        changes = {name: update.state[name] - start[name] for name in trained_entries(self.info, start)}
        length = float(torch.stack([change.norm() for change in changes.values()]).norm())
        factor = min(1.0, self.clip / length) if length > 0 else 1.0
        for name, change in changes.items():  # the visit has seeded the generator: the noise is the same in every run
            update.state[name] = start[name] + factor * change + self.noise * self.clip * torch.randn_like(change)
        update.metrics["clipped"] = float(factor < 1)  # the log has the mean over clients, `clients/clipped`
        return update


class Poison(UpdateStep):
    """Some clients send a change the wrong way round, and large."""

    def __init__(self, clients: set[int], scale: float = 5.0):
        self.clients = clients
        self.scale = scale

    def on_client(self, update, sent, memory):
        if update.client in self.clients:
            for name in trained_entries(self.info, sent.state):
                change = update.state[name] - sent.state[name]
                update.state[name] = sent.state[name] - self.scale * change
        return update


class CoordinateMedian(Aggregator):
    """The median of every single entry over the clients; it keeps all updates of a round in memory.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
    """

    def start(self, info, state):
        self.round, self.state, self.states = info.round, state, []

    def broadcast(self, request):
        return Broadcast(self.round, dict(self.state))

    def receive(self, update):
        self.states.append(update.state)

    def merge(self, other):
        self.states += other.states

    def aggregate(self):
        return {name: median(torch.stack([state[name] for state in self.states])) for name in self.state}


def median(values):
    """Median over the first dimension: the mean of the middle two of an even number, the lower one of integers."""
    ordered = values.sort(dim=0).values
    low, high = ordered[(len(values) - 1) // 2], ordered[len(values) // 2]
    return (low + high) / 2 if values.is_floating_point() else low


def train(method, steps, rounds, samples):
    """Validation accuracy after a federated fit."""
    L.seed_everything(1)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=2,
        method=method,
        partition=IID(10),
        steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), datamodule=DigitsDataModule(samples))
    return float(trainer.callback_metrics["val_acc"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1000)
    args = parser.parse_args()

    for method in (FedAvg(), CoordinateMedian()):
        steps = [ClipAndNoise(clip=5.0, noise=1e-4), Poison(clients={3, 7})]  # from the model to the wire
        accuracy = train(method, steps, args.rounds, args.samples)
        print(f"{type(method).__name__}: validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
