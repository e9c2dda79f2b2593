"""TLS of the control links, from the files that a configuration names."""

from __future__ import annotations

import ssl
from typing import Protocol

from tidekv.states.errors import InvalidConfig, cause_of


class TlsFiles(Protocol):
    """Options that name files; see `TransportSection`."""

    @property
    def tls_certificate(self) -> str:
        """PEM file with this worker's certificate; empty: none."""
        ...

    @property
    def tls_key(self) -> str:
        """PEM file with the certificate's key; empty: the certificate's file has it."""
        ...

    @property
    def tls_authority(self) -> str:
        """PEM file with the certificates that must sign a peer's certificate; empty: none."""
        ...


def listen_context(section: TlsFiles) -> ssl.SSLContext | None:
    """Return prefill's TLS context; None: no TLS. With an authority, peers need a certificate signed by it.

    Raises InvalidConfig for files that cannot be used, and for an authority without a certificate for this worker: the
    links would not be under TLS although the configuration asks for it. Blocks.
    """
    if not section.tls_certificate:
        if section.tls_authority:
            raise InvalidConfig("tls_authority is given, but listening under TLS needs tls_certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, section)
    if section.tls_authority:
        _load_authority(context, section)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def dial_context(section: TlsFiles) -> ssl.SSLContext | None:
    """Return decode's TLS context; None: no TLS. It trusts the authority, and presents its certificate if it has
    one.

    Raises InvalidConfig for files that cannot be used, and for a certificate without an authority. Blocks.
    """
    if not section.tls_authority:
        if section.tls_certificate:
            raise InvalidConfig("tls_certificate is given, but dialling under TLS needs tls_authority to check prefill")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_authority(context, section)
    if section.tls_certificate:
        _load_certificate(context, section)
    return context


def check_files(section: TlsFiles) -> None:
    """Raise InvalidConfig unless each file in the options has the expected content. Blocks."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if section.tls_certificate:
        _load_certificate(context, section)
    if section.tls_authority:
        _load_authority(context, section)


def _load_certificate(context: ssl.SSLContext, section: TlsFiles) -> None:
    try:
        context.load_cert_chain(section.tls_certificate, section.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        files = section.tls_certificate + (f" with tls_key {section.tls_key}" if section.tls_key else "")
        raise InvalidConfig(f"tls_certificate {files} cannot be used: {cause_of(error)}") from error


def _load_authority(context: ssl.SSLContext, section: TlsFiles) -> None:
    try:
        context.load_verify_locations(section.tls_authority)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"tls_authority {section.tls_authority} cannot be used: {cause_of(error)}") from error
