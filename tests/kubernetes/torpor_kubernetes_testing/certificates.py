"""The keys of one control plane: an authority, a serving certificate for 127.0.0.1, the service accounts' key.

Made anew for each control plane and valid for a day; nothing outside its temporary folder trusts them.
"""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = datetime.timedelta(days=1)
CLOCK_SLACK = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class KeyFiles:
    ca: Path
    serving_certificate: Path
    serving_key: Path
    service_account_key: Path
    service_account_public_key: Path


def write_keys(folder: Path) -> KeyFiles:
    """Create the keys in `folder`, which must exist and be private."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("torpor test authority")
    ca = (
        _builder(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    addresses = [
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.DNSName("localhost"),
        x509.DNSName("kubernetes.default.svc"),
    ]
    certificate = (
        _builder(_name("kube-apiserver"), ca_name, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    account_key = ec.generate_private_key(ec.SECP256R1())
    files = KeyFiles(
        ca=folder / "ca.crt",
        serving_certificate=folder / "apiserver.crt",
        serving_key=folder / "apiserver.key",
        service_account_key=folder / "service-accounts.key",
        service_account_public_key=folder / "service-accounts.pub",
    )
    files.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    files.serving_certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.serving_key.write_bytes(_private_pem(key))
    files.service_account_key.write_bytes(_private_pem(account_key))
    files.service_account_public_key.write_bytes(
        account_key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return files


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + VALID_FOR)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    # kube-apiserver's parser of service account keys takes "EC PRIVATE KEY", not every PKCS#8.
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
