"""Traffic between server and clients by model part, compared with federated averaging."""

from __future__ import annotations

import csv
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from torch import Tensor

from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.federation import find_federation, move_behind_federation
from lightning_fed.console import markdown_table, round_number
from lightning_fed.errors import OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State, distinct, sent_entries, tensor_bytes
from lightning_fed.model.entries import live_entries

_EXTRAS, _REQUEST, _REST, _ALL = "(extras)", "(request)", "(rest)", "(all)"


class Traffic(NamedTuple):
    """Bytes and tensor elements exchanged with one client in one round, for one submodule (``part``).

    Only the last ``client_rounds`` rounds have values per client. Earlier rounds have sums, as client ``"(all)"``. Part
    ``"(extras)"`` is for a method's extra tensors, and part ``"(request)"`` for indices of requested parameter rows.
    """

    round: int
    client: Client
    part: str
    down_numel: int = 0
    down_bytes: int = 0
    up_numel: int = 0
    up_bytes: int = 0


class PartTraffic(NamedTuple):
    """Mean bytes for a submodule (or ``"(all)"``) per client and round.

    ``full_numel`` is the submodule's number of elements, which federated averaging would send in each direction.
    ``share`` is the number of bytes in both directions, divided by the bytes of federated averaging.
    """

    part: str
    full_numel: int
    down_numel: float
    up_numel: float
    down_bytes: float
    up_bytes: float
    share: float | None


class CommunicationReport(FederatedCallback):
    r"""Measures the bytes sent per submodule, and compares with federated averaging of the whole model.

    The callback counts the tensors in the server's messages, the clients' updates, and requests for parameter rows.
    For example, FedSS sends :math:`|\varphi| + d |S_k|` numbers in each direction. These are the model without the last
    layer (:math:`\varphi`), and :math:`d` numbers for each class in client k's request :math:`S_k`. Federated averaging
    would send all parameters and buffers. Messages outside training, for example for BatchNorm statistics, appear only
    in ``comm/down_bytes`` and ``comm/up_bytes``.

    Every round, the callback logs ``comm/down_share`` and ``comm/up_share``: the bytes sent, divided by the bytes for
    federated averaging. :meth:`table` shows means over clients and rounds. :attr:`rows` and :meth:`to_csv` contain a
    :class:`Traffic` for each round, client and part. Rounds before the last ``client_rounds`` have only sums over
    clients. Checkpoints contain ``rows``, and ``visits``: the numbers of contacted clients and received updates in
    rounds with only sums.

    Args:
        parts: Prefixes of parameter and buffer names, one per part, such as ``["model.head"]``. Other tensors form the
            part ``"(rest)"``. By default the parts are the outermost submodules.
        client_rounds: Number of recent rounds with separate values per client. Earlier rounds have only sums.

    Raises:
        ValueError: If ``client_rounds`` is below 0; in ``fit``, if no parameter or buffer matches a prefix.
        MisconfigurationException: In ``setup``, if the Trainer has no federation.

    Example:
        >>> report = CommunicationReport(parts=["model.head"])

    References:
        "Efficient image representation learning with federated sampled softmax" (FedSS), submission to ICLR 2022,
        figures 5, 8 and 10.
    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, parts: Sequence[str] = (), client_rounds: int = 100) -> None:
        self.parts = tuple(parts)
        self.client_rounds = check_count("client_rounds", client_rounds, lowest=0)
        self._prefixes: Sequence[str] = ()
        self._sent: dict[Client, Broadcast] = {}  # clients whose answer is not yet received
        self._full: dict[str, tuple[int, int]] = {}
        self._visits: dict[tuple[int, Client], dict[str, Traffic]] = {}
        self._counts: dict[int, tuple[int, int]] = {}  # numbers of visits and answers in early rounds

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            find_federation(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        move_behind_federation(self, trainer)  # Lightning's loop is already past this position, so skips no callback
        entries = live_entries(pl_module)
        self._prefixes = self.parts or top_level_parts(list(entries))
        self._full = {}
        for part, tensors in self._by_part(entries).items():
            self._full[part] = sum(tensor.numel() for tensor in tensors.values()), tensor_bytes(tensors)
        missing = [prefix for prefix in self._prefixes if prefix not in self._full]
        if missing:
            raise OptionError(f"Expected `parts` to be prefixes of entry names, but no name begins with {missing}.")

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        now, self._sent = trainer.current_epoch, {}
        self._visits = {key: traffic for key, traffic in self._visits.items() if key[0] < now}
        self._counts = {round: counts for round, counts in self._counts.items() if round < now}
        for round in sorted(
            {round for round, _ in self._visits if round < now - self.client_rounds} - self._counts.keys()
        ):
            self._sum_up(round)

    def on_server_send(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self._sent[client] = broadcast

    def on_client_receive(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self._sent.pop(client, None)
        self._add_broadcast(trainer, client, broadcast)

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        self._receive_elsewhere(trainer, update.client)
        for part, tensors in {**self._by_part(sent_entries(update)), _EXTRAS: update.extras}.items():
            self._add(trainer, update.client, part, tensors, "up")

    def share_round(self, trainer: L.Trainer, module: L.LightningModule) -> Generator[Any, list[Any], None]:
        shares = yield {key: traffic for key, traffic in self._visits.items() if key[0] == trainer.current_epoch}
        joint = {key: traffic for share in shares for key, traffic in share.items()}
        for visit in find_federation(trainer).cohort.visits:
            key = trainer.current_epoch, visit.client
            self._visits.pop(key, None)
            if key in joint:
                self._visits[key] = joint[key]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for client in list(self._sent):
            self._receive_elsewhere(trainer, client)
        round = trainer.current_epoch
        visits = [traffic for key, traffic in self._visits.items() if key[0] == round]
        full = sum(size for _, size in self._full.values())
        values = {}
        for name, count, field in (("down", len(visits), "down_bytes"), ("up", _num_answers(visits), "up_bytes")):
            if count and full:
                values[f"comm/{name}_share"] = _total(visits, field) / (count * full)
        if values:
            find_federation(trainer).round_log.put(trainer, round, values)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": [list(row) for row in self.rows],
            "visits": {round: list(counts) for round, counts in self._counts.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._visits = {}
        self._counts = {round: (visits, answers) for round, (visits, answers) in state_dict["visits"].items()}
        for row in (Traffic(*fields) for fields in state_dict["rows"]):
            self._visits.setdefault((row.round, row.client), {})[row.part] = row

    @property
    def rows(self) -> list[Traffic]:
        return [row for traffic in self._visits.values() for row in traffic.values()]

    def summary(self) -> list[PartTraffic]:
        """Mean traffic per client and round, by submodule and for other data, then in total. Empty before training."""
        if not self._visits:
            return []
        seen = dict.fromkeys([*self._full, *(row.part for row in self.rows)])
        summaries = [self._summarize([part], part) for part in seen]
        return [*summaries, self._summarize(list(seen), _ALL)]

    def table(self) -> str:
        header = ["part", "numbers", "down", "up", "bytes down", "bytes up", "share of FedAvg"]
        rows = [
            [row.part, *(f"{number:,.0f}" for number in row[1:-1]), "" if row.share is None else f"{row.share:.2%}"]
            for row in self.summary()
        ]
        return markdown_table([header, *rows], "---:")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes all traffic to a CSV file, with the fields of :class:`Traffic` as columns. Rounds start at 1."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Traffic._fields)
            writer.writerows(row._replace(round=round_number(row.round)) for row in self.rows)

    def _sum_up(self, round: int) -> None:
        visits = [self._visits.pop(key) for key in list(self._visits) if key[0] == round]
        self._counts[round] = len(visits), _num_answers(visits)
        sums: dict[str, Traffic] = {}
        for row in (row for traffic in visits for row in traffic.values()):
            before = sums.get(row.part, Traffic(round, _ALL, row.part))
            numbers = [total + added for total, added in zip(before[3:], row[3:], strict=True)]
            sums[row.part] = Traffic(round, _ALL, row.part, *numbers)
        self._visits = dict(sorted([((round, _ALL), sums), *self._visits.items()], key=lambda item: item[0][0]))

    def _by_part(self, state: Mapping[str, Tensor]) -> dict[str, State]:
        parts: dict[str, State] = {}
        for name, tensor in state.items():
            fitting = [prefix for prefix in self._prefixes if f"{name}.".startswith(f"{prefix}.")]
            parts.setdefault(max(fitting, key=len, default=_REST), {})[name] = tensor
        return parts

    def _receive_elsewhere(self, trainer: L.Trainer, client: Client) -> None:
        broadcast = self._sent.pop(client, None)
        if broadcast is not None:
            self._add_broadcast(trainer, client, broadcast)

    def _add_broadcast(self, trainer: L.Trainer, client: Client, broadcast: Broadcast) -> None:
        for part, tensors in {**self._by_part(sent_entries(broadcast)), _EXTRAS: broadcast.extras}.items():
            self._add(trainer, client, part, tensors, "down")
        self._add(trainer, client, _REQUEST, distinct(broadcast.rows), "up")

    def _add(
        self, trainer: L.Trainer, client: Client, part: str, tensors: Mapping[str, Tensor], direction: str
    ) -> None:
        visit = self._visits.setdefault((trainer.current_epoch, client), {})
        if not tensors:
            return
        row = visit.get(part, Traffic(trainer.current_epoch, client, part))
        added = {
            f"{direction}_numel": sum(value.numel() for value in tensors.values()),
            f"{direction}_bytes": tensor_bytes(tensors),
        }
        visit[part] = row._replace(**{name: getattr(row, name) + count for name, count in added.items()})

    def _summarize(self, parts: Sequence[str], name: str) -> PartTraffic:
        selected = [{part: row for part, row in traffic.items() if part in parts} for traffic in self._visits.values()]
        single = [traffic for (round, _), traffic in self._visits.items() if round not in self._counts]
        downs = sum(visits for visits, _ in self._counts.values()) + len(single)
        ups = sum(answers for _, answers in self._counts.values()) + _num_answers(single)
        full = [self._full.get(part, (0, 0)) for part in parts]
        full_numel, full_bytes = (sum(sizes) for sizes in zip(*full, strict=True))
        down_bytes, up_bytes = _total(selected, "down_bytes"), _total(selected, "up_bytes")
        return PartTraffic(
            name,
            full_numel,
            _total(selected, "down_numel") / downs,
            _total(selected, "up_numel") / max(1, ups),
            down_bytes / downs,
            up_bytes / max(1, ups),
            (down_bytes + up_bytes) / (full_bytes * (downs + ups)) if full_bytes else None,
        )


def top_level_parts(names: Sequence[str]) -> list[str]:
    """Returns the names of the submodules directly below the prefix common to all entry names."""
    paths = [name.split(".") for name in names]
    depth = 1
    while len({tuple(path[:depth]) for path in paths}) == 1 and all(len(path) > depth for path in paths):
        depth += 1
    return list(dict.fromkeys(".".join(path[:depth]) for path in paths))


def _num_answers(visits: Iterable[Mapping[str, Traffic]]) -> int:
    return sum(any(row.up_bytes for part, row in traffic.items() if part != _REQUEST) for traffic in visits)


def _total(visits: Iterable[Mapping[str, Traffic]], field: str) -> int:
    return sum(getattr(row, field) for traffic in visits for row in traffic.values())
