r"""Federated matched averaging: layer after layer, neurons are matched before they are averaged.

Wang, Yurochkin, Sun, Papailiopoulos & Khazaeni, "Federated Learning with Matched Averaging" (FedMA), ICLR 2020,
Algorithm 1.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_fed.algorithms.fedma.class_mean import class_mean
from lightning_fed.algorithms.fedma.matching_pass import COUNTS, NEEDS, STEP, MatchingPass, digest
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.errors import BadUpdate, OptionError
from lightning_fed.matching.groups import PermutationGroups
from lightning_fed.matching.neuron_matching import MatchScore
from lightning_fed.matching.one_shot import MatchMode, MatchOrder, StateMatch, match_states
from lightning_fed.matching.permutation import PermutationGroup, grow_neurons
from lightning_fed.matching.stages import Stage, StageChoice, check_stages, find_outputs
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.method import register
from lightning_fed.model.entries import find_non_finite
from lightning_fed.server.schedule import client_key
from lightning_fed.server.server import Aggregator, RoundPlan

_log = logging.getLogger(__name__)


@register
class FedMA(Aggregator):
    r"""Matched averaging, layer by layer, with training in between; one exchange is one round.

    A pass through a network of :math:`N` stages has :math:`N` rounds, all with the same clients. In the first they
    train the whole model, and send the first stage only (in a chain: its first layer). The server finds out which of
    the clients' neurons are one neuron, and averages these. In the next round every client receives that stage and the
    places of its own neurons in it, gives the inputs of the following layers that order, keeps what is settled as it is
    and trains the rest; and so on. The output layer is averaged by the clients' shares of every class. After the last
    round there is a new global model: until then the Trainer validates the one before. It is a wider one if clients had
    neurons that others had not. In the next pass clients start from their own neurons of the global model, at the
    widths that they had.

    What belongs to a neuron is found in any network (:class:`~lightning_fed.matching.PermutationGroups`), and so are
    the stages (:func:`~lightning_fed.matching.find_stages`): all blocks whose sums tie their channels are one. The
    module's layers get other widths in place; :func:`~lightning_fed.matching.load_matched` loads a checkpoint of a
    wider model. A client that fails or drops out is left out for the rest of the pass. If too few answer, a new pass
    begins.

    BatchNorm's statistics of a settled stage are measured by the clients (``batch_norm="recalibrate"``), and used as
    they are while later layers train; those of the complete model are measured once more.

    The client's side is a callback, which is added to the Trainer if it has none:
    :class:`~lightning_fed.callbacks.LayerwiseTraining`. Its options can be given here or there.

    Args:
        mode: ``"grow"``, as in the paper: neurons that others do not have are added; ``"permute"``: every neuron has
            one partner in every other client, and widths stay; ``"none"``: layers are averaged as they are, which is
            freezing and training without matching. Groups that cannot grow are permuted with ``"grow"``.
        stages: ``"auto"``; the most that there are to be (1 for all layers in one exchange, without training in
            between); or patterns of entry names for each stage.
        retrain_epochs: Local epochs after the first round of a pass; ``None`` for as many as in that.
        last_epochs: Local epochs before the last stage is averaged; ``None`` for ``retrain_epochs``. The authors have
            three times as many.
        last_layer: Whether output layers are averaged by the clients' shares of every class, for which they send their
            numbers of examples (or pixels) per class, or by their numbers of examples (``"size"``), as are models
            without classes. Class counts say something of the clients' labels. Labels are numbers of classes: several
            classes of one example (multi-hot) go with ``"size"``.
        start: Whether all clients start from the same model (``"shared"``: the module as it is), or each from random
            numbers of its own (``"independent"``), as the authors do, for which nothing is sent.
        order: In what order the groups of one stage are matched, and by what: as in FedMA, or as in PFNM.
        score: Score of a match, see :func:`~lightning_fed.matching.match_neurons`.
        gamma: :math:`\gamma`; the larger, the more neurons are added.
        passes: Most passes over the clients in the matching of a group.
        max_width: Most neurons of a group, as a multiple of those of a client; ``None`` for no limit.
        seed: Seed of the order in which clients are matched.

    Attributes:
        client_widths: Numbers of neurons of a client's groups.
        received: The round's updates.
        outputs: Entries of the output layers.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Note:
        Logged are ``fedma/stage`` (the stage that the round has settled, from 0 on) and, of each of its groups,
        ``fedma/<group>/width``, ``fedma/<group>/matched`` (the share of the clients' neurons that others have too) and
        ``fedma/<group>/seconds``; at the end of a pass also ``fedma/growth``, the global model's numbers over a
        client's.

    Example:
        >>> rule = FedMA("permute", retrain_epochs=5)
        >>> rule.resizes, [type(callback).__name__ for callback in rule.required_callbacks()]
        (True, ['LayerwiseTraining'])

    References:
        Wang et al., ICLR 2020, https://arxiv.org/abs/2002.06440; the scores are in
        :mod:`lightning_fed.matching.neuron_matching`.

    """

    resizes: bool = True

    def __init__(
        self,
        mode: MatchMode = "grow",
        stages: StageChoice = "auto",
        retrain_epochs: int | None = None,
        last_epochs: int | None = None,
        last_layer: Literal["class", "size"] = "class",
        start: Literal["shared", "independent"] = "shared",
        order: MatchOrder = "fedma",
        score: MatchScore = "marginal",
        gamma: float | None = None,
        passes: int = 5,
        max_width: float | None = 1.25,
        seed: int = 0,
    ) -> None:
        check_option("mode", mode, get_args(MatchMode))
        check_option("last_layer", last_layer, ("class", "size"))
        check_option("start", start, ("shared", "independent"))
        check_option("order", order, get_args(MatchOrder))
        check_option("score", score, get_args(MatchScore))
        if gamma is not None and not 0 < gamma < float("inf"):
            raise ValueError(f"Expected `gamma` to be greater than 0 and finite, but got {gamma}.")
        if max_width is not None and not 1 <= max_width < float("inf"):
            raise ValueError(f"Expected `max_width` to be at least 1 and finite, or None, but got {max_width}.")
        self.mode: MatchMode = mode
        self.stages = check_stages(stages)
        self.retrain_epochs = None if retrain_epochs is None else check_count("retrain_epochs", retrain_epochs)
        self.last_epochs = None if last_epochs is None else check_count("last_epochs", last_epochs)
        self.last_layer = last_layer
        self.start = start
        self.order: MatchOrder = order
        self.score: MatchScore = score
        self.gamma = gamma
        self.passes = check_count("passes", passes, 0)
        self.max_width = max_width
        self.seed = check_count("seed", seed, 0)
        self.client_widths: dict[str, int] = {}
        self._groups = PermutationGroups(())
        self._stages: list[Stage] = []
        self._form: State = {}
        self._new = frozenset[str]()  # what is sent to clients that have their model of the last pass
        self._current: MatchingPass | None = None  # the one under way
        self._last: MatchingPass | None = None  # the last complete one
        self._round = -1
        self._state: State = {}
        self.received: dict[Client, ClientUpdate] = {}
        self.outputs: list[str] = []
        self._metrics: dict[str, float] = {}

    def prepare(self, groups: PermutationGroups, stages: Sequence[Stage], form: Mapping[str, Tensor]) -> None:
        """Makes the network known, before the first round of a fit.

        Args:
            groups: Its groups, of a client's widths.
            stages: Its stages.
            form: Its entries of a client's widths; values do not matter.

        Raises:
            ValueError: If a pass that goes on has other stages.

        """
        current = self._current
        if current is not None:
            begun = {name for stage in stages[: current.stage] for name in stage.entries}
            if current.settled.keys() != begun or current.stage >= len(stages):
                raise OptionError(
                    f"Expected the `stages` of the pass that is to go on, of which {current.stage} are settled, but"
                    f" got {len(stages)} others: `stages` and what is frozen, personal or pinned can change after a"
                    " pass only."
                )
        self._groups, self._stages, self.client_widths = groups, list(stages), groups.sizes
        self._form = {name: torch.empty_like(value, device="meta") for name, value in form.items()}
        self.outputs = find_outputs(groups, stages[-1].entries, form)

    @property
    def widths(self) -> dict[str, int]:
        """Numbers of neurons of the global model's groups; empty before there is one."""
        return {} if self._last is None else dict(self._last.sizes)

    @property
    def num_classes(self) -> int:
        """Rows of the output layers; 0 where none was found."""
        return len(self._form[self.outputs[0]]) if self.outputs else 0

    @property
    def holders(self) -> frozenset[Client]:
        """Clients whose own models later rounds may build on: those of the last passes."""
        return frozenset().union(*(own.places for own in (self._last, self._current) if own is not None))

    @property
    def unfinished(self) -> tuple[Stage, MatchingPass] | None:
        """The stage that the round has settled, and the pass, if that goes on."""
        current = self._current
        if current is None or current.round != self._round:
            return None
        return self._stages[current.stage - 1], current

    def plan(self, round: int) -> RoundPlan:
        """The clients of the pass that is under way, and their epochs."""
        current = self._pass(round)
        if not current.stage:
            return RoundPlan()
        epochs = self.retrain_epochs
        if current.stage == len(self._stages) - 1 and self.last_epochs is not None:
            epochs = self.last_epochs
        return RoundPlan(current.origin, epochs, frozenset(current.places))

    def start_round(self, round: int, state: State) -> None:
        """Goes on with the pass that is under way, or begins one from ``state``.

        Raises:
            RuntimeError: If the network is not known.

        """
        if not self._stages:
            raise RuntimeError("The network is not known: `LayerwiseTraining` says it in a fit, or else `prepare`.")
        if self._current is not None and not self._pass(round).stage:
            _log.warning("Round %d: nothing came of the round before, so that a new pass begins.", round)
        self._round, self._state, self.received, self._metrics = round, state, {}, {}
        self._new = frozenset[str]()
        if self._last is not None and not self._pass(round).stage:
            known = {name for stage in self._stages[:-1] for name in stage.entries}
            digests = {name: digest(value) for name, value in state.items() if name in known}
            self._new = frozenset(name for name in state if digests.get(name) != self._last.digests[name])

    def broadcast(self, client: Client) -> Broadcast:
        """The stage that was settled last, or all of the model to start a pass from.

        Of a wider global model that is the client's own neurons, or those that most clients have, if it was not in the
        last pass.
        """
        current, last = self._pass(self._round), self._last
        if current.stage:
            stage = self._stages[current.stage - 1]
            state = {name: current.settled[name] for name in stage.entries}
            return Broadcast(self._round, state, current.extras(client, stage))
        if last is None:
            state = {} if self.start == "independent" else dict(self._state)
        else:
            own = last.places.get(client) or {
                group.name: torch.argsort(last.owners[group.name], descending=True, stable=True)[: group.size].sort()[0]
                for group in self._groups
            }
            state = self._groups.resized(last.sizes).slice(self._state, own)
        return Broadcast(self._round, state, {STEP: current.step})

    def respond(self, request: Request) -> Broadcast:
        """What the client does not have yet.

        Where it has its model of the last pass, that is what came after its last exchange (the last stage), and what
        differs from what it was sent (BatchNorm's statistics of the complete model).
        """
        last, has = self._last, request.extras.get(STEP)
        message = self.broadcast(request.client)
        if self._pass(self._round).stage or last is None or request.client not in last.places or has is None:
            return message
        if not torch.equal(has.cpu(), last.step_before):
            return message
        state = {name: value for name, value in message.state.items() if name in self._new}
        return Broadcast(self._round, state, {**message.extras, NEEDS: last.step_before})

    def expected(self, broadcast: Broadcast) -> State:
        """The entries of the stage that is to be settled, with the client's neurons and the settled inputs."""
        current = self._pass(self._round)
        form = self._grown(current)
        return {name: form[name] for name in self._stages[current.stage].entries}

    def receive(self, update: ClientUpdate) -> None:
        """Keeps the client's stage.

        Raises:
            BadUpdate: If it has counts of classes that cannot be.

        """
        counts = update.extras.get(COUNTS)
        if counts is not None:
            is_right = counts.dtype == torch.int64 and counts.shape == (self.num_classes,)
            if not is_right or bool((counts < 0).any()):
                raise BadUpdate(
                    f"its class counts are not one whole number of at least 0 for each of {self.num_classes} classes"
                )
        self.received[update.client] = update

    def merge(self, other: Aggregator) -> None:
        """Joins the updates of another aggregator of the same kind.

        Raises:
            TypeError: If ``other`` is of another kind.

        """
        if not isinstance(other, FedMA):
            raise TypeError(f"Expected `other` to be a FedMA, but got {type(other).__name__}.")
        self.received |= other.received

    def aggregate(self) -> State:
        """Settles a stage; the new model if it was the last one."""
        current = self._pass(self._round)
        stage = self._stages[current.stage]
        clients = sorted(self.received, key=client_key)
        updates = [self.received[client] for client in clients]
        groups = self._groups.resized(current.sizes)
        own = tuple(group for group in groups if group.name in stage.groups)
        match = match_states(
            [update.state for update in updates],
            replace(groups, groups=own),
            np.random.default_rng([self.seed, self._round]),
            self.order,
            mode=self.mode,
            weights=[float(update.num_samples) for update in updates],
            max_growth=self.max_width,
            score=self.score,
            gamma=self.gamma,
            passes=self.passes,
        )
        if current.stage == len(self._stages) - 1:
            match.state.update(self._output_means(updates, own, match))
        fault = find_non_finite(match.state)
        if fault is not None:
            _log.error("Round %d: the stage is not used: %s.", self._round, fault)
            return self._state
        lost = sorted(map(str, current.places.keys() - self.received.keys()))
        if lost:
            _log.warning("Round %d: left out for the rest of the pass: %s.", self._round, ", ".join(lost))
        done = current.settling(self._round, clients, match)
        for kind, values in (("width", match.groups.sizes), ("matched", match.matched), ("seconds", match.seconds)):
            self._metrics |= {f"fedma/{name}/{kind}": value for name, value in values.items()}
        self._metrics["fedma/stage"] = current.stage
        if done.stage < len(self._stages):
            self._current = done
            return self._state
        self._current, self._last = None, done.complete()
        of_client = sum(value.numel() for value in self._form.values())
        self._metrics["fedma/growth"] = sum(value.numel() for value in done.settled.values()) / of_client
        return {name: done.settled[name] for name in self._state}

    def put_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Replaces running statistics of settled entries by measured ones."""
        if self._current is not None:
            self._current = replace(self._current, settled={**self._current.settled, **statistics})

    def metrics(self) -> dict[str, float]:
        """The stage, and for each of its groups its width, the share of neurons that others have too, and the time.

        At the end of a pass also ``fedma/growth``, the global model's numbers over a client's.
        """
        return dict(self._metrics)

    def required_callbacks(self) -> Sequence[Any]:
        """The client's side."""
        from lightning_fed.algorithms.fedma.callback import LayerwiseTraining  # a room above this one

        return [LayerwiseTraining()]

    def state_dict(self) -> dict[str, Any]:
        """The pass that is under way, and the last complete one."""
        passes = {name: dict(vars(own)) for name, own in (("current", self._current), ("last", self._last)) if own}
        return {**passes, "client_widths": dict(self.client_widths)} if passes else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both."""
        self._current = MatchingPass(**state["current"]) if "current" in state else None
        self._last = MatchingPass(**state["last"]) if "last" in state else None
        self.client_widths = state.get("client_widths", {})

    def _pass(self, round: int) -> MatchingPass:
        """The pass that a round belongs to; a new one where nothing came of the round before."""
        current = self._current
        return current if current is not None and round <= current.round + 1 else MatchingPass(round, round)

    def _grown(self, current: MatchingPass) -> State:
        """A client's entries in the pass; values do not matter."""
        shapes = {name: list(value.shape) for name, value in self._form.items()}
        for group in self._groups.resized(current.sizes):
            for (name, axis), entry in group.entries.items():
                if name in shapes:
                    shapes[name][axis] = entry.length
        return {name: self._form[name].new_empty(shape) for name, shape in shapes.items()}

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
                grow_neurons({name: update.state[name]}, groups, list(found.values()), sizes)[name]
                for update, found in zip(updates, match.places, strict=True)
            ]
            means[name] = class_mean(layers, counts, weights)
        return means
