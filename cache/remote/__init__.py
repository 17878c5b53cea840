"""Bytes elsewhere: object stores and web servers, through obstore (extra `remote`).

    url      addresses, printed without secrets; proxies and certificates, from the environment
    store    the one file that knows obstore, and what it says goes wrong; time-outs and retries
    client   one address for a process, its threads and its forks

Nothing here knows shards or data sets. `import cache.remote` loads no obstore.
"""

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
from cache.remote.client import PARALLEL, Remote
from cache.remote.store import CRC_ATTRIBUTE, Facts, Patience, Span
from cache.remote.url import SCHEMES, RemoteUrl, is_remote, parse_url

__all__ = [
    "CRC_ATTRIBUTE",
    "PARALLEL",
    "SCHEMES",
    "AddressError",
    "CertificateError",
    "ChangedError",
    "DeniedError",
    "ExistsError",
    "Facts",
    "MissingError",
    "NoBucketError",
    "Patience",
    "Remote",
    "RemoteError",
    "RemoteUrl",
    "SlowError",
    "Span",
    "TruncatedError",
    "UnsupportedError",
    "is_remote",
    "parse_url",
]
