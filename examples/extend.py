"""A federation with parts of one's own: a callback on the messages, and a rule of the server.

Two of ten clients send poison. The mean follows them, the median does not; every honest step is clipped and gets
a little noise on its way.
"""

import argparse

import lightning as L
import torch
from lightning_fed import Aggregator, Broadcast, FederatedCallback, FederatedTrainer
from lightning_fed.algorithms import FedAvg
from lightning_fed.data import IID

from classifier import Classifier, DigitsDataModule  # the plain project beside this file


class ClipAndNoise(FederatedCallback):
    """Clips each client's step to the Euclidean norm ``clip`` and adds Gaussian noise of deviation ``noise * clip``.

    It works on the parameters; running statistics of BatchNorm travel as they are.
    McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018.
    """

    def __init__(self, clip: float, noise: float = 0.0):
        self.clip = clip
        self.noise = noise

    def on_client_start(self, trainer, module, client, broadcast):
        self.start = broadcast.state

    def on_client_end(self, trainer, module, client, update):
        names = [name for name, _ in module.named_parameters() if name in update.state]
        steps = {name: update.state[name] - self.start[name] for name in names}
        length = float(torch.stack([step.norm() for step in steps.values()]).norm())
        factor = min(1.0, self.clip / length) if length > 0 else 1.0
        for name, step in steps.items():  # the visit has seeded the generator: the noise is the same in every run
            update.state[name] = self.start[name] + factor * step + self.noise * self.clip * torch.randn_like(step)
        module.log("fed/clipped", float(factor < 1), on_step=False, on_epoch=True, batch_size=1)  # share of the clients


class Poison(FederatedCallback):
    """Some clients send a step the wrong way round, and large."""

    def __init__(self, clients: set[int], scale: float = 5.0):
        self.clients = clients
        self.scale = scale

    def on_client_start(self, trainer, module, client, broadcast):
        self.start = broadcast.state

    def on_client_end(self, trainer, module, client, update):
        if client in self.clients:
            for name, value in update.state.items():
                update.state[name] = self.start[name] - self.scale * (value - self.start[name])


class CoordinateMedian(Aggregator):
    """The median of every single entry over the clients; it keeps all updates of a round in memory.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
    """

    def __init__(self):
        self.round, self.state, self.states = -1, {}, []

    def start(self, info, state):
        self.round, self.state, self.states = round, state, []

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


def train(method, callbacks, rounds, samples):
    """Validation accuracy after a federated fit."""
    L.seed_everything(1)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=2,
        method=method,
        partition=IID(10),
        callbacks=callbacks,
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
        callbacks = [ClipAndNoise(clip=5.0, noise=1e-4), Poison(clients={3, 7})]
        accuracy = train(method, callbacks, args.rounds, args.samples)
        print(f"{type(method).__name__}: validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
