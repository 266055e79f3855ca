"""An optimizer step on the server, with the clients' mean update as gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar & McMahan, "Adaptive Federated Optimization", ICLR 2021, Algorithm
1. https://arxiv.org/abs/2003.00295
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.messages import State
from lightning_fed.numerics.chunks import chunk_steps
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.rule import Aggregator, trained_entries
from lightning_fed.steps.update_step import UpdateStep

_ELEMENTS = 1 << 18  # elements per block, to limit each temporary copy to 2 MB


class ServerOptimizer(UpdateStep):
    r"""Update step: applies a ``torch.optim`` optimizer to the global model once per round.

    The gradient is the difference between the global model :math:`w_t` and the clients' mean :math:`\bar w`:

    .. math:: g_t = w_t - \bar w, \qquad w_{t+1} = \mathrm{step}(w_t, g_t)

    Here step is the optimizer's update. SGD with ``lr=1`` returns the clients' mean bit for bit. :class:`FedAvgM`,
    :class:`FedAdagrad`, :class:`FedAdam` and :class:`FedYogi` use this class. Checkpoints contain the optimizer state.
    Reference: Reddi et al., ICLR 2021, Algorithm 1.

    The optimizer changes only trainable parameters. Frozen layers and buffers are set to the aggregation rule's result.

    Args:
        optimizer: Optimizer class, or the name in ``torch.optim``. Optimizers that need a closure are not supported.
        lazy_rows: Whether rows of a tensor that no client trained in a round stay unchanged. Otherwise momentum still
            moves these rows.
        **optimizer_kwargs: Arguments for the optimizer. Set ``lr``, because the default is meant for local training.

    Raises:
        ValueError: If the optimizer is unknown or refuses the arguments, or the method has several global models.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> step = ServerOptimizer("SGD", lr=0.5, momentum=0.9)
        >>> step.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> step.on_aggregate({"w": torch.tensor(3.0)}, {"w": torch.tensor(1.0)})
        {'w': tensor(2.)}
    """

    refuses = ("has_clusters", "resizes")

    def __init__(self, optimizer: type[Optimizer] | str, lazy_rows: bool = False, **optimizer_kwargs: Any) -> None:
        self.optimizer = _find_optimizer(optimizer)
        self.optimizer_kwargs = optimizer_kwargs
        self.lazy_rows = lazy_rows
        self._rule: Aggregator | None = None
        self._memory: dict[str, dict[str, Any]] = {}
        self._try_step()

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        self._rule = rule

    def on_aggregate(self, new: State, start: State) -> State:
        memory: dict[str, dict[str, Any]] = {}
        held_rows = self._rule.held_rows() if self._rule is not None and self.lazy_rows else {}
        # A step could make running variances negative, and weight decay would shrink constant buffers.
        for name in trained_entries(self.info, start):
            old = start[name]
            held = None
            if name in held_rows:
                held = torch.zeros(len(old), dtype=torch.bool, device=old.device)
                held[held_rows[name].to(old.device)] = True
            new[name], memory[name] = self._step(old, new[name], self._memory.get(name, {}), held)
        self._memory = {name: value for name, value in memory.items() if value}
        return new

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.__name__, "entries": self._memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expected = self.optimizer.__name__
        name = state.get("optimizer", expected)
        if name != expected:
            raise ValueError(f"Expected a state for the server optimizer {expected}, but got a state for {name}.")
        self._memory = dict(state.get("entries", {}))

    def _step(
        self, old: Tensor, mean: Tensor, memory: dict[str, Any], held: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        if not self._is_elementwise or old.numel() <= _ELEMENTS:
            return self._step_whole(old, mean, memory, held)
        rows, _ = chunk_steps(len(old), old[0].numel(), 1, _ELEMENTS)
        return self._step_in_pieces(old, mean, memory, held, rows)

    def _step_in_pieces(
        self, old: Tensor, mean: Tensor, memory: dict[str, Any], held: Tensor | None, rows: int
    ) -> tuple[Tensor, dict[str, Any]]:
        new, after = torch.empty_like(old), dict[str, Any]()
        for start in range(0, len(old), rows):
            part = slice(start, start + rows)
            part_memory = {name: value[part] if _is_like(value, old) else value for name, value in memory.items()}
            part_held = None if held is None else held[part]
            new[part], part_after = self._step_whole(old[part], mean[part], part_memory, part_held)
            for name, value in part_after.items():
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
        rest = step + gradient  # difference between the mean and the optimizer's result
        # Compute from the nearer endpoint. For plain averaging the difference is exactly zero. If the mean is far away,
        # for example after a client's huge update, cancellation would lose the step.
        new = cast_back(torch.where(rest.abs() <= step.abs(), target + rest, start + step), old)
        after = optimizer.state_dict()["state"].get(0, {})
        if held is None:
            return new, after
        return _select_rows(held, new, old), {
            name: _select_rows(held, value, before.get(name)) for name, value in after.items()
        }

    def _try_step(self) -> None:
        name = self.optimizer.__name__
        try:
            value, _ = self._step_whole(torch.tensor([1.0]), torch.tensor([0.0]), {}, None)
            self._is_elementwise = self._goes_by_element()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                "Expected `optimizer` to step from dense gradients without a closure, with the arguments "
                f"{self.optimizer_kwargs}, but {name} failed: use another optimizer or other arguments. {error}"
            ) from error
        if not value.isfinite():
            raise ValueError(f"Expected finite arguments for {name}, but got {self.optimizer_kwargs}.")

    def _goes_by_element(self) -> bool:
        """True if the optimizer treats the elements of a tensor independently, unlike ``Adafactor``."""
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


def _find_optimizer(optimizer: type[Optimizer] | str) -> type[Optimizer]:
    optimizer_class = getattr(torch.optim, optimizer, None) if isinstance(optimizer, str) else optimizer
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ValueError(
            f"Expected `optimizer` to be an optimizer's class or its name in torch.optim, but got {optimizer!r}."
        )
    return optimizer_class


def _is_like(value: Any, entry: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == entry.shape


def _select_rows(held: Tensor, new: Any, old: Any) -> Any:
    if not isinstance(new, Tensor) or new.shape[:1] != held.shape:
        return new
    old = torch.zeros_like(new) if old is None else old.to(new)
    return torch.where(held.to(new.device).view(-1, *[1] * (new.ndim - 1)), new, old)
