"""Entry point for ``python -m lightning_fed``, equal to the command ``lightning-fed``."""

from lightning_fed.cli.main import main

if __name__ == "__main__":
    main()
