"""Compression of client updates and broadcast models, with error feedback.

Alistarh, Grubic, Li, Tomioka & Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017. https://arxiv.org/abs/1610.02132
Seide, Fu, Droppo, Li & Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014 (error feedback).
Stich, Cordonnier & Jaggi, "Sparsified SGD with Memory", NeurIPS 2018. https://arxiv.org/abs/1809.07599
Tang, Yu, Lian, Zhang & Liu, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
Compression", ICML 2019. https://arxiv.org/abs/1905.05957
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lightning_fed.argument_checks import check_number
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import BadUpdate, OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import (
    Broadcast,
    Client,
    ClientUpdate,
    State,
    digest,
    plain_keys,
    tensor_bytes,
    without_prefix,
)
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.row_sums import is_increasing
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.steps.update_step import UpdateStep

_PREFIX = "short:"  # prefix for scales and positions in the extras
_STREAM, _DOWN_STREAM = 9, 10  # random streams for clients and for the server

# Prefix for encoded model changes in the extras of a broadcast.
CODES = "down:"

# Model version in the extras of a broadcast and in a node's stored entries.
VERSION = "model:version"


class Compression(UpdateStep, ABC):
    """Base class of steps that compress client updates.

    A client adds the compression error of an update to its next update. This is called error feedback.
    """

    refuses = ("resizes",)

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        exact = next((step for step in steps if step.reveals != "update"), None)
        if exact is not None:
            raise OptionError(
                f"Expected no `{type(self).__name__}` with `{type(exact).__name__}`, which needs uncompressed updates:"
                " compression may increase an update's norm above the clipping norm, and encoded updates cannot be"
                " added. Remove one of the two steps."
            )

    @abstractmethod
    def code_like(self, value: Tensor) -> Tensor:
        """Returns an empty tensor with the shape and dtype of an encoded update for the tensor ``value``."""

    @abstractmethod
    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Encodes one tensor's update. Returns the code, and a tensor for decoding such as a scale."""

    @abstractmethod
    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        """Decodes one tensor's update to float64 in the shape of ``like``. Invalid codes raise :class:`BadUpdate`."""

    def form(self, state: State) -> State:
        return state | {name: self.code_like(state[name]) for name in self.names(state)}

    @torch.no_grad()
    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Adds the stored compression error to the update, encodes the sum, and stores the new error."""
        seed = derive_seed(self.info.seed, sent.round, client_key(update.client), _STREAM)
        generator = torch.Generator().manual_seed(seed)
        for name in self.names(sent.state):
            step = to_float64(update.state[name]) - to_float64(sent.state[name])
            if name in memory:
                step = step + to_float64(memory[name]).to(step.device)
            code, extra = self.encode(step, generator)
            if name not in self.info.sliced:  # the rows of sliced entries differ between rounds
                memory[name] = cast_back(step - self.decode(code, extra, step), sent.state[name])
            update.state[name], update.extras[_PREFIX + name] = code, extra
        return update

    @torch.no_grad()
    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        for name in self.names(sent):
            extra = update.extras.pop(_PREFIX + name, None)
            if extra is None:
                raise BadUpdate(f"the client's compressed update of {name!r} lacks the scale or positions for decoding")
            start = to_float64(sent[name])
            update.state[name] = cast_back(start + self.decode(update.state[name], extra, start), sent[name])
        return update

    def names(self, state: State) -> list[str]:
        untrained = self.info.untrained
        trainable = self.info.trainable
        return [
            name
            for name, value in state.items()
            if value.is_floating_point() and value.numel() and name not in untrained
            if trainable is None or name in trainable
        ]


class Quantized(Compression):
    r"""Rounds updates to 8 or 4 bits at random, without bias (Alistarh et al., section 3.1).

    A value :math:`u_i` of a tensor's update is divided by a scale :math:`s`, and rounded to the integer :math:`q_i`:

    .. math:: q_i = \lfloor u_i / s + \xi_i \rfloor, \qquad \xi_i \sim \mathcal{U}[0, 1), \qquad
        s = \max_j |u_j| / (2^{b - 1} - 1)

    Here :math:`\xi_i` is a random number.

    Args:
        bits: Number of bits b per value.

    Raises:
        ValueError: If ``bits`` is not 8 or 4, or with FedMA, secure sums or central differential privacy.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[Quantized(bits=8)])
    """

    def __init__(self, bits: Literal[8, 4] = 8) -> None:
        if bits not in (8, 4):
            raise ValueError(f"Expected `bits` to be 8 or 4, but got {bits!r}.")
        self.bits = bits

    def code_like(self, value: Tensor) -> Tensor:
        size = math.ceil(value.numel() * self.bits / 8)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        levels = 2 ** (self.bits - 1) - 1
        scale = step.abs().max() / levels
        noise = torch.rand(step.shape, generator=generator, dtype=torch.float64).to(step.device)
        multiples = (step / scale + noise).floor() if float(scale) else torch.zeros_like(step)
        code = (multiples.clamp(-levels, levels) + levels).to(torch.uint8).flatten()
        if self.bits == 4:
            code = torch.cat([code, code.new_zeros(len(code) % 2)])
            code = code[0::2] | (code[1::2] << 4)
        return code, scale

    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        scale = read_scale(extra)
        if self.bits == 4:
            code = torch.stack([code & 15, code >> 4], 1).flatten()
        offsets = code[: like.numel()].to(torch.float64).reshape(like.shape)
        lowest: int = 2 ** (self.bits - 1) - 1
        return (offsets - lowest).to(like.device) * scale.to(like.device)


class Float16(Compression):
    """Sends updates as float16. Each tensor is divided by its largest magnitude.

    Raises ``ValueError`` with FedMA, secure sums or central differential privacy.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[Float16()])
    """

    def code_like(self, value: Tensor) -> Tensor:
        return torch.empty(value.shape, dtype=torch.float16, device="meta")

    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Divides a tensor by the largest magnitude, to fit into float16."""
        scale = step.abs().max()
        return (step / scale if float(scale) else step).half(), scale

    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        return code.to(like.device, torch.float64) * read_scale(extra).to(like.device)


class TopK(Compression):
    """Sends only the largest values in each tensor's update, by magnitude (Stich et al., Algorithm 1).

    Args:
        share: Fraction of each tensor's values to send, in (0, 1]. The number of values is rounded up.

    Raises:
        ValueError: If ``share`` is outside (0, 1], or with FedMA, secure sums or central differential privacy.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[TopK(share=0.01)])
    """

    def __init__(self, share: float) -> None:
        if not 0 < check_number("share", share) <= 1:
            raise ValueError(f"Expected `share` to be in (0, 1], but got {share}.")
        self.share = float(share)

    def code_like(self, value: Tensor) -> Tensor:
        return torch.empty(self._count(value), dtype=torch.float32, device="meta")

    def encode(self, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        positions = step.flatten().abs().topk(self._count(step)).indices.sort().values
        return step.flatten()[positions].float(), positions.to(torch.int32)

    def decode(self, code: Tensor, extra: Tensor, like: Tensor) -> Tensor:
        is_list = extra.dtype == torch.int32 and extra.shape == code.shape
        if not is_list or int(extra[0]) < 0 or int(extra[-1]) >= like.numel() or not is_increasing(extra):
            raise BadUpdate("the client's compressed update has invalid positions")
        step = torch.zeros(like.numel(), dtype=torch.float64, device=like.device)
        step[extra.long().to(like.device)] = code.to(like.device, torch.float64)
        return step.reshape(like.shape)

    def _count(self, value: Tensor) -> int:
        return math.ceil(self.share * value.numel() - 1e-9)


class Downlink(UpdateStep):
    r"""Sends compressed changes of the global model to the clients (Tang et al., ICML 2019).

    In round :math:`t`, the server compresses the change :math:`u` of the global model :math:`w_t`. The compression
    error :math:`e_{t+1}` is added to the next change:

    .. math:: u = \text{new} - w_t + e_t, \qquad w_{t+1} = w_t + C(u), \qquad e_{t+1} = u - C(u)

    Here *new* is the aggregated model, and :math:`C(u)` is the change after compression. A client with an earlier
    global model receives the changes since then, if smaller than the model. All other clients receive the full model.
    BatchNorm statistics are not compressed. If clients receive only some rows of a tensor, this tensor is not
    compressed either. Checkpoints grow by up to twice the model's size, and by a number per client.

    Args:
        step: Compression of the changes. ``Downlink`` must follow all steps that change the new model.

    Raises:
        ValueError: If the method has several global models, or models of different shapes.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[Quantized(bits=8), Downlink(Quantized(bits=8))])
    """

    refuses = ("has_clusters", "has_versions", "resizes")

    def __init__(self, step: Compression) -> None:
        self.step = step
        self._version = 0  # version of the global model
        self._errors: State = {}
        self._codes: list[State] = []  # codes for the newest models
        self._digests: dict[str, str] = {}  # compression error by entry, for the newest model
        self._client_versions: dict[Client, int] = {}  # model version by client

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        for step in steps[[step is self for step in steps].index(True) + 1 :]:
            if type(step).on_aggregate is not UpdateStep.on_aggregate:
                raise OptionError(
                    f"Expected `Downlink` after `{type(step).__name__}`, because this step changes the "
                    "new model: move `Downlink` to the end of `steps`."
                )

    def callbacks(self) -> Sequence[Any]:
        return [HeldModels(self)]

    def start(self, info: RoundInfo, state: State) -> None:
        super().start(info, state)
        self.step.start(info, state)
        changed = [name for name, old_digest in self._digests.items() if digest({name: state[name]}) != old_digest]
        if changed and self._codes:
            newest = {key: code for key, code in self._codes[-1].items() if key.partition(":")[2] not in changed}
            self._codes = [*self._codes[:-1], newest]

    def on_send(self, client: Client, broadcast: Broadcast) -> None:
        broadcast.extras[VERSION] = torch.tensor(self._version)
        behind = self._version - self._client_versions.get(client, -1)
        if not 0 < behind <= len(self._codes):
            return
        codes = self._codes[-behind:]
        unsent = frozenset.intersection(*(frozenset(key.partition(":")[2] for key in code) for code in codes))
        state = broadcast.state
        unsent = frozenset(  # other entries are client-specific
            name for name in unsent if state[name] is self.state[name] or torch.equal(state[name], self.state[name])
        )
        broadcast.unsent |= unsent
        for number, code in enumerate(codes, self._version - behind + 1):
            broadcast.extras |= {
                f"{CODES}{number}:{key}": value for key, value in code.items() if key.partition(":")[2] in unsent
            }

    @torch.no_grad()
    def restore(self, client_model: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> State:
        """Decodes a broadcast on the client, starting from the client's last model."""
        state, number = dict[str, Tensor](), int(client_model.get(VERSION, -1)) + 1
        while number and number <= int(extras.get(VERSION, -1)):
            codes = without_prefix(extras, f"{CODES}{number}:code:")
            if not codes.keys() <= client_model.keys() or not codes:
                return {}
            for name, code in codes.items():
                extra = extras[f"{CODES}{number}:of:{name}"].cpu()
                state[name] = self._add(state.get(name, client_model[name]), code.cpu(), extra)
            number += 1
        return state

    @torch.no_grad()
    def on_aggregate(self, new: State, start: State) -> State:
        seed = derive_seed(self.info.seed, self.info.round, _DOWN_STREAM)
        generator, codes = torch.Generator().manual_seed(seed), State()
        errors, names = self._errors, [name for name in self.step.names(new) if name not in self.info.sliced]
        self._errors = {}
        for name in names:
            change = to_float64(new[name]) - to_float64(start[name])
            if name in errors:
                change = change + to_float64(errors[name]).to(change.device)
            code, extra = self.step.encode(change, generator)
            codes[f"code:{name}"], codes[f"of:{name}"] = code, extra
            new[name] = self._add(start[name], code, extra)
            self._errors[name] = cast_back(change - (to_float64(new[name]) - to_float64(start[name])), start[name])
        self._digests = {name: digest({name: new[name]}) for name in names}
        self._codes, limit = [*self._codes, codes], tensor_bytes({name: new[name] for name in names})
        while self._codes and sum(map(tensor_bytes, self._codes)) >= limit:
            self._codes = self._codes[1:]
        self._version += 1
        return new

    def record_clients(self, clients: Iterable[Client]) -> None:
        versions = self._client_versions | dict.fromkeys(clients, self._version - 1)
        self._client_versions = {
            client: version for client, version in versions.items() if version >= self._version - len(self._codes)
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "errors": dict(self._errors),
            "codes": list(self._codes),
            "digests": dict(self._digests),
            "clients": plain_keys(self._client_versions),
            "held": list(self._client_versions.values()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._version, self._errors = state.get("version", 0), dict(state.get("errors", {}))
        self._codes, self._digests = list(state.get("codes", ())), dict(state.get("digests", {}))
        self._client_versions = dict(zip(state.get("clients", ()), state.get("held", ()), strict=True))

    def _add(self, value: Tensor, code: Tensor, extra: Tensor) -> Tensor:
        start = to_float64(value)
        return cast_back(start + self.step.decode(code, extra, start), value)


class HeldModels(FederatedCallback):
    """Callback that records which version of the global model each client has, for :class:`Downlink`."""

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, step: Downlink) -> None:
        self._step = step

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        if is_new:
            self._step.record_clients(find_federation(trainer).server.report.received)


def read_scale(extra: Tensor) -> Tensor:
    """Checks and returns the scale of a compressed update. An invalid scale raises :class:`BadUpdate`."""
    if extra.shape != torch.Size([]) or extra.dtype != torch.float64 or not float(extra) >= 0:
        raise BadUpdate("the client's compressed update has an invalid scale")
    return extra
