"""A pass of FedMA through the layers: how far it has come, and what its messages say.

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
from lightning_fed.messages import Client, State

MEMORY = "fedma:"
"""What everything that clients keep begins with."""
STEP = "fedma:step"
"""The pass (its first round) and the number of its stages that are settled."""
NEEDS = "fedma:needs"
"""The step that the client's own model must have reached."""
COUNTS = "fedma:counts"
"""Examples, or pixels, of every class."""
PLACES, WIDTH = "fedma:places:", "fedma:width:"
"""Before a group's name: the places of the client's neurons in it, and how many neurons it has."""


@dataclass(frozen=True)
class MatchingPass:
    """How far a pass through the layers has come.

    Attributes:
        origin: Index of the round in which it began.
        round: Index of the round in which it came that far.
        stage: Number of stages that are settled.
        places: For every client that is still in it, the places of its neurons in the settled groups.
        sizes: Numbers of neurons of the settled groups.
        owners: Number of clients that have each of these neurons.
        settled: Values of the settled entries; empty when it is complete.
        digests: Hashes of these values, when it is complete.

    """

    origin: int
    round: int
    stage: int = 0
    places: dict[Client, dict[str, Tensor]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    owners: dict[str, Tensor] = field(default_factory=dict)
    settled: State = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> Tensor:
        """What clients are told of it, int64, shape ``(2,)``."""
        return torch.tensor([self.origin, self.stage])

    @property
    def step_before(self) -> Tensor:
        """The step before the last one: as far as clients' models come, which train no more after it."""
        return torch.tensor([self.origin, self.stage - 1])

    def settling(self, round: int, clients: Sequence[Client], match: StateMatch) -> MatchingPass:
        """The pass after a round, with another stage settled.

        Args:
            round: Index of the round.
            clients: Those that are still in it.
            match: Their layers merged.

        """
        return replace(
            self,
            round=round,
            stage=self.stage + 1,
            places={
                client: {**self.places.get(client, {}), **found}
                for client, found in zip(clients, match.assignments, strict=True)
            },
            sizes={**self.sizes, **match.groups.sizes},
            owners={**self.owners, **match.owners},
            settled={**self.settled, **match.state},
        )

    def complete(self) -> MatchingPass:
        """The pass after its last round: the values are the global model's, and are not kept a second time."""
        digests = {name: digest(value) for name, value in self.settled.items()}
        return replace(self, settled={}, digests=digests)

    def extras(self, client: Client, stage: Stage) -> State:
        """What a client is told of the stage that was settled last, beside its values."""
        places = {PLACES + name: self.places[client][name] for name in stage.groups}
        widths = {WIDTH + name: torch.tensor(self.sizes[name]) for name in stage.groups}
        return {STEP: self.step, NEEDS: self.step_before, **places, **widths}


def digest(value: Tensor) -> int:
    """A number that depends on every bit of a tensor's values."""
    return int(sample_hashes(value.reshape(1, -1)))


def widths_in(values: Mapping[str, Tensor]) -> dict[str, int]:
    """The widths that a message, or a client's memory, has."""
    return {name: int(width) for name, width in _named(values, WIDTH).items()}


def places_in(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The places of neurons that a message, or a client's memory, has."""
    return _named(values, PLACES)


def _named(values: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in values.items() if name.startswith(prefix)}
