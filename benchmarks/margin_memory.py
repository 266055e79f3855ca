"""Peak memory of FedMargin's analysis on large inputs, each in a separate process.

The script measures the process's peak resident memory twice: with only the inputs, and with the computation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from common import machine, parser, peak_bytes, prepare, table, write_section
from torch import Tensor

from lightning_fed.algorithms.fedmargin import class_sums
from lightning_fed.metrics.functional import maximum_mean_discrepancy, softmax_entropy

WIDTH, CLASSES = 512, 21
WORDS = {
    "mmd": "`maximum_mean_discrepancy`, {0:,} x 512 against {0:,} x 512, median bandwidth",
    "sums": "`class_sums`, {0:,} feature maps of 512 x 64 x 64",
    "entropy": "`softmax_entropy`, {0:,} logit maps of 21 x 256 x 256",
}
SAMPLES = {"mmd": 20_000, "sums": 64, "entropy": 64}
QUICK = {"mmd": 1000, "sums": 2, "entropy": 2}


def inputs_of(part: str, samples: int) -> tuple[Tensor, ...]:
    if part == "mmd":
        return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)
    if part == "sums":
        return torch.randn(samples, WIDTH, 64, 64), torch.randint(CLASSES, (samples, 512, 512), dtype=torch.uint8)
    return (torch.randn(samples, CLASSES, 256, 256),)


def measure(part: str, samples: int) -> dict[str, Any]:
    inputs = inputs_of(part, samples)
    before, begin = peak_bytes(), time.process_time()
    if part == "mmd":
        maximum_mean_discrepancy(*inputs)
    elif part == "sums":
        class_sums(*inputs, CLASSES)
    else:
        softmax_entropy(*inputs)
    return {"input_bytes": before, "peak_bytes": peak_bytes(), "cpu_s": time.process_time() - begin}


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--parts", nargs="+", default=list(WORDS), choices=list(WORDS), help="what to measure")
    made.add_argument("--measure", default=None, choices=list(WORDS), help=argparse.SUPPRESS)
    made.add_argument("--samples", type=int, default=None, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments.samples)))
        return
    rows = []
    for part in arguments.parts:
        samples = (QUICK if arguments.quick else SAMPLES)[part]
        command = [sys.executable, __file__, "--measure", part, "--samples", str(samples)]
        command += ["--threads", str(arguments.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        mebibytes = [result["input_bytes"] / 2**20, result["peak_bytes"] / 2**20]
        rows.append([WORDS[part].format(samples), *(f"{value:.0f}" for value in mebibytes), f"{result['cpu_s']:.1f}"])
    text = (
        f"`python benchmarks/margin_memory.py --out benchmarks/results/method_costs.md`."
        f" {machine(arguments.threads)}.\n\n"
    )
    header = ["", "peak resident MiB, package and inputs alone", "with the computation", "s, process"]
    write_section(arguments.out, "margin memory", text + table(header, rows))


if __name__ == "__main__":
    main()
