"""Central differential privacy for clients: an update step, and a callback that enforces the budget.

McMahan, Ramage, Talwar & Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018.
https://arxiv.org/abs/1710.06963
Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.
https://arxiv.org/abs/1905.03871
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.argument_checks import check_inside, check_positive
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.errors import BadUpdate, ClientFault, OptionError
from lightning_fed.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.fit.options import LocalStatistics
from lightning_fed.lightning.internals import is_overridden, loss_scaler
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.model.entries import batch_norm_statistics
from lightning_fed.numerics.precision import to_float64
from lightning_fed.numerics.seeds import client_key
from lightning_fed.privacy.accounting import Accountant, Budget, Sampling, budget_of, plan_budget
from lightning_fed.privacy.noise import NormalStream
from lightning_fed.process_group import process_group_of
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.server.schedule import SecretSampling
from lightning_fed.steps.update_step import Arrived, CollectingStep, Held, UpdateStep

_log = logging.getLogger(__name__)

_LOCAL_TREATMENTS = ("auto", "personal", "frozen")  # BatchNorm options that do not share client statistics

# Budget and rounds of each fit in this process, by clients (number, first and last key) and by secret key.
_FITS: dict[tuple[int, int, int], dict[int, tuple[Budget, int]]] = {}

CLIP = "privacy/clip"
IS_SHORT = "privacy/is_short"


class CentralDP(UpdateStep):
    r"""Central differential privacy: the model reveals little about any single client.

    Clients clip their updates, and the server adds noise to the sum. The server is trusted and sees each client's
    update. Only the models of all rounds and the logged values are protected.

    .. math:: w_{t+1} = w_t + \frac{1}{q N} \left( \sum_i u_i \min\left(1, \frac{C}{\lVert u_i \rVert}\right) +
        \mathcal{N}(0, z_\Delta^2 C^2 I) \right)

    :math:`w_t` is the model in round t, and :math:`u_i` a client's update. Each of the N clients is drawn with
    probability q, and all have equal weight. Without ``adaptive``, :math:`z_\Delta` is the ``noise_multiplier`` z. The
    equations are for ``"poisson"`` sampling.

    With ``adaptive`` the clipping norm C changes until a fraction :math:`\gamma` (``quantile``) of updates is not
    clipped:

    .. math:: C \leftarrow C \exp(-\eta_C (\tilde b - \gamma)), \qquad
        \tilde b = \frac{1}{2} + \frac{1}{q N} \left( \sum_i \left( [\lVert u_i \rVert \le C] - \frac{1}{2} \right) +
        \mathcal{N}(0, \sigma_b^2) \right), \qquad
        z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}

    :math:`\tilde b` is the fraction of unclipped updates plus noise. The bracket is 1 for an unclipped update, else 0.
    The noise's standard deviation :math:`\sigma_b` is the class attribute ``count_noise`` times :math:`q N`. The
    fraction also reveals information, so the sum has more noise: :math:`z_\Delta` is larger than z.

    A small epsilon requires many clients: with all of 12 clients in each of 50 rounds and z = 1, epsilon is 44.4 at
    :math:`\delta = 0.01` (``"rdp"``). The aggregation rule must be ``fedavg``, and clients may only send the model. For
    example, ``fedprox``, ``fedbn`` and server optimizers (``fedadam``) are supported.

    Args:
        clip: Clipping norm C of an update over all shared parameters; with ``adaptive``, the initial norm.
        delta: Probability :math:`\delta` that the privacy loss exceeds epsilon, less than one over the number of
            clients.
        noise_multiplier: Noise multiplier z: the noise's standard deviation divided by C, or by 2 C with ``"fixed"``
            sampling.
        epsilon: Epsilon after all rounds, from which the noise is computed; alternative to ``noise_multiplier``.
        adaptive: Whether to adapt the clipping norm (Andrew et al. 2021).
        max_epsilon: The fit stops before epsilon exceeds this value. By default, ``epsilon``.
        sampling: ``"poisson"`` draws each client independently, so the number of clients varies. ``"fixed"`` draws a
            fixed number of clients, and needs twice the noise.
        accountant: Method for computing epsilon: ``"rdp"`` is fast, ``"pld"`` is tighter and takes seconds.
        quantile: With ``adaptive``: target fraction :math:`\gamma` of unclipped updates.
        clip_rate: With ``adaptive``: learning rate :math:`\eta_C` of the clipping norm.

    Raises:
        ValueError: If an argument is outside its range, the method is not supported, or clients would send values
            without noise. Also if both or neither of ``noise_multiplier`` and ``epsilon`` are given.

    Note:
        Logs ``privacy/epsilon`` (so far), ``privacy/delta``, ``privacy/noise_std`` (per coordinate of the sum), and
        ``privacy/clip``. With ``adaptive``, also logs ``privacy/clipped_share``. Anyone with a checkpoint can remove
        the noise, because checkpoints contain the secret key. The noise is not protected against attacks on the lowest
        bits of floating-point numbers (Mironov 2012).

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedadam", steps=[CentralDP(clip=1.0, delta=1e-4, noise_multiplier=1.0)])
        >>> [type(step).__name__ for step in federation.server.chain.steps]
        ['ServerOptimizer', 'CentralDP']

    Reference: McMahan et al., ICLR 2018, Algorithm 1.
    """

    reveals: Literal["model"] = "model"
    count_noise: float = 0.05

    def __init__(
        self,
        clip: float,
        delta: float,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        adaptive: bool = False,
        max_epsilon: float | None = None,
        sampling: Sampling = "poisson",
        accountant: Accountant = "rdp",
        quantile: float = 0.5,
        clip_rate: float = 0.2,
    ) -> None:
        if (noise_multiplier is None) == (epsilon is None):
            raise ValueError(
                f"Expected one of `noise_multiplier` and `epsilon`, but got noise_multiplier={noise_multiplier} and"
                f" epsilon={epsilon}."
            )
        positive = {"clip": clip, "noise_multiplier": noise_multiplier, "epsilon": epsilon, "max_epsilon": max_epsilon}
        positive["clip_rate"] = clip_rate
        for name, value in positive.items():
            if value is not None:
                check_positive(name, value)
        check_inside("quantile", quantile)
        Budget(noise_multiplier or 1.0, delta, 1, 1, sampling, accountant)  # raises
        self.delta, self.noise_multiplier, self.epsilon = delta, noise_multiplier, epsilon
        self.adaptive, self.max_epsilon = adaptive, epsilon if max_epsilon is None else max_epsilon
        self.sampling, self.accountant = sampling, accountant
        self.quantile, self.clip_rate = quantile, clip_rate
        self.clip = self.first_clip = float(clip)
        self.rounds = 0
        self.budget: Budget | None = None
        self.key: int | None = None
        self._last: dict[str, float] = {}

    def start(self, info: RoundInfo, state: State) -> None:
        super().start(info, state)
        self.names = [name for name, value in state.items() if value.is_floating_point() and name not in info.untrained]
        vectors = [to_float64(state[name]).reshape(-1) for name in self.names]
        self.vector = torch.cat(vectors) if vectors else torch.empty(0)

    def draw_key(self) -> int:
        return secrets.randbits(128)

    def plan(self, population: int, cohort: int, rounds: int | None) -> Budget:
        """Computes the privacy budget for ``rounds`` rounds with ``cohort`` of ``population`` clients."""
        resumed = None if self.budget is None else self.budget.noise_multiplier  # budget of a resumed fit
        return plan_budget(
            self.noise_multiplier if self.noise_multiplier is not None else resumed,
            self.epsilon,
            self.delta,
            population,
            cohort,
            rounds,
            self.sampling,
            self.accountant,
        )

    def begin(self, budget: Budget, key: int) -> None:
        """Sets the budget and the secret noise key before a fit. Refuses another budget in a resumed fit."""
        if self.budget is not None and self.budget != budget:
            raise OptionError(
                f"Expected the privacy budget of the checkpoint or earlier fit, {self.budget}, but got {budget}: keep "
                "the options of `CentralDP`, the clients and `clients_per_round`."
            )
        self.budget, self.key = budget, key
        self.step_noise  # noqa: B018 - raises

    @property
    def sensitivity(self) -> float:
        """Largest change of the sum by one client, divided by ``clip``: 1 for Poisson sampling, 2 for fixed."""
        assert self.budget is not None
        # Poisson sampling adds or removes one client. Fixed sampling replaces one client.
        return 1.0 if self.budget.sampling == "poisson" else 2.0

    @property
    def step_noise(self) -> float:
        """Noise multiplier for the sum; larger with ``adaptive``, because counting unclipped updates costs epsilon."""
        assert self.budget is not None
        z = self.budget.noise_multiplier
        if not self.adaptive:
            return z
        # A client contributes 1/2 or -1/2, so adding or removing a client changes the count by 1/2.
        twice = 2 * self.count_noise * self.budget.cohort / self.sensitivity
        if z >= twice:
            raise OptionError(
                f"Expected a noise multiplier below {twice:g} with adaptive=True, but got {z:g}. The noisy count of "
                "clipped updates would leave no privacy budget for the updates: use a smaller noise multiplier (larger "
                "epsilon), or more clients per round."
            )
        return float((z**-2 - twice**-2) ** -0.5)

    @property
    def cohort(self) -> int:
        """Expected number of clients per round, by which the noised sum is divided."""
        assert self.budget is not None
        return self.budget.cohort

    @property
    def noise_std(self) -> float:
        """Standard deviation of this round's noise, for each coordinate in the sum of updates."""
        return self.step_noise * self.sensitivity * self.clip

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses non-average aggregation rules, a second :class:`CentralDP`, and steps that compare updates."""
        if type(rule) is not FedAvg:
            raise OptionError(
                "Expected an averaging method for differential privacy ('fedavg', 'fedprox', or a server optimizer),"
                f" but got {type(rule).__name__}."
            )
        if sum(isinstance(step, CentralDP) for step in steps) > 1:
            raise OptionError("Expected one `CentralDP`, but got several.")
        comparing = next((step for step in steps if isinstance(step, CollectingStep)), None)
        if comparing is not None:  # outer steps; the chain refuses inner steps
            raise OptionError(
                f"Expected no `{type(comparing).__name__}` with `CentralDP`, because one client could change the "
                "contributions of others, but the noise only covers one client's update: remove the step."
            )

    def callbacks(self) -> Sequence[Any]:
        return [PrivacyBudget(self)]

    def on_send(self, client: Client, broadcast: Broadcast) -> None:
        broadcast.extras[CLIP] = torch.tensor(self.clip, dtype=torch.float64)

    @torch.no_grad()
    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Clips a client's update. Resets untrained entries, and removes metrics and the number of examples."""
        clip = float(sent.extras[CLIP])
        if clip != self.clip and not self.adaptive:
            raise ClientFault(f"the client's federation has clip={self.clip:g}, but the server has clip={clip:g}")
        update.state |= {name: sent.state[name] for name in self.info.untrained if name in update.state}
        length = self.measure(update.state, sent.state)
        factor = clip_factor(length, clip)
        if factor < 1:
            for name, step in self.by_entry(self.vector.mul_(factor)).items():
                old = sent.state[name]
                update.state[name] = step.add_(old.to(step.device)).to(old.dtype, copy=True).to(old.device)
        if self.adaptive:
            update.extras[IS_SHORT] = torch.tensor(float(length <= clip))
        update.num_samples, update.metrics = 1, {}
        return update

    def hold(self) -> PrivateSum:
        return PrivateSum(self)

    def release(self, total: State, short_count: float) -> State:
        """Adds noise to the sum of the clipped updates, and returns the new model.

        ``short_count`` is half the number of unclipped updates minus half the number of clipped updates. With
        ``adaptive``, this number determines the next clipping norm.
        """
        if self.budget is None or self.key is None:
            raise RuntimeError(
                "Expected `begin` before the first round of `CentralDP`, but it was not called: call `begin` first."
            )
        new, std, cohort = dict(self.state), self.noise_std, self.cohort
        for name in self.names:
            old = to_float64(self.state[name])
            noised = self.noise(name, old.shape, std).to(old.device)
            if name in total:
                noised += total[name].to(old.device)
            new[name] = old + noised / cohort
        self.rounds += 1
        self._last = {"privacy/delta": self.budget.delta, "privacy/noise_std": std, "privacy/clip": self.clip}
        if self.adaptive:
            noise = self.noise("", torch.Size([1]), self.count_noise * cohort)
            share = 0.5 + (short_count + float(noise)) / cohort
            self._last["privacy/clipped_share"] = 1 - share
            self.clip *= math.exp(-self.clip_rate * (share - self.quantile))
        return new

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        if self.budget is None or not self._last:
            return {}
        return {"privacy/epsilon": self.budget.epsilon(self.rounds), **self._last}

    def state_dict(self) -> dict[str, Any]:
        return {
            "key": "" if self.key is None else f"{self.key:032x}",
            "budget": {} if self.budget is None else self.budget.state_dict(),
            "rounds": self.rounds,
            "clip": self.clip,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.key = int(state["key"], 16) if state.get("key") else None
        self.budget = budget_of(state["budget"]) if state.get("budget") else None
        self.rounds, self.clip = state.get("rounds", 0), state.get("clip", self.first_clip)

    def noise(self, name: str, shape: torch.Size, std: float) -> Tensor:
        """Draws float64 noise for the entry ``name``, or for the number of unclipped updates if ``name`` is empty."""
        assert self.key is not None
        # A round repeated after a crash has the same noise, because other noise would reveal more about the sum.
        entry = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")
        stream = NormalStream([self.key, self.info.round, entry], shape.numel(), torch.float64)
        return stream.draw(shape).mul_(std)

    def measure(self, new: State, old: State) -> float:
        """Writes ``new - old`` for all clipped parameters to ``self.vector``, float64, and returns the norm."""
        squares = [
            step.copy_(new[name]).sub_(old[name].to(step.device)).square().sum()
            for name, step in self.by_entry(self.vector).items()
        ]
        return math.sqrt(sum(float(square) for square in squares))

    def by_entry(self, vector: Tensor) -> State:
        """Splits a vector of all clipped parameters into one view per parameter, in the parameter's shape."""
        shapes = [self.state[name].shape for name in self.names]
        parts = torch.split(vector, [shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, shapes, strict=True)}


class PrivateSum(Held):
    """Running sum over the clipped updates of a round. Needs memory for one model."""

    def __init__(self, step: CentralDP) -> None:
        super().__init__(step)
        self.vector: Tensor | None = None
        self.longest = step.clip + rounding_of(step.state, step.clip)
        self.short_count = 0.0
        self.members: tuple[Client, ...] = ()

    @torch.no_grad()
    def add(self, update: ClientUpdate, sent: State) -> None:
        """Adds a client's clipped update, or n times the mean update of n clients from a secure sum."""
        step, expected = self._step, {IS_SHORT} if self._step.adaptive else set()
        if update.extras.keys() != expected:
            raise BadUpdate(
                f"the client sends the additional tensors {sorted(update.extras)} instead of {sorted(expected)}: "
                "unexpected tensors would have no noise"
            )
        length = step.measure(update.state, sent)
        if not length <= self.longest:
            raise BadUpdate(f"the client's update has norm {length:g}, above clip={step.clip:g}")
        # Clips again, because rounding can raise the norm. Ignores the weight that the client reports.
        factor = clip_factor(length, step.clip) * len(update.clients)
        self._join(step.vector.mul_(factor))
        if step.adaptive:
            self.short_count += 0.5 if bool((update.extras[IS_SHORT] > 0).all()) else -0.5
        self.members += update.clients

    @property
    def total(self) -> State:
        return {} if self.vector is None else self._step.by_entry(self.vector)

    def merge(self, other: PrivateSum) -> None:
        if other.vector is not None:
            self._join(other.vector)
        self.short_count += other.short_count
        self.members += other.members

    def release(self) -> Sequence[Arrived]:
        """Returns the new, noised model as one update. If no client took part, this is the old model plus noise."""
        state = self._step.release(self.total, self.short_count)
        return [(ClientUpdate("sum", 1, state, members=self.members), self._step.state)]

    def _join(self, vector: Tensor) -> None:
        self.vector = vector.clone() if self.vector is None else self.vector.add_(vector.to(self.vector.device))


class PrivacyBudget(FederatedCallback):
    """Sets the noise of :class:`CentralDP` before the first round, and stops the fit before epsilon exceeds the limit.

    Args:
        step: Update step that adds the noise.
    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, step: CentralDP) -> None:
        self.step = step

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation, step = find_federation(trainer), self.step
        refuse_other_messages(trainer)
        _refuse_other_releases(trainer, pl_module, federation)
        if not federation.has_server:
            return
        population = len(federation.find_population().clients)
        budget = step.plan(population, federation.schedule.cohort_size(population), trainer.max_epochs)
        budget.epsilon(1)  # raises before the first round if the accountant is not installed
        if budget.delta >= 1 / budget.population:
            _log.warning(
                "delta=%g is not below one over the number of clients (%d), so a whole client may be revealed.",
                budget.delta,
                budget.population,
            )
        key = process_group_of(trainer).broadcast(step.draw_key() if step.key is None else step.key)
        step.begin(budget, key)
        federation.schedule.secret = SecretSampling(key, budget.sampling == "poisson")

    def _warn_of_earlier(self, trainer: L.Trainer) -> None:
        if not find_federation(trainer).has_server:
            return
        fits = _FITS.get(_names(trainer), {})
        spent = [f"{budget.epsilon(rounds):.4g}" for key, (budget, rounds) in fits.items() if key != self.step.key]
        if spent:
            _log.warning(
                "Earlier fits in this process on clients with the same names spent epsilon %s. The epsilon of this "
                "fit counts only new rounds, but the total privacy loss is the sum. To continue the count, resume "
                "from a checkpoint.",
                " and ".join(spent),
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._warn_of_earlier(trainer)
        self._stop_in_time(trainer)

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        if self.step.budget is not None and self.step.key is not None:
            _FITS.setdefault(_names(trainer), {})[self.step.key] = self.step.budget, self.step.rounds
        self._stop_in_time(trainer)

    def _stop_in_time(self, trainer: L.Trainer) -> None:
        step = self.step
        if step.max_epsilon is None or not find_federation(trainer).has_server:
            return
        assert step.budget is not None
        following = step.budget.epsilon(step.rounds + 1)
        if following > step.max_epsilon * (1 + 1e-9):
            if trainer.max_epochs is None or step.rounds != trainer.max_epochs:
                _log.warning(
                    "The fit ends after %d rounds, because another round would raise epsilon to %.4g, above "
                    "max_epsilon=%g.",
                    step.rounds,
                    following,
                    step.max_epsilon,
                )
            trainer.should_stop = True


def _names(trainer: L.Trainer) -> tuple[int, int, int]:
    clients = find_federation(trainer).find_population().clients
    return len(clients), client_key(clients[0]), client_key(clients[-1])


def refuse_other_messages(trainer: L.Trainer) -> None:
    """Refuses callbacks that can send anything besides the update, because only the update is protected."""
    for callback in federated_callbacks(trainer):
        for hook in ("on_client_request", "on_client_end"):
            is_harmless = getattr(callback, "keeps_privacy", False) or getattr(callback, "leaves_update", False)
            if not is_harmless and is_overridden(hook, callback, FederatedCallback):
                raise MisconfigurationException(
                    f"Expected clients to send only updates, but `{type(callback).__name__}.{hook}` may send more, "
                    "without protection: remove the callback."
                )


def _refuse_other_releases(trainer: L.Trainer, module: L.LightningModule, federation: Federation) -> None:
    refuse_statistics(module, federation, "without noise")
    if federation.server.min_clients > 1:
        raise MisconfigurationException(
            f"Expected min_clients=1 with differential privacy, but got {federation.server.min_clients}: a skipped "
            "round would reveal absent clients."
        )
    is_manual = not module.automatic_optimization
    if any(is_manual or config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise MisconfigurationException(
            "Expected learning-rate schedulers per epoch (round) and automatic optimization with differential "
            "privacy, but got a scheduler per step or manual optimization: the learning rate would depend on the "
            "clients' step counts, which have no noise."
        )
    if loss_scaler(trainer) is not None:
        raise MisconfigurationException(
            f"Expected precision='bf16-mixed' or '32-true' with differential privacy, but got {trainer.precision!r}, "
            "whose loss scale reveals the clients' gradients without noise."
        )


def refuse_statistics(module: L.LightningModule, federation: Federation, how: str) -> None:
    """Raises an error if clients send BatchNorm statistics to the server. ``how`` completes the error's text."""
    option, statistics = federation.options.batch_norm, sorted(batch_norm_statistics(module))
    is_local = option.unseen != "pooled" if isinstance(option, LocalStatistics) else option in _LOCAL_TREATMENTS
    if statistics and not is_local:
        raise MisconfigurationException(
            f"The clients' BatchNorm statistics ({statistics[0]}, ...) would be sent {how}: to send no statistics, set"
            " batch_norm='personal', 'frozen' or LocalStatistics(). Or replace BatchNorm by GroupNorm"
            " (`lightning_fed.modules.to_group_norm`)."
        )


def step_length(steps: State) -> float:
    """Euclidean norm of an update over all model entries together."""
    return math.sqrt(sum(float(to_float64(step).square().sum()) for step in steps.values()))


def clip_factor(length: float, clip: float) -> float:
    """Factor in (0, 1] that reduces an update with norm ``length`` to at most norm ``clip``."""
    return clip / length if length > clip else 1.0


def rounding_of(state: State, length: float) -> float:
    """Upper bound for the norm of the rounding error when an update with norm ``length`` is added to ``state``."""
    return sum(
        float(torch.finfo(value.dtype).eps * (to_float64(value).square().sum().sqrt() + length))
        for value in state.values()
        if value.is_floating_point()
    )
