"""A federation with a custom aggregation rule and two custom update steps.

Two of ten clients send poisoned updates. The mean follows the poison, the median does not. Each honest update is
clipped and receives a little noise before the client sends the update.
"""

import argparse

import lightning as L
import torch
from lightning_fed import Aggregator, Broadcast, FederatedTrainer
from lightning_fed.algorithms import FedAvg
from lightning_fed.data import IID
from lightning_fed.steps import UpdateStep, trained_entries

from classifier import Classifier, DigitsDataModule  # the plain project next to this file


class ClipAndNoise(UpdateStep):
    """Clips each client's update to the Euclidean norm ``clip`` and adds Gaussian noise (deviation ``noise * clip``).

    Applies to trainable entries only; BatchNorm's running statistics are sent unchanged.
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
        for name, change in changes.items():  # the visit seeds the generator: every run has the same noise
            update.state[name] = start[name] + factor * change + self.noise * self.clip * torch.randn_like(change)
        update.metrics["clipped"] = float(factor < 1)  # logged as `clients/clipped`, the mean over clients
        return update


class Poison(UpdateStep):
    """Some clients send a large update in the opposite direction."""

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
    """Median of every entry over the clients. The server stores all updates of a round.

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
    """Median over the first dimension. With an even number of values: mean of the middle two, or the lower integer."""
    ordered = values.sort(dim=0).values
    low, high = ordered[(len(values) - 1) // 2], ordered[len(values) // 2]
    return (low + high) / 2 if values.is_floating_point() else low


def train(method, steps, rounds, samples):
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
        steps = [
            ClipAndNoise(clip=5.0, noise=1e-4),
            Poison(clients={3, 7}),
        ]  # from model to network
        accuracy = train(method, steps, args.rounds, args.samples)
        print(f"{type(method).__name__}: validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
