"""Which modules' examples are run: those of the Flower engine need Flower, an extra."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["lightning_fed/engines/flower/*.py", "tests/engines/*.py"]
