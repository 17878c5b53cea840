"""Bytes in object stores and on web servers, through obstore (extra `remote`).

    url      addresses, printed without secrets; proxies and certificates, from the environment
    store    the one file that knows obstore and its errors; time-outs and retries
    client   one address for a process, its threads and its forks

Nothing here knows shards or data sets. `import cache.remote` does not load obstore.
"""

from cache.remote.store import (
    CRC_ATTRIBUTE,
    PARALLEL,
    SCHEMES,
    Facts,
    Patience,
    Remote,
    RemoteUrl,
    Span,
    is_public,
    is_remote,
    parse_url,
)

__all__ = [
    "CRC_ATTRIBUTE",
    "PARALLEL",
    "SCHEMES",
    "Facts",
    "Patience",
    "Remote",
    "RemoteUrl",
    "Span",
    "is_public",
    "is_remote",
    "parse_url",
]
