"""FedMA's layer-wise matching over several rounds: progress, and conversion to tensors for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fed.algorithms.sample_hashes import sample_hashes
from lightning_fed.matching.one_shot import StateMatch
from lightning_fed.matching.stages import Stage
from lightning_fed.messages import Client, State, without_prefix

# Prefix for all entries in the client state.
MEMORY = "fedma:"
# Index of the first round in the pass, and number of matched stages.
STEP = "fedma:step"
# Required STEP in the client's stored model.
REQUIRED_STEP = "fedma:required_step"
# Examples or pixels per class.
COUNTS = "fedma:counts"
# Prefixes for group names: positions of the client's neurons in the group, and the width of the group.
ASSIGNMENT, WIDTH = "fedma:assignment:", "fedma:width:"


@dataclass(frozen=True)
class MatchingPass:
    """Progress of FedMA through the network. Each round matches one set of layers, called a stage.

    Attributes:
        origin: First round.
        round: Latest round.
        stage: Number of stages matched so far.
        assignments: Each client's neuron positions in the global model.
        sizes: Number of global neurons per group; layers in a group share neurons.
        owners: Number of clients with a matching neuron, per global neuron.
        matched_state: Tensors averaged so far.
        hashes: Hashes for the averaged tensors, after the last stage.
    """

    origin: int
    round: int
    stage: int = 0
    assignments: dict[Client, dict[str, Tensor]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    owners: dict[str, Tensor] = field(default_factory=dict)
    matched_state: State = field(default_factory=dict)
    hashes: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> Tensor:
        """Index of the first round, and number of stages (sets of layers) matched since; sent to clients."""
        return torch.tensor([self.origin, self.stage])

    @property
    def step_before(self) -> Tensor:
        """Value of :attr:`step` at the start of round :attr:`round`, received and stored by this round's clients."""
        return torch.tensor([self.origin, self.stage - 1])

    def with_stage(self, round: int, clients: Sequence[Client], match: StateMatch) -> MatchingPass:
        return replace(
            self,
            round=round,
            stage=self.stage + 1,
            assignments={
                client: {**self.assignments.get(client, {}), **assignment}
                for client, assignment in zip(clients, match.assignments, strict=True)
            },
            sizes={**self.sizes, **match.groups.sizes},
            owners={**self.owners, **match.owners},
            matched_state={**self.matched_state, **match.state},
        )

    def complete(self) -> MatchingPass:
        """Replaces the averaged tensors by hashes, so that FedMA can later find changed tensors."""
        hashes = {name: tensor_hash(value) for name, value in self.matched_state.items()}
        return replace(self, matched_state={}, hashes=hashes)

    def extras(self, client: Client, stage: Stage) -> State:
        assignment = {ASSIGNMENT + name: self.assignments[client][name] for name in stage.groups}
        widths = {WIDTH + name: torch.tensor(self.sizes[name]) for name in stage.groups}
        return {STEP: self.step, REQUIRED_STEP: self.step_before, **assignment, **widths}


def tensor_hash(value: Tensor) -> int:
    """Hash over all bits of a tensor, for equality tests without the values."""
    return int(sample_hashes(value.reshape(1, -1)))


def read_widths(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Reads each permutation group's neuron count in the global model from a message or stored tensors."""
    return {name: int(width) for name, width in without_prefix(values, WIDTH).items()}


def read_assignment(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads the positions of a client's neurons in the global model from a message or stored tensors."""
    return without_prefix(values, ASSIGNMENT)
