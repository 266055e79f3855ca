"""Progress of a pass of FedMA through the layers, and the extras of its messages.

Wang et al., "Federated Learning with Matched Averaging" (FedMA), ICLR 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fed.data.sample_hashes import sample_hashes
from lightning_fed.matching.one_shot import StateMatch
from lightning_fed.matching.stages import Stage
from lightning_fed.messages import Client, State, without_prefix

MEMORY = "fedma:"
"""Prefix of all entries in a client's memory."""
STEP = "fedma:step"
"""The pass (its first round) and the number of its stages that are matched."""
REQUIRED_STEP = "fedma:required_step"
"""The step that the client's own model must have reached."""
COUNTS = "fedma:counts"
"""Examples, or pixels, of every class."""
ASSIGNMENT, WIDTH = "fedma:assignment:", "fedma:width:"
"""Before a group's name: the positions of the client's neurons in it, and its number of neurons."""


@dataclass(frozen=True)
class MatchingPass:
    """Progress of a pass through the layers.

    Attributes:
        origin: Index of the round in which it began.
        round: Index of its last round.
        stage: Number of stages that are matched.
        assignments: For every client that is still in it, the positions of its neurons in the matched groups.
        sizes: Numbers of neurons of the matched groups.
        owners: Number of clients that have each of these neurons.
        matched_state: Values of the matched entries; empty when it is complete.
        hashes: Hashes of these values, when it is complete.

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
        """Its first round and its number of matched stages, int64, shape ``(2,)``."""
        return torch.tensor([self.origin, self.stage])

    @property
    def step_before(self) -> Tensor:
        """The step before the last one, which clients' models reach: they train no more after it."""
        return torch.tensor([self.origin, self.stage - 1])

    def with_stage(self, round: int, clients: Sequence[Client], match: StateMatch) -> MatchingPass:
        """The pass after a round, with another stage matched.

        Args:
            round: Index of the round.
            clients: Those that are still in it.
            match: Their layers merged.

        """
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
        """The pass after its last round: the values are the global model's, and are not kept a second time."""
        hashes = {name: tensor_hash(value) for name, value in self.matched_state.items()}
        return replace(self, matched_state={}, hashes=hashes)

    def extras(self, client: Client, stage: Stage) -> State:
        """Extras of the message with the stage that was matched last."""
        assignment = {ASSIGNMENT + name: self.assignments[client][name] for name in stage.groups}
        widths = {WIDTH + name: torch.tensor(self.sizes[name]) for name in stage.groups}
        return {STEP: self.step, REQUIRED_STEP: self.step_before, **assignment, **widths}


def tensor_hash(value: Tensor) -> int:
    """A number that depends on every bit of a tensor's values."""
    return int(sample_hashes(value.reshape(1, -1)))


def read_widths(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Numbers of neurons by group, from the extras of a message or a client's memory."""
    return {name: int(width) for name, width in without_prefix(values, WIDTH).items()}


def read_assignment(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Positions of the client's neurons by group, from the extras of a message or a client's memory."""
    return without_prefix(values, ASSIGNMENT)
