"""FeSEM on the server: several global models, one for each cluster of clients."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch

from lightning_fed.algorithms.fesem.clustering import embed, k_means
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.console import round_number
from lightning_fed.errors import OptionError
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, plain_keys
from lightning_fed.model.entries import copy_state, is_running_statistic
from lightning_fed.numerics.precision import to_float64
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.numerics.trees import move_beside
from lightning_fed.numerics.weighted_mean import WeightedMean
from lightning_fed.rule import Aggregator, RoundInfo

_log = logging.getLogger(__name__)


class FeSEM(Aggregator):
    r"""Clusters clients, and trains one global model for each cluster (FeSEM).

    .. math:: r_k = \arg\min_g \lVert W_k - \tilde W^{(g)} \rVert^2, \qquad
        \tilde W^{(g)} = \frac{\sum_{k: r_k = g} n_k W_k}{\sum_{k: r_k = g} n_k}

    Here :math:`W_k` is client k's model after local training, :math:`n_k` the number of examples, and :math:`r_k` the
    client's cluster. :math:`\tilde W^{(g)}` is the global model ("centre") of cluster g. Each client in a round is
    assigned to the nearest centre. Then each centre becomes the mean over the assigned clients. A centre without
    clients in the round does not change. Local training starts from the client's centre. Reference: Xie et al., 2020,
    "FeSEM".

    The first round uses federated averaging, and the clients' models initialise the centres. Clients without a centre
    start from the Trainer's model, the mean over all centres. :class:`~lightning_fed.callbacks.CenterEvaluation`
    evaluates the centres. Logs ``fesem/clients/<index>`` (clients per centre), and ``fesem/moved`` (clients that
    changed to another centre).

    - Sends: 1 model down, 1 up.
    - Keeps: ``num_centers`` models on the server.
    - Costs: distances to all centres on the server.
    - For: clients that form clusters.

    Args:
        num_centers: Number of centres. 1 gives exactly the weights of FedAvg.
        assign_on: Pattern for the names of compared parameters, such as ``"*head.*"`` for the last layer.
        init: Initialisation of the centres. ``"k-means++"`` clusters the first round's client models. ``"random"``
            draws client models and needs less memory, but two centres may be in one cluster.
        seed: Seed for the initialisation.

    Raises:
        ValueError: If an argument is invalid, or ``assign_on`` matches nothing.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> fesem = FeSEM(num_centers=2)
        >>> fesem.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, w in {"a": 1.0, "b": 1.5, "c": 9.0, "d": 7.0}.items():
        ...     fesem.receive(ClientUpdate(client, 1, {"w": torch.tensor(w)}))
        >>> fesem.aggregate(), sorted(float(center["w"]) for center in fesem.centers)
        ({'w': tensor(4.6250)}, [1.25, 8.0])
    """

    has_clusters = True

    def __init__(
        self,
        num_centers: int = 3,
        assign_on: str = "*",
        init: Literal["k-means++", "random"] = "k-means++",
        seed: int = 0,
    ) -> None:
        check_option("init", init, ("k-means++", "random"))
        self.num_centers = check_count("num_centers", num_centers)
        self.assign_on = assign_on
        self.init = init
        self.seed = check_count("seed", seed, 0)
        self.centers: list[State] = []
        self.assignments: dict[Client, int] = {}
        self._num_samples: dict[Client, int] = {}
        self._moved = 0
        self.start(RoundInfo(-1), {})

    def start(self, info: RoundInfo, state: State) -> None:
        self._info, self._state = info, state
        self.centers = [move_beside(center, state) for center in self.centers]
        self._names = self._compared_names(state)
        self.means = [WeightedMean() for _ in self.centers] or [WeightedMean()]
        self.received: dict[Client, tuple[int, int]] = {}  # index in `means`, and the number of examples
        self.candidates: dict[tuple[int, int], ClientUpdate] = {}

    def broadcast(self, request: Request) -> Broadcast:
        center = self.model_of(request.client)
        return Broadcast(self._info.round, dict(self._state if center is None else center))

    def receive(self, update: ClientUpdate) -> None:
        index = self._nearest(update.state) if self.centers else 0
        self.means[index].add(update.state, update.num_samples, update.num_samples)
        self.received[update.client] = index, update.num_samples
        if not self.centers:
            key = client_key(update.client)
            self._store_candidate((derive_seed(self.seed, key), key), update)

    def merge(self, other: FeSEM) -> None:
        for mean, joined in zip(self.means, other.means, strict=True):
            mean.merge(joined)
        self.received |= other.received
        for key, update in other.candidates.items():
            self._store_candidate(key, update)

    def aggregate(self) -> State:
        self._num_samples = self._num_samples | {client: size for client, (_, size) in self.received.items()}
        if not self.centers:
            return self._first_centers()
        assignments = {client: index for client, (index, _) in self.received.items()}
        self._moved = sum(self.assignments.get(client, index) != index for client, index in assignments.items())
        self.assignments = self.assignments | assignments
        self.centers = _move_centers(self.means, self.centers)
        total = WeightedMean()
        for index, size in self.sizes().items():
            if index is not None:
                total.add(self.centers[index], size, size)
        return total.mean()

    def sizes(self) -> dict[int | None, int]:
        """Maps each centre's index to the number of examples. Key ``None`` stands for clients without a centre."""
        sizes: dict[int | None, int] = {}
        for client, size in self._num_samples.items():
            index = self.assignments.get(client)
            sizes[index] = sizes.get(index, 0) + size
        return sizes

    def model_of(self, client: Client) -> State | None:
        index = self.assignments.get(client)
        return None if index is None else self.centers[index]

    def metrics(self) -> dict[str, float]:
        counts = Counter(self.assignments.values())
        values = {f"fesem/clients/{index}": float(counts[index]) for index in range(len(self.centers))}
        return values | {"fesem/moved": float(self._moved)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "centers": self.centers,
            "clients": plain_keys(self._num_samples),
            "assignments": [self.assignments.get(client) for client in self._num_samples],
            "num_samples": list(self._num_samples.values()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        centers = state.get("centers", [])
        if centers and len(centers) != self.num_centers:
            raise ValueError(
                f"Expected a checkpoint with {self.num_centers} centres (`num_centers`), but the checkpoint has "
                f"{len(centers)}: set `num_centers` to the number in the checkpoint."
            )
        clients = state.get("clients", [])
        self.centers = list(centers)
        assignments = zip(clients, state.get("assignments", []), strict=True)
        self.assignments = {client: index for client, index in assignments if index is not None}
        self._num_samples = dict(zip(clients, state.get("num_samples", []), strict=True))

    def _first_centers(self) -> State:
        mean = self.means[0].mean()
        self._moved = 0
        updates = [self.candidates[key] for key in sorted(self.candidates)]
        if self.num_centers == 1:
            self.centers = [copy_state(mean)]
            self.assignments = dict.fromkeys(self.received, 0)
        elif len(updates) < self.num_centers:
            _log.warning(
                "Round %d had %d valid updates, fewer than num_centers=%d: the round used federated averaging.",
                round_number(self._info.round),
                len(updates),
                self.num_centers,
            )
        elif self.init == "random":
            self.centers = [update.state for update in updates]
            self.assignments = {update.client: index for index, update in enumerate(updates)}
        else:
            points = embed([update.state for update in updates], self._names)
            sizes = torch.tensor([update.num_samples for update in updates])
            generator = np.random.default_rng([self.seed, self._info.round])
            assignments, first = k_means(points, self.num_centers, sizes, generator)
            means = [WeightedMean() for _ in first]
            for update, index in zip(updates, assignments.tolist(), strict=True):
                means[index].add(update.state, update.num_samples, update.num_samples)
                self.assignments = self.assignments | {update.client: index}
            self.centers = _move_centers(means, [updates[index].state for index in first.tolist()])
        self.candidates = {}
        return mean

    def _store_candidate(self, key: tuple[int, int], update: ClientUpdate) -> None:
        if self.num_centers > 1:
            self.candidates[key] = update
            if self.init == "random" and len(self.candidates) > self.num_centers:
                del self.candidates[max(self.candidates)]  # smallest keys: independent of the order

    @torch.no_grad()
    def _nearest(self, state: State) -> int:
        distances = [
            sum((to_float64(state[name]) - to_float64(center[name])).square().sum() for name in self._names)
            for center in self.centers
        ]
        return int(torch.stack([torch.as_tensor(distance) for distance in distances]).argmin())

    def _compared_names(self, state: State) -> list[str]:
        names = [
            name
            for name, value in state.items()
            if value.is_floating_point() and not is_running_statistic(name) and fnmatchcase(name, self.assign_on)
        ]
        if state and not names:
            raise OptionError(
                f"Expected `assign_on` to match floating-point entries of the model, but {self.assign_on!r} matches "
                f"none of {list(state)}."
            )
        return names


def _move_centers(means: Sequence[WeightedMean], centers: Sequence[State]) -> list[State]:
    return [mean.mean() if mean.count else center for mean, center in zip(means, centers, strict=True)]
