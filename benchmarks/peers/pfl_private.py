"""`pfl` with central differential privacy, on clients and noise from `privacy_utility.py`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl_round import Net
from work import now


class Scores(TrainingProcessCallback):
    """Test accuracy after each of the last rounds, and end times of rounds."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, rounds: int, last: int) -> None:
        self.images, self.labels, self.first = images, labels, rounds - last
        self.stamps: list[float] = []
        self.scores: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.stamps.append(now())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.stamps.append(now())
        if len(self.stamps) - 1 > self.first:
            with torch.no_grad():
                logits = torch.cat([model.pytorch_model(images) for images in self.images.split(500)])
            self.scores.append(float((logits.argmax(1) == self.labels).double().mean()))
        return False, Metrics()


def main() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("work")
    made.add_argument("out")
    given = made.parse_args()
    work = torch.load(given.work, weights_only=True)
    sys.path.insert(0, work["root"])
    from lightning_fed.tasks.networks import build_network  # only for the network

    torch.set_num_threads(1)
    np.random.seed(work["seed"])  # noqa: NPY002 - pfl draws clients from this generator
    torch.manual_seed(work["seed"])
    network = build_network(*work["network"])
    network.load_state_dict(work["state"])
    net = Net(network)
    users = [Dataset(tensors, user_id=str(place)) for place, tensors in enumerate(work["clients"])]
    sampler = get_user_sampler("minimize_reuse", list(range(len(users))))
    data = FederatedDataset(lambda user: users[user], sampler)
    noise = []
    if work["noise_multiplier"] is not None:
        mechanism = GaussianMechanism(work["clip"], work["noise_multiplier"] * work["cohort"] / work["noise_cohort"])
        noise = [CentrallyAppliedPrivacyMechanism(mechanism)]
    scores = Scores(*work["test"], work["rounds"], work["last"])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work["rounds"],
            evaluation_frequency=work["rounds"] + 1,
            train_cohort_size=work["cohort"],
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=noise),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work["lr"], local_batch_size=work["batch_size"]),
        NNEvalHyperParams(local_batch_size=500),
        [scores],
    )
    with open(given.out, "w") as file:
        json.dump({"scores": scores.scores, "stamps": scores.stamps}, file)


if __name__ == "__main__":
    main()
