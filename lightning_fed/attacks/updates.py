"""Attacks of clients on their own updates: each knows what it was sent and what it has trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_nonnegative, check_number, check_option
from lightning_fed.attacks.attack import AttackStep, attacked_entries
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.numerics.seeds import client_key, derive_seed


class UpdateAttack(AttackStep, ABC):
    """Base class of attacks that replace a client's update, entry by entry, when its visit is over.

    Args:
        clients: The malicious clients, or their number.
        seed: Seed of the clients that are drawn, and of what the attack draws.

    """

    @abstractmethod
    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """The values that a malicious client sends of an entry.

        Args:
            trained: The entry as the client has trained it.
            start: The entry as it was sent to the client.
            generator: Draws for this client in this round, on the CPU.

        """

    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Replaces a malicious client's update."""
        if update.client in self.malicious(self.info.clients):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, sent.round, client_key(update.client)))
            for name in attacked_entries(update.state):
                update.state[name] = self.fake(update.state[name], sent.state[name], generator)
        return update


class SignFlip(UpdateAttack):
    r"""Attack by clients that send their step turned round: :math:`w_t - s (w_k - w_t)`.

    Args:
        clients: The malicious clients, or their number.
        scale: Factor :math:`s`.
        seed: Seed of the clients that are drawn.

    Example:
        >>> SignFlip(clients=1).fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(-1.)

    """

    def __init__(self, clients: Sequence[Client] | int, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.scale = check_number("scale", scale)

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """The model that the step turned round leads to."""
        return start - self.scale * (trained - start)


class Scaling(UpdateAttack):
    r"""Attack by clients that send their step many times over: :math:`w_t + s (w_k - w_t)`.

    Where s is the number of clients in an average, the malicious client's model replaces the global one.

    Args:
        clients: The malicious clients, or their number.
        scale: Factor :math:`s`.
        seed: Seed of the clients that are drawn.

    Example:
        >>> Scaling(clients=1, scale=10).fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(21.)

    References:
        Bagdasaryan, Veit, Hua, Estrin & Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020 ("model
        replacement").

    """

    def __init__(self, clients: Sequence[Client] | int, scale: float = 10.0, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.scale = check_number("scale", scale)

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """The model that the longer step leads to."""
        return start + self.scale * (trained - start)


class GaussianNoise(UpdateAttack):
    r"""Attack by clients whose step is noise: :math:`w_t + \sigma z, z \sim \mathcal{N}(0, I)`.

    Args:
        clients: The malicious clients, or their number.
        std: Standard deviation :math:`\sigma` of every number.
        seed: Seed of the clients that are drawn, and of the noise, which depends on client and round.

    Raises:
        ValueError: If ``std`` is negative.

    Example:
        >>> GaussianNoise(clients=1, std=0.0).fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(1.)

    """

    def __init__(self, clients: Sequence[Client] | int, std: float = 1.0, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.std = check_nonnegative("std", std)

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """The model and the noise."""
        dtype = start.dtype if start.is_complex() else torch.float32
        noise = torch.randn(start.shape, generator=generator, dtype=dtype)
        return start + (self.std * noise).to(start.dtype).to(start.device)


class FreeRider(UpdateAttack):
    """Clients that send back what they got, as if they had trained.

    Args:
        clients: The free riders, or their number.
        seed: Seed of the clients that are drawn.

    Example:
        >>> FreeRider(clients=1).fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(1.)

    """

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """The model as it was."""
        return start.clone()


class BadValues(UpdateAttack):
    """Attack by clients that send numbers that are none, or as large as there are.

    Args:
        clients: The malicious clients, or their number.
        kind: ``"nan"``, ``"inf"``, or ``"huge"``, the largest finite number of the entry's type. NaN and infinite
            values are left out by every rule; huge ones are for robust rules to stand.
        seed: Seed of the clients that are drawn.

    Raises:
        ValueError: If ``kind`` is unknown.

    Example:
        >>> BadValues(clients=1, kind="nan").fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(nan)

    """

    def __init__(
        self, clients: Sequence[Client] | int, kind: Literal["nan", "inf", "huge"] = "huge", seed: int = 0
    ) -> None:
        super().__init__(clients, seed)
        check_option("kind", kind, ("nan", "inf", "huge"))
        self.kind = kind

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """The values, in every place."""
        value = {"nan": float("nan"), "inf": float("inf"), "huge": torch.finfo(trained.dtype).max}[self.kind]
        return torch.full_like(trained, value)
