"""FedMA on the server (Algorithm 1): matches neurons before averaging, layer by layer."""

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
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.server.schedule import Cohort, Schedule

_log = logging.getLogger(__name__)


class FedMA(Aggregator):
    r"""Matches the clients' neurons, and averages matched neurons, layer by layer.

    A stage is a set of layers matched in one round, usually one layer. A network with :math:`N` stages takes :math:`N`
    rounds with the same clients, called a pass:

    1. In the first round, clients train the whole model and send the first stage.
    2. The server matches the clients' neurons in this stage, and averages matched neurons.
    3. In the next round, clients receive and freeze the averaged stage. The inputs of the next layers are reordered to
       match. Clients train all other layers, and send the next stage.
    4. In the last round, the server averages the output layers. The result is the new global model.

    Unmatched neurons make the global model wider, but clients start every pass with the original layer widths. Until a
    pass ends, validation uses the previous global model. A client that fails is excluded for the rest of the pass. If
    too few clients remain, a new pass starts. In the paper clients have equal weights, as with the federation's
    ``weighting="uniform"``.

    Stages are found by :func:`~lightning_fed.matching.find_stages`. Layers connected by residual connections share one
    stage. Clients run :class:`~lightning_fed.callbacks.LayerwiseTraining`, added automatically.
    :func:`~lightning_fed.matching.load_matched` loads checkpoints of wider models. Reference: Wang et al., ICLR 2020,
    https://arxiv.org/abs/2002.06440.

    - Sends: one stage of the model per round, both ways; widths may grow.
    - Keeps: the layer widths of each client.
    - Costs: one round per stage, and an assignment problem per layer on the server.
    - For: separately trained clients, whose neurons have different orders.

    Args:
        mode: ``"grow"`` (as in the paper) adds unmatched neurons to the global model, except in layers of fixed width.
            ``"permute"`` matches neurons one to one and preserves widths. ``"none"`` averages without matching.
        stages: Maximum number of stages, or a list with patterns for parameter names per stage; ``"auto"`` for no
            maximum. With 1 all layers are matched in one round.
        last_layer: Weights for averaging output layers. For ``"class"`` clients send their number of examples or
            pixels per class, which reveals label statistics. ``"size"`` uses numbers of examples. Multi-hot labels and
            models without classes require ``"size"``.
        initial: ``"shared"`` if all clients start from the module, or ``"independent"`` (as the authors do) for
            separate random weights. Clients then shuffle the module's weights.
        order: ``"fedma"`` matches first layers first, by incoming weights; ``"pfnm"`` matches last layers first, by
            outgoing weights. See :func:`~lightning_fed.matching.match_states`.
        score: Matching score, ``"marginal"`` or ``"published"``, see :func:`~lightning_fed.matching.match_neurons`.
        gamma: Parameter :math:`\gamma` of the score; larger values add more neurons. By default 7 with the published
            score, or 1 with the marginal score. With the published score, the authors use 7 for convolutional networks,
            and 0.001 (no growth) for an LSTM.
        passes: Maximum number of times to match the neurons of one layer again within a round, to improve the result.
        max_width: Maximum layer width, as a multiple of a client's width; ``None`` for no limit. ``"auto"`` sets 1.25
            with the marginal score, and no limit with the published score.
        prior_weight: Weight of a prior with mean 0, which shrinks the averages; 1 equals the weight of one client.
        seed: Seed for the order in which clients are matched.

    Example:
        >>> rule = FedMA("permute")
        >>> from lightning_fed.method import build_method
        >>> rule.initial, [type(callback).__name__ for callback in build_method(rule).callbacks]
        ('shared', ['LayerwiseTraining'])

    Note:
        Logs ``fedma/stage`` (matched stage, from 0), and after a pass ``fedma/growth`` (the global model's size
        relative to a client's). Logs for each group of neurons: ``fedma/<group>/width``, ``fedma/<group>/matched``
        (share of client neurons matched with another client), ``fedma/<group>/agreement`` (1 if matched neurons are
        equal, about 1/n for n unrelated neurons), and ``fedma/<group>/seconds``.
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
        self._changed = frozenset[str]()  # entries to send to clients that have a model from the last pass
        self._open_pass: MatchingPass | None = None  # current pass
        self._last_pass: MatchingPass | None = None  # last complete pass
        self._info = RoundInfo(-1)
        self._state: State = {}
        self.received: dict[Client, ClientUpdate] = {}
        self.outputs: list[str] = []
        self._metrics: dict[str, float] = {}

    def prepare(self, groups: PermutationGroups, stages: Sequence[Stage], entries: Mapping[str, Tensor]) -> None:
        """Describes the clients' network to this rule, before a fit's first round.

        Each of the ``stages`` is a set of layers matched in one round. ``entries`` has the shapes and dtypes of shared
        tensors. If a checkpoint has k matched stages, changed layers in the first k stages raise ``OptionError``.
        """
        current = self._open_pass
        if current is not None:
            matched = {name for stage in stages[: current.stage] for name in stage.entries}
            if current.matched_state.keys() != matched or current.stage >= len(stages):
                raise OptionError(
                    f"Expected the first {current.stage} of {len(stages)} stages (sets of layers) to equal the "
                    "checkpoint's stages, but the stages differ: until a pass is complete, resume with the same "
                    "`stages`, `frozen`, `personal`, and `pin` (`LayerwiseTraining`)."
                )
        self._groups, self._stages, self.client_widths = groups, list(stages), groups.sizes
        self._client_entries = {name: torch.empty_like(value, device="meta") for name, value in entries.items()}
        self.outputs = find_outputs(groups, stages[-1].entries, entries)

    @property
    def widths(self) -> dict[str, int]:
        """Number of global neurons per permutation group; empty until the first pass is complete."""
        return {} if self._last_pass is None else dict(self._last_pass.sizes)

    @property
    def num_classes(self) -> int:
        """Number of rows in the output layer's weight, or 0 without output layer."""
        return len(self._client_entries[self.outputs[0]]) if self.outputs else 0

    @property
    def clients_with_models(self) -> frozenset[Client]:
        passes = (self._last_pass, self._open_pass)
        return frozenset().union(*(matching_pass.assignments for matching_pass in passes if matching_pass is not None))

    @property
    def unfinished(self) -> tuple[Stage, MatchingPass] | None:
        """Layers matched in this round, and the progress so far; ``None`` after the last layers or a failed round."""
        current = self._open_pass
        if current is None or current.round != self._info.round:
            return None
        return self._stages[current.stage - 1], current

    def draw_cohort(self, round: int, schedule: Schedule, population: Any) -> Cohort:
        current = self._pass(round)
        if not current.stage:
            return schedule.cohort(round, population.clients)
        cohort = schedule.cohort(round, population.clients, current.origin)
        visits = tuple(visit for visit in cohort.visits if visit.client in current.assignments)
        absent = [visit.client for visit in cohort.visits if visit.client not in current.assignments]
        return Cohort(visits, (*cohort.dropped, *absent))

    def start(self, info: RoundInfo, state: State) -> None:
        if not self._stages:
            raise RuntimeError(
                "Expected a call to `FedMA.prepare` before the first round, but got none: fit with `LayerwiseTraining`."
            )
        if self._open_pass is not None and not self._pass(info.round).stage:
            _log.warning(
                "Round %d: the previous round failed, so matching restarts with the first layers.",
                round_number(info.round),
            )
        self._info, self._state, self.received, self._metrics = info, state, {}, {}
        self._changed = frozenset[str]()
        if self._last_pass is not None and not self._pass(info.round).stage:
            matched_names = {name for stage in self._stages[:-1] for name in stage.entries}
            hashes = {name: tensor_hash(value) for name, value in state.items() if name in matched_names}
            self._changed = frozenset(name for name in state if hashes.get(name) != self._last_pass.hashes[name])

    def broadcast(self, request: Request) -> Broadcast:
        """Builds the message to a client.

        The first message in a pass over all layers contains a complete model with the client's layer widths. If the
        global model is wider, the server selects the neurons matched with the client's neurons, or for a new client the
        neurons shared by the most clients. Tensors stored by the client are not sent again. With
        ``initial="independent"``, clients create the first model. Later messages contain the last round's layers.
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
        """Returns empty tensors with the names, shapes and dtypes of a valid update."""
        current = self._pass(self._info.round)
        entries = self._resized_entries(current)
        return {name: entries[name] for name in self._stages[current.stage].entries}

    def receive(self, update: ClientUpdate) -> None:
        counts = update.extras.get(COUNTS)
        if counts is not None:
            is_row = counts.dtype == torch.int64 and counts.shape == (self.num_classes,)
            if not is_row or bool((counts < 0).any()):
                raise BadUpdate(f"the client's class counts are not {self.num_classes} non-negative integers")
        self.received[update.client] = update

    def merge(self, other: FedMA) -> None:
        self.received |= other.received

    def aggregate(self) -> State | None:
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
            _log.error("Round %d: matching failed and restarts next round: %s.", round_number(self._info.round), fault)
            return None
        dropped = sorted(map(str, current.assignments.keys() - self.received.keys()))
        if dropped:
            words = "Round %d: excluded for the rest of the pass: %s."
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
        """Stores BatchNorm statistics, measured on the clients, for the layers matched in this round."""
        if self._open_pass is not None:
            self._open_pass = replace(self._open_pass, matched_state={**self._open_pass.matched_state, **statistics})

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        passes = {
            name: dict(vars(matching_pass))
            for name, matching_pass in (("current", self._open_pass), ("last", self._last_pass))
            if matching_pass
        }
        return {**passes, "client_widths": dict(self.client_widths)} if passes else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._open_pass = MatchingPass(**state["current"]) if "current" in state else None
        self._last_pass = MatchingPass(**state["last"]) if "last" in state else None
        self.client_widths = state.get("client_widths", {})

    def _pass(self, round: int) -> MatchingPass:
        current = self._open_pass
        # A failed round ends the pass.
        return current if current is not None and round <= current.round + 1 else MatchingPass(round, round)

    def _resized_entries(self, current: MatchingPass) -> State:
        shapes = {name: list(value.shape) for name, value in self._client_entries.items()}
        for group in self._groups.resized(current.sizes):
            for (name, axis), entry in group.entries.items():
                if name in shapes:
                    shapes[name][axis] = entry.length
        return {name: self._client_entries[name].new_empty(shape) for name, shape in shapes.items()}

    def _output_means(
        self, updates: Sequence[ClientUpdate], groups: Sequence[PermutationGroup], match: StateMatch
    ) -> State:
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
