"""One node's bytes for the others: ranges over HTTP, for those who have the token.

    http         a bounded server of GET and HEAD, without answers
    server       the server of ranges: what it answers, and what it refuses
    process      the server in a process of its own, and this node's address in the network
    rendezvous   the folder that all nodes share: the token, and the address of each node

Nothing here knows shards or data sets. The client is `cache.remote`, as for any web server.
"""

from cache.serving.http import HttpServer, Limits, Request, http_date, listen
from cache.serving.server import (
    Ranges,
    Rendezvous,
    Server,
    ServerProcess,
    ServerStats,
    ServeTerms,
    own_address,
    read_token,
)

__all__ = [
    "HttpServer",
    "Limits",
    "Ranges",
    "Rendezvous",
    "Request",
    "ServeTerms",
    "Server",
    "ServerProcess",
    "ServerStats",
    "http_date",
    "listen",
    "own_address",
    "read_token",
]
