"""Bugs injected into a copy of `lightning_fed/backends/wire/`, one at a time: how many does a rehearsal find?

    python benchmarks/rehearsal_mutations.py --seeds 1000

Each bug is a text substitution in a temporary copy of the package. A bug counts as found if any seed violates an
invariant, or ends with an error that the unchanged package does not raise.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning  # noqa: F401 - before the forks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

BUGS = {
    "a restarted client is not asked again": (
        "transport.py", "if connection is not None and again is not None:", "if False:"),
    "late answers are not counted": ("transport.py", "self.late += 1", "pass"),
    "the deadline is ten times too long": (
        "transport.py", "end, limit = time.monotonic() + self.deadline.seconds,",
        "end, limit = time.monotonic() + 10 * self.deadline.seconds,"),
    "the deadline is half as long": (
        "transport.py", "end, limit = time.monotonic() + self.deadline.seconds,",
        "end, limit = time.monotonic() + self.deadline.seconds / 2,"),
    "a lost connection is given up at once": (
        "transport.py", "if now - message.lost_at < self.deadline.reconnect:", "if False:"),
    "a lost connection is never given up": (
        "transport.py", "if now - message.lost_at < self.deadline.reconnect:", "if True:"),
    "a connection that is back counts as lost since its first loss": (
        "transport.py", "            message.lost_at = None\n            return None", "            return None"),
    "the time for the other clients is ignored": (
        "transport.py", "end = min(end, time.monotonic() + self.deadline.rest)", "pass"),
    "a fault counts as an answer": (
        "transport.py", "counts = isinstance(answer, Packet) and is_answer(answer)", "counts = True"),
    "an answer after the deadline check is dropped": (
        "transport.py", "answer = self._fetch(message, again)\n                    if",
        "answer = self._fetch(message, again) if time.monotonic() <= end else None\n                    if"),
    "answers wait in memory": (
        "transport.py", "_constant(answer) if in_turn else put_aside(answer)", "_constant(answer)"),
    "bytes of answers are not counted": (
        "transport.py", "answer = ready.pop(client)()\n            self.received += len(answer.data) if",
        "answer = ready.pop(client)()\n            self.received += 0 if"),
    "the answer file ignores the order": (
        "answer_file.py", "if file.readline().rstrip() != self._key:", "if not file.readline():"),
    "the answer file ignores the model": (
        "answer_file.py", "        order.update(data)\n", ""),
    "the answer file is not atomic": (
        "answer_file.py",
        'with atomic_write(self._path, f"-{os.getpid()}.partial") as partial, partial.open("wb") as file:',
        'self._path.parent.mkdir(parents=True, exist_ok=True)\n            with self._path.open("wb") as file:'),
    "the server forgets which state a client keeps": (
        "remote_client_store.py", "return self._of_round.get(client, self._rounds.get(client, -1))", "return -1"),
    "the kept state is off by one round": (
        "remote_client_store.py", "self._of_round[client] = start", "self._of_round[client] = start - 1"),
    "a failed round keeps the clients' states": (
        "remote_client_store.py", "{client: number for client, number in self._of_round.items() if client in clients}",
        "dict(self._of_round)"),
    "states that a resumed server needs are deleted": (
        "remote_client_store.py", "return self._checkpoints[0]", "return self._checkpoints[-1]"),
    "a resumed run has another name": (
        "remote_client_store.py", 'self.run = state.get("run") or uuid.uuid4().hex', "self.run = uuid.uuid4().hex"),
    "an update of a client that stored nothing is recorded as stored": (
        "clients_for_server.py", "if reported.keeps:", "if True:"),
    "a client trains without its lost state": (
        "server_for_client.py", "fit.store.newest(train_request.visit.client) != train_request.kept:", "False:"),
    "a late order of a killed server is obeyed": (
        "newest_order.py", "if newest > order:", "if False:"),
    "the client's states are never deleted": (
        "runner.py", "if train_request.needed:", "if False:"),
    "the reply belongs to any client": (
        "packets.py", 'read_packet(packet, "request", "update", "fault", client=client)',
        'read_packet(packet, "request", "update", "fault")'),
    "shares of a secure sum can be opened twice": (
        "secure_sum_client.py", "path.rename(claimed)", "claimed.write_bytes(path.read_bytes())"),
}  # fmt: skip
"""File in `backends/wire/`, old text and new text, by bug."""


def find_violation(seeds):
    """Returns the first violated invariant or failure; `None` if all seeds are good."""
    from lightning_fed.backends.rehearsal.rehearsal import rehearse
    from tests.backends.rehearsal.plans import build_plans

    plans = list(build_plans().values())
    for seed in range(seeds):
        outcome = rehearse(plans[seed % len(plans)], seed)
        if outcome.violations or outcome.failure:
            return f"seed {seed}: {(outcome.violations or [outcome.failure])[0]}"
    return None


def try_bug(file, old, new, seeds):
    """Returns the text about the bug, and the seconds; an empty text for an undetected bug.

    A child process imports the changed copy: a fork keeps the import of PyTorch and Lightning from the parent.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("lightning_fed", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(folder) / "lightning_fed/backends/wire" / file
        text = path.read_text()
        assert text.count(old) == 1, (file, old, text.count(old))
        path.write_text(text.replace(old, new))
        child = os.fork()
        if not child:
            sys.path[:] = [folder, *(entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, HERE))]
            warnings.simplefilter("ignore")
            try:
                found = find_violation(seeds) or ""
            except BaseException as error:
                found = repr(error)
            (Path(folder) / "found.txt").write_text(found)
            os._exit(0)
        os.waitpid(child, 0)
        return (Path(folder) / "found.txt").read_text(), time.monotonic() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    found = 0
    bugs = {name: bug for name, bug in BUGS.items() if options.only in name}
    for name, (file, old, new) in bugs.items():
        text, seconds = try_bug(file, old, new, options.seeds)
        found += bool(text)
        print(f"{'found' if text else 'MISSED'} after {seconds:.0f} s: {name}: {text[:300]}", flush=True)
    print(f"{found} of {len(bugs)} bugs found")


if __name__ == "__main__":
    main()
