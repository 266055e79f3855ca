"""Scripts in processes of their own that have Lightning imported: its import takes as long as a dozen small fits.

Each is forked from a process that has done nothing but import, so that it shares nothing with the tests but the files.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["lightning_fed"])


@dataclass
class Script:
    """A script that runs.

    Args:
        process: Its process.
        folder: The folder of what it writes to its outputs.
    """

    process: multiprocessing.Process
    folder: Path

    @property
    def output(self):
        return (self.folder / "1").read_text()

    @property
    def errors(self):
        return (self.folder / "2").read_text()


@contextmanager
def started(script, *arguments, cwd=ROOT, **environment):
    """Starts a module, or a file, with arguments and further variables; it is killed at the end, if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        for descriptor in (1, 2):
            (Path(folder) / f"{descriptor}").touch()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        everything = {**os.environ, "PYTHONPATH": path, **environment}
        texts = [str(argument) for argument in arguments]
        process = PROCESSES.Process(target=_run, args=(str(script), texts, str(cwd), everything, folder))
        process.start()
        try:
            yield Script(process, Path(folder))
        finally:
            process.kill()
            process.join()


def run(script, *arguments, seconds=280, code=0, **options):
    """Runs a module, or a file, to its end, a success unless `code` says otherwise; its output and its errors."""
    with started(script, *arguments, **options) as running:
        running.process.join(seconds)
        output, errors = running.output, running.errors
        assert running.process.exitcode == code, f"{running.process.exitcode}: {output[-4000:]}\n{errors[-4000:]}"
    return output, errors


def _run(script, arguments, cwd, environment, folder):
    for descriptor in (1, 2):
        with open(Path(folder) / f"{descriptor}", "ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    sys.path.insert(0, cwd)
    if script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
