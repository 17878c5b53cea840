"""Where a training stands in its epoch: a small dictionary to save beside the model.

It counts global positions and knows neither ranks, batch size nor workers, so a run resumes on another number of any of
them. What it does know is checked: the data set by its fingerprint and number of samples, the order by its `spec`, and
what decoded the images.

    {"kind": "packer-resume", "version": 1, "seed": 7, "epoch": 3, "cursor": 81920, "samples": 1281167,
     "fingerprint": "…", "decoder": "…", "order": {"kind": "shuffled", "samples": 1281167}}

Unknown members are ignored, so that later versions can add some.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cache.errors import ResumeError

if TYPE_CHECKING:
    from readers.order.base import Order

__all__ = ["ResumeToken"]

_Order = TypeVar("_Order", bound="Order")
_KIND = "packer-resume"
_VERSION = 1
_COUNTS = {"seed": 1 << 64, "epoch": 1 << 64, "cursor": 1 << 62, "samples": 1 << 62}
_TEXTS = ("fingerprint", "decoder")
_MAX_TEXT = 1024
_MAX_PARAMETERS = 64


@dataclass(frozen=True)
class ResumeToken:
    """`cursor` positions of epoch `epoch` have been trained on, on all ranks together.

    fingerprint: of the reader. decoder: a name of what decodes, such as "simplejpeg 1.8"; "" for none. order: the
    `spec` of the order. samples: of the data set. Raises ResumeError for values no run can have had.
    """

    seed: int
    epoch: int
    cursor: int
    fingerprint: str
    decoder: str
    order: dict[str, str | int | float]
    samples: int

    def __post_init__(self) -> None:
        for name, limit in _COUNTS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
                raise ResumeError(f"resume token: {name} is {_short(value)}, expected an integer below {limit}")
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > _MAX_TEXT:
                raise ResumeError(f"resume token: {name} is {_short(value)}, expected a string")
        _check_order(self.order)

    def to_dict(self) -> dict[str, Any]:
        """Strings, integers and one dictionary of them: for JSON, or a checkpoint."""
        names = ("seed", "epoch", "cursor", "samples", "fingerprint", "decoder")
        values = {name: getattr(self, name) for name in names}
        return {"kind": _KIND, "version": _VERSION, **values, "order": dict(self.order)}

    @classmethod
    def from_dict(cls, content: Any) -> ResumeToken:
        """The inverse of `to_dict`; raises ResumeError for anything that it cannot have written."""
        if not isinstance(content, Mapping) or content.get("kind") != _KIND:
            raise ResumeError(f"not a resume token: expected an object of kind {_KIND!r}, found {_short(content)}")
        version = content.get("version")
        if version != _VERSION or isinstance(version, bool):
            raise ResumeError(
                f"resume token of version {_short(version)}, this packer reads version {_VERSION}; upgrade packer"
            )
        names = (*_COUNTS, *_TEXTS, "order")
        missing = [name for name in names if name not in content]
        if missing:
            raise ResumeError(f"resume token without {', '.join(missing)}: save it again from the run")
        values = {name: content[name] for name in names}
        return cls(**{**values, "order": _check_order(values["order"])})

    def resumed(self, order: _Order) -> _Order:
        """`order` as it was in the epoch of this token (see `Order.resumed`), for one of its seed.

        Raises ResumeError for a cursor that is beyond the epoch's end.
        """
        found = cast("_Order", order.resumed(self.order))  # an order resumes as one of its own kind
        if self.cursor > len(found):
            raise ResumeError(
                f"resume token: cursor {self.cursor} is beyond the {len(found)} positions of an epoch; no run of this "
                f"order has written it"
            )
        return found

    def check(
        self, *, fingerprint: str, order_spec: Mapping[str, Any], decoder: str, samples: int | None = None
    ) -> None:
        """Whether a run with this data set, order and decoder may go on from here.

        Raises ResumeError for another data set or another kind of order; warns where another decoder would give
        slightly other pixels. Parameters of the order are for `Order.resumed` to judge.
        """
        count = order_spec.get("samples") if samples is None else samples
        if fingerprint != self.fingerprint or (count is not None and count != self.samples):
            raise ResumeError(
                f"the resume token is of the data set {self.fingerprint} with {self.samples} samples, this one is "
                f"{fingerprint} with {count}; open the one that the run began with, or start without the token"
            )
        kind = order_spec.get("kind")
        if kind != self.order["kind"]:
            raise ResumeError(
                f"the epoch began with the order {self.order['kind']!r}, this run has {kind!r}; resume with "
                f"{self.order['kind']!r}, or start a new epoch"
            )
        if decoder != self.decoder:
            warnings.warn(
                f"the epoch began with the decoder {self.decoder!r} and goes on with {decoder!r}: "
                f"pixels may differ slightly",
                UserWarning,
                stacklevel=2,
            )


def _check_order(order: Any) -> dict[str, str | int | float]:
    if not isinstance(order, Mapping) or not isinstance(order.get("kind"), str) or len(order) > _MAX_PARAMETERS:
        raise ResumeError(f"resume token: order is {_short(order)}, expected the spec of an order")
    for name, value in order.items():
        plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        if not isinstance(name, str) or not plain or (isinstance(value, float) and not math.isfinite(value)):
            raise ResumeError(f"resume token: order has {_short(name)}: {_short(value)}, expected a text or a number")
    return dict(order)


def _short(value: Any) -> str:
    return f"{value!r:.80}"
