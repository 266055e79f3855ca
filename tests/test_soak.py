"""A long fit uses no more in the last third than in the second: memory, descriptors, threads and files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 300
MODEL = 4 * (8 * 256 + 256 * 1024)  # bytes of the large layers
MOST = MODEL // 20  # per round; a copy of one model in every twentieth round would exceed the limit


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which Linux has")
@pytest.mark.parametrize("method", ["fedavgm", "fedma"])
def test_what_a_process_holds_does_not_grow(method, tmp_path):
    command = [sys.executable, "-m", "tests.soak_script", str(tmp_path), str(ROUNDS), method]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    third = ROUNDS // 3
    parts = {name: (values[third : 2 * third], values[2 * third :]) for name, values in seen.items()}
    assert all(len(second) == len(last) == third for second, last in parts.values())
    second, last = parts["bytes"]
    assert (sum(last) - sum(second)) / third / third < MOST
    for name in ("descriptors", "threads", "files"):
        second, last = parts[name]
        assert max(last) <= max(second), name
