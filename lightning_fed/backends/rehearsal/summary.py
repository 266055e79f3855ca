"""Summary of many simulated runs of a deployment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lightning_fed.backends.rehearsal.rehearsal import Outcome, Plan
from lightning_fed.console import markdown_table

_QUANTILES = (0.05, 0.5, 0.95)
_LAST_EVENTS = 6


def find_quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value ``v`` with at least the fraction ``share`` of values at or below ``v``.

    Example:
        >>> find_quantile([3.0, 1.0, 2.0, 4.0], 0.5), find_quantile([3.0, 1.0], 1.0)
        (2.0, 3.0)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def rank_outcomes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sorts simulated runs, worst first: violated guarantees, few rounds, exclusions, long duration."""
    return sorted(
        outcomes, key=lambda one: (-len(one.violations), one.rounds, -sum(one.excluded.values()), -one.hours, one.seed)
    )


def suggest_deadline(plan: Plan, outcomes: Sequence[Outcome]) -> str:
    """Suggests arguments for :class:`Deadline` from the answer times in simulated fits.

    The time limit is ``seconds = 1.2 * q(99 %)``, with quantiles q of the answer times. After ``min_clients`` answers,
    a shorter limit starts, ``rest = q(95 %) - q(50 %)``. For ``min_clients``, the function suggests a number of valid
    updates reached in 95 % of the rounds.
    """
    times = [seconds for outcome in outcomes for seconds in outcome.answer_seconds]
    if not times:
        return "No client has answered: see the event logs."
    counts = [len(result.received) for outcome in outcomes for result in outcome.visits.values()]
    enough = max(1, int(find_quantile(counts, 0.05))) if counts else 1
    median, late, latest = (find_quantile(times, share) for share in (0.5, 0.95, 0.99))
    rest = max(1, math.ceil(late - median))
    return (
        f"Suggested: Deadline({math.ceil(1.2 * latest)}, min_clients={enough}, rest={rest}) and "
        f"Faults(min_clients={max(1, enough // 2)}), for {len(plan.sites.sites)} clients."
    )


def write_summary(plan: Plan, outcomes: Sequence[Outcome]) -> str:
    """Formats the results of simulated deployments as Markdown.

    Shows the probability to complete a number of rounds, durations, traffic, and excluded clients with reasons.
    """
    count = len(outcomes)
    reached = [["rounds", "probability"]]
    for rounds in sorted({math.ceil(plan.rounds * part / 4) for part in (1, 2, 3, 4)}):
        reached.append([f"{rounds}", f"{sum(one.rounds >= rounds for one in outcomes) / count:.3f}"])
    costs = [["", *(f"{share:.0%}" for share in _QUANTILES)]]
    for name in ("hours", "megabytes"):
        values = [getattr(one, name) for one in outcomes]
        costs.append([name, *(f"{find_quantile(values, share):.4g}" for share in _QUANTILES)])
    excluded = Counter[tuple[str, str]]()
    for one in outcomes:
        excluded.update({(str(client), reason): number for (client, reason), number in one.excluded.items()})
    table = [["client", "excluded rounds per run", "reason"]]
    table += [[client, f"{number / count:.3f}", reason] for (client, reason), number in excluded.most_common(20)]
    parts = [
        f"{count} rehearsals of {plan.rounds} rounds with {len(plan.sites.sites)} clients.",
        markdown_table(reached),
        markdown_table(costs),
        markdown_table(table) if excluded else "No client was excluded.",
        suggest_deadline(plan, outcomes),
    ]
    failures = Counter(one.failure for one in outcomes if one.failure is not None)
    parts += [f"{number} runs ended early: {reason}" for reason, number in failures.most_common(5)]
    violations = [text for one in outcomes for text in one.violations]
    parts.append("\n".join(violations[:10]) if violations else f"All invariants hold in {count} seeds.")
    worst = "\n\n".join(
        f"Seed {one.seed}: {one.rounds} rounds, {sum(one.excluded.values())} exclusions, {one.hours:.2f} hours\n"
        + write_log(one, _LAST_EVENTS)
        for one in rank_outcomes(outcomes)[:3]
    )
    return "\n\n".join([*parts, f"The worst seeds, with the last events:\n\n{worst}"])


def write_log(outcome: Outcome, last: int | None = None) -> str:
    """Formats the ``last`` events in a simulated fit, one per line; by default all events."""
    events = outcome.log if last is None else outcome.log[-last:]
    return "\n".join(
        f"{int(time // 3600)}:{int(time % 3600 // 60):02d}:{time % 60:06.3f} {machine or '-'}: {text}"
        for time, machine, text in events
    )
