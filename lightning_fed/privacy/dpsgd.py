"""Differential privacy with an example as its unit: DP-SGD.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar & Zhang, "Deep Learning with Differential Privacy", CCS 2016.
https://arxiv.org/abs/1607.00133
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from lightning_fed.data.poisson import PoissonSampling, check_poisson_loader, poisson_loader
from lightning_fed.errors import ClientFault, OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.fit.synchronisation import process_group_of
from lightning_fed.lightning.internals import OverriddenMethod
from lightning_fed.messages import Broadcast, Client, ClientUpdate, file_name
from lightning_fed.model.entries import tensors_by_path
from lightning_fed.numerics.seeds import client_key
from lightning_fed.privacy.accounting import Accountant, Budget, calibrate
from lightning_fed.privacy.dpsgd_checks import check_federation, check_trainer, loader_owner
from lightning_fed.privacy.gradients import ExampleGradients, check_examples, clipped_sum
from lightning_fed.server.schedule import Visit

_log = logging.getLogger(__name__)

_NOISE = 1


@dataclass
class _Account:
    """Cost of the steps so far in the privacy of a client's examples.

    Args:
        num_samples: Number of its examples.
        batch_size: Expected number of examples in a batch.
        steps: Number of steps so far.
        last: Number of steps of the last visit; 1 without a federation.

    """

    num_samples: int
    batch_size: int
    steps: int = 0
    last: int = 1

    @property
    def share(self) -> float:
        """Probability with which an example is drawn."""
        return min(1.0, self.batch_size / self.num_samples)

    @property
    def expected(self) -> int:
        """Expected number of examples in a batch."""
        return min(self.batch_size, self.num_samples)

    def with_steps(self, steps: int) -> _Account:
        """The cost of one visit of so many steps."""
        return _Account(self.num_samples, self.batch_size, steps, steps)

    def after(self, other: _Account) -> _Account:
        """The account after another visit; where the number of examples has changed the larger share counts for all."""
        return _Account(
            min(self.num_samples, other.num_samples),
            max(self.batch_size, other.batch_size),
            self.steps + other.steps,
            other.steps,
        )


class DPSGD(FederatedCallback):
    r"""Differential privacy of every training example: DP-SGD in the visits of clients, or on a plain Trainer.

    Every step draws each of the client's :math:`n` examples by itself with the probability :math:`q = B / n`, clips
    their gradients to a length and adds noise to the sum:

    .. math:: \tilde g = \frac{1}{B} \left( \sum_i g_i \min\left(1, \frac{C}{\lVert g_i \rVert}\right) +
        \mathcal{N}(0, z^2 C^2 I) \right)

    The module's optimizer steps with :math:`\tilde g`; :math:`B` is the batch size of its loader. In segmentation an
    example is an image. The gradients of single examples come from Opacus' rules for layers (``pip install
    'lightning-fed[privacy]'``), in one backward pass; the module is not changed. The loss must be a mean over the
    examples of a batch: on the first batch of every visit it is tried out with some of them.

    In a federation the unit is an example of one client, and the bound holds for whoever sees that client's updates,
    the server too. Every client has its own account, from its own number of examples and of steps. Clients may send
    only what they make of the noised steps: methods that send something else are refused. **The number of a client's
    examples is not protected**, nor are the values that a module logs in ``training_step``.

    On Flower noise, batches and accounts are the client's: every visit has a key of its own, which is forgotten after
    it, so that one that the server asks for again is another release, and is paid for. The account is a file in the
    client's ``store``, of all its fits: a client that has nothing left of ``max_epsilon`` answers with that. Its
    epsilon is in its own log.

    Args:
        max_grad_norm: Length C of an example's gradient, over all parameters that train.
        noise_multiplier: Noise multiplier z: the standard deviation of the noise over the length. With 0 nothing is
            private. ``None`` to find that of ``epsilon``.
        delta: Probability :math:`\delta` with which the bound need not hold: less than one over a client's number of
            examples.
        max_epsilon: Bound that is kept: the fit ends before a client's next visit could exceed it (without a
            federation: before the step that would), and a client whose first visit would exceed it is left out by
            name.
        accountant: ``"rdp"``, or ``"pld"``, which is tighter and takes seconds.
        key_for_tests: A key that is known, for tests: with it nothing is private. ``None`` for one that
            :mod:`secrets` draws.
        epsilon: In the place of a noise multiplier, the bound after all epochs of the fit: the least noise is taken
            with which no client exceeds it that takes part in every round. Every client is asked for its number of
            examples. It is the ``max_epsilon``, too, unless there is another. Not on Flower, where nobody knows all
            clients' numbers: :func:`calibrate` finds a ``noise_multiplier``.

    Raises:
        ValueError: If an argument is out of its range, or not one of ``noise_multiplier`` and ``epsilon`` is given; in
            a fit, if the number of its epochs is open and the noise is to be found.
        MisconfigurationException: In a fit, for what cannot be private: BatchNorm and other layers that mix examples,
            manual optimization, accumulated or clipped gradients, 16-bit loss scaling, compiled modules, several
            clients at once, optimizers that ask for several losses a step or train what is not the module's, callbacks
            and methods that send more; if a loss is no mean over examples.
        ModuleNotFoundError: In a fit, if ``opacus`` or ``dp-accounting`` is not installed.

    Note:
        Logged are ``dp/epsilon``, the largest of all clients so far, and ``dp/delta``.

        State: ``key``, the secret key of noise and batches; ``noise_multiplier``; ``accounts``, four whole numbers for
        every client that has taken part. Who has a checkpoint can take the noise away. A fit that is resumed has the
        same noise and batches as one that was never interrupted.

    Example:
        >>> trainer = L.Trainer(callbacks=[DPSGD(1.0, 1.1, delta=1e-5)], logger=False, enable_checkpointing=False)

    References:
        Abadi et al., CCS 2016, Algorithm 1.

    """

    keeps_privacy = True

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
                "the noise of an `epsilon` follows from the numbers of examples of all clients, which stay with them;"
                " give it a `noise_multiplier`, which `lightning_fed.privacy.calibrate` finds"
            )
            max_epsilon = epsilon if max_epsilon is None else max_epsilon
            noise_multiplier = math.nan  # until the fit is planned
        else:
            noise_multiplier = check_nonnegative("noise_multiplier", noise_multiplier)
        if noise_multiplier and max_grad_norm == math.inf:
            raise ValueError("Expected `max_grad_norm` to be finite where there is noise, but got inf.")
        check_inside("delta", delta)
        if max_epsilon is not None and not (noise_multiplier and check_number("max_epsilon", max_epsilon) > 0):
            raise ValueError(
                f"Expected `max_epsilon` to be greater than 0, and noise, but got {max_epsilon} with"
                f" noise_multiplier={noise_multiplier}."
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
        self._of_round: dict[Client | None, _Account] = {}
        self._visit: _Visit | None = None
        self._safe_steps: dict[float, int] = {}  # within the budget, by the share of examples in a batch

    def epsilon(self, client: Client | None = None) -> float:
        r"""The bound :math:`\epsilon` of what the fit has taken so far.

        Args:
            client: The client; ``None`` for the largest of all, and without a federation.

        """
        if client is not None:
            return self._epsilon(self._accounts[client]) if client in self._accounts else 0.0
        return self._largest_epsilon(self._accounts.values())

    def describe_privacy(self) -> str:
        """Describes options for a checkpoint; :meth:`load_state_dict` compares the noise multiplier."""
        return f"DPSGD(max_grad_norm={self.max_grad_norm}, delta={self.delta})"

    # The fit

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begins a fit; without a federation draws the batches of the training loader."""
        if stage != "fit":
            return
        if self._trainer is not trainer or trainer.current_epoch == 0:  # else its `max_epochs` was raised
            self._reset()
        self._trainer = trainer
        if federation_of(trainer) is None:
            owner = loader_owner(trainer, pl_module)
            self._loader = OverriddenMethod(owner, "train_dataloader", self._poisson_batches)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses what cannot be private, draws the key, and in a federation finds the noise of an epsilon.

        Raises:
            MisconfigurationException: With what to do instead.
            ValueError: If the number of rounds is open and the noise is to be found.

        """
        check_trainer(trainer, pl_module, self.max_epsilon is not None)
        federation = federation_of(trainer)
        if self.noise_multiplier and self.planned_epsilon is None:
            self._epsilon(_Account(2, 1, 1))  # an accountant that is not installed is missed now
        key = self._key if self._key is not None else self.key_for_tests
        self._key = process_group_of(trainer).broadcast(secrets.randbits(128) if key is None else key)
        if federation is not None:
            check_federation(trainer, federation, self)
            federation.find_population().sampling = PoissonSampling(self._key)
            if self.planned_epsilon is not None and not federation.has_server:
                raise MisconfigurationException(f"`DPSGD` cannot find its noise here: {self.needs_local_clients}.")
            self._plan_noise(trainer.max_epochs, lambda: map(_visit_of(federation), federation.population.clients))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ends a fit that has nothing left of its budget; without a federation begins to look at the gradients."""
        if federation_of(trainer) is None:
            (account,) = self._accounts.values()
            steps = trainer.estimated_stepping_batches
            visit = _Account(account.num_samples, account.batch_size)
            self._plan_noise(int(steps) if steps < math.inf else None, lambda: [visit])
        self._stop_in_time(trainer, trainer.current_epoch)
        if federation_of(trainer) is None:
            (account,) = self._accounts.values()
            self._begin(_Visit(None, 0, account), trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Takes back what the fit has changed."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Takes back what the fit has changed."""
        self._end()
        if self._loader is not None:
            self._loader.restore()
            self._loader = None

    # A visit

    def on_client_receive(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Lets no client take part whose visit would exceed the budget.

        Raises:
            ClientFault: If it would.

        """
        visit = self._planned(trainer)
        self._read_account(trainer, client)
        known = self._accounts.get(client)
        account = visit.of_all if known is None else known.after(visit.of_all)
        if self.max_epsilon is not None and self._epsilon(account) > self.max_epsilon:
            raise ClientFault(
                f"its visit of {account.last} steps would take epsilon from {self.epsilon(client):.4g} to"
                f" {self._epsilon(account):.4g}, more than max_epsilon={self.max_epsilon:g}"
            )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Begins to look at the gradients."""
        self._begin(self._planned(trainer), trainer, module)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Makes sure that nothing else of the model has changed.

        Raises:
            MisconfigurationException: If something has.

        """
        if self._visit is not None:
            self._visit.check_others()

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Takes the hooks off, and notes the visit's steps, also where nothing came of it."""
        visit = self._visit
        if visit is not None and visit.number >= 0:
            self._of_round[client] = visit.of_all.with_steps(visit.number + 1)
        self._end()
        if self._of_round and _account_path(trainer, client) is not None:
            self._read_account(trainer, client)  # a visit in another process may have ended since this one began
            self._enter_round()
            self._write_account(trainer, client)

    def share_round(self, trainer: L.Trainer, module: L.LightningModule) -> Any:
        """The steps of this process's visits."""
        return self._of_round

    def join_round(self, trainer: L.Trainer, module: L.LightningModule, shares: Sequence[Any]) -> None:
        """Takes those of all processes."""
        self._of_round = {client: account for share in shares for client, account in share.items()}

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        """Enters the round's steps into the accounts, logs epsilon, and ends the fit where no budget is left."""
        self._enter_round()
        federation = federation_of(trainer)
        assert federation is not None
        if not self._accounts:  # they are with clients on other machines
            return
        federation.round_log.put(
            trainer, federation.server.report.round, {"dp/epsilon": self.epsilon(), "dp/delta": self.delta}
        )
        self._stop_in_time(trainer, trainer.current_epoch + 1)

    # A batch

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch, and tries the loss out on the first one of several examples.

        Raises:
            MisconfigurationException: If it is no mean over examples.

        """
        visit = self._visit
        if visit is None:
            return
        visit.number = self._accounts[None].steps if visit.client is None else visit.number + 1
        visit.count = len(self._draw(visit, visit.number))
        visit.has_step = False
        if not visit.was_tried and visit.count > 1:
            check_examples(trainer, pl_module, batch, visit.gradients)
            visit.was_tried = True
        visit.gradients.values = {}

    @torch.no_grad()
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replaces the gradients of the mean loss by the noised sum of clipped ones.

        Raises:
            MisconfigurationException: If a parameter's gradients of single examples are not known, or the optimizer
                asks for a second loss.

        """
        visit, federation = self._visit, federation_of(trainer)
        if visit is None:
            return
        if federation is not None and federation.current_visit is not None and federation.current_visit.fault:
            return
        if visit.has_step:
            raise MisconfigurationException(
                "`DPSGD` needs an optimizer that asks for one loss a step, but got a second one in the same batch: the"
                " step's noise is that of the first."
            )
        values, visit.gradients.values = visit.gradients.values, {}
        for name, parameter in visit.trained.items():
            rows = len(values[parameter]) if parameter in values else None
            if rows is None and parameter.grad is not None and parameter.requires_grad:
                raise MisconfigurationException(
                    f"The parameter {name!r} has a gradient that came from outside of the call of its layer: the"
                    " gradients of single examples are not known."
                )
            if rows is not None and rows != max(visit.count, 1):
                raise MisconfigurationException(
                    f"The layer of the parameter {name!r} sees {rows} rows in a batch of {visit.count} examples: the"
                    " gradients of single examples cannot be told apart."
                )
        sums = clipped_sum(values, visit.count, self.max_grad_norm) if visit.count else {}
        noise = self._noise(visit)
        for parameter in visit.trained.values():
            if not parameter.requires_grad:
                continue
            total = sums.get(parameter, torch.zeros_like(parameter))
            if noise is not None:
                drawn = noise.standard_normal(tuple(parameter.shape), dtype=_numpy_type(parameter))
                scaled = self.noise_multiplier * self.max_grad_norm * torch.from_numpy(np.asarray(drawn))
                total = total + scaled.to(parameter)
            parameter.grad = total / visit.of_all.expected
        visit.has_step = True
        if visit.client is None:
            self._accounts[None].steps += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Makes sure that a step was made; without a federation ends the fit where no budget is left.

        Raises:
            MisconfigurationException: If none was.

        """
        visit, federation = self._visit, federation_of(trainer)
        if visit is None:
            return
        has_failed = federation is not None and (federation.current_visit is None or federation.current_visit.fault)
        if not visit.has_step and not has_failed:
            raise MisconfigurationException(
                "`training_step` gave no loss for a batch: which batches it leaves out would tell of their examples."
            )
        if visit.client is None:
            self._stop_in_time(trainer, trainer.current_epoch + trainer.is_last_batch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Without a federation logs epsilon, and makes sure that nothing else of the model has changed.

        Raises:
            MisconfigurationException: If something has.

        """
        if self._visit is not None and self._visit.client is None:
            self._visit.check_others()
            pl_module.log_dict({"dp/epsilon": self.epsilon(), "dp/delta": self.delta})

    # State

    @property
    def state_key(self) -> str:
        """The same whatever the arguments."""
        return "DPSGD"

    def state_dict(self) -> dict[str, Any]:
        """The key, the noise multiplier and the accounts."""
        return {
            "key": "" if self._key is None else f"{self._key:032x}",
            "noise_multiplier": self.noise_multiplier,
            "accounts": {client: list(astuple(account)) for client, account in self._accounts.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from them.

        Raises:
            ValueError: If the steps so far had other noise.

        """
        before = state_dict["noise_multiplier"]
        if self.planned_epsilon is not None:
            self.noise_multiplier = before
        if before != self.noise_multiplier and state_dict["accounts"]:
            raise OptionError(
                f"Expected the `noise_multiplier` of the steps so far, {before}, but got {self.noise_multiplier}."
            )
        self._key = int(state_dict["key"], 16) if state_dict["key"] else None
        self._accounts = {client: _Account(*counts) for client, counts in state_dict["accounts"].items()}

    # Parts

    def _plan_noise(self, times: int | None, visits: Callable[[], Iterable[_Account]]) -> None:
        """Finds the noise of an epsilon, where it is to be found and no steps were made before.

        Args:
            times: How often visits are made; ``None`` or less than 1 where it is open.
            visits: Gives the cost of each client's visit.

        Raises:
            ValueError: If the number of visits is open.

        """
        epsilon = self.planned_epsilon
        if epsilon is None or any(account.steps for account in self._accounts.values()):
            return
        if times is None or times < 1:
            raise OptionError(
                f"Expected a number of epochs (`max_rounds`, `max_epochs`) to find the noise of an epsilon, but got"
                f" {times}: give a `noise_multiplier` instead."
            )
        self.noise_multiplier = 0.0
        for visit in visits():
            account = visit.with_steps(visit.last * times)
            if account.steps and self._epsilon(account) > epsilon:
                self.noise_multiplier = calibrate(
                    epsilon, self.delta, visit.num_samples, visit.expected, account.steps, "poisson", self.accountant
                ).noise_multiplier
        if not self.noise_multiplier:
            raise OptionError("Expected clients with examples to find the noise of an epsilon, but there are none.")
        _log.info(
            "A noise multiplier of %.4g keeps epsilon at %g or below in %d visits of every client.",
            self.noise_multiplier, epsilon, times,
        )  # fmt: skip

    def _enter_round(self) -> None:
        for client, account in self._of_round.items():
            known = self._accounts.get(client)
            self._accounts[client] = account if known is None else known.after(account)
        self._of_round = {}

    def _read_account(self, trainer: L.Trainer, client: Client) -> None:
        """Goes on with a client's account, where it is a file on the client's machine.

        Raises:
            ClientFault: If the steps so far had other noise.

        """
        path = _account_path(trainer, client)
        if path is None or not path.exists():
            return
        known = json.loads(path.read_text())
        if known["noise_multiplier"] != self.noise_multiplier:
            raise ClientFault(
                f"its steps so far were made with noise_multiplier={known['noise_multiplier']}, and not"
                f" {self.noise_multiplier}: another noise needs another store"
            )
        self._accounts[client] = _Account(*known["account"])

    def _write_account(self, trainer: L.Trainer, client: Client) -> None:
        path = _account_path(trainer, client)
        assert path is not None
        account = self._accounts[client]
        content = {"noise_multiplier": self.noise_multiplier, "account": astuple(account)}
        write_text_atomically(path, json.dumps(content))
        _log.info(
            "Round %d: client %r has taken %d steps so far, epsilon %.4g at delta %g.",
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
        batch_size = federation.population.examples_per_batch(client)
        steps = planned.num_batches
        return _Visit(client, planned.visit.round, _Account(planned.num_samples, batch_size, steps, steps))

    def _begin(self, visit: _Visit, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._end()
        if self.delta >= 1 / visit.of_all.num_samples and not self._has_warned:
            _log.warning(
                "delta=%g is not less than one over the number of examples (%d): it allows to give one of them away.",
                self.delta,
                visit.of_all.num_samples,
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
        account = visit.of_all
        return PoissonSampling(self._key).draw(
            visit.client, visit.round, number, account.num_samples, account.batch_size
        )

    def _noise(self, visit: _Visit) -> np.random.Generator | None:
        if not self.noise_multiplier:
            return None
        assert self._key is not None
        client = 0 if visit.client is None else client_key(visit.client)
        return np.random.Generator(np.random.Philox([self._key, client, visit.round, visit.number, _NOISE]))

    def _poisson_batches(self) -> _DrawnBatches:
        """Override of ``train_dataloader``."""
        assert self._loader is not None
        loader = check_poisson_loader(self._loader.original())
        num_samples, batch_size = len(loader.dataset), loader.batch_size  # type: ignore[arg-type]
        assert batch_size is not None
        account = _Account(num_samples, batch_size)
        known = self._accounts.setdefault(None, account)
        if (known.num_samples, known.batch_size) != (num_samples, batch_size):
            raise OptionError(
                f"Expected {known.num_samples} examples in batches of {known.batch_size}, with which the steps so far"
                f" were made, but got {num_samples} in batches of {batch_size}."
            )
        return _DrawnBatches(loader, self)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Batches of an epoch without a federation: they go on from the number of steps so far."""
        assert self._key is not None
        account, sampling = self._accounts[None], PoissonSampling(self._key)
        start = account.steps
        drawn = (
            sampling.served(None, 0, start + number, account.num_samples, account.batch_size)
            for number in range(len(loader))
        )
        yield from poisson_loader(loader, drawn, start)

    def _largest_epsilon(self, accounts: Iterable[_Account]) -> float:
        largest: dict[int, _Account] = {}  # of those with as many steps
        for account in accounts:
            known = largest.get(account.steps, account)
            largest[account.steps] = max(known, account, key=lambda one: one.share)
        return max(map(self._epsilon, largest.values()), default=0.0)

    def _stop_in_time(self, trainer: L.Trainer, epochs: int) -> None:
        if self.max_epsilon is None or trainer.should_stop:
            return
        following = [account.after(account.with_steps(account.last)) for account in self._accounts.values()]
        if all(account.steps <= self._safe_steps.get(account.share, 0) for account in following):
            return
        epsilon = self._largest_epsilon(following)
        if epsilon <= self.max_epsilon:
            self._note_safe_steps(following)
            return
        if epochs != trainer.max_epochs and trainer.global_step != trainer.max_steps:
            _log.warning(
                "The fit ends after %d epochs and %d steps: with one more visit or step epsilon could be %.4g, more"
                " than max_epsilon=%g.",
                epochs,
                trainer.global_step,
                epsilon,
                self.max_epsilon,
            )
        trainer.should_stop = True

    def _note_safe_steps(self, accounts: Iterable[_Account]) -> None:
        """Notes numbers of steps that stay within the budget, so that not every step asks for epsilon."""
        assert self.max_epsilon is not None
        for account in accounts:
            for steps in (2 * account.steps, account.steps + account.steps // 16, account.steps):
                if self._epsilon(account.with_steps(steps)) <= self.max_epsilon:
                    self._safe_steps[account.share] = steps
                    break


class _Visit:
    """The steps of a client, or of a fit without a federation.

    Args:
        client: The client; ``None`` without a federation.
        round: Index of the round.
        of_all: The visit's cost.

    """

    def __init__(self, client: Client | None, round: int, of_all: _Account) -> None:
        self.client, self.round, self.of_all = client, round, of_all
        self.number, self.count = -1, 0
        self.was_tried = self.has_step = False

    def watch(self, module: L.LightningModule, optimized: set[int]) -> None:
        """Begins to look at the gradients, and notes what is not to change."""
        self.trained = {
            path: value
            for path, value in tensors_by_path(module).items()
            if isinstance(value, nn.Parameter) and id(value) in optimized
        }
        self.gradients = ExampleGradients(module, self.trained.values())
        self._module = module
        self._others = {name: value.detach().clone() for name, value in self._untrained().items()}

    def check_others(self) -> None:
        """Refuses entries that have changed beside the noised steps."""
        for name, value in self._untrained().items():
            if name in self._others and not torch.equal(value, self._others[name]):
                raise MisconfigurationException(
                    f"The entry {name!r} of the module has changed in training, and not by the noised steps of an"
                    " optimizer: it tells of examples without noise."
                )

    def _untrained(self) -> Mapping[str, Tensor]:
        # Also buffers that are not saved: what a step writes into them, the next one may train with.
        return {path: value for path, value in tensors_by_path(self._module).items() if path not in self.trained}


class _DrawnBatches:
    """A loader whose batches ``DPSGD`` draws."""

    def __init__(self, loader: Any, callback: DPSGD) -> None:
        self._loader, self._callback = loader, callback

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loader.dataset

    def state_dict(self) -> dict[str, Any]:
        """An empty state: the draws go on from the steps of the account. Lightning takes it for exact resuming."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing, because the state is empty."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._callback.batches(self._loader)


def _visit_of(federation: Federation) -> Callable[[Client], _Account]:
    """Function from a client to the cost of a visit with all of its work."""
    population, schedule = federation.population, federation.schedule

    def visit(client: Client) -> _Account:
        planned = Visit(client, 0, 0, schedule.local_epochs, schedule.local_steps)
        try:
            steps = planned.num_batches(population.batches_per_epoch(client) or 1)
            return _Account(population.num_samples(client), population.examples_per_batch(client), steps, steps)
        except OptionError:
            raise
        except Exception:  # its visits will say why
            return _Account(1, 1, 0, 0)

    return visit


def _account_path(trainer: L.Trainer, client: Client) -> Path | None:
    """File of a client's account on its own machine, of all fits; ``None`` where the server is in this process."""
    federation = federation_of(trainer)
    if federation is None or federation.has_server:
        return None
    assert isinstance(federation.store, FolderStore)
    return federation.store.folder.parent / "dpsgd" / f"{file_name(client)}.json"


def _numpy_type(parameter: Tensor) -> Any:
    return np.float64 if parameter.dtype == torch.float64 else np.float32
