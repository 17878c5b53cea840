"""What a loader goes by when it is told little: its order, its seed, and what becomes of the end of an epoch."""

from __future__ import annotations

from readers.order.base import Order
from readers.order.schedule import Tail
from readers.order.sequential import Sequential
from readers.order.shuffled import Shuffled

__all__ = ["choose_order", "choose_tail"]


def choose_order(samples: int, order: Order | None, shuffle: bool, seed: int | None) -> Order:
    """The order, with the one seed that also draws augmentations and that a state holds.

    Raises ValueError for an order that has another seed.
    """
    if order is None:
        return Shuffled(samples, seed or 0) if shuffle else Sequential(samples, seed or 0)
    if seed is None or seed == order.seed:
        return order
    if order.seed:
        raise ValueError(
            f"seed={seed}, but the order has the seed {order.seed}: a run has one, or it could not be resumed; leave "
            f"seed= out, or give the order that seed"
        )
    return order.with_seed(seed)


def choose_tail(tail: Tail | None, order: Order) -> Tail:
    """As given; otherwise the end of an epoch is left out where samples are shuffled, and loaded where they are not."""
    return tail or ("exact" if isinstance(order, Sequential) else "drop_last")
