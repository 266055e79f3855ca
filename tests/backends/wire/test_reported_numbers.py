"""The page's table with all numbers from a client: every field in a message, with the bounds in the code.

``python -m tests.backends.wire.test_reported_numbers`` writes the table into the page.
"""

import math
from dataclasses import fields
from pathlib import Path

from lightning_fed import messages
from lightning_fed.algorithms import channels, fednova
from lightning_fed.algorithms.fedma.matching_pass import COUNTS
from lightning_fed.algorithms.fedmargin import prototype_messages
from lightning_fed.algorithms.fednova import FedNova
from lightning_fed.algorithms.qffl import QFFL
from lightning_fed.backends.site import policy
from lightning_fed.backends.wire import clients_for_server, packets
from lightning_fed.callbacks.evaluation import bounds, data_pass, report
from lightning_fed.fit import round_log
from lightning_fed.method import METHODS
from lightning_fed.model import entries
from lightning_fed.server import server

PAGE = Path(__file__).parents[3] / "docs" / "dev" / "design" / "privacy.md"
HEAD = "| reported number | fields of the message | use on the server | bounds |\n|---|---|---|---|\n"


def of(module, name):
    """A private number in a module."""
    return vars(module)[f"_{name}"]


def power(value):
    """Formats powers (base 10 or 2), and other numbers with separators."""
    for base in (10, 2):
        exponent = round(math.log(value, base))
        if abs(exponent) > 3 and value == float(base) ** exponent:
            return f"{base}^{exponent}"
    return f"{value:,}"


SAMPLES = f"1 to {power(messages.MOST_SAMPLES)}"
COUNT = f"per example at most {of(bounds, 'MOST_COUNTS')}, or {of(bounds, 'MOST_COUNTS')} times the median"
SPREADS = f"at most {of(bounds, 'FARTHEST')} spreads from the median"
LARGEST = power(of(entries, "MOST_MEAN_SQUARE"))
FAR = 2 ** of(channels, "OCTAVES")
NEAR = 2 ** of(fednova, "OCTAVES")
EPOCHS = NEAR * 2 ** of(fednova, "BATCH_SIZES")
MANUAL, TIMES = of(clients_for_server, "MANUAL_STEPS"), of(clients_for_server, "MOST_TIMES")
WHOLE = f"whole, from 0 to {power(of(packets, 'MANY'))}"

ROWS = [
    ("examples", "num_samples", "weight in averages; integer entries", f"{SAMPLES}; less with `MaxSamples` or"
     " `UniformWeights`"),
    (
        "shared entries",
        "state",
        "the aggregate",
        f"names, shapes, dtypes of the broadcast; finite; root mean square up to {LARGEST}; step"
        f" up to {power(of(server, 'FARTHEST'))} model lengths; update steps",
    ),
    (
        "other tensors",
        "extras",
        "as the method declares",
        f"finite; root mean square up to {LARGEST}; bounds in the rows below. A mean of tensors, such as"
        " the control variates of SCAFFOLD, has no other bound",
    ),
    (
        "optimizer steps",
        "steps",
        "`global_step`",
        f"planned steps, {MANUAL} times as many with manual optimization; at most"
        f" {power(of(clients_for_server, 'MOST_STEPS'))}; counts as at most {TIMES} times the median",
    ),
    ("steps of per-step schedulers, loss scale (`16-mixed`)", "after", "the visit with the median number of steps sets"
     " both", "as for optimizer steps; scale from "
     + " to ".join(power(scale) for scale in of(clients_for_server, 'LOSS_SCALES'))),
    (
        "logged numbers",
        "metrics",
        "`clients/...`",
        f"finite; at most {of(round_log, 'MOST_METRICS')} for a client, {of(round_log, 'MOST_NAMES')} names in a fit",
    ),
    ("omitted entries", "unsent same", "the server fills in the sent values", f"{WHOLE}; the missing entries"),
    ("state held by the client", "keeps", "record of the client's last round", "affects this client only"),
    ("last line of the site's record", "head", "returned with the next order", "a number and a digest; affects this"
     " client only"),
    ("requested rows", "rows", "rows to send", "existing rows; in a secure sum, shares that fit published digests"),
    ("clients of a node", "clients", "orders to the node", "`clients` assigns each client to a key"),
    ("length of steps (FedNova)", "length", "divisor, and the mean length",
     f"not negative; per planned epoch and per planned work, both at most {NEAR} to {2 * NEAR} times above or below the"
     f" median with `local_steps`, and {EPOCHS} to {2 * EPOCHS} times with epochs, because batch sizes differ; with"
     " momentum 1 / (1 - momentum) times as far"),
    ("loss of the global model (q-FedAvg)", "qffl:loss", "weight, to the power of q",
     f"not negative, finite, at most {FAR} to {2 * FAR} times the median; with q <"
     " 1 also a bounded slope"),
    ("prototypes, margins (FedMargin)", "prototypes:", "averages, weights",
     f"valid shapes and counts; at most {of(prototype_messages, 'OUTLYING'):g} times the median"),
    ("counts per class (FedMA)", COUNTS, "weights in the last layer", "integers, not negative"),
    ("BatchNorm count, mean, variance", "batch_norm:", "pooled",
     "finite, not negative; counts as examples; the pool is checked"),
    (
        "evaluation: examples",
        "num_samples",
        "weight",
        f"{SAMPLES}; at most {of(bounds, 'MOST_CHANGE')} times more or fewer than in the first evaluation; at most"
        f" {of(bounds, 'MOST_EXAMPLES')} times the number in training (`MaxSamples` counts) or the median, and"
        f" {power(of(bounds, 'MOST_BY_MEDIAN'))} times the median",
    ),
    (
        "evaluation: sums and their weights",
        "logged",
        "the server's values",
        f"{SPREADS}; a weight counts as at most {of(data_pass, 'MOST_TIMES')} times the median for each example; a"
        f" single negative loss at most {of(bounds, 'FARTHEST_NEGATIVE')} median distances",
    ),
    (
        "evaluation: metric states",
        "states metrics",
        "the server's metrics",
        f"shapes of the server's metric; value {SPREADS}; counts not negative, {COUNT}; at most"
        f" {of(bounds, 'MOST_BATCHES')} updates for each example",
    ),
    (
        "evaluation: values",
        "values",
        "`client/<id>/...`, spread, worst tenth",
        f"at most {power(of(report, 'MOST_NAMES'))}; equal to the value from the sums and states; {SPREADS}",
    ),
    ("evaluation: variances of values", "variances", "standard error of the mean over clients", "finite, not negative"),
    ("evaluation: flags of values", "partial shown higher_is_better stays", "how a value is shown",
     "names with values; `partial` counts if most clients agree"),
    ("examples per class", "support", "table of clients", f"not negative; {COUNT}"),
]  # fmt: skip

NO_NUMBERS = {"client", "stage", "reason"}
"""Fields with a client's name, a step in a secure sum, or a fault."""


def table():
    return HEAD + "".join(f"| {' | '.join((name, _code(names), use, bound))} |\n" for name, names, use, bound in ROWS)


def _code(names):
    return ", ".join(f"`{name}`" for name in names.split())


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(), f"Run `python -m {__spec__.name}`."


def test_the_table_has_every_number():
    """All packets' fields, an evaluation's fields, and each method's single numbers."""
    sent = {field for header, groups in of(policy, "CONTENTS").values() for field in header | groups.keys()}
    sent |= {field.name for field in fields(report.EvaluationReport)} | {COUNTS}
    rules = [rule for rule in METHODS.values() if isinstance(rule, type) and issubclass(rule, channels.ChannelRule)]
    assert {FedNova, QFFL} <= set(rules)
    sent |= {title for rule in rules for title, one in rule.channels.items() if one.up and one.form != "entry"}
    named = {field for _, names, _, _ in ROWS for field in names.split()}
    assert named - {"prototypes:", "batch_norm:"} == sent - NO_NUMBERS


if __name__ == "__main__":
    page = PAGE.read_text()
    start = page.index("| reported number |")
    end = next(
        (page.index(line, start) for line in page[start:].splitlines(True) if not line.startswith("|")), len(page)
    )
    PAGE.write_text(page[:start] + table() + page[end:])
