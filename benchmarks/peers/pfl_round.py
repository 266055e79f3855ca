"""`pfl` (Apple's pfl-research), in one process, or in several processes with ``torchrun``."""

from __future__ import annotations

import os
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor, nn
from torch.nn import functional as F
from work import RATE, WORKS, arguments, now, save


class Net(nn.Module):
    """A network with pfl's interface."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def loss(self, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {}


class Stamps(TrainingProcessCallback):
    """End times of rounds."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.stamps.append(now())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.stamps.append(now())
        return False, Metrics()


class InTurn:
    """Selects one client after another."""

    def __init__(self, clients: int) -> None:
        self.clients, self.asked = clients, 0

    def __call__(self) -> int:
        self.asked += 1
        return (self.asked - 1) % self.clients


def main() -> None:
    given = arguments()
    work = WORKS[given.work]
    datasets = [Dataset(work.make_data(client), user_id=str(client)) for client in range(given.clients)]
    data = FederatedDataset(lambda client: datasets[client], InTurn(given.clients))
    net = Net(work.make_network())
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    watch = Stamps()
    privacy = []
    if given.contestant == "pfl_private":
        privacy = [CentrallyAppliedPrivacyMechanism(GaussianMechanism(1.0, 1.0))]
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=given.rounds,
            evaluation_frequency=given.rounds + 1,  # only in the first round, without a timer
            train_cohort_size=given.clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=privacy),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=work.batch_size),
        NNEvalHyperParams(local_batch_size=work.batch_size),
        [watch],
    )
    if int(os.environ.get("RANK", "0")) == 0:
        save(given.out, watch.stamps, net)


if __name__ == "__main__":
    main()
