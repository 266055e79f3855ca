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

from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.method import build_aggregator
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.numerics.chunks import chunk_steps
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.schedule import SecretSampling

_ELEMENTS = 1 << 18  # that step at a time, in 2 MB for each of the copies that a step needs


class ServerOptimizer(Aggregator):
    r"""Any averaging rule, followed by a step of any optimizer of ``torch.optim``.

    The optimizer steps from the global model :math:`w_t`, with what the mean :math:`\bar w` of the clients is short of
    it as the gradient:

    .. math:: g_t = w_t - \bar w, \qquad w_{t+1} = \mathrm{step}(w_t, g_t)

    SGD with ``lr=1`` is the averaging rule itself, bit for bit. :class:`FedAvgM`, :class:`FedAdagrad`,
    :class:`FedAdam` and :class:`FedYogi` are ready-made, with their papers' definitions.

    Entries that train take the step, in float64. Frozen layers and buffers are what the averaging rule makes of them: a
    step beyond the clients would give negative running variances, and weight decay would shrink constants. Without a
    fit, which knows the parameters (:attr:`~lightning_fed.Aggregator.trainable`), all floating-point
    entries but running statistics of BatchNorm, which are told by their names, count as trained.

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
        ValueError: If the optimizer is not known or refuses its arguments, or the averaging rule keeps several models,
            changes their shapes or takes several rounds for one.

    Note:
        Its state, which is part of checkpoints, is what the optimizer remembers of every entry: with momentum 8 bytes
        per parameter, with adaptive moments 16. A round makes it anew, and a new model; beside that a step needs little
        memory, because large entries step some rows at a time, unless the optimizer looks at a whole entry at once, as
        ``Adafactor`` does.

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
        self.optimizer = _find_optimizer(optimizer)
        self.optimizer_kwargs = optimizer_kwargs
        self.lazy_rows = lazy_rows
        self.inner = build_aggregator(aggregator)
        if type(self.inner).model_of is not Aggregator.model_of:
            raise ValueError(
                f"Expected `aggregator` to make one global model, but {type(self.inner).__name__} keeps several."
            )
        if self.inner.resizes or type(self.inner).plan is not Aggregator.plan:
            raise ValueError(
                "Expected `aggregator` to make a model of the same shapes in every round, but"
                f" {type(self.inner).__name__} takes several rounds for one, or changes its shapes: use it by"
                " itself."
            )
        self.takes_rows = self.inner.takes_rows  # of the class elsewhere, here of the object
        self.always = self.inner.always
        self.is_private = self.inner.is_private
        self._memory: dict[str, dict[str, Any]] = {}
        self._try_step()
        self.start_round(-1, {})

    def sampling(self) -> SecretSampling | None:
        """The draw of clients that the averaging rule has."""
        return self.inner.sampling()

    def around(self, inner: Aggregator) -> ServerOptimizer:
        """The same optimizer after another averaging rule."""
        rule = copy.copy(self)
        rule.inner, rule.takes_rows = inner, inner.takes_rows
        rule.always, rule.is_private = inner.always, inner.is_private
        rule.load_state_dict({})
        rule.start_round(-1, {})
        return rule

    def required_callbacks(self) -> Sequence[Any]:
        """The callbacks of the averaging rule."""
        return self.inner.required_callbacks()

    def start_round(self, round: int, state: State) -> None:
        """Starts a round from ``state``."""
        self._state = state
        self.held: dict[str, Tensor] = {}  # of entries that came in rows: whether a client held the row
        self.whole: set[str] = set()  # entries that came as a whole
        self.inner.trainable, self.inner.untrained = self.trainable, self.untrained
        self.inner.num_clients = self.num_clients
        self.inner.start_round(round, state)

    def broadcast(self, client: Client) -> Broadcast:
        """The broadcast of the averaging rule."""
        return self.inner.broadcast(client)

    def expected(self, broadcast: Broadcast) -> State:
        """Form of the answer, as the averaging rule has it."""
        return self.inner.expected(broadcast)

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

    def leave_out(self) -> dict[Client, str]:
        """Clients whose updates the averaging rule cannot use, and why."""
        self.inner.num_refused = self.num_refused
        return self.inner.leave_out()

    def tolerated(self, count: int) -> int:
        """Number of malicious clients that the averaging rule stands."""
        return self.inner.tolerated(count)

    def aggregate(self) -> State:
        """The averaging rule's result, and the step."""
        new = dict(self.inner.aggregate())
        memory: dict[str, dict[str, Any]] = {}
        for name, old in self._state.items():
            if old.is_floating_point() and self._trains(name):
                held = None if name in self.whole else self.held.get(name)
                new[name], memory[name] = self._step(old, new[name], self._memory.get(name, {}), held)
        self._memory = {name: value for name, value in memory.items() if value}
        return new

    def _trains(self, name: str) -> bool:
        return not is_running_statistic(name) if self.trainable is None else name in self.trainable

    def metrics(self) -> dict[str, float]:
        """The metrics of the averaging rule."""
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

    def _step(
        self, old: Tensor, mean: Tensor, memory: dict[str, Any], held: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """New value of one entry, and what the optimizer remembers of it then; ``memory`` is left as it is."""
        if not self._is_elementwise or old.numel() <= _ELEMENTS:
            return self._step_whole(old, mean, memory, held)
        rows, _ = chunk_steps(len(old), old[0].numel(), 1, _ELEMENTS)
        return self._step_in_pieces(old, mean, memory, held, rows)

    def _step_in_pieces(
        self, old: Tensor, mean: Tensor, memory: dict[str, Any], held: Tensor | None, rows: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """The same, some rows at a time: beside the results nothing is as large as the entry."""
        new, after = torch.empty_like(old), dict[str, Any]()
        for start in range(0, len(old), rows):
            part = slice(start, start + rows)
            known = {name: value[part] if _is_like(value, old) else value for name, value in memory.items()}
            here = None if held is None else held[part]
            new[part], piece = self._step_whole(old[part], mean[part], known, here)
            for name, value in piece.items():
                if _is_like(value, old[part]):
                    after.setdefault(name, value.new_empty(old.shape))[part] = value
                else:
                    after[name] = value
        return new, after

    @torch.no_grad()
    def _step_whole(
        self, old: Tensor, mean: Tensor, memory: dict[str, Any], held: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        start, target = to_float64(old), to_float64(mean)
        gradient = start - target
        parameter = start.clone().requires_grad_()
        parameter.grad = gradient.clone()
        optimizer = self.optimizer([parameter], **self.optimizer_kwargs)
        before = memory or optimizer.state_dict()["state"].get(0, {})
        if before:
            copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in before.items()}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: copied}})
        optimizer.step()
        step = parameter.detach() - start
        rest = step + gradient  # of the way to the mean
        # From the nearer end on. Where the step is that of averaging, the rest is zero, whatever was rounded; where the
        # mean is far away, as after one client's huge update, the step would be lost in the difference of two such.
        new = cast_back(torch.where(rest.abs() <= step.abs(), target + rest, start + step), old)
        after = optimizer.state_dict()["state"].get(0, {})
        if held is None:
            return new, after
        return _keep(held, new, old), {name: _keep(held, value, before.get(name)) for name, value in after.items()}

    def _try_step(self) -> None:
        """Makes some, so that what cannot work is refused here and not after a round."""
        name = self.optimizer.__name__
        try:
            value, _ = self._step_whole(torch.tensor([1.0]), torch.tensor([0.0]), {}, None)
            self._is_elementwise = self._goes_by_element()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"Expected `optimizer` to step by gradients alone, with the arguments {self.optimizer_kwargs}, but"
                f" {name} does not: {error}"
            ) from error
        if not value.isfinite():
            raise ValueError(f"Expected arguments of {name} that are finite, but got {self.optimizer_kwargs}.")

    def _goes_by_element(self) -> bool:
        """True if rows step alone as they do together; a step that looks at a whole entry, as Adafactor's, does not."""
        old, mean = torch.linspace(-3, 5, 12).pow(3).view(2, 3, 2)
        together: tuple[Tensor, dict[str, Any]] = (old, {})
        alone: tuple[Tensor, dict[str, Any]] = (old, {})
        for _ in range(2):
            together = self._step_whole(together[0], mean, together[1], None)
            alone = self._step_in_pieces(alone[0], mean, alone[1], None, 1)
        results = [{"": new, **memory} for new, memory in (together, alone)]
        return results[0].keys() == results[1].keys() and all(
            torch.equal(value, results[1][name]) if isinstance(value, Tensor) else value == results[1][name]
            for name, value in results[0].items()
        )


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


def _is_like(value: Any, entry: Tensor) -> bool:
    """True if an optimizer remembers one number per element of this entry, and not one for the whole entry."""
    return isinstance(value, Tensor) and value.shape == entry.shape


def _keep(held: Tensor, new: Any, old: Any) -> Any:
    """``new`` in the rows that were held, ``old`` (zeros, if there was nothing) in the others."""
    if not isinstance(new, Tensor) or new.shape[:1] != held.shape:
        return new
    old = torch.zeros_like(new) if old is None else old.to(new)
    return torch.where(held.to(new.device).view(-1, *[1] * (new.ndim - 1)), new, old)
