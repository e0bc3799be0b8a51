"""Certificates of the webhook: made, read from the Secret, written into it. Called by keeper.py.

The Secret holds four texts in PEM form: `ca.crt`, the authorities to trust, oldest first; `ca.key`, the key
of the last of them; `tls.crt` and `tls.key`, what is served. What cannot be read counts as not there.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvist_operator.webhook.rotation import Lifetimes, Served

Key = ec.EllipticCurvePrivateKey
Time = datetime.datetime
CA, CA_KEY, CHAIN, CHAIN_KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
# Certificates are valid from this long before they are made, since clocks differ.
SKEW: Final = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Material:
    """`signer` belongs to the last authority, `serving_key` to `serving`; None where they do not match."""

    authorities: tuple[x509.Certificate, ...] = ()
    signer: Key | None = None
    serving: x509.Certificate | None = None
    serving_key: Key | None = None

    @property
    def served(self) -> Served | None:
        """What rotation.py decides on; None when nothing can be served."""
        if self.serving is None or self.serving_key is None:
            return None
        issuer = next((ca for ca in reversed(self.authorities) if signed_by(self.serving, ca)), None)
        return Served(
            authority=None if issuer is None else fingerprint(issuer),
            since=self.serving.not_valid_before_utc + SKEW,
            until=self.serving.not_valid_after_utc,
            names=frozenset(names_of(self.serving)),
        )


def read(data: Mapping[str, bytes]) -> Material:
    """From a Secret's decoded data."""
    authorities, chain = certificates(data.get(CA, b"")), certificates(data.get(CHAIN, b""))
    signer, serving_key = _key(data.get(CA_KEY, b"")), _key(data.get(CHAIN_KEY, b""))
    serving = chain[0] if chain else None
    return Material(
        authorities,
        signer if authorities and _matches(authorities[-1], signer) else None,
        serving,
        serving_key if serving is not None and _matches(serving, serving_key) else None,
    )


def write(material: Material) -> dict[str, bytes]:
    """What `read` reads back."""
    serving = () if material.serving is None else (material.serving,)
    return {
        CA: bundle(material.authorities),
        CA_KEY: _pem(material.signer),
        CHAIN: bundle(serving),
        CHAIN_KEY: _pem(material.serving_key),
    }


def add_authority(material: Material, kept: frozenset[str], now: Time, lifetimes: Lifetimes) -> Material:
    """A new authority after those in `kept`; what is served stays."""
    key = ec.generate_private_key(ec.SECP256R1())
    number = x509.random_serial_number()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvist-webhook-{number:x}"[:64])])
    certificate = (
        _draft(subject, subject, key, number, now, now + lifetimes.authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return replace(trim(material, kept), authorities=(*_those(material, kept), certificate), signer=key)


def add_serving(material: Material, names: tuple[str, ...], now: Time, lifetimes: Lifetimes) -> Material:
    """A new serving certificate by the last authority; ValueError without its key."""
    if not material.authorities or material.signer is None:
        raise ValueError("the key of the newest authority is not there")
    authority, key = material.authorities[-1], ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    until = min(now + lifetimes.serving, authority.not_valid_after_utc)
    certificate = (
        _draft(subject, authority.subject, key, x509.random_serial_number(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(material.signer.public_key()), critical=False
        )
        .sign(material.signer, hashes.SHA256())
    )
    return replace(material, serving=certificate, serving_key=key)


def trim(material: Material, kept: frozenset[str]) -> Material:
    """Only the authorities in `kept`."""
    return replace(material, authorities=_those(material, kept))


def certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    """All of them; none when it is not PEM."""
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except ValueError:
        return ()


def bundle(found: tuple[x509.Certificate, ...]) -> bytes:
    """PEM of several."""
    return b"".join(item.public_bytes(serialization.Encoding.PEM) for item in found)


def fingerprint(certificate: x509.Certificate) -> str:
    """What tells authorities apart."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority's key made it."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """DNS names and addresses that it is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(str(item.value) for item in found)


def _draft(
    subject: x509.Name, issuer: x509.Name, key: Key, number: int, now: Time, until: Time
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(now - SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _those(material: Material, kept: frozenset[str]) -> tuple[x509.Certificate, ...]:
    return tuple(item for item in material.authorities if fingerprint(item) in kept)


def _key(pem: bytes) -> Key | None:
    try:
        found = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return found if isinstance(found, ec.EllipticCurvePrivateKey) else None


def _pem(key: Key | None) -> bytes:
    if key is None:
        return b""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _matches(certificate: x509.Certificate, key: Key | None) -> bool:
    return key is not None and certificate.public_key() == key.public_key()
