"""A rehearsal's prediction, compared with real runs over Flower and NVFLARE: two sites on this machine, one slow.

    python benchmarks/rehearsal_real.py --out docs/guides/rehearsal.md

Each network first runs two rounds with one pass over the data. This run gives both sites' profiles (seconds for a
training step, and for a message). The rehearsal with these profiles predicts a longer run: more rounds, and two passes
in a visit.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import network_latency
import torch
from common import load_json, machine, parser, prepare, save_json, table, write_section
from network_halves import CLIENTS, OPTIONS, data_of, model
from rehearsal_halves import BATCHES, SECONDS, TIME_LIMIT, make_federation

from lightning_fed.backends.rehearsal.profiles import Profile, Sites
from lightning_fed.backends.rehearsal.rehearsal import Plan, rehearse
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.messages import digest

NETWORKS = {"Flower": network_latency.on_flower, "NVFLARE": network_latency.on_nvflare}
MEASURED, PREDICTED, PREDICTED_QUICK = (2, 1), (3, 2), (1, 1)  # rounds, and passes over the data in a visit
REPETITIONS = 5
INSTANT = 1e6  # megabits per second: the measured seconds of a message include the transfer


def run_real(train: Callable[[Path], None], rounds: int, epochs: int) -> dict[str, Any]:
    """Runs a deployment, and returns events, bytes, seconds and the final model's digest."""
    with tempfile.TemporaryDirectory(prefix="net-") as name:
        folder = Path(name)
        os.environ |= {
            "REHEARSAL_FOLDER": name, "REHEARSAL_ROUNDS": f"{rounds}", "REHEARSAL_EPOCHS": f"{epochs}",
        }  # fmt: skip
        train(folder)
        notes = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
        state = torch.load(folder / "run" / "last.ckpt", weights_only=True)["state_dict"]
    notes.sort(key=lambda note: note["time"])
    begin, end = (next(note for note in notes if note["what"] == what) for what in ("round", "end"))
    return {
        "notes": notes,
        "events": [[note["round"], note["client"]] for note in notes if note["what"] == "leaves"],
        "used": [[note["round"], note["client"]] for note in notes if note["what"] == "used"],
        "rounds": sum(note["what"] == "round" for note in notes),
        "bytes": sum(end["bytes"]),
        "seconds": end["time"] - begin["time"],
        "model": digest(state),
        "load": os.getloadavg()[0],
    }


def measure_profile(client: str, notes: list[dict[str, Any]]) -> Profile:
    """Medians of one site: seconds of a step, and seconds of a message (half of the remaining time)."""
    steps, rest = [], []
    for round in {note["round"] for note in notes if note["what"] == "trained"}:
        of_round = [note for note in notes if note.get("round") == round and note.get("client", client) == client]
        times = {note["what"]: note for note in of_round}
        trained = times["trained"]["seconds"]
        steps.append(trained / times["trained"]["steps"])
        rest.append(times["used"]["time"] - times["sent"]["time"] - trained)
    return Profile(
        seconds_per_step=statistics.median(steps), batches=BATCHES, latency=statistics.median(rest) / 2,
        bandwidth=INSTANT,
    )  # fmt: skip


def predict(profiles: dict[str, Profile], rounds: int, epochs: int) -> dict[str, Any]:
    os.environ["REHEARSAL_EPOCHS"] = f"{epochs}"
    plan = Plan(
        Sites(Profile(), profiles, Deadline(TIME_LIMIT)), make_federation, rounds, model=model,
        data=lambda client: data_of({"site": client}), trains=True, trainer=OPTIONS,
    )  # fmt: skip
    outcome = rehearse(plan, 0)
    assert not outcome.violations, outcome.violations
    assert outcome.failure is None, outcome.failure
    answered = [(machine, text.split()) for _, machine, text in outcome.log if text.startswith("has answered")]
    return {
        "events": [[int(words[-1]) - 1, machine] for machine, words in answered],
        "used": [[round, client] for round, result in outcome.visits.items() for client in result.received],
        "rounds": outcome.rounds,
        "bytes": round(outcome.megabytes * 1e6),
        "seconds": outcome.hours * 3600,
        "model": digest(outcome.visits[outcome.rounds - 1].model),
    }


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--report", action="store_true", help="only write the table of stored runs")
    arguments = made.parse_args()
    prepare(arguments)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    network_latency.HALVES = "rehearsal_halves"
    rows, loads, plan = [], [], PREDICTED_QUICK if arguments.quick else PREDICTED
    for network, train in NETWORKS.items():
        runs = []
        for number in range(1 + (1 if arguments.quick else REPETITIONS)):
            path = arguments.runs / "rehearsal_real" / f"{network}_{number}.json"
            if not path.exists() and not arguments.report:
                save_json(path, run_real(train, *(plan if number else MEASURED)))
            if path.exists():
                runs.append(load_json(path))
        if len(runs) < 2:
            continue
        profiles = {client: measure_profile(client, runs[0]["notes"]) for client in CLIENTS}
        predicted = predict(profiles, *plan)
        real = runs[1:]
        loads += [run["load"] for run in runs]

        def count_equal(name: str, real: Any = real, predicted: Any = predicted) -> str:
            equal = sum(run[name] == predicted[name] for run in real)
            return f"{equal}/{len(real)}"

        seconds = [run["seconds"] for run in real]
        median = statistics.median(seconds)
        rows.append([
            network, *map(count_equal, ("rounds", "bytes", "events", "used", "model")), f"{predicted['seconds']:.1f}",
            f"{median:.1f} ({min(seconds):.1f}-{max(seconds):.1f})",
            f"{100 * (predicted['seconds'] / median - 1):+.1f} %",
        ])  # fmt: skip
        print(rows[-1], profiles, flush=True)
    header = [
        "", "rounds", "bytes", "order of answers", "used answers", "final model, bit for bit", "predicted seconds",
        "real seconds", "difference of the median",
    ]  # fmt: skip
    first, second = SECONDS.values()
    text = (
        f"Two sites on one machine train McMahan's CNN, each on {BATCHES} batches. A training step sleeps {first} s at"
        f" one site and {second} s at the other.\n\nA short real run, with {MEASURED[0]} rounds and {MEASURED[1]} pass"
        " over the data per round, measures the time for a training step and for a message at each site. From these"
        f" times, the rehearsal predicts longer real runs, with {plan[0]} rounds and {plan[1]} passes per round.\n\n"
        'In the columns from "rounds" to "final model", k/n means that the prediction is exactly right for k of n real'
        " runs.\n\nScript: `python benchmarks/rehearsal_real.py --out docs/guides/rehearsal.md`. Machine:"
        f" {machine(1)}, flwr {version('flwr')}, nvflare {version('nvflare')}, load average up to {max(loads):.0f}."
        f"\n\n{table(header, rows)}"
    )
    write_section(arguments.out, "rehearsal", text)


if __name__ == "__main__":
    main()
