"""A step of an optimizer on the server, with the round's mean change as its gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar & McMahan, "Adaptive Federated Optimization", ICLR 2021, Algorithm
1. https://arxiv.org/abs/2003.00295
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.functional.wide import narrow, widen
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.server import Aggregator
from lightning_fed.state import is_running_statistic


class ServerOptimizer(Aggregator):
    r"""Any averaging rule, followed by a step of any optimizer of ``torch.optim``.

    The optimizer steps from the global model :math:`w_t`, with what the mean :math:`\bar w` of the clients is short of
    it as the gradient:

    .. math:: g_t = w_t - \bar w, \qquad w_{t+1} = \mathrm{step}(w_t, g_t)

    SGD with ``lr=1`` is the averaging rule itself, bit for bit. :class:`FedAvgM`, :class:`FedAdagrad`,
    :class:`FedAdam` and :class:`FedYogi` are ready-made, with their papers' definitions.

    Floating-point entries take the step, in float64. Integer entries and running statistics of BatchNorm are what the
    averaging rule makes of them: a step beyond the clients would give negative variances.

    Args:
        optimizer: Class of the optimizer, or its name in ``torch.optim``. It must step by gradients alone, which
            ``LBFGS`` does not.
        aggregator: The averaging rule, by name or as an object.
        lazy_rows: Of entries of which the clients hold some rows only, whether the rows that nobody held in a round are
            left alone, and what the optimizer remembers of them too. Otherwise they have a gradient of zero, and
            momentum still moves them.
        **optimizer_kwargs: Arguments of the optimizer. Its default for ``lr`` is one for local training.

    Attributes:
        inner: The averaging rule.

    Raises:
        ValueError: If the optimizer is not known or refuses its arguments, or the averaging rule keeps several models.

    Note:
        Its state, which is part of checkpoints, is what the optimizer remembers of every entry: with momentum 8 bytes
        per parameter, with adaptive moments 16.

    Example:
        >>> rule = ServerOptimizer("SGD", lr=0.5, momentum=0.9)
        >>> rule.start_round(0, {"w": torch.tensor(1.0)})
        >>> rule.receive(ClientUpdate("a", 1, {"w": torch.tensor(3.0)}))
        >>> rule.aggregate()
        {'w': tensor(2.)}

    References:
        Reddi et al., ICLR 2021, Algorithm 1 ("FedOpt").

    """

    def __init__(
        self,
        optimizer: type[Optimizer] | str,
        aggregator: str | Aggregator = "fedavg",
        lazy_rows: bool = False,
        **optimizer_kwargs: Any,
    ) -> None:
        from lightning_fed.aggregators.registry import build_aggregator  # which knows the rules of this file

        self.optimizer = _find_optimizer(optimizer)
        self.optimizer_kwargs = optimizer_kwargs
        self.lazy_rows = lazy_rows
        self.inner = build_aggregator(aggregator)
        if type(self.inner).model_of is not Aggregator.model_of:
            raise ValueError(
                f"Expected `aggregator` to make one global model, but {type(self.inner).__name__} keeps several."
            )
        self.takes_rows = self.inner.takes_rows  # of the class elsewhere, here of the object
        self._memory: dict[str, dict[str, Any]] = {}
        self._try_step()
        self.start_round(-1, {})

    def required_callbacks(self) -> Sequence[Any]:
        """Those of the averaging rule."""
        return self.inner.required_callbacks()

    def start_round(self, round: int, state: State) -> None:
        """Starts a round from ``state``."""
        self._state = state
        self.held: dict[str, Tensor] = {}  # of entries that came in rows: whether a client held the row
        self.whole: set[str] = set()  # entries that came as a whole
        self.inner.start_round(round, state)

    def broadcast(self, client: Client) -> Broadcast:
        """What the averaging rule sends."""
        return self.inner.broadcast(client)

    def receive(self, update: ClientUpdate) -> None:
        """Hands the update to the averaging rule."""
        if self.lazy_rows:
            self.whole.update(update.state.keys() - update.rows.keys())
            for name, rows in update.rows.items():
                held = self.held.setdefault(name, torch.zeros(len(self._state[name]), dtype=torch.bool))
                held[rows.to(held.device)] = True
        self.inner.receive(update)

    def merge(self, other: Aggregator) -> None:
        """Joins what another server optimizer's averaging rule has received.

        Raises:
            TypeError: If ``other`` is of another kind.

        """
        if not isinstance(other, ServerOptimizer):
            raise TypeError(f"Expected `other` to be a ServerOptimizer, but got {type(other).__name__}.")
        self.whole |= other.whole
        for name, held in other.held.items():
            self.held[name] = self.held.get(name, held) | held
        self.inner.merge(other.inner)

    def aggregate(self) -> State:
        """The averaging rule's result, and the step."""
        new = dict(self.inner.aggregate())
        memory: dict[str, dict[str, Any]] = {}
        for name, old in self._state.items():
            if old.is_floating_point() and not is_running_statistic(name):
                held = None if name in self.whole else self.held.get(name)
                new[name], memory[name] = self._step(old, new[name], self._memory.get(name, {}), held)
        self._memory = {name: value for name, value in memory.items() if value}
        return new

    def metrics(self) -> dict[str, float]:
        """Those of the averaging rule."""
        return self.inner.metrics()

    def state_dict(self) -> dict[str, Any]:
        """See the class's note; with the name of the optimizer, and the averaging rule's own state."""
        return {"optimizer": self.optimizer.__name__, "entries": self._memory, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it; an empty state is that of a rule without an optimizer.

        Raises:
            ValueError: If it is of another optimizer.

        """
        theirs, ours = state.get("optimizer", self.optimizer.__name__), self.optimizer.__name__
        if theirs != ours:
            raise ValueError(f"Expected a state of the server's optimizer {ours}, but it is of {theirs}.")
        self._memory = dict(state.get("entries", {}))
        self.inner.load_state_dict(state.get("inner", {}))

    @torch.no_grad()
    def _step(
        self, old: Tensor, mean: Tensor, memory: dict[str, Any], held: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """New value of one entry, and what the optimizer remembers of it then; ``memory`` is left as it is."""
        start = widen(old)
        gradient = start - widen(mean)
        parameter = start.clone().requires_grad_()
        parameter.grad = gradient.clone()
        optimizer = self.optimizer([parameter], **self.optimizer_kwargs)
        before = optimizer.state_dict()
        if memory:
            before["state"] = {0: memory}
        optimizer.load_state_dict(copy.deepcopy(before))
        optimizer.step()
        # From the mean on: where the step is that of averaging, what follows it is zero, whatever was rounded.
        new = narrow(widen(mean) + (parameter.detach() - start + gradient), old)
        after = optimizer.state_dict()["state"].get(0, {})
        if held is None:
            return new, after
        memory = before["state"].get(0, {})
        return _keep(held, new, old), {name: _keep(held, value, memory.get(name)) for name, value in after.items()}

    def _try_step(self) -> None:
        """Makes one, so that what cannot work is refused here and not after a round."""
        name = self.optimizer.__name__
        try:
            value, _ = self._step(torch.tensor([1.0]), torch.tensor([0.0]), {})
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"Expected `optimizer` to step by gradients alone, with the arguments {self.optimizer_kwargs}, but"
                f" {name} does not: {error}"
            ) from error
        if not value.isfinite():
            raise ValueError(f"Expected arguments of {name} that are finite, but got {self.optimizer_kwargs}.")


def averaging_rule(aggregator: Aggregator) -> Aggregator:
    """The rule behind a server's optimizer; any other rule itself.

    Example:
        >>> type(averaging_rule(ServerOptimizer("SGD", "fairavg"))).__name__
        'FairAvg'

    """
    return averaging_rule(aggregator.inner) if isinstance(aggregator, ServerOptimizer) else aggregator


def _find_optimizer(optimizer: type[Optimizer] | str) -> type[Optimizer]:
    found = getattr(torch.optim, optimizer, None) if isinstance(optimizer, str) else optimizer
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(
            f"Expected `optimizer` to be an optimizer's class or its name in torch.optim, but got {optimizer!r}."
        )
    return found


def _keep(held: Tensor, new: Any, old: Any) -> Any:
    """``new`` in the rows that were held, ``old`` (zeros, if there was nothing) in the others."""
    if not isinstance(new, Tensor) or new.shape[:1] != held.shape:
        return new
    old = torch.zeros_like(new) if old is None else old.to(new)
    return torch.where(held.to(new.device).view(-1, *[1] * (new.ndim - 1)), new, old)
