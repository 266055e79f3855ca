"""The server's rule of central differential privacy: a noised sum of clipped steps over the expected cohort.

McMahan, Ramage, Talwar & Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018.
https://arxiv.org/abs/1710.06963
Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.
https://arxiv.org/abs/1905.03871
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.errors import BadUpdate, OptionError
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.privacy.accounting import Budget, budget_of
from lightning_fed.privacy.ring import RingSum, ring_form
from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.schedule import SecretSampling

CLIP = "privacy/clip"
IS_SHORT = "privacy/is_short"


class PrivateMean(Aggregator):
    r"""The global model and a noised sum of clipped steps over the expected number of clients.

    .. math:: w_{t+1} = w_t + \frac{1}{q N} \left( \sum_i u_i \min\left(1, \frac{C}{\lVert u_i \rVert}\right) +
        \mathcal{N}(0, z_\Delta^2 C^2 I) \right)

    The divisor is the expected number of clients, never that of those who came; all count the same. The clients clip
    their steps, over all floating-point entries that travel; an update that is longer than C by more than rounding is
    left out, and what is longer by rounding is clipped once more. Integer entries keep the server's value.

    With ``adaptive`` the clip follows a quantile :math:`\gamma` of the steps' lengths:

    .. math:: C \leftarrow C \exp(-\eta_C (\tilde b - \gamma)), \qquad
        \tilde b = \frac{1}{2} + \frac{1}{q N} \left( \sum_i \left( [\lVert u_i \rVert \le C] - \frac{1}{2} \right) +
        \mathcal{N}(0, \sigma_b^2) \right), \qquad
        z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}

    The noise is a function of (key, round, entry): a round that is done again, after a crash, has the same noise, for
    with another it would be a second release. :meth:`begin` must be called before the first round.

    Args:
        clip: Length C, the first one with ``adaptive``.
        adaptive: Whether the clip follows the steps' lengths.
        quantile: Share :math:`\gamma` of the steps that the clip is to leave as they are.
        clip_rate: Rate :math:`\eta_C`.
        count_noise: Standard deviation :math:`\sigma_b` of the noise of the count, as a share of the expected number of
            clients.
        callbacks: Callbacks of the rule that this one takes the place of.

    Attributes:
        clip: The clip of the round to come.
        rounds: Number of rounds that were released.
        budget: What a round costs; ``None`` before :meth:`begin`.
        simulating: Expected number of clients in a round, where the budget is that of others, which are simulated, so
            that it bounds nothing; ``None`` where it is their own.
        key: The secret key, 128 bits; ``None`` before :meth:`begin`.
        sums: The secure sum, where there is one: then the clip is that of the clients alone, for the length of a single
            step is not to be known.

    Note:
        Its state, which is part of checkpoints, holds the ``key``: who has a checkpoint can take the noise away.

    """

    is_private = True

    def __init__(
        self,
        clip: float,
        adaptive: bool = False,
        quantile: float = 0.5,
        clip_rate: float = 0.2,
        count_noise: float = 0.05,
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.adaptive, self.quantile, self.clip_rate, self.count_noise = adaptive, quantile, clip_rate, count_noise
        self.callbacks = tuple(callbacks)
        self.clip = float(clip)
        self.rounds = 0
        self.budget: Budget | None = None
        self.simulating: int | None = None
        self.key: int | None = None
        self.sums: RingSum | None = None
        self._last: dict[str, float] = {}
        self.start_round(-1, {})

    def required_callbacks(self) -> Sequence[Any]:
        """The callbacks of the rule whose place it takes."""
        return self.callbacks

    def begin(self, budget: Budget, key: int, simulating: int | None = None) -> None:
        """Starts a fit, or goes on with one.

        Args:
            budget: What a round costs.
            key: The secret key.
            simulating: Expected number of clients in a round, where the budget is that of others.

        Raises:
            ValueError: If the fit that is gone on with has another budget, or the count needs more noise.

        """
        if self.budget is not None and self.budget != budget:
            raise OptionError(f"Expected the budget that the rounds so far had, {self.budget}, but got {budget}.")
        self.budget, self.key = budget, key
        self.simulating = simulating
        self.step_noise  # noqa: B018 - raises

    def sampling(self) -> SecretSampling | None:
        """A draw of clients from the key."""
        if self.budget is None or self.key is None:
            return None
        return SecretSampling(self.key, self.budget.sampling == "poisson")

    @property
    def sensitivity(self) -> float:
        """Most by which one client changes a sum of steps of length 1: 2 where it is another in its place."""
        assert self.budget is not None
        return 1.0 if self.budget.sampling == "poisson" else 2.0

    @property
    def step_noise(self) -> float:
        r"""Noise multiplier :math:`z_\Delta` of the steps: larger than z where the count has a part in the budget.

        Raises:
            ValueError: If z is at least twice the count's noise.

        """
        assert self.budget is not None
        z = self.budget.noise_multiplier
        if not self.adaptive:
            return z
        # A client moves the count by 1/2 or -1/2, so that one that comes or goes changes it by 1/2.
        twice = 2 * self.count_noise * self.budget.cohort / self.sensitivity
        if z >= twice:
            raise OptionError(
                f"Expected a noise multiplier below {twice:g}, twice the noise of the count of an adaptive clip, but"
                f" got {z:g}: take more clients in a round, or a larger `count_noise`."
            )
        return float((z**-2 - twice**-2) ** -0.5)

    @property
    def cohort(self) -> int:
        """Expected number of clients in a round."""
        assert self.budget is not None
        return self.budget.cohort if self.simulating is None else self.simulating

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise of the sum, at every coordinate, in this round.

        The mean of fewer clients than those of the budget has the noise that the mean of all would have.
        """
        assert self.budget is not None
        return self.step_noise * self.sensitivity * self.clip * self.cohort / self.budget.cohort

    def start_round(self, round: int, state: State) -> None:
        """Starts a round from ``state``.

        Raises:
            ValueError: If there are complex entries.

        """
        refuse_complex(state)
        self._round, self._state = round, state
        self.total: State = {}
        self.sums = None if self.sums is None else self.sums.emptied()
        self.short_count = 0.0  # 1/2 for a client whose step was short enough, -1/2 for one whose was not

    def broadcast(self, client: Client) -> Broadcast:
        """The global state, and the clip; with a secure sum its ring."""
        extras = {CLIP: torch.tensor(self.clip, dtype=torch.float64)}
        if self.sums is not None:
            assert self.sums.ring is not None
            extras |= self.sums.ring.extras()
        return Broadcast(self._round, dict(self._state), extras)

    def expected(self, broadcast: Broadcast) -> State:
        """A model; with a secure sum, whole numbers in the place of floating-point entries that train."""
        if self.sums is None:
            return broadcast.state
        return broadcast.state | ring_form({name: broadcast.state[name] for name in self._names})

    @torch.no_grad()
    def receive(self, update: ClientUpdate) -> None:
        """Adds a clipped step to the sum.

        Raises:
            BadUpdate: If it is too long, or sends something that the noise does not cover.

        """
        expected = {IS_SHORT} if self.adaptive else set()
        if update.extras.keys() != expected:
            raise BadUpdate(f"it sends {sorted(update.extras)} along, and not {sorted(expected)}: no noise covers it")
        if self.sums is not None:
            self.sums.add(update.client, {name: update.state[name] for name in self._names})
            return
        steps = {name: to_float64(update.state[name]) - to_float64(self._state[name]) for name in self._names}
        length = step_length(steps)
        if not length <= self.clip + rounding_of(self._state, self.clip):
            raise BadUpdate(f"its step is {length:g} long, longer than the clip of {self.clip:g}")
        factor = clip_factor(length, self.clip)
        for name, step in steps.items():
            step = step * factor
            self.total[name] = self.total[name] + step if name in self.total else step
        if self.adaptive:
            self.short_count += 0.5 if bool((update.extras[IS_SHORT] > 0).all()) else -0.5

    def merge(self, other: Aggregator) -> None:
        """Joins the sums of another rule of this kind.

        Raises:
            TypeError: If ``other`` is of another kind.

        """
        if not isinstance(other, PrivateMean):
            raise TypeError(f"Expected `other` to be a PrivateMean, but got {type(other).__name__}.")
        if self.sums is not None:
            assert other.sums is not None
            self.sums.merge(other.sums)
            return
        for name, total in other.total.items():
            self.total[name] = self.total[name] + total.to(self.total[name].device) if name in self.total else total
        self.short_count += other.short_count

    def leave_out(self) -> dict[Client, str]:
        """All clients of a secure sum that has too few: then there is noise alone, as of a round of nobody."""
        return {} if self.sums is None else self.sums.leave_out()

    @torch.no_grad()
    def aggregate(self) -> State:
        """The noised mean; of nobody it is noise alone.

        Raises:
            RuntimeError: Before :meth:`begin`.

        """
        if self.budget is None or self.key is None:
            raise RuntimeError("A private mean must `begin` before its first round.")
        new = {name: value.clone() for name, value in self._state.items()}
        std, cohort = self.noise_std, self.cohort
        received = self.total if self.sums is None else self.sums.decoded()
        for name in self._names:
            old = to_float64(self._state[name])
            total = self.noise(name, old.shape, std).to(old.device)
            if name in received:
                total += received[name].to(old.device)
            new[name] = cast_back(old + total / cohort, self._state[name])
        self.rounds += 1
        self._last = {
            "privacy/delta": self.budget.delta,
            "privacy/noise_std": std,
            "privacy/clip": self.clip,
        }
        if self.adaptive:
            noise = self.noise("", torch.Size([1]), self.count_noise * cohort)
            share = 0.5 + (self.short_count + float(noise)) / cohort
            self._last["privacy/clipped_share"] = 1 - share
            self.clip *= math.exp(-self.clip_rate * (share - self.quantile))
        return new

    def metrics(self) -> dict[str, float]:
        """The budget so far, and the noise and the clip of the round."""
        if self.budget is None or not self._last:
            return {}
        name = "privacy/epsilon" if self.simulating is None else "privacy/simulated_epsilon"
        return {name: self.budget.epsilon(self.rounds), **self._last}

    def state_dict(self) -> dict[str, Any]:
        """The key, the budget, the number of rounds and the clip."""
        return {
            "key": "" if self.key is None else f"{self.key:032x}",
            "budget": {} if self.budget is None else self.budget.state_dict(),
            "rounds": self.rounds,
            "clip": self.clip,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        self.key = int(state["key"], 16) if state.get("key") else None
        self.budget = budget_of(state["budget"]) if state.get("budget") else None
        self.rounds, self.clip = state.get("rounds", 0), state.get("clip", self.clip)

    @property
    def _names(self) -> list[str]:
        return [name for name, value in self._state.items() if value.is_floating_point() and name not in self.untrained]

    def noise(self, name: str, shape: torch.Size, std: float) -> Tensor:
        """Noise of this round for an entry, float64, a function of (key, round, name).

        Args:
            name: Name of the entry; empty for the count of short steps.
            shape: Shape of the entry.
            std: Standard deviation.

        """
        assert self.key is not None
        entry = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.key, self._round, entry])))
        return torch.from_numpy(np.asarray(std * generator.standard_normal(tuple(shape))))


def refuse_complex(state: State) -> None:
    """Refuses entries of which there is no clipped step.

    Raises:
        ValueError: If there are complex entries.

    """
    if any(value.is_complex() for value in state.values()):
        raise OptionError("Expected a model without complex entries, whose steps are clipped.")


def step_length(steps: State) -> float:
    """Euclidean length of a step, all its entries as one vector."""
    return math.sqrt(sum(float(to_float64(step).square().sum()) for step in steps.values()))


def clip_factor(length: float, clip: float) -> float:
    """Factor that makes a step no longer than ``clip``; 1 for a step of length 0.

    Example:
        >>> clip_factor(4.0, 1.0), clip_factor(0.0, 1.0)
        (0.25, 1.0)

    """
    return clip / length if length > clip else 1.0


def rounding_of(state: State, length: float) -> float:
    """Most by which a step from a state becomes longer when the new model is rounded to the types of its entries."""
    return sum(
        float(torch.finfo(value.dtype).eps * (to_float64(value).square().sum().sqrt() + length))
        for value in state.values()
        if value.is_floating_point()
    )
