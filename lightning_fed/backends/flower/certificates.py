"""Certificates and keys for a federation: certificate authority, server certificate, and node keys."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lightning_fed.backends.site.owned_files import write_private

_HERE = ("localhost", "127.0.0.1", "::1")
"""The SuperLink's names on the server's machine, for the SuperLink's processes, the gateway and `flwr`."""


def write_certificates(folder: Path, names: Sequence[str], days: int = 365) -> list[Path]:
    """Writes the server's certificate and key for the host ``names``. Creates a missing certificate authority.

    The authority's certificate (``ca.crt``) is valid ten times longer than ``days``.
    """
    if (folder / "server.crt").exists():
        raise FileExistsError(
            f"The certificate {str(folder / 'server.crt')!r} already exists. For a new certificate from the same "
            "authority, remove `server.crt` and `server.key` first."
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = [] if (folder / "ca.key").exists() else _issue(folder, "ca", "Authority of a federation", 10 * days)
    return [*written, *_issue(folder, "server", names[0][:64], days, (*names, *_HERE))]


def write_node_key(folder: Path, name: str) -> list[Path]:
    """Writes a key pair for a node: ``<name>.key`` and ``<name>.key.pub``, as ``ssh-keygen -t ecdsa`` does."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private, public = folder / f"{name}.key", folder / f"{name}.key.pub"
    if private.exists():
        raise FileExistsError(f"The key {str(private)!r} already exists.")
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(
        private,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    )
    return [private, public]


def _issue(folder: Path, file: str, title: str, days: int, names: Sequence[str] = ()) -> list[Path]:
    key, is_authority = ec.generate_private_key(ec.SECP256R1()), not names
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # tolerates a slow clock
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        .add_extension(_usage(is_authority), critical=True)
    )
    if is_authority:
        return _write(folder, file, key, builder.issuer_name(subject).sign(key, hashes.SHA256()))
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signing = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    builder = (
        builder.issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName([*map(_general_name, dict.fromkeys(names))]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    return _write(folder, file, key, builder.sign(signing, hashes.SHA256()))


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(folder: Path, file: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> list[Path]:
    pem, paths = serialization.Encoding.PEM, [folder / f"{file}.key", folder / f"{file}.crt"]
    write_private(paths[0], key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    paths[1].write_bytes(certificate.public_bytes(pem))
    return paths
