"""A SuperNode whose ``flwr-clientapp`` is loaded already: for every message a fork instead of a new process.

Flower's SuperExec starts the command ``flwr-clientapp`` for every message, and loading Flower takes it a second of a
core. Here another command of that name comes first in ``PATH``. It asks this process, in which Flower is loaded and
nothing else (no torch, no threads), to fork itself; the child does what Flower's own command does. If this process is
gone, Flower's own command is run.

This file is run as a script, so that nothing of lightning_fed is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

_NAME = "flwr-clientapp"
COMMAND = f"""#!{{python}} -IS
import json, os, socket, sys
try:
    link = socket.socket(socket.AF_UNIX)
    link.connect({{place!r}})
    link.sendall(json.dumps({{{{"args": sys.argv[1:], "cwd": os.getcwd()}}}}).encode())
except OSError:
    os.execv({{own!r}}, ["{_NAME}", *sys.argv[1:]])
"""
"""What comes first in ``PATH``."""


def main(command: list[str]) -> int:
    """Runs ``flower-supernode``, and forks for its messages until it ends.

    Args:
        command: Its arguments.

    Returns:
        Its exit status.

    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = shutil.which(_NAME, path=path)
    if own is None:
        sys.stderr.write('Expected Flower, but there is no `flwr-clientapp`: pip install "lightning-fed[flower]"\n')
        return 1
    with tempfile.TemporaryDirectory(prefix="flower-") as folder, socket.socket(socket.AF_UNIX) as listener:
        place, ours = f"{folder}/start", Path(folder) / "bin" / _NAME  # which only this user can reach
        ours.parent.mkdir()
        ours.write_text(COMMAND.format(python=sys.executable, place=place, own=own))
        ours.chmod(0o700)
        listener.bind(place)
        listener.listen(16)
        listener.settimeout(0.5)  # to see that the node has ended
        path = os.pathsep.join([str(ours.parent), path])
        node = subprocess.Popen(["flower-supernode", *command], env={**os.environ, "PATH": path})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: node.send_signal(number))
        import flwr.app
        import flwr.clientapp
        import flwr.supernode.cli  # noqa: F401

        children: list[int] = []
        while node.poll() is None:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            try:
                link, _ = listener.accept()
                with link, link.makefile() as text:
                    link.settimeout(5)
                    said = json.loads(text.read())
            except (OSError, ValueError):  # nobody, or nonsense
                continue
            child = os.fork()
            if child == 0:
                listener.close()
                _become(said)
            children.append(child)
        return node.returncode


def _become(said: dict[str, Any]) -> NoReturn:
    """Does what Flower's own command does, and ends."""
    from flwr.supernode.cli import flwr_clientapp

    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(said["cwd"])
        sys.argv = [_NAME, *said["args"]]
        flwr_clientapp()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
