"""Differential privacy for examples: DP-SGD.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar & Zhang, "Deep Learning with Differential Privacy", CCS 2016.
https://arxiv.org/abs/1607.00133
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.argument_checks import (
    check_count,
    check_inside,
    check_nonnegative,
    check_number,
    check_option,
    check_positive,
)
from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.federation import Federation, federation_of
from lightning_fed.callbacks.training_trace import optimized_parameters
from lightning_fed.client.client_store import FolderStore
from lightning_fed.console import round_number
from lightning_fed.errors import ClientFault, OptionError
from lightning_fed.federated_callback import FederatedCallback, RevertingCallback
from lightning_fed.fit.checks import find_loader_owner
from lightning_fed.lightning.internals import OverriddenMethod
from lightning_fed.messages import Broadcast, Client, ClientUpdate, file_name
from lightning_fed.model.entries import tensors_by_path
from lightning_fed.numerics.seeds import client_key
from lightning_fed.privacy.accounting import Accountant, Budget, calibrate
from lightning_fed.privacy.dpsgd_checks import HANDED_LOADER, check_federation, check_trainer
from lightning_fed.privacy.gradients import ExampleGradients, check_examples, clipped_sum
from lightning_fed.privacy.noise import NormalStream
from lightning_fed.privacy.poisson import PoissonSampling, check_poisson_loader, examples_per_batch, poisson_loader
from lightning_fed.process_group import process_group_of
from lightning_fed.server.schedule import Visit, count_visit_batches

_log = logging.getLogger(__name__)

_NOISE = 1


@dataclass
class _Account:
    """One client's numbers for computing epsilon. ``last`` is the number of steps in the last round."""

    num_samples: int
    batch_size: int
    steps: int = 0
    last: int = 1

    @property
    def share(self) -> float:
        return min(1.0, self.batch_size / self.num_samples)

    @property
    def expected(self) -> int:
        return min(self.batch_size, self.num_samples)

    def with_steps(self, steps: int) -> _Account:
        return _Account(self.num_samples, self.batch_size, steps, steps)

    def after(self, other: _Account) -> _Account:
        """Returns this account plus the steps of a later account.

        If batch sizes or numbers of examples differ, epsilon of the result is an upper bound.
        """
        return _Account(
            min(self.num_samples, other.num_samples),
            max(self.batch_size, other.batch_size),
            self.steps + other.steps,
            other.steps,
        )


class DPSGD(RevertingCallback, FederatedCallback):
    r"""Differential privacy for every training example: DP-SGD on the clients, or with a plain Trainer.

    Each step draws each of the client's :math:`n` examples independently with probability :math:`B / n`, where
    :math:`B` is the loader's batch size. The examples' gradients :math:`g_i` are clipped to norm :math:`C`, and noise
    is added to the sum:

    .. math:: \tilde g = \frac{1}{B} \left( \sum_i g_i \min\left(1, \frac{C}{\lVert g_i \rVert}\right) +
        \mathcal{N}(0, z^2 C^2 I) \right)

    The module's optimizer uses :math:`\tilde g` as gradient. In segmentation an example is an image. The loss must be a
    mean over examples. Install the required packages with ``pip install 'lightning-fed[privacy]'``.

    In a federation, epsilon limits how much a client's updates reveal about each example, even to the server. Clients
    may only send values computed from the noised gradients. Methods that send other values are refused. **The number of
    examples is not protected**, nor are values logged in ``training_step``.

    On Flower, each client computes and logs epsilon over all fits. The numbers of steps are kept in the client's
    ``store``. A client reports a failure if the next training would exceed ``max_epsilon``.

    Args:
        max_grad_norm: Clipping norm C of an example's gradient over all trained parameters.
        noise_multiplier: Noise multiplier z: the noise's standard deviation divided by C; 0 for no privacy.
        delta: Probability :math:`\delta` that the privacy loss exceeds epsilon. Choose less than :math:`1 / n`.
        max_epsilon: Limit for epsilon; by default ``epsilon`` if given, else none. The fit stops before epsilon could
            exceed the limit. A client is excluded from a round if the training in this round would exceed the limit.
        accountant: Method for computing epsilon: ``"rdp"`` is fast, ``"pld"`` is tighter and takes seconds.
        key_for_tests: Noise key, only for tests; by default, a secret key is drawn.
        epsilon: Epsilon after all epochs, from which the noise is computed; alternative to ``noise_multiplier``. Not
            supported on Flower: use :func:`calibrate`.

    Raises:
        ValueError: If an argument is outside its range, or both or neither of ``noise_multiplier`` and ``epsilon`` are
            given. Also if ``epsilon`` is given for an unlimited number of epochs.
        MisconfigurationException: In a fit, if a setting does not allow a privacy guarantee, for example BatchNorm,
            manual optimization, accumulated or clipped gradients, a compiled module, or a precision other than
            ``"32-true"``, ``"64-true"`` and ``"bf16-mixed"``.
        ModuleNotFoundError: In a fit, if ``opacus`` or ``dp-accounting`` is not installed.

    Note:
        Logs ``dp/epsilon``, the largest epsilon of all clients so far, and ``dp/delta``.

        Anyone with a checkpoint can remove the noise, because checkpoints contain the secret key.

    Example:
        >>> trainer = L.Trainer(callbacks=[DPSGD(1.0, 1.1, delta=1e-5)], logger=False, enable_checkpointing=False)

    Reference: Abadi et al., CCS 2016, Algorithm 1.
    """

    keeps_privacy = True
    shared_attribute = "_round_accounts"

    def __init__(
        self,
        max_grad_norm: float,
        noise_multiplier: float | None,
        delta: float,
        max_epsilon: float | None = None,
        accountant: Accountant = "rdp",
        key_for_tests: int | None = None,
        epsilon: float | None = None,
    ) -> None:
        if (noise_multiplier is None) == (epsilon is None):
            raise ValueError(
                f"Expected one of `noise_multiplier` and `epsilon`, but got noise_multiplier={noise_multiplier} and"
                f" epsilon={epsilon}."
            )
        if not check_number("max_grad_norm", max_grad_norm) > 0:
            raise ValueError(f"Expected `max_grad_norm` to be greater than 0, but got {max_grad_norm}.")
        if epsilon is not None:
            check_positive("epsilon", epsilon)
            self.needs_local_clients = (
                "the noise for an `epsilon` depends on the numbers of examples, which stay on the clients: pass a "
                "`noise_multiplier` from `lightning_fed.privacy.calibrate`"
            )
            max_epsilon = epsilon if max_epsilon is None else max_epsilon
            noise_multiplier = math.nan  # set in the fit
        else:
            noise_multiplier = check_nonnegative("noise_multiplier", noise_multiplier)
        if noise_multiplier and max_grad_norm == math.inf:
            raise ValueError("Expected `max_grad_norm` to be finite with noise, but got inf.")
        check_inside("delta", delta)
        if max_epsilon is not None and not (noise_multiplier and check_number("max_epsilon", max_epsilon) > 0):
            raise ValueError(
                f"Expected `max_epsilon` and `noise_multiplier` to be greater than 0, but got {max_epsilon} and"
                f" {noise_multiplier}."
            )
        check_option("accountant", accountant, ("rdp", "pld"))
        self.max_grad_norm, self.noise_multiplier, self.delta = max_grad_norm, noise_multiplier, delta
        self.max_epsilon, self.accountant, self.planned_epsilon = max_epsilon, accountant, epsilon
        self.key_for_tests = None if key_for_tests is None else check_count("key_for_tests", key_for_tests, lowest=0)
        self._trainer: L.Trainer | None = None
        self._loader: OverriddenMethod | None = None
        self._has_warned = False
        self._reset()

    def _reset(self) -> None:
        self._key: int | None = None
        self._accounts: dict[Client | None, _Account] = {}
        self._round_accounts: dict[Client | None, _Account] = {}
        self._visit: _Visit | None = None
        self._safe_steps: dict[float, int] = {}  # number of steps within the budget, by sampling probability

    def epsilon(self, client: Client | None = None) -> float:
        """Returns the epsilon spent by ``client`` so far; without a client, the largest epsilon over all clients."""
        if client is not None:
            return self._epsilon(self._accounts[client]) if client in self._accounts else 0.0
        return self._largest_epsilon(self._accounts.values())

    def describe_privacy(self) -> str:
        """Returns the privacy settings as a text. Checkpoints contain the text, to detect changed settings."""
        return f"DPSGD(max_grad_norm={self.max_grad_norm}, delta={self.delta})"

    # The fit

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self._trainer is not trainer or trainer.current_epoch == 0:  # false if the fit continues
            self._reset()
        self._trainer = trainer
        if federation_of(trainer) is None:
            owner = find_loader_owner(trainer, pl_module, HANDED_LOADER)
            self._loader = OverriddenMethod(owner, "train_dataloader", self._poisson_batches)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_trainer(trainer, pl_module, self.max_epsilon is not None)
        federation = federation_of(trainer)
        if self.noise_multiplier and self.planned_epsilon is None:
            self._epsilon(_Account(2, 1, 1))  # raises early if the accountant is not installed
        key = self._key if self._key is not None else self.key_for_tests
        self._key = process_group_of(trainer).broadcast(secrets.randbits(128) if key is None else key)
        if federation is not None:
            check_federation(trainer, federation, self)
            federation.find_population().sampling = PoissonSampling(self._key)
            if self.planned_epsilon is not None and not federation.has_server:
                raise MisconfigurationException(
                    f"`DPSGD` refuses `epsilon` with clients on other machines, because {self.needs_local_clients}."
                )
            self._plan_noise(trainer.max_epochs, lambda: map(_visit_of(federation), federation.population.clients))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if federation_of(trainer) is None:
            (account,) = self._accounts.values()
            steps = trainer.estimated_stepping_batches
            visit = _Account(account.num_samples, account.batch_size)
            self._plan_noise(int(steps) if steps < math.inf else None, lambda: [visit])
        self._stop_in_time(trainer, trainer.current_epoch)
        if federation_of(trainer) is None:
            (account,) = self._accounts.values()
            self._begin(_Visit(None, 0, account), trainer, pl_module)

    def revert(self) -> None:
        self._end()
        if self._loader is not None:
            self._loader.restore()
            self._loader = None

    # A visit

    def on_client_receive(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        visit = self._planned(trainer)
        self._read_account(trainer, client)
        earlier = self._accounts.get(client)
        account = visit.planned if earlier is None else earlier.after(visit.planned)
        if self.max_epsilon is not None and self._epsilon(account) > self.max_epsilon:
            raise ClientFault(
                f"the client's visit of {account.last} steps would raise epsilon from {self.epsilon(client):.4g} to"
                f" {self._epsilon(account):.4g}, above max_epsilon={self.max_epsilon:g}"
            )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self._begin(self._planned(trainer), trainer, module)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        if self._visit is not None:
            self._visit.check_untrained()

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Removes the gradient hooks, and adds this training's steps to the privacy account, also after a failure."""
        visit = self._visit
        if visit is not None and visit.number >= 0:
            self._round_accounts[client] = visit.planned.with_steps(visit.number + 1)
        self._end()
        if self._round_accounts and _account_path(trainer, client) is not None:
            self._read_account(trainer, client)  # a visit in another process may have updated the account
            self._add_round()
            self._write_account(trainer, client)

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        self._add_round()
        federation = federation_of(trainer)
        assert federation is not None
        if not self._accounts:  # remote clients store their accounts themselves
            return
        federation.round_log.put(
            trainer, federation.server.report.round, {"dp/epsilon": self.epsilon(), "dp/delta": self.delta}
        )
        self._stop_in_time(trainer, trainer.current_epoch + 1)

    # A batch

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        visit = self._visit
        if visit is None:
            return
        visit.number = self._accounts[None].steps if visit.client is None else visit.number + 1
        visit.count = len(self._draw(visit, visit.number))
        visit.has_step = False
        visit.gradients.clear()
        if not visit.was_checked and visit.count > 1:
            check_examples(trainer, pl_module, batch, visit.gradients)
            visit.was_checked = True

    @torch.no_grad()
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        visit, federation = self._visit, federation_of(trainer)
        if visit is None:
            return
        if federation is not None and federation.current_visit is not None and federation.current_visit.fault:
            return
        if visit.has_step:
            raise MisconfigurationException(
                "`DPSGD` needs an optimizer with one loss per step, but got a second loss in one batch: the noise "
                "covers only the first loss."
            )
        values = visit.gradients.values
        visit.gradients.clear()
        for name, parameter in visit.trained.items():
            rows = len(values[parameter].norms) if parameter in values else None
            if rows is None and parameter.grad is not None and parameter.requires_grad:
                raise MisconfigurationException(
                    f"The gradient of the parameter {name!r} comes from outside its layer's `forward`, so its "
                    "per-example gradients are unknown: use the parameter only in the layer."
                )
            if rows is not None and rows != max(visit.count, 1):
                raise MisconfigurationException(
                    f"The layer of the parameter {name!r} receives {rows} rows in a batch of {visit.count} examples, "
                    "so its per-example gradients are unknown: use one row per example."
                )
        sums = clipped_sum(values, visit.count, self.max_grad_norm) if visit.count else {}
        noise = self._noise(visit)
        for parameter in visit.trained.values():
            if not parameter.requires_grad:
                continue
            total = sums[parameter] if parameter in sums else torch.zeros_like(parameter)
            if noise is not None:
                scaled = noise.draw(parameter.shape).mul_(self.noise_multiplier * self.max_grad_norm)
                total.add_(scaled.to(parameter))
            parameter.grad = total.div_(visit.planned.expected)
        visit.has_step = True
        if visit.client is None:
            self._accounts[None].steps += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        visit, federation = self._visit, federation_of(trainer)
        if visit is None:
            return
        has_failed = federation is not None and (federation.current_visit is None or federation.current_visit.fault)
        if not visit.has_step and not has_failed:
            raise MisconfigurationException(
                "`training_step` returned no loss for a batch, but a skipped batch would reveal information about "
                "examples: return a loss for every batch."
            )
        if visit.client is None:
            self._stop_in_time(trainer, trainer.current_epoch + trainer.is_last_batch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._visit is not None and self._visit.client is None:
            self._visit.check_untrained()
            pl_module.log_dict({"dp/epsilon": self.epsilon(), "dp/delta": self.delta})

    # State

    @property
    def state_key(self) -> str:
        return "DPSGD"

    def state_dict(self) -> dict[str, Any]:
        return {
            "key": "" if self._key is None else f"{self._key:032x}",
            "noise_multiplier": self.noise_multiplier,
            "accounts": {client: list(astuple(account)) for client, account in self._accounts.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the clients' privacy accounts. Raises ``ValueError`` if the noise of earlier steps was different."""
        saved = state_dict["noise_multiplier"]
        if self.planned_epsilon is not None:
            self.noise_multiplier = saved
        if saved != self.noise_multiplier and state_dict["accounts"]:
            raise OptionError(
                f"Expected noise_multiplier={saved}, as before the checkpoint, but got {self.noise_multiplier}: resume "
                "with the same value."
            )
        self._key = int(state_dict["key"], 16) if state_dict["key"] else None
        self._accounts = {client: _Account(*counts) for client, counts in state_dict["accounts"].items()}

    # Parts

    def _plan_noise(self, times: int | None, visits: Callable[[], Iterable[_Account]]) -> None:
        epsilon = self.planned_epsilon
        if epsilon is None or any(account.steps for account in self._accounts.values()):
            return
        if times is None or times < 1:
            raise OptionError(
                "Expected a number of epochs (`max_rounds`, `max_epochs`) to compute the noise for an epsilon, but "
                f"got {times}: set the number, or pass a `noise_multiplier`."
            )
        self.noise_multiplier = 0.0
        for visit in visits():
            account = visit.with_steps(visit.last * times)
            if account.steps and self._epsilon(account) > epsilon:
                self.noise_multiplier = calibrate(
                    epsilon, self.delta, visit.num_samples, visit.expected, account.steps, "poisson", self.accountant
                ).noise_multiplier
        if not self.noise_multiplier:
            raise OptionError("Expected clients with examples to compute the noise for an epsilon, but got none.")
        _log.info(
            "Noise multiplier %.4g: epsilon is at most %g after %d visits of every client.",
            self.noise_multiplier, epsilon, times,
        )  # fmt: skip

    def _add_round(self) -> None:
        for client, account in self._round_accounts.items():
            earlier = self._accounts.get(client)
            self._accounts[client] = account if earlier is None else earlier.after(account)
        self._round_accounts = {}

    def _read_account(self, trainer: L.Trainer, client: Client) -> None:
        path = _account_path(trainer, client)
        if path is None or not path.exists():
            return
        content = json.loads(path.read_text())
        if content["noise_multiplier"] != self.noise_multiplier:
            raise ClientFault(
                f"the client's earlier steps had noise_multiplier={content['noise_multiplier']} instead of "
                f"{self.noise_multiplier}: use another store for other noise"
            )
        self._accounts[client] = _Account(*content["account"])

    def _write_account(self, trainer: L.Trainer, client: Client) -> None:
        path = _account_path(trainer, client)
        assert path is not None
        account = self._accounts[client]
        content = {"noise_multiplier": self.noise_multiplier, "account": astuple(account)}
        write_text_atomically(path, json.dumps(content))
        _log.info(
            "Round %d: client %r has taken %d steps so far, with epsilon %.4g at delta %g.",
            round_number(trainer.current_epoch), client, account.steps, self.epsilon(client), self.delta,
        )  # fmt: skip

    def _epsilon(self, account: _Account) -> float:
        if not account.steps:
            return 0.0
        if not self.noise_multiplier:
            return math.inf
        cohort = account.expected
        budget = Budget(self.noise_multiplier, self.delta, account.num_samples, cohort, "poisson", self.accountant)
        return budget.epsilon(account.steps)

    def _planned(self, trainer: L.Trainer) -> _Visit:
        federation = federation_of(trainer)
        assert federation is not None
        planned = federation.visit
        client = planned.visit.client
        batch_size = examples_per_batch(federation.population, client)
        steps = planned.num_batches
        return _Visit(client, planned.visit.round, _Account(planned.num_samples, batch_size, steps, steps))

    def _begin(self, visit: _Visit, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._end()
        if self.delta >= 1 / visit.planned.num_samples and not self._has_warned:
            _log.warning(
                "delta=%g is not below one over the number of examples (%d), so an example may be revealed.",
                self.delta,
                visit.planned.num_samples,
            )
            self._has_warned = True
        visit.watch(module, optimized_parameters(trainer))
        self._visit = visit

    def _end(self) -> None:
        if self._visit is not None:
            self._visit.gradients.remove()
            self._visit = None

    def _draw(self, visit: _Visit, number: int) -> np.ndarray:
        assert self._key is not None
        account = visit.planned
        return PoissonSampling(self._key).draw(
            visit.client, visit.round, number, account.num_samples, account.batch_size
        )

    def _noise(self, visit: _Visit) -> NormalStream | None:
        if not self.noise_multiplier:
            return None
        assert self._key is not None
        client = 0 if visit.client is None else client_key(visit.client)
        parameters = visit.trained.values()
        is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
        return NormalStream(
            [self._key, client, visit.round, visit.number, _NOISE],
            sum(parameter.numel() for parameter in parameters),
            torch.float64 if is_double else torch.float32,
        )

    def _poisson_batches(self) -> _DrawnBatches:
        assert self._loader is not None
        loader, batch_size = check_poisson_loader(self._loader.original())
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        account = _Account(num_samples, batch_size)
        earlier = self._accounts.setdefault(None, account)
        if (earlier.num_samples, earlier.batch_size) != (num_samples, batch_size):
            raise OptionError(
                f"Expected {earlier.num_samples} examples in batches of {earlier.batch_size}, as in earlier steps, but"
                f" got {num_samples} in batches of {batch_size}."
            )
        return _DrawnBatches(loader, self)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yields one epoch of Poisson-sampled batches, in a fit without a federation."""
        assert self._key is not None
        account, sampling = self._accounts[None], PoissonSampling(self._key)
        start = account.steps
        drawn = (
            sampling.served(None, 0, start + number, account.num_samples, account.batch_size)
            for number in range(len(loader))
        )
        yield from poisson_loader(loader, drawn, start)

    def _largest_epsilon(self, accounts: Iterable[_Account]) -> float:
        largest: dict[int, _Account] = {}  # largest sampling probability by number of steps
        for account in accounts:
            current = largest.get(account.steps, account)
            largest[account.steps] = max(current, account, key=lambda candidate: candidate.share)
        return max(map(self._epsilon, largest.values()), default=0.0)

    def _stop_in_time(self, trainer: L.Trainer, epochs: int) -> None:
        if self.max_epsilon is None or trainer.should_stop:
            return
        following = [account.after(account.with_steps(account.last)) for account in self._accounts.values()]
        if all(account.steps <= self._safe_steps.get(account.share, 0) for account in following):
            return
        epsilon = self._largest_epsilon(following)
        if epsilon <= self.max_epsilon:
            self._record_safe_steps(following)
            return
        if epochs != trainer.max_epochs and trainer.global_step != trainer.max_steps:
            _log.warning(
                "The fit ends after %d epochs and %d steps, because another visit or step could raise epsilon to "
                "%.4g, above max_epsilon=%g.",
                epochs,
                trainer.global_step,
                epsilon,
                self.max_epsilon,
            )
        trainer.should_stop = True

    def _record_safe_steps(self, accounts: Iterable[_Account]) -> None:
        assert self.max_epsilon is not None
        # caches the number of steps within the budget, to avoid computing epsilon in every step
        for account in accounts:
            for steps in (2 * account.steps, account.steps + account.steps // 16, account.steps):
                if self._epsilon(account.with_steps(steps)) <= self.max_epsilon:
                    self._safe_steps[account.share] = steps
                    break


class _Visit:
    """Counts one client's noised steps in a round, or in a whole fit without a federation.

    ``planned`` contains the planned numbers of examples and steps, for computing epsilon.
    """

    def __init__(self, client: Client | None, round: int, planned: _Account) -> None:
        self.client, self.round, self.planned = client, round, planned
        self.number, self.count = -1, 0
        self.was_checked = self.has_step = False

    def watch(self, module: L.LightningModule, optimized: set[int]) -> None:
        """Records gradients of parameters with ids in ``optimized``. Copies other tensors, to detect changes."""
        self.trained = {
            path: value
            for path, value in tensors_by_path(module).items()
            if isinstance(value, nn.Parameter) and id(value) in optimized
        }
        self.gradients = ExampleGradients(module, self.trained.values())
        self._module = module
        # compared after the training, because other tensors must not change
        self._initial_entries = {name: value.detach().clone() for name, value in self._untrained().items()}

    def check_untrained(self) -> None:
        for name, value in self._untrained().items():
            if name in self._initial_entries and not torch.equal(value, self._initial_entries[name]):
                raise MisconfigurationException(
                    f"The entry {name!r} of the module has changed in training, but not by a noised optimizer step, "
                    "so it may reveal examples: freeze the entry."
                )

    def _untrained(self) -> Mapping[str, Tensor]:
        # Includes non-persistent buffers, because later steps may read values from earlier steps.
        return {path: value for path, value in tensors_by_path(self._module).items() if path not in self.trained}


class _DrawnBatches:
    def __init__(self, loader: Any, callback: DPSGD) -> None:
        self._loader, self._callback = loader, callback

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def state_dict(self) -> dict[str, Any]:
        # Random draws resume from the account. Lightning requires a state for exact resuming.
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._callback.batches(self._loader)


def _visit_of(federation: Federation) -> Callable[[Client], _Account]:
    population, schedule = federation.population, federation.schedule

    def visit(client: Client) -> _Account:
        planned = Visit(client, 0, 0, schedule.local_epochs, schedule.local_steps)
        try:
            steps = count_visit_batches(planned, population.batches_per_epoch(client) or 1)
            return _Account(population.num_samples(client), examples_per_batch(population, client), steps, steps)
        except OptionError:
            raise
        except Exception:  # the visit reports the error
            return _Account(1, 1, 0, 0)

    return visit


def _account_path(trainer: L.Trainer, client: Client) -> Path | None:
    federation = federation_of(trainer)
    if federation is None or federation.has_server:
        return None
    assert isinstance(federation.store, FolderStore)
    return federation.store.folder.parent / "dpsgd" / f"{file_name(client)}.json"
