"""Attacks by single malicious clients, without knowledge of other clients' updates."""

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
    """Base class of attacks that replace the trained parameters in a malicious client's update."""

    @abstractmethod
    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a malicious client's values for one parameter, from the values after and before training."""

    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        if update.client in self.malicious(self.info.clients):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, sent.round, client_key(update.client)))
            for name in attacked_entries(update.state):
                update.state[name] = self.fake(update.state[name], sent.state[name], generator)
        return update


class SignFlip(UpdateAttack):
    """Malicious clients send the update with the opposite sign.

    The sent model is :math:`w_t - s (w_k - w_t)`, for global model :math:`w_t` and trained model :math:`w_k`.

    Args:
        clients: Malicious clients, or the number to draw.
        scale: Factor :math:`s`.
        seed: Seed for drawing clients.

    Example:
        >>> SignFlip(clients=1).fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(-1.)
    """

    def __init__(self, clients: Sequence[Client] | int, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.scale = check_number("scale", scale)

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        return start - self.scale * (trained - start)


class Scaling(UpdateAttack):
    """Malicious clients multiply the update by a factor.

    The sent model is :math:`w_t + s (w_k - w_t)`, for global model :math:`w_t` and trained model :math:`w_k`. If
    :math:`s` equals the number of averaged clients, the malicious model replaces the global model.

    Args:
        clients: Malicious clients, or the number to draw.
        scale: Factor :math:`s`.
        seed: Seed for drawing clients.

    Example:
        >>> Scaling(clients=1, scale=10).fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(21.)

    Bagdasaryan, Veit, Hua, Estrin & Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020.
    """

    def __init__(self, clients: Sequence[Client] | int, scale: float = 10.0, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.scale = check_number("scale", scale)

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        return start + self.scale * (trained - start)


class GaussianNoise(UpdateAttack):
    r"""Malicious clients send the global model plus Gaussian noise instead of the trained model.

    Args:
        clients: Malicious clients, or the number to draw.
        std: Standard deviation of the noise per coordinate.
        seed: Seed for drawing clients and for the noise.

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
        dtype = start.dtype if start.is_complex() else torch.float32
        noise = torch.randn(start.shape, generator=generator, dtype=dtype)
        return start + (self.std * noise).to(start.dtype).to(start.device)


class FreeRider(UpdateAttack):
    """Malicious clients return the broadcast model unchanged, without training.

    Args:
        clients: Free riders, or the number to draw.
        seed: Seed for drawing clients.

    Example:
        >>> FreeRider(clients=1).fake(torch.tensor(3.0), torch.tensor(1.0), torch.Generator())
        tensor(1.)
    """

    def fake(self, trained: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        return start.clone()


class BadValues(UpdateAttack):
    """Malicious clients send NaN, infinite or huge values.

    Args:
        clients: Malicious clients, or the number to draw.
        kind: ``"nan"``, ``"inf"``, or ``"huge"`` (the largest finite number).
        seed: Seed for drawing clients.

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
        value = {"nan": float("nan"), "inf": float("inf"), "huge": torch.finfo(trained.dtype).max}[self.kind]
        return torch.full_like(trained, value)
