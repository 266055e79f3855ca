"""Training steps for several clients simultaneously in one stacked model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.backends.vectorized.group_loader import GroupLoader, StackedBatch
from lightning_fed.backends.vectorized.stacked_model import StackedModel, joint_loss
from lightning_fed.data.batch_structure import batch_tensors
from lightning_fed.data.population import PlannedVisit
from lightning_fed.rounds.visit_driver import VisitDriver
from lightning_fed.rounds.visit_flow import ClientVisit

_log = logging.getLogger(__name__)


class StackedVisits(VisitDriver):
    """Trains several clients simultaneously, batch by batch, with ``torch.func.vmap``."""

    _loader: GroupLoader
    may_end_early = False  # simultaneous visits end without an update

    def __init__(self, *arguments: Any, model: StackedModel) -> None:
        super().__init__(*arguments)
        self._model = model  # holds the clients' models
        self._visits: list[ClientVisit] = []

    def start(self, group: Sequence[PlannedVisit]) -> None:
        if len(group) == 1:
            super().start(group)
            return
        self.group = group
        for planned in group:
            self.current = self.open_visit(planned)
            self.current.advance()
            self._visits.append(self.current)
            self._model.add_client()  # a failed client also needs a row, but does not train
        self.current = None
        self._model.enter(self.fit.trainer.optimizers)

    def train_step(self, training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.current is not None:  # a single visit, or a pass over the data before the first batch
            return super().train_step(training_step, args, kwargs)
        parts: list[StackedBatch] = list(args[0])
        if len(parts) == len(self.group) and "contents" not in self.fit.warned and _has_equal_shapes(parts):
            self.fit.record_warning("contents")
            _log.warning(
                "`Vectorized`: the batches of %d clients have equal shapes, but contain different strings, numbers "
                "or objects (perhaps file names). The clients' steps run separately, which is slower than sequential "
                "training: remove values from the batches that `training_step` does not need.",
                len(parts),
            )
        losses: list[Tensor] = []
        assert self._loader.numbers is not None
        for part in parts:
            try:
                losses.append(self._model.step(training_step, part, args[1:], self._loader.numbers))
            except MisconfigurationException:
                raise
            except Exception as error:
                rows = part.split()
                if len(rows) > 1:  # no model has changed yet: repeating the step with single rows identifies the client
                    parts += rows
                else:
                    self._fail(self.group[part.clients[0]], error)
        return joint_loss(losses) if losses else self._skip_batch()

    def end(self, group: Sequence[PlannedVisit]) -> None:
        if len(group) == 1:
            super().end(group)
            return
        if self.group is group:
            self._model.check_step()
            self._model.leave()
            for row, visit in enumerate(self._visits):
                if visit.step is not None:
                    self.current = visit
                    self._model.load_row(row)
                    visit.advance(has_loss=True)
        else:
            for planned in group:
                self._exclude(planned)
        self._clear()

    def close(self) -> None:
        self._model.leave()
        for visit in self._visits:
            self.current = visit
            visit.close()
        self._clear()
        super().close()

    def _advance(self) -> None:
        if len(self.group) == 1:
            super()._advance()
            return
        self._model.check_step()
        finished = self.group[0].num_batches - self._loader.batches_left
        for row, visit in enumerate(self._visits):
            if visit.planned.num_batches == finished:  # other clients have more batches
                self._model.save_row(row)
            elif visit.planned.num_batches > finished and visit.planned.fault is None:
                visit.advance(has_loss=True)

    def _clear(self) -> None:
        self._model.clear()
        self._visits, self.group, self.current = [], (), None


def _has_equal_shapes(parts: Sequence[StackedBatch]) -> bool:
    return len({tuple((tensor.shape, tensor.dtype) for tensor in batch_tensors(part.batch)) for part in parts}) == 1
