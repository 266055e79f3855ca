"""Options for a fit, chosen by the user and constant during the fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.lazy_names import load_feature
from lightning_fed.model.entries import Selector, check_selectors
from lightning_fed.server.schedule import Availability


@dataclass(frozen=True)
class LocalStatistics:
    """Option ``batch_norm``: clients share the weights, but each client has its own running statistics.

    After the aggregation, each client in the round passes its data once through the new global model, and stores mean
    and variance for each BatchNorm layer. Other clients do the same before an evaluation. Checkpoints contain 8 bytes
    per channel and client. With many clients, set the option ``store`` to a folder.

    Args:
        unseen: Statistics for data from outside the fit's clients. ``"batch"``: from each batch. ``"data"``: from the
            whole loader, before the evaluation (AdaBN, Li et al. 2016). ``"pooled"``: pooled over the round's clients,
            with an additional download of each new model by these clients, as in ``batch_norm="recalibrate"``.
        measured: Time of the measurement. ``"aggregation"``: after the aggregation, with the new weights. ``"visit"``:
            during local training as in SiloBN, while the weights change, so that the statistics fit no single model.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(batch_norm=LocalStatistics(unseen="pooled")).has_personal_entries
        True
    """

    unseen: Literal["batch", "data", "pooled"] = "batch"
    measured: Literal["aggregation", "visit"] = "aggregation"

    def __post_init__(self) -> None:
        check_option("unseen", self.unseen, ("batch", "data", "pooled"))
        check_option("measured", self.measured, ("aggregation", "visit"))


@dataclass(frozen=True)
class FixedStatistics:
    """Option ``batch_norm``: fixes the averaged running statistics after some rounds (FixBN).

    Args:
        after: Number of rounds before the statistics are fixed, at least 0.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation(batch_norm=FixedStatistics(after=50))
    """

    after: int

    def __post_init__(self) -> None:
        check_count("after", self.after, lowest=0)


class VisitsAtOnce(ABC):
    """Base class for values of the option ``visits`` that train several clients simultaneously."""

    clients: int

    @abstractmethod
    def plan(self, fit: Any) -> Any:
        """Plans to train clients in groups. Logs the reason and returns ``None`` if this is not possible."""


@dataclass(frozen=True)
class Faults:
    """Option ``faults``: limits on client failures.

    Args:
        min_clients: Minimum number of valid updates per round. With fewer updates, the global model does not change.
        max_failed_rounds: After this number of failed rounds in a row, the fit stops with an error. A round fails if
            failures leave no new model. The fit also ends with an error if all clients of a round raise the same error,
            or if no round has succeeded at the end. With ``None``, the fit continues after any failure.
        visit_timeout: Time limit for one client's training in a round, in seconds, including data loading; ``None`` for
            no limit. Requires Unix, and a fit in the main thread.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation(clients_per_round=10, faults=Faults(min_clients=5, visit_timeout=600))
    """

    min_clients: int = 1
    max_failed_rounds: int | None = 3
    visit_timeout: float | None = None

    def __post_init__(self) -> None:
        check_count("min_clients", self.min_clients)
        if self.max_failed_rounds is not None:
            check_count("max_failed_rounds", self.max_failed_rounds)
        if self.visit_timeout is not None:
            VisitClock(self.visit_timeout)


_FASTEST = "lightning_fed.backends.vectorized.plan"

BatchNormName = Literal["auto", "recalibrate", "average", "personal", "frozen"]
VisitsName = Literal["auto", "lightning", "fused", "fastest"]
BatchNormOption: TypeAlias = BatchNormName | LocalStatistics | FixedStatistics
VisitsOption: TypeAlias = VisitsName | VisitsAtOnce


@dataclass(frozen=True)
class FitOptions:
    """Checked options of a fit. For other arguments see :class:`~lightning_fed.callbacks.Federation`.

    Args:
        visits_at_once: Object that trains several clients simultaneously, such as ``Vectorized(8)``; ``None`` for none.
        visits_one_by_one: Training loop for one client: ``"fused"`` (this package's loop), ``"lightning"`` or
            ``"auto"``.
        has_personal_entries: Whether some state dict tensors stay on each client.
    """

    personal: Sequence[Selector]
    frozen: Sequence[Selector]
    batch_norm: BatchNormOption
    optimizer_state: Literal["reset", "keep"]
    availability: Availability
    faults: Faults
    visits: VisitsOption
    visits_at_once: VisitsAtOnce | None
    visits_one_by_one: VisitsName
    has_personal_entries: bool


def build_options(
    personal: Sequence[Selector],
    frozen: Sequence[Selector],
    batch_norm: BatchNormOption,
    optimizer_state: Literal["reset", "keep"],
    availability: Availability | None,
    faults: Faults | None,
    visits: VisitsOption,
) -> FitOptions:
    """Checks the options for a fit. Raises ``ValueError`` for an invalid option."""
    personal, frozen = check_selectors("personal", personal), check_selectors("frozen", frozen)
    if not isinstance(batch_norm, LocalStatistics | FixedStatistics):
        _check_name("batch_norm", batch_norm, get_args(BatchNormName), "LocalStatistics or FixedStatistics")
    if not isinstance(visits, VisitsAtOnce):
        _check_name("visits", visits, get_args(VisitsName), "Vectorized")
    check_option("optimizer_state", optimizer_state, ("reset", "keep"))
    availability = Availability() if availability is None else availability
    faults = Faults() if faults is None else faults
    for name, value, kind in (("availability", availability, Availability), ("faults", faults, Faults)):
        if not isinstance(value, kind):
            raise ValueError(f"Expected `{name}` to be {kind.__name__}(...), but got {value!r}.")
    group = load_feature(_FASTEST).Fastest() if visits == "fastest" else visits
    at_once = group if isinstance(group, VisitsAtOnce) and group.clients > 1 else None
    if faults.visit_timeout is not None and at_once is not None:
        raise ValueError(
            "Expected `visit_timeout` or `Vectorized`, not both: clients that train at once wait for each other."
        )
    one_by_one: VisitsName = "auto" if isinstance(visits, VisitsAtOnce) or visits == "fastest" else visits
    is_personal = bool(personal) or batch_norm == "personal" or isinstance(batch_norm, LocalStatistics)
    kinds = at_once, one_by_one, is_personal
    return FitOptions(personal, frozen, batch_norm, optimizer_state, availability, faults, visits, *kinds)


def _check_name(argument: str, value: object, names: Sequence[str], kinds: str) -> None:
    if not (isinstance(value, str) and value in names):
        raise ValueError(f"Expected `{argument}` to be one of {list(names)} or a {kinds} object, but got {value!r}.")
