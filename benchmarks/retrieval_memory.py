"""Peak memory of MAP@R with Stanford Online Products' number of test images, in a separate process.

The script measures the process's peak resident memory twice: with only the embeddings, and with the computation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any, Literal

import torch
from common import machine, parser, peak_bytes, prepare, table, write_section

from lightning_fed.metrics import MeanAveragePrecisionAtR

WIDTH, PER_CLASS, BATCH = 64, 5, 512
R: dict[str, Literal[10, "relevant"]] = {"map": 10, "relevant": "relevant"}
WORDS = {
    "map": "`MeanAveragePrecisionAtR(10)`, {0:,} x 64",
    "relevant": '`MeanAveragePrecisionAtR("relevant")`, {0:,} x 64',
}
SAMPLES, QUICK = 60_000, 2000


def measure(part: str, samples: int) -> dict[str, Any]:
    labels = torch.arange(samples) // PER_CLASS
    embeddings = torch.randn(samples // PER_CLASS + 1, WIDTH)[labels] + torch.randn(samples, WIDTH)
    before, begin = peak_bytes(), time.process_time()
    metric = MeanAveragePrecisionAtR(R[part])
    for batch in zip(embeddings.split(BATCH), labels.split(BATCH), strict=True):
        metric.update(*batch)
    value = float(metric.compute())
    return {
        "input_bytes": before,
        "peak_bytes": peak_bytes(),
        "cpu_s": time.process_time() - begin,
        "value": value,
    }


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--measure", default=None, choices=list(WORDS), help=argparse.SUPPRESS)
    made.add_argument("--samples", type=int, default=None, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments.samples)))
        return
    rows = []
    samples = QUICK if arguments.quick else SAMPLES
    for part, words in WORDS.items():
        command = [sys.executable, __file__, "--measure", part, "--samples", str(samples)]
        command += ["--threads", str(arguments.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        mebibytes = [result["input_bytes"] / 2**20, result["peak_bytes"] / 2**20]
        rows.append([words.format(samples), *(f"{value:.0f}" for value in mebibytes), f"{result['cpu_s']:.1f}"])
    text = (
        f"`python benchmarks/retrieval_memory.py --out benchmarks/results/method_costs.md`."
        f" {machine(arguments.threads)}.\n\n"
    )
    header = ["", "peak resident MiB, package and inputs alone", "with the computation", "s, process"]
    write_section(arguments.out, "retrieval memory", text + table(header, rows))


if __name__ == "__main__":
    main()
