"""Imports for the processes of `warm_process.py`, and a record of imports by the package.

`python -m tests.warm_imports` prints the record as JSON. Lightning may load some modules before the package, so
the record has requested imports and added modules.
"""

import builtins
import importlib
import json
import sys

RECORD = {}


def record_imports(name):
    """Imports a module after Lightning, and records requests of the package and added modules."""
    for library in ("lightning", "torchmetrics"):
        importlib.import_module(library)
    before, asked, original = set(sys.modules), set(), builtins.__import__

    def recording(name, globals=None, locals=None, fromlist=(), level=0):
        if (globals or {}).get("__name__", "").startswith("lightning_fed") and level == 0:
            asked.add(name.partition(".")[0])
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = recording
    try:
        importlib.import_module(name)
    finally:
        builtins.__import__ = original
    added = set(sys.modules) - before
    RECORD.update(asked=sorted(asked), added=sorted(added))


if __name__ == "__main__":
    # Not the record in this module, `__main__`, but the record at the first import.
    from tests.warm_imports import RECORD as FIRST_RECORD

    sys.stdout.write(json.dumps(FIRST_RECORD))
else:
    record_imports("lightning_fed.trainer")
    importlib.import_module("lightning_fed.callbacks")
