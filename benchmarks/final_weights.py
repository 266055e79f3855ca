"""Bit-for-bit comparison of final weights between two versions of the package, with one small fit per method.

    python benchmarks/final_weights.py --out before.json        # in the first version
    python benchmarks/final_weights.py --compare before.json    # in the second version, on the same machine

The fits are from `tests/draws_script.py`: each method, and a few combinations, on five small clients.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.draws_script import JOBS


def digest(state):
    content = hashlib.sha256()
    for name, value in sorted(state.items()):
        content.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the digests")
    parser.add_argument("--compare", type=Path, help="file of digests to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    digests = {}
    for name, job in JOBS.items():
        torch.manual_seed(0)
        digests[name] = digest(job({}))
        print(f"{name:24} {digests[name][:16]}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(digests, indent=1))
    if options.compare:
        before = json.loads(options.compare.read_text())
        unlike = sorted(name for name in digests if before.get(name) != digests[name])
        print(f"{len(digests) - len(unlike)} of {len(digests)} fits end with the same bits; unlike: {unlike or 'none'}")
        sys.exit(bool(unlike))


if __name__ == "__main__":
    main()
