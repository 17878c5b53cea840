"""What obstore raises, as the errors of this project.

What the library says is quoted to its first line, without secrets.
"""

from __future__ import annotations

import re

from cache.errors import (
    AddressError,
    CertificateError,
    ChangedError,
    DeniedError,
    ExistsError,
    MissingError,
    NoBucketError,
    RemoteError,
    SlowError,
    TruncatedError,
    UnsupportedError,
)

__all__ = ["translated"]

_KINDS: dict[str, tuple[type[RemoteError], str]] = {
    "FileNotFoundError": (MissingError, "there is no such object; check the address"),
    "NotFoundError": (MissingError, "there is no such object; check the address"),
    "PermissionDeniedError": (DeniedError, "access was denied; check credentials and the rights they give: {set}"),
    "UnauthenticatedError": (DeniedError, "credentials are missing or wrong; set {set}"),
    "PreconditionError": (ChangedError, "is no longer the object that was read before; open it again"),
    "AlreadyExistsError": (ExistsError, "is there already"),
    "NotSupportedError": (UnsupportedError, "the server does not support this request"),
    "NotImplementedError": (UnsupportedError, "the server does not support this request"),
    "InvalidPathError": (AddressError, "is no valid address"),
    "UnknownConfigurationKeyError": (AddressError, "the configuration has a key that obstore does not know"),
}


_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to an account's file, or for a public bucket GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or for a public "
    "container AZURE_SKIP_SIGNATURE=true",
    "https": "user name and password in the address, as https://user:password@host/path",
}
# What obstore's debug text of a failed connection or of a client that could not be made says, in this order.
_CAUSES: tuple[tuple[str, type[RemoteError], str], ...] = (
    (r"127\.0\.0\.1:0,", DeniedError, "the server redirects to another host, which must not get the session token"),
    (
        r"UnknownIssuer|CaUsedAsEndEntity|BadSignature",
        CertificateError,
        "TLS: no authority that this machine trusts has signed the server's certificate; if it is a private one, set "
        "{prefix}ROOT_CERTIFICATE to the file of its certificate",
    ),
    (
        r"InvalidCertificate\(\s*(Expired|NotValidYet)",
        CertificateError,
        "TLS: the server's certificate has expired or is not valid yet; renew it, and check this machine's clock",
    ),
    (
        r"NotValidForName",
        CertificateError,
        "TLS: the server's certificate is for another host; check the endpoint",
    ),
    (
        r"builder error[\s\S]*InvalidCertificate|No certificates found",
        CertificateError,
        "TLS: {prefix}ROOT_CERTIFICATE or {prefix}PROXY_CA_CERTIFICATE holds no PEM certificate that can be read",
    ),
    (r"InvalidCertificate\(", CertificateError, "TLS: the server's certificate is not accepted"),
    (
        r"InvalidMessage|InvalidContentType|CorruptMessage",
        CertificateError,
        "TLS: the server does not speak TLS there; check the port, or whether the endpoint is http",
    ),
    (
        r"AlertReceived|HandshakeFailure|PeerIncompatible|NoApplicationProtocol",
        CertificateError,
        "TLS: the server refuses the connection",
    ),
    (
        r"allow_http|BadScheme",
        AddressError,
        "the endpoint is http; allow that with {prefix}ALLOW_HTTP=true, or use https",
    ),
    (r"Invalid Access Key|InvalidAccessKey", DeniedError, "the key in AZURE_STORAGE_ACCOUNT_KEY is not base64"),
    (r"MissingAccount|Account must be specified", DeniedError, "set AZURE_STORAGE_ACCOUNT_NAME"),
    (
        r"OpenCredentials|DecodeCredentials|ServiceAccount|service account",
        DeniedError,
        "the file that GOOGLE_APPLICATION_CREDENTIALS names is missing or is no account's",
    ),
    (
        r"ReadPem|Error reading pem|KeyRejected",
        DeniedError,
        "the private key in the file that GOOGLE_APPLICATION_CREDENTIALS names cannot be read",
    ),
    (r"dns error", RemoteError, "no host of that name is known; check the endpoint and the region"),
    (
        r"ConnectionRefused",
        RemoteError,
        "error sending request: nothing listens there; check the endpoint and its port",
    ),
)


def translated(error: BaseException, where: str, says: str) -> RemoteError:
    """The error of ours for one of obstore's. where: printable address and range. says: its text without secrets."""
    detail, scheme = _detail(says), where.partition("://")[0]
    set_these = _CREDENTIALS.get(scheme, _CREDENTIALS["https"])
    if "NoSuchBucket" in says or "ContainerNotFound" in says or "The specified bucket does not exist" in says:
        return NoBucketError(f"{where}: there is no such bucket; check the address, the endpoint and the region")
    if "169.254.169.254" in says or "metadata.google.internal" in says:  # where a cloud's machines find theirs
        return DeniedError(f"{where}: no credentials were found ({detail}); set {set_these}")
    if "416 Range Not Satisfiable" in says:
        return ChangedError(f"{where}: the object is shorter than that; it changed since it was indexed")
    kind, meaning = _KINDS.get(type(error).__name__, (RemoteError, ""))
    if kind is UnsupportedError and "GET" in where:
        meaning = "the server ignores ranges; download the set, or stage it from a server that serves ranges"
    if kind is not RemoteError:
        return kind(f"{where}: {meaning.format(set=set_these)} ({detail})")
    for pattern, kind, meaning in _CAUSES:
        if re.search(pattern, says):
            return kind(f"{where}: {meaning.format(prefix=_PREFIXES.get(scheme, 'PACKER_HTTP_'))} ({detail})")
    if re.search(r"TimedOut|timed out|deadline has elapsed", says):
        return SlowError(f"{where}: no whole answer in time ({detail}); PACKER_REMOTE_TIMEOUT sets the seconds")
    if re.search(r"IncompleteMessage|UnexpectedEof|end of file before|IncompleteBody|response body", says):
        return TruncatedError(f"{where}: the answer broke off ({detail}); try again")
    return RemoteError(f"{where}: {detail}; check the network, the endpoint and the region")


def _detail(says: str) -> str:
    """The first line of a message, and what the server said of the cause, in at most some 300 characters."""
    line = says.partition("\n")[0].partition(": <?xml")[0].strip().rstrip(":;. ")
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", says)
    shown = line if len(line) <= 300 else line[:297] + "..."
    return f"{shown}, {code[1]}" if code and code[1] not in shown else shown
