"""``lightning-fed certify``: writes or verifies the signed certificate of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed certify`` with ``args``. Exits with status 1 if the run differs from the certificate."""
    parser = argparse.ArgumentParser(
        prog="lightning-fed certify",
        description="Write or verify one signed JSON file about a run with the callback `KeepRounds`: participants,"
        " rounds, rule, steps, versions, metrics (with epsilon and evaluations), heads of the sites' records, digests.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the callback's folder")
    parser.add_argument("--key", type=Path, help="the server's private key, to write a certificate")
    parser.add_argument("--check", type=Path, metavar="KEY", help="the server's public key, to verify the certificate")
    parser.add_argument(
        "--out", type=Path, default=Path("certificate.json"), help="the certificate (default: %(default)s)"
    )
    options = parser.parse_args(args)
    if (options.key is None) == (options.check is None):
        parser.error("Expected either `--key`, to write a certificate, or `--check`, to verify a certificate.")
    from lightning_fed.backends.kept_rounds.certificate import find_changes, write_certificate
    from lightning_fed.backends.site.signatures import read_private_key, read_public_key

    if options.check is not None:
        changes = find_changes(options.run, options.out.read_text(), read_public_key(options.check.read_text()))
        sys.stdout.writelines(f"changed: {name}\n" for name in changes)
        if changes:
            raise SystemExit(1)
        sys.stdout.write(f"{options.out}: nothing has changed.\n")
        return
    key = read_private_key(options.key)
    assert key is not None
    options.out.write_text(write_certificate(options.run, key))
    sys.stdout.write(f"The certificate: {options.out}\n")
