r"""FedMA's server side: layer after layer, neurons are matched before they are averaged.

Wang, Yurochkin, Sun, Papailiopoulos & Khazaeni, "Federated Learning with Matched Averaging" (FedMA), ICLR 2020,
Algorithm 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fed.algorithms.fedma.class_mean import class_mean
from lightning_fed.algorithms.fedma.matching_pass import COUNTS, REQUIRED_STEP, STEP, MatchingPass, tensor_hash
from lightning_fed.argument_checks import check_count, check_nonnegative, check_option, check_positive
from lightning_fed.console import round_number
from lightning_fed.errors import BadUpdate, OptionError
from lightning_fed.matching.neuron_matching import MatchScore
from lightning_fed.matching.one_shot import (
    MatchMode,
    MatchOrder,
    StateMatch,
    WidthLimit,
    check_width_limit,
    match_states,
)
from lightning_fed.matching.permutation import PermutationGroup, grow_neurons
from lightning_fed.matching.permutation_groups import PermutationGroups
from lightning_fed.matching.stages import Stage, StageChoice, check_stages, find_outputs
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import find_non_finite
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo, RoundPlan

_log = logging.getLogger(__name__)


class FedMA(Aggregator):
    r"""Matched averaging, layer by layer, with training in between; one exchange is one round.

    A pass through a network of :math:`N` stages has :math:`N` rounds, all with the same clients. In the first they
    train the whole model, and send the first stage only (in a chain: its first layer). The server finds out which of
    the clients' neurons are one neuron, and averages these. In the next round every client receives that stage and the
    positions of its neurons in it, gives the inputs of the following layers that order, keeps the matched layers frozen
    and trains the rest; and so on. The output layer is averaged by the clients' shares of every class. After the last
    round there is a new global model: until then the Trainer validates the one before. It is a wider one if clients had
    neurons that others had not. In the next pass clients start from their neurons of the global model, at the
    widths that they had.

    The entries of a neuron are found in any network (:class:`~lightning_fed.matching.PermutationGroups`), and so are
    the stages (:func:`~lightning_fed.matching.find_stages`): all blocks whose sums tie their channels are one. The
    module's layers get other widths in place; :func:`~lightning_fed.matching.load_matched` loads a checkpoint of a
    wider model. A client that fails or drops out is left out for the rest of the pass. If too few answer, a new pass
    begins.

    BatchNorm's statistics of a matched stage are measured by the clients (``batch_norm="recalibrate"``), and used as
    they are while later layers train; those of the complete model are measured once more.

    Every owner of a neuron counts alike in its mean, as in the paper and the authors' program, with
    ``weighting="uniform"``, an option of the federation; by default by its number of examples.

    The client's side is a callback, which is added to the Trainer if it has none:
    :class:`~lightning_fed.callbacks.LayerwiseTraining`. Its options can be given here or there.

    - Sends: one stage of the model per round, both ways; widths may grow.
    - Keeps: every client its widths.
    - Costs: one round per stage; an assignment problem per layer on the server.
    - For: clients that trained apart, so that their neurons are not in the same order.

    Args:
        mode: ``"grow"``, as in the paper: neurons that others do not have are added; ``"permute"``: every neuron has
            one partner in every other client, and widths stay; ``"none"``: layers are averaged as they are, which is
            freezing and training without matching. Groups that cannot grow are permuted with ``"grow"``.
        stages: ``"auto"``; the most that there are to be (1 for all layers in one exchange, without training in
            between); or patterns of entry names for each stage.
        last_layer: Whether output layers are averaged by the clients' shares of every class, for which they send their
            numbers of examples (or pixels) per class, or by their numbers of examples (``"size"``), as are models
            without classes. Class counts say something of the clients' labels. Labels are numbers of classes: several
            classes of one example (multi-hot) go with ``"size"``.
        initial: Whether all clients start from the same model (``"shared"``: the module as it is), or each from random
            numbers of its own (``"independent"``), as the authors do, for which nothing is sent: the entries of the
            module's own tensors in an order of the client's, which is another draw of the module's initialisation,
            see :func:`~lightning_fed.model.initial_state.shuffled_state`.
        order: Order in which the groups of one stage are matched, and their weights: as in FedMA, or as in PFNM.
        score: Score of a match, see :func:`~lightning_fed.matching.match_neurons`.
        gamma: :math:`\gamma`; the larger, the more neurons are added. By default 7 with the published score and 1 with
            the marginal one. The authors have 7 for convolutional networks, and 0.001 for their LSTM, with which none
            is added.
        passes: Most passes over the clients in the matching of a group.
        max_width: Most neurons of a group, as a multiple of those of a client; ``None`` for no limit; ``"auto"``: 1.25
            with the marginal score, and no limit with the published one, as published.
        prior_weight: Clients that a prior with mean 0 counts for in a neuron's mean. With 1 and
            ``weighting="uniform"`` the mean of *n* owners is multiplied by n/(n+1), as in the authors' program for
            convolutional networks; the paper has no such factor. The logged agreement falls with it.
        seed: Seed of the order in which clients are matched.

    Attributes:
        client_widths: Numbers of neurons of a client's groups.
        received: The round's updates.
        outputs: Entries of the output layers.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Note:
        Logged are ``fedma/stage`` (the stage that the round has matched, from 0 on) and, of each of its groups,
        ``fedma/<group>/width``, ``fedma/<group>/matched`` (the share of the clients' neurons that others have too),
        ``fedma/<group>/agreement`` (the share of the squared length of their incoming weights that averaging keeps: 1
        where matched neurons are the same, about 1/n where they are n unrelated ones) and ``fedma/<group>/seconds``; at
        the end of a pass also ``fedma/growth``, the global model's numbers over a client's.

    Example:
        >>> rule = FedMA("permute")
        >>> from lightning_fed.method import build_method
        >>> rule.initial, [type(callback).__name__ for callback in build_method(rule).callbacks]
        ('shared', ['LayerwiseTraining'])

    References:
        Wang et al., ICLR 2020, https://arxiv.org/abs/2002.06440; the scores are in
        :mod:`lightning_fed.matching.neuron_matching`.

    """

    resizes = True

    def __init__(
        self,
        mode: MatchMode = "grow",
        stages: StageChoice = "auto",
        last_layer: Literal["class", "size"] = "class",
        initial: Literal["shared", "independent"] = "shared",
        order: MatchOrder = "fedma",
        score: MatchScore = "marginal",
        gamma: float | None = None,
        passes: int = 5,
        max_width: WidthLimit = "auto",
        prior_weight: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_option("mode", mode, MatchMode)
        check_option("last_layer", last_layer, ("class", "size"))
        check_option("initial", initial, ("shared", "independent"))
        check_option("order", order, MatchOrder)
        check_option("score", score, MatchScore)
        if gamma is not None:
            check_positive("gamma", gamma)
        self.mode = mode
        self.stages = check_stages(stages)
        self.last_layer = last_layer
        self.initial = initial
        self.order = order
        self.score = score
        self.gamma = gamma
        self.passes = check_count("passes", passes, 0)
        self.max_width = check_width_limit("max_width", max_width)
        self.prior_weight = check_nonnegative("prior_weight", prior_weight)
        self.seed = check_count("seed", seed, 0)
        self.client_widths: dict[str, int] = {}
        self._groups = PermutationGroups(())
        self._stages: list[Stage] = []
        self._client_entries: State = {}
        self._changed = frozenset[str]()  # entries sent to clients that have their model of the last pass
        self._open_pass: MatchingPass | None = None  # the one under way
        self._last_pass: MatchingPass | None = None  # the last complete one
        self._info = RoundInfo(-1)
        self._state: State = {}
        self.received: dict[Client, ClientUpdate] = {}
        self.outputs: list[str] = []
        self._metrics: dict[str, float] = {}

    def prepare(self, groups: PermutationGroups, stages: Sequence[Stage], entries: Mapping[str, Tensor]) -> None:
        """Makes the network known, before the first round of a fit.

        Args:
            groups: Its groups, of a client's widths.
            stages: Its stages.
            entries: Its entries of a client's widths; values do not matter.

        Raises:
            ValueError: If a pass that goes on has other stages.

        """
        current = self._open_pass
        if current is not None:
            matched = {name for stage in stages[: current.stage] for name in stage.entries}
            if current.matched_state.keys() != matched or current.stage >= len(stages):
                raise OptionError(
                    f"Expected the `stages` of the pass that is to go on, of which {current.stage} are matched, but"
                    f" got {len(stages)} others: `stages` and what is frozen, personal or pinned can change after a"
                    " pass only."
                )
        self._groups, self._stages, self.client_widths = groups, list(stages), groups.sizes
        self._client_entries = {name: torch.empty_like(value, device="meta") for name, value in entries.items()}
        self.outputs = find_outputs(groups, stages[-1].entries, entries)

    @property
    def widths(self) -> dict[str, int]:
        """Numbers of neurons of the global model's groups; empty before there is one."""
        return {} if self._last_pass is None else dict(self._last_pass.sizes)

    @property
    def num_classes(self) -> int:
        """Rows of the output layers; 0 where none was found."""
        return len(self._client_entries[self.outputs[0]]) if self.outputs else 0

    @property
    def clients_with_models(self) -> frozenset[Client]:
        """Clients whose own models later rounds may build on: those of the last passes."""
        passes = (self._last_pass, self._open_pass)
        return frozenset().union(*(known.assignments for known in passes if known is not None))

    @property
    def unfinished(self) -> tuple[Stage, MatchingPass] | None:
        """The stage that the round has matched, and the pass, if that goes on."""
        current = self._open_pass
        if current is None or current.round != self._info.round:
            return None
        return self._stages[current.stage - 1], current

    def plan(self, round: int) -> RoundPlan:
        """The clients of the pass that is under way."""
        current = self._pass(round)
        return RoundPlan(current.origin, frozenset(current.assignments)) if current.stage else RoundPlan()

    def start(self, info: RoundInfo, state: State) -> None:
        """Goes on with the pass that is under way, or begins one from ``state``.

        Raises:
            RuntimeError: If the network is not known.

        """
        if not self._stages:
            raise RuntimeError(
                "The network is not known: `LayerwiseTraining` makes it known in a fit, or else `prepare`."
            )
        if self._open_pass is not None and not self._pass(info.round).stage:
            _log.warning(
                "Round %d: nothing came of the round before, so that a new pass begins.", round_number(info.round)
            )
        self._info, self._state, self.received, self._metrics = info, state, {}, {}
        self._changed = frozenset[str]()
        if self._last_pass is not None and not self._pass(info.round).stage:
            known = {name for stage in self._stages[:-1] for name in stage.entries}
            hashes = {name: tensor_hash(value) for name, value in state.items() if name in known}
            self._changed = frozenset(name for name in state if hashes.get(name) != self._last_pass.hashes[name])

    def broadcast(self, request: Request) -> Broadcast:
        """The stage that was matched last, or all of the model to start a pass from.

        Of a wider global model these are the client's neurons, or those that most clients have, if it was not in the
        last pass. If the client has its model of the last pass, they are the entries of the last stage, and those that
        differ from the ones that it was sent (BatchNorm's statistics of the complete model).
        """
        current, last, client = self._pass(self._info.round), self._last_pass, request.client
        if current.stage:
            stage = self._stages[current.stage - 1]
            state = {name: current.matched_state[name] for name in stage.entries}
            return Broadcast(self._info.round, state, current.extras(client, stage))
        extras = {STEP: current.step}
        if last is None:
            state = {} if self.initial == "independent" else dict(self._state)
            return Broadcast(self._info.round, state, extras)
        assignment = last.assignments.get(client) or {
            group.name: torch.argsort(last.owners[group.name], descending=True, stable=True)[: group.size].sort()[0]
            for group in self._groups
        }
        state = self._groups.resized(last.sizes).slice(self._state, assignment)
        step = request.extras.get(STEP)
        if client in last.assignments and step is not None and torch.equal(step.cpu(), last.step_before):
            state = {name: value for name, value in state.items() if name in self._changed}
            extras[REQUIRED_STEP] = last.step_before
        return Broadcast(self._info.round, state, extras)

    def expected(self, broadcast: Broadcast) -> State:
        """The entries of the stage that is matched next, with the client's neurons and the matched inputs."""
        current = self._pass(self._info.round)
        entries = self._resized_entries(current)
        return {name: entries[name] for name in self._stages[current.stage].entries}

    def receive(self, update: ClientUpdate) -> None:
        """Keeps the client's stage.

        Raises:
            BadUpdate: If it has counts of classes that cannot be.

        """
        counts = update.extras.get(COUNTS)
        if counts is not None:
            is_row = counts.dtype == torch.int64 and counts.shape == (self.num_classes,)
            if not is_row or bool((counts < 0).any()):
                raise BadUpdate(
                    f"its class counts are not one whole number of at least 0 for each of {self.num_classes} classes"
                )
        self.received[update.client] = update

    def merge(self, other: FedMA) -> None:
        """Joins the updates of another aggregator of the same kind."""
        self.received |= other.received

    def aggregate(self) -> State | None:
        """Matches and averages a stage; returns the new model if it was the last one."""
        current = self._pass(self._info.round)
        stage = self._stages[current.stage]
        clients = sorted(self.received, key=client_key)
        updates = [self.received[client] for client in clients]
        groups = self._groups.resized(current.sizes)
        stage_groups = tuple(group for group in groups if group.name in stage.groups)
        match = match_states(
            [update.state for update in updates],
            replace(groups, groups=stage_groups),
            np.random.default_rng([self.seed, self._info.round]),
            self.order,
            mode=self.mode,
            weights=[float(update.num_samples) for update in updates],
            max_growth=self.max_width,
            prior_weight=self.prior_weight,
            score=self.score,
            gamma=self.gamma,
            passes=self.passes,
        )
        if current.stage == len(self._stages) - 1:
            match.state.update(self._output_means(updates, stage_groups, match))
        fault = find_non_finite(match.state)
        if fault is not None:
            _log.error("Round %d: the stage is not used: %s.", round_number(self._info.round), fault)
            return None
        dropped = sorted(map(str, current.assignments.keys() - self.received.keys()))
        if dropped:
            words = "Round %d: left out for the rest of the pass: %s."
            _log.warning(words, round_number(self._info.round), ", ".join(dropped))
        current = current.with_stage(self._info.round, clients, match)
        agreement = {name: share for name, share in match.agreement.items() if math.isfinite(share)}
        measured: dict[str, Mapping[str, float]] = {"width": match.groups.sizes, "matched": match.matched}
        for kind, values in {**measured, "agreement": agreement, "seconds": match.seconds}.items():
            self._metrics |= {f"fedma/{name}/{kind}": value for name, value in values.items()}
        self._metrics["fedma/stage"] = current.stage - 1
        if current.stage < len(self._stages):
            self._open_pass = current
            return None
        self._open_pass, self._last_pass = None, current.complete()
        client_numel = sum(value.numel() for value in self._client_entries.values())
        self._metrics["fedma/growth"] = sum(value.numel() for value in current.matched_state.values()) / client_numel
        return {name: current.matched_state[name] for name in self._state}

    def put_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Replaces running statistics of matched entries by measured ones."""
        if self._open_pass is not None:
            self._open_pass = replace(self._open_pass, matched_state={**self._open_pass.matched_state, **statistics})

    def metrics(self) -> dict[str, float]:
        """The stage, and for each of its groups its width, what of its neurons others have and agree on, and the time.

        At the end of a pass also ``fedma/growth``, the global model's numbers over a client's.
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """The pass that is under way, and the last complete one."""
        passes = {
            name: dict(vars(known))
            for name, known in (("current", self._open_pass), ("last", self._last_pass))
            if known
        }
        return {**passes, "client_widths": dict(self.client_widths)} if passes else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both."""
        self._open_pass = MatchingPass(**state["current"]) if "current" in state else None
        self._last_pass = MatchingPass(**state["last"]) if "last" in state else None
        self.client_widths = state.get("client_widths", {})

    def _pass(self, round: int) -> MatchingPass:
        """The pass that a round belongs to; a new one where nothing came of the round before."""
        current = self._open_pass
        return current if current is not None and round <= current.round + 1 else MatchingPass(round, round)

    def _resized_entries(self, current: MatchingPass) -> State:
        """A client's entries in the pass; values do not matter."""
        shapes = {name: list(value.shape) for name, value in self._client_entries.items()}
        for group in self._groups.resized(current.sizes):
            for (name, axis), entry in group.entries.items():
                if name in shapes:
                    shapes[name][axis] = entry.length
        return {name: self._client_entries[name].new_empty(shape) for name, shape in shapes.items()}

    def _output_means(
        self, updates: Sequence[ClientUpdate], groups: Sequence[PermutationGroup], match: StateMatch
    ) -> State:
        """The rows of output layers, averaged by the clients' shares of their classes."""
        if self.last_layer != "class" or not all(COUNTS in update.extras for update in updates):
            return {}
        counts = [update.extras[COUNTS] for update in updates]
        weights = [float(update.num_samples) for update in updates]
        sizes, means = list(match.groups.sizes.values()), {}
        for name in self.outputs:
            layers = [
                grow_neurons({name: update.state[name]}, groups, list(assignment.values()), sizes)[name]
                for update, assignment in zip(updates, match.assignments, strict=True)
            ]
            means[name] = class_mean(layers, counts, weights)
        return means
