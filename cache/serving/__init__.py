"""One node's bytes for the others: ranges over HTTP, for those who have the token.

    server       the server: what it answers, and what it refuses
    process      the server in a process of its own, and this node's address in the network
    rendezvous   the folder that all nodes share: the token, and the address of each node

Nothing here knows shards or data sets. The client is `cache.remote`, as for any web server.
"""

from cache.serving.process import ServerProcess, own_address
from cache.serving.rendezvous import Rendezvous, read_token
from cache.serving.server import Limits, Ranges, Server, ServerStats, ServeTerms

__all__ = [
    "Limits",
    "Ranges",
    "Rendezvous",
    "ServeTerms",
    "Server",
    "ServerProcess",
    "ServerStats",
    "own_address",
    "read_token",
]
