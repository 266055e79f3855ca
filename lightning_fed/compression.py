"""Update steps that make updates smaller on the wire, with error feedback.

Alistarh, Grubic, Li, Tomioka & Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017. https://arxiv.org/abs/1610.02132
Seide, Fu, Droppo, Li & Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014 (error feedback).
Stich, Cordonnier & Jaggi, "Sparsified SGD with Memory", NeurIPS 2018. https://arxiv.org/abs/1809.07599
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_number
from lightning_fed.errors import BadUpdate, OptionError
from lightning_fed.messages import Broadcast, ClientUpdate, State
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.rule import Aggregator, ResizingAggregator
from lightning_fed.steps.bounds import refuse_rule
from lightning_fed.steps.update_step import UpdateStep

_PREFIX = "short:"  # of the names of extras
_STREAM = 9  # of a client's random numbers


class Compression(UpdateStep, ABC):
    """Base of steps that send a short form of every entry that trains.

    What the short form lacks of a client's step is kept by the client, and added to its next step (error feedback), so
    that in the end it arrives. Of entries of which a client holds some rows only nothing is kept: the rows change.
    """

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses models of any shape, and steps that need the exact numbers on the wire."""
        refuse_rule(self, rule, ResizingAggregator)
        exact = next((step for step in steps if step.reveals != "update"), None)
        if exact is not None:
            raise OptionError(
                f"Expected no `{type(self).__name__}` with `{type(exact).__name__}`, which needs the exact numbers: a"
                " compressed step may be longer than a clip, and its codes do not add up."
            )

    @abstractmethod
    def short(self, value: Tensor) -> Tensor:
        """Form of an entry on the wire; values do not matter."""

    @abstractmethod
    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The short form of a step, float64, and what belongs to it: a scale, positions."""

    @abstractmethod
    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        """The step that a short form stands for, float64.

        Raises:
            BadUpdate: If the extra is not one of :meth:`encode`.

        """

    def form(self, state: State) -> State:
        """Short forms in the place of entries that train."""
        return state | {name: self.short(state[name]) for name in self._names(state)}

    @torch.no_grad()
    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Shortens the step, and what is left of the steps before."""
        seed = derive_seed(self.info.seed, sent.round, client_key(update.client), _STREAM)
        generator = torch.Generator().manual_seed(seed)
        for name in self._names(sent.state):
            step = to_float64(update.state[name]) - to_float64(sent.state[name])
            if name in memory:
                step = step + to_float64(memory[name]).to(step.device)
            code, extra = self.encode(step, generator)
            if name not in self.info.sliced:
                memory[name] = cast_back(step - self.decode(code, extra, step), sent.state[name])
            update.state[name], update.extras[_PREFIX + name] = code, extra
        return update

    @torch.no_grad()
    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        """Adds what has come to the model that the client was sent.

        Raises:
            BadUpdate: If something is missing.

        """
        for name in self._names(sent):
            extra = update.extras.pop(_PREFIX + name, None)
            if extra is None:
                raise BadUpdate(f"it sends a short form of {name!r} that cannot be read")
            start = to_float64(sent[name])
            update.state[name] = cast_back(start + self.decode(update.state[name], extra, start), sent[name])
        return update

    def _names(self, state: State) -> list[str]:
        untrained = self.info.untrained
        trainable = self.info.trainable
        return [
            name
            for name, value in state.items()
            if value.is_floating_point() and value.numel() and name not in untrained
            if trainable is None or name in trainable
        ]


class Quantized(Compression):
    r"""Numbers of 8 or 4 bits: whole multiples of a scale, rounded at random so that they are right in the mean.

    .. math:: q_i = \lfloor u_i / s + \xi_i \rfloor, \qquad \xi_i \sim \mathcal{U}[0, 1), \qquad
        s = \max_i |u_i| / (2^{b - 1} - 1)

    Args:
        bits: Number of bits b.

    Raises:
        ValueError: If ``bits`` is neither 8 nor 4; for FedMA, secure sums and central privacy.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[Quantized(bits=8)])

    References:
        Alistarh et al., NeurIPS 2017, section 3.1; with the largest number as the scale.

    """

    def __init__(self, bits: Literal[8, 4] = 8) -> None:
        if bits not in (8, 4):
            raise ValueError(f"Expected `bits` to be 8 or 4, but got {bits!r}.")
        self.bits = bits

    def short(self, value: Tensor) -> Tensor:
        """Bytes: one for each number, or for two."""
        size = math.ceil(value.numel() * self.bits / 8)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The multiples, as offsets from the lowest, and the scale."""
        levels = 2 ** (self.bits - 1) - 1
        scale = step.abs().max() / levels
        drawn = torch.rand(step.shape, generator=generator, dtype=torch.float64).to(step.device)
        multiples = (step / scale + drawn).floor() if float(scale) else torch.zeros_like(step)
        code = (multiples.clamp(-levels, levels) + levels).to(torch.uint8).flatten()
        if self.bits == 4:
            code = torch.cat([code, code.new_zeros(len(code) % 2)])
            code = code[0::2] | (code[1::2] << 4)
        return code, scale

    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        """The multiples times the scale."""
        scale = read_scale(extra)
        if self.bits == 4:
            code = torch.stack([code & 15, code >> 4], 1).flatten()
        offsets = code[: like.numel()].to(torch.float64).reshape(like.shape)
        lowest: int = 2 ** (self.bits - 1) - 1
        return (offsets - lowest).to(like.device) * scale.to(like.device)


class Float16(Compression):
    """Half the bytes: a step as float16 numbers, of the entry's largest one.

    Raises:
        ValueError: For FedMA, secure sums and central privacy.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[Float16()])

    """

    def short(self, value: Tensor) -> Tensor:
        """The same shape as float16."""
        return torch.empty(value.shape, dtype=torch.float16, device="meta")

    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The numbers divided by the largest, and that one: whatever the rate, they use float16's range."""
        scale = step.abs().max()
        return (step / scale if float(scale) else step).half(), scale

    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        """The numbers times the largest."""
        return code.to(like.device, torch.float64) * read_scale(extra).to(like.device)


class TopK(Compression):
    """The numbers of largest magnitude of every entry, with their positions.

    Args:
        share: Share of an entry's numbers that is sent, rounded up; in (0, 1].

    Raises:
        ValueError: If ``share`` is out of its range; for FedMA, secure sums and central privacy.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[TopK(share=0.01)])

    References:
        Stich et al., NeurIPS 2018, Algorithm 1.

    """

    def __init__(self, share: float) -> None:
        if not 0 < check_number("share", share) <= 1:
            raise ValueError(f"Expected `share` to be in (0, 1], but got {share}.")
        self.share = float(share)

    def short(self, value: Tensor) -> Tensor:
        """The numbers, in a row."""
        return torch.empty(self._count(value), dtype=torch.float32, device="meta")

    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The numbers, float32, and their positions, int32, increasing."""
        positions = step.flatten().abs().topk(self._count(step)).indices.sort().values
        return step.flatten()[positions].float(), positions.to(torch.int32)

    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        """The numbers in their places, and zeros."""
        is_list = extra.dtype == torch.int32 and extra.shape == code.shape
        if not is_list or int(extra[0]) < 0 or int(extra[-1]) >= like.numel() or not bool((extra.diff() > 0).all()):
            raise BadUpdate("it sends positions that are none")
        step = torch.zeros(like.numel(), dtype=torch.float64, device=like.device)
        step[extra.long().to(like.device)] = code.to(like.device, torch.float64)
        return step.reshape(like.shape)

    def _count(self, value: Tensor) -> int:
        return math.ceil(self.share * value.numel() - 1e-9)


def read_scale(extra: Tensor) -> Tensor:
    """A scale that has come.

    Raises:
        BadUpdate: If it is none.

    """
    if extra.shape != torch.Size([]) or extra.dtype != torch.float64 or not float(extra) >= 0:
        raise BadUpdate("it sends a scale that is none")
    return extra
