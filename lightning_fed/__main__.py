"""``python -m lightning_fed`` is ``lightning-fed``."""

from lightning_fed.cli.main import main

if __name__ == "__main__":
    main()
