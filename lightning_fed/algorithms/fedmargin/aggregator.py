"""FedMargin on the server (our reconstruction): weights client models by distances of mean features per class."""

from __future__ import annotations

import logging
import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.algorithms.fedmargin.attention import (
    AttentionKind,
    Combination,
    combine_attention,
    margin_attention,
)
from lightning_fed.algorithms.fedmargin.margins import (
    ClassReduction,
    MarginKind,
    MeanMarginKind,
    aggregate_mean_margin,
    aggregate_prototype_margin,
)
from lightning_fed.algorithms.fedmargin.prototype_messages import (
    find_invalid_prototypes,
    find_mismatched_prototypes,
    find_outlying_prototypes,
    lpm_key,
    pack_prototypes,
    unpack_prototypes,
)
from lightning_fed.algorithms.fedmargin.prototypes import (
    PrototypeMemory,
    Prototypes,
    PrototypeWeighting,
    aggregate_prototypes,
    reference_prototypes,
    update_prototypes,
)
from lightning_fed.argument_checks import check_option, check_positive
from lightning_fed.console import round_number
from lightning_fed.errors import BadUpdate, BadUpdates, OptionError
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.weighted_mean import WeightedMean
from lightning_fed.rule import Aggregator, RoundInfo

_log = logging.getLogger(__name__)

_CLIENTS_BY_NAME = 20


@dataclass
class MarginReport:
    """Prototype margins and client weights in a FedMargin round, in the order of ``clients``.

    Args:
        clients: Clients in the round.
        lpm: Each client's local prototype margin, between class prototypes before and after training; NaN if missing.
        apm: Each client's aggregate prototype margin, between the client's and the mean prototypes; NaN if missing.
        attention: Weight for each client in the average, with sum 1.
        amm: Mean margin between classes.
    """

    clients: list[Client] = field(default_factory=list)
    lpm: list[float] = field(default_factory=list)
    apm: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)
    amm: float = math.nan


class FedMargin(Aggregator):
    r"""Weighted mean of client models, with larger weights for clients whose class prototypes change more.

    A class prototype is the mean feature vector of a class. The margin between two prototypes is half the distance. The
    local prototype margin (LPM) compares a client's prototypes before and after local training. The aggregate prototype
    margin (APM) compares the prototypes after training with the mean over all clients and rounds.

    .. math:: a_k = \tfrac12 \left( \frac{\mathrm{LPM}_k}{\sum_j \mathrm{LPM}_j}
        + \frac{\mathrm{APM}_k}{\sum_j \mathrm{APM}_j} \right), \qquad
        w_{t+1} = w_t + \eta \sum_k a_k (w_k - w_t)

    Here :math:`a_k` is a client's weight (attention), :math:`w_t` the global model, :math:`w_k` a client's model, and
    :math:`\eta` the server's step size. The equations are reconstructions from the paper's description. Equal margins
    give equal weights, as in FairAvg. A client without prototypes gets the mean margin of the other clients.
    :attr:`last` reports the last round's margins and weights.

    :class:`~lightning_fed.callbacks.ClassPrototypes`, added automatically, measures the prototypes. To select the layer
    or classes, add this callback explicitly, with the same ``margin`` and ``class_reduction``.

    - Sends: the model both ways. Each client also sends a vector and two numbers per class. With the margins
      "hypothesis" and "relative", the server also sends a vector and two numbers per class.
    - Keeps: one vector per class on the server.
    - Costs: two passes over a client's data per round, without gradients. The server stores all updates of a round.
    - For: unbalanced class distributions; segmentation.

    Args:
        margin: Kind of margin per class, see :func:`~lightning_fed.algorithms.fedmargin.class_margins`.
        class_reduction: Reduction over classes to one margin per client. ``"count"`` is a mean weighted by class size.
        attention: Conversion of margins to weights. ``"softmax"`` is the formula of FedAtt.
        combine: Use of LPM and APM: mean or product of both weights, or only one.
        proto_weighting: Client weights in the mean over client prototypes. The default is the number of feature
            vectors.
        proto_memory: Mean of prototypes over rounds: moving average, or mean over all rounds.
        size_weighting: Whether to multiply weights by the numbers of examples.
        server_lr: Step size :math:`\eta` towards the weighted mean.
        amm: Kind of the logged mean margin between classes: over all pairs, or only nearest neighbours.

    Raises:
        ValueError: If an option is invalid, or a client measured another kind of margin.

    Note:
        Logs ``fedmargin/amm`` and ``fedmargin/attention_entropy`` (1 for equal weights). With at most 20 clients, also
        logs ``fedmargin/lpm/<client>``, ``fedmargin/apm/<client>`` and ``fedmargin/attention/<client>``.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> fedmargin = FedMargin(combine="lpm")
        >>> fedmargin.start(RoundInfo(0), {"w": torch.tensor([0.0])})
        >>> for client, moved in (("a", 3.0), ("b", 1.0)):
        ...     extras = {"prototypes:lpm:semantic:mean": torch.tensor(moved)}
        ...     fedmargin.receive(ClientUpdate(client, 1, {"w": torch.tensor([moved])}, extras))
        >>> fedmargin.aggregate(), fedmargin.last.attention
        ({'w': tensor([2.5000])}, [0.75, 0.25])
    """

    accepts_rows = True

    def __init__(
        self,
        margin: MarginKind = "semantic",
        class_reduction: ClassReduction = "mean",
        attention: AttentionKind = "sum",
        combine: Combination = "mean",
        proto_weighting: PrototypeWeighting = "class_count",
        proto_memory: PrototypeMemory = "ema",
        size_weighting: bool = False,
        server_lr: float = 1.0,
        amm: MeanMarginKind = "pairs",
    ) -> None:
        for name, value, kinds in (
            ("margin", margin, MarginKind),
            ("class_reduction", class_reduction, ClassReduction),
            ("attention", attention, AttentionKind),
            ("combine", combine, Combination),
            ("proto_weighting", proto_weighting, PrototypeWeighting),
            ("proto_memory", proto_memory, PrototypeMemory),
            ("amm", amm, MeanMarginKind),
        ):
            check_option(name, value, kinds)
        check_positive("server_lr", server_lr)
        self.margin = margin
        self.class_reduction = class_reduction
        self.attention = attention
        self.combine = combine
        self.proto_weighting = proto_weighting
        self.proto_memory = proto_memory
        self.size_weighting = size_weighting
        self.server_lr = server_lr
        self.amm = amm
        self.prototypes: Prototypes | None = None
        self.last = MarginReport()
        self.num_classes: int | None = None
        self._info = RoundInfo(-1)
        self._state: State = {}
        self.updates: list[ClientUpdate] = []
        self._held_rows: dict[str, Tensor] = {}

    def start(self, info: RoundInfo, state: State) -> None:
        self._info, self._state, self.updates = info, state, []

    def broadcast(self, request: Request) -> Broadcast:
        extras: State = {}
        if self.margin in ("hypothesis", "relative") and self.prototypes is not None:
            extras = pack_prototypes(self.prototypes)
        return Broadcast(self._info.round, dict(self._state), extras)

    def receive(self, update: ClientUpdate) -> None:
        fault = find_invalid_prototypes(update.extras, self.num_classes)
        if fault is not None:
            raise BadUpdate(fault)
        self._local_margin(update)
        self.updates.append(update)

    def merge(self, other: FedMargin) -> None:
        self.updates += other.updates

    def aggregate(self) -> State:
        num_features = None if self.prototypes is None else self.prototypes.means.shape[1]
        extras = {update.client: update.extras for update in self.updates}
        faults = find_outlying_prototypes(extras) | find_mismatched_prototypes(extras, num_features)
        self.updates = [update for update in self.updates if update.client not in faults]
        if faults:
            raise BadUpdates(faults)
        weights = self._measure_weights()
        largest = weights.max()
        mean = WeightedMean()
        for update, weight in zip(self.updates, weights, strict=True):
            # gives exactly 1 for equal weights
            mean.add(update.state, float(weight / largest), update.num_samples, update.rows)
        state, self._held_rows = mean.mean(self._state), mean.held_rows()
        self.updates = []
        if self.server_lr == 1:
            return state
        return {name: self._step(name, value) for name, value in state.items()}

    def held_rows(self) -> dict[str, Tensor]:
        return self._held_rows

    def metrics(self) -> dict[str, float]:
        last, values = self.last, {"fedmargin/amm": self.last.amm}
        if len(last.clients) > 1:
            entropy = -sum(weight * math.log(weight) for weight in last.attention if weight)
            values["fedmargin/attention_entropy"] = entropy / math.log(len(last.clients))
        if len(last.clients) <= _CLIENTS_BY_NAME:
            for name in ("lpm", "apm", "attention"):
                numbers = zip(last.clients, getattr(last, name), strict=True)
                values |= {f"fedmargin/{name}/{client}": value for client, value in numbers}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.prototypes is None else {"means": self.prototypes.means, "counts": self.prototypes.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prototypes = Prototypes(state["means"], state["counts"]) if state else None

    def _measure_weights(self) -> Tensor:
        updates = self.updates
        num_samples = [update.num_samples for update in updates]
        lpm = [self._local_margin(update) for update in updates]
        apm = [math.nan] * len(updates)
        sets = self._unpack()
        if sets:
            weighting = self.proto_weighting
            current = aggregate_prototypes(list(sets.values()), weighting, [num_samples[number] for number in sets])
            reference = reference_prototypes(self.prototypes, current)
            for number, prototypes in sets.items():
                margin = aggregate_prototype_margin(
                    prototypes, reference, margin=self.margin, class_reduction=self.class_reduction
                )
                apm[number] = float(margin)
            self.prototypes = update_prototypes(self.prototypes, current, self.proto_memory)
        local, aggregate = (
            margin_attention(torch.tensor(margins, dtype=torch.float64), self.attention) for margins in (lpm, apm)
        )
        weights = combine_attention(
            local, aggregate, self.combine, num_samples=num_samples if self.size_weighting else None
        )
        amm = math.nan if self.prototypes is None else float(aggregate_mean_margin(self.prototypes, self.amm))
        self.last = MarginReport([update.client for update in updates], lpm, apm, weights.tolist(), amm)
        return weights

    def _local_margin(self, update: ClientUpdate) -> float:
        name = lpm_key(self.margin, self.class_reduction)
        if name in update.extras:
            return float(update.extras[name])
        unexpected = [key for key in update.extras if key.startswith("prototypes:lpm:")]
        if unexpected:
            raise OptionError(
                f"Expected a client to send the margin {name!r}, but got {unexpected[0]!r}: pass the same `margin` and "
                "`class_reduction` to `ClassPrototypes` (on the client) and `FedMargin`."
            )
        return math.nan

    def _unpack(self) -> dict[int, Prototypes]:
        packed = {
            number: update.extras
            for number, update in enumerate(self.updates)
            if len(update.extras.get("prototypes:classes", ()))
        }
        self._forget_other_features({extras["prototypes:means"].shape[1] for extras in packed.values()})
        num_known = 0 if self.prototypes is None else len(self.prototypes.counts)
        num_classes = max([num_known, *(int(extras["prototypes:classes"].max()) + 1 for extras in packed.values())])
        if self.prototypes is not None:
            means, counts = self.prototypes
            self.prototypes = Prototypes(
                F.pad(means, (0, 0, 0, num_classes - num_known)), F.pad(counts, (0, num_classes - num_known))
            )
        sets = {number: unpack_prototypes(extras, num_classes) for number, extras in packed.items()}
        return {number: prototypes for number, prototypes in sets.items() if prototypes is not None}

    def _forget_other_features(self, widths: Set[int]) -> None:
        # Aggregate prototypes with a different number of features came from a single or faulty client.
        if self.prototypes is not None and not widths <= {self.prototypes.means.shape[1]}:
            _log.warning(
                "Round %d: the aggregate prototypes are reset: the clients' prototypes have %d features, not %d.",
                round_number(self._info.round),
                *widths,
                self.prototypes.means.shape[1],
            )
            self.prototypes = None

    def _step(self, name: str, mean: Tensor) -> Tensor:
        if not mean.is_floating_point() or is_running_statistic(name):
            return mean
        old = to_float64(self._state[name])
        return cast_back(old + self.server_lr * (to_float64(mean) - old), mean)
