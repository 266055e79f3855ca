"""Scripts in separate processes with Lightning already imported: the import takes as long as a dozen small fits.

Each script is forked from a process used only for imports, and shares only files with the tests.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CAN_FORK = "forkserver" in multiprocessing.get_all_start_methods()
PROCESSES = multiprocessing.get_context("forkserver" if CAN_FORK else "spawn")
# The last two modules import the tests' models and Flower: 1.3 seconds in each process otherwise.
PRELOADED = ["tests.warm_imports", "tests.resume_script", "tests.backends.ddp.sites"]
if CAN_FORK:
    PROCESSES.set_forkserver_preload(PRELOADED)  # for tests that use `PROCESSES` without `start`


@dataclass
class Script:
    """A running script.

    Args:
        process: The process.
        folder: Folder with the captured outputs.
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
    """Starts a module or a file with arguments and environment variables; kills the process group on exit."""
    with tempfile.TemporaryDirectory() as folder:
        for descriptor in (1, 2):
            (Path(folder) / f"{descriptor}").touch()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        everything = {**os.environ, "PYTHONPATH": path, **environment}
        texts = [str(argument) for argument in arguments]
        process = start(_run, str(script), texts, str(cwd), folder, environment=everything)
        try:
            yield Script(process, Path(folder))
        finally:
            end(process)


def run(script, *arguments, seconds=280, code=0, **options):
    """Runs a module or a file, checks the exit code against `code`, and returns output and errors."""
    with started(script, *arguments, **options) as running:
        running.process.join(seconds)
        output, errors = running.output, running.errors
        assert running.process.exitcode == code, f"{running.process.exitcode}: {output[-4000:]}\n{errors[-4000:]}"
    return output, errors


def start_server():
    """Starts the process used only for imports; the package would start a process with fewer imports."""
    if CAN_FORK:
        PROCESSES.set_forkserver_preload(PRELOADED)
        multiprocessing.forkserver.ensure_running()


def start(function, *arguments, environment=None):
    """Starts a process for a function in a module, as leader of a process group."""
    start_server()
    process = PROCESSES.Process(target=_call, args=(function, arguments, dict(environment or os.environ)))
    process.start()
    return process


def end(process):
    """Kills a process and its children, unless already ended."""
    if process.is_alive() and hasattr(os, "killpg"):
        with suppress(ProcessLookupError):  # not a group leader yet
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _call(function, arguments, environment):
    if hasattr(os, "setsid"):
        os.setsid()
    assert not CAN_FORK or "lightning.pytorch" in sys.modules, "the imports failed before the fork"
    multiprocessing.set_start_method(None, force=True)  # as in a user's script
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def _run(script, arguments, cwd, folder):
    for descriptor in (1, 2):
        with open(Path(folder) / f"{descriptor}", "ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    if script.endswith(".py"):
        sys.path[:] = [str(Path(script).parent), *(path for path in sys.path if path != str(ROOT))]
        runpy.run_path(script, run_name="__main__")
    else:
        sys.path.insert(0, cwd)
        runpy.run_module(script, run_name="__main__", alter_sys=True)
