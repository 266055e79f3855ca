"""Random numbers under ``torch.func.vmap``, equal to the numbers in a separate run for each client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS: set[Any] = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout}
_MAKERS: set[Any] = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.poisson),
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.multinomial),
    *(Tensor.bernoulli, Tensor.multinomial),
}
_WRITERS: set[Any] = {
    *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.log_normal_),
    *(Tensor.cauchy_, Tensor.geometric_),
}


class PerClientRandom(TorchFunctionMode):
    """Draws the same random numbers inside ``torch.func.vmap`` as in a separate run for each client.

    This context manager covers dropout and functions for random tensors. ``vmap`` handles all other random functions.
    """

    def __init__(self, switch_to: Callable[[int], object], places: Sequence[int], index: Tensor) -> None:
        super().__init__()
        self._turn_to, self._places, self._index = switch_to, places, index

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if kwargs.get("generator") is None:
            if func in _MAKERS:
                return self._drawn(func, args, kwargs)
            if func in _WRITERS:
                return args[0].copy_(
                    self._drawn(lambda written, *rest, **options: func(written.clone(), *rest, **options), args, kwargs)
                )
        return func(*args, **kwargs)

    def _dropout(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Dropout applied to ones gives the mask, without a gradient.
        return input * self._drawn(lambda like: func(torch.ones_like(like), *args, **kwargs), (input.detach(),), {})

    def _drawn(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        def draw(row: int, *args: Any) -> Tensor:
            self._turn_to(self._places[row])
            return func(*args, **kwargs)

        drawn: Tensor = _Draw.apply(draw, self._index, *args)
        return drawn


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(draw: Callable[..., Tensor], index: Tensor, *args: Any) -> Tensor:
        return draw(int(index), *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], draw: Callable[..., Tensor], index: Tensor, *args: Any
    ) -> tuple[Tensor, int]:
        def select_row(row: int) -> list[Any]:
            return [
                arg.select(dim, row) if isinstance(arg, Tensor) and dim is not None else arg
                for arg, dim in zip(args, in_dims[2:], strict=True)
            ]

        return torch.stack([draw(row, *select_row(row)) for row in range(info.batch_size)]), 0
