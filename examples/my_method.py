"""A custom method in one file: clients with a larger loss have a larger weight.

python my_method.py
lightning-fed fit -c RECIPE --trainer.method my_method.FedLoss --trainer.method.q 2
lightning-fed compare RECIPE --methods fedavg my_method.FedLoss:q=2
"""

import argparse

import lightning as L
import torch
from lightning_fed import FederatedCallback, FederatedTrainer, Method
from lightning_fed.algorithms import AveragingAggregator
from lightning_fed.data import Dirichlet

from classifier import Classifier, DigitsDataModule  # the plain project next to this file


class ReportLoss(FederatedCallback):
    """Client half: sends the visit's mean loss with the update."""

    def on_client_start(self, trainer, module, client, broadcast):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach())

    def on_client_end(self, trainer, module, client, update):
        update.extras["loss"] = torch.stack(self.losses).mean()


class LossAverage(AveragingAggregator):
    """Server half: weights clients by examples times loss to the power ``q``."""

    def __init__(self, q: float):
        super().__init__()
        self.q = q

    def weight(self, update):
        return update.num_samples * float(update.extras["loss"]) ** self.q


class FedLoss(Method):
    """Weighted average with larger weights for larger losses; ``q=0`` is plain averaging."""

    def __init__(self, q: float = 1.0):
        super().__init__(LossAverage(q), [ReportLoss()])


def train(method, rounds, samples):
    L.seed_everything(1)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = FederatedTrainer(method, max_rounds=rounds, partition=Dirichlet(10, alpha=0.3), **options)
    trainer.fit(Classifier(), datamodule=DigitsDataModule(samples))
    return float(trainer.callback_metrics["val_acc"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1000)
    args = parser.parse_args()
    for name, method in (("FedAvg", "fedavg"), ("FedLoss", FedLoss(q=2.0))):
        print(f"{name}: validation accuracy {train(method, args.rounds, args.samples):.3f}")


if __name__ == "__main__":
    main()
