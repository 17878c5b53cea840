"""Which tensors of a batch a step uses, and in which types: by watching the operations of PyTorch.

Two modes see every operation: one in Python, for what leaves PyTorch (`numpy`, `data_ptr`, …), and one below autocast
and autograd, for everything that computes, compiled and scripted modules included. Compiled functions run eagerly
meanwhile. Unpacking a batch, asking for a shape and copying to a device or type is not use; the copy is watched in
place of the tensor.
"""

from __future__ import annotations

import contextlib
import copy as copying
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from readers.diagnosis.pipeline import map_tree, paths

__all__ = ["track_use"]

# Operations whose result is the tensor itself, elsewhere or in another type.
_MOVES = frozenset(("_to_copy", "clone", "detach", "alias", "lift_fresh", "_pin_memory", "pin_memory", "view_as"))
_IDLE = frozenset(("record_stream", "is_pinned", "set_", "sym_size", "sym_stride", "sym_numel"))
_LEAVES = frozenset(("numpy", "data_ptr", "untyped_storage", "storage", "tolist", "item", "__dlpack__", "__array__"))
_INTERFACES = ("__cuda_array_interface__", "__array_interface__")


class _Watched:
    """Tensors under watch, by identity; they are kept, so that no other takes the identity of one."""

    def __init__(self) -> None:
        self._paths: dict[int, tuple[str, torch.Tensor]] = {}
        self.used: dict[str, set[str]] = {}

    def add(self, path: str, tensor: torch.Tensor) -> None:
        self._paths[id(tensor)] = path, tensor
        self.used.setdefault(path, set())

    def among(self, values: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for value in values:
            if isinstance(value, torch.Tensor) and (found := self._paths.get(id(value))) is not None:
                yield found

    def use(self, values: Iterable[Any]) -> None:
        for path, tensor in self.among(values):
            self.used[path].add(str(tensor.dtype).removeprefix("torch."))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What computes."""

    def __init__(self, watched: _Watched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _MOVES:
            for path, _ in self._watched.among(args):
                for tensor in tree_leaves(result):
                    if isinstance(tensor, torch.Tensor):
                        self._watched.add(path, tensor)
        elif name not in _IDLE:
            self._watched.use(tree_leaves((args, kwargs)))
        return result


class _Departures(TorchFunctionMode):
    """What hands the values to something that is not PyTorch."""

    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self._watched = watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")  # of a property: func is its __get__
        if name in _LEAVES or owner in _INTERFACES:
            self._watched.use(args)
        return func(*args, **(kwargs or {}))


def track_use(
    batch: Any, step: Callable[[Any], object], copy: Callable[[Any], Any] | None
) -> dict[str, frozenset[str] | None]:
    """Run the step once on a copy of the batch; of each tensor's path, the types it was used in: none if it was not.

    None for what is not a tensor, as its use is not seen. What the step raises is passed on.
    """
    may_be_compiled = "torch._dynamo" in sys.modules  # which importing torch alone does not load
    if may_be_compiled and not hasattr(torch.compiler, "set_stance"):
        raise RuntimeError(f"something may be compiled, which torch {torch.__version__} cannot switch off")
    own = map_tree(batch, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else copying.copy(leaf))
    there = own if copy is None else copy(own)
    host, device = dict(paths(batch)), dict(paths(there))
    if host.keys() != device.keys():  # the copy is of another form, so it is not known what came from where
        return {}
    watched, unknown = _Watched(), dict[str, frozenset[str] | None]()
    for path, leaf in device.items():
        if isinstance(leaf, torch.Tensor):
            watched.add(path, leaf)
        else:
            unknown[path] = None
    eager: Any = contextlib.nullcontext()
    if may_be_compiled:
        eager = torch.compiler.set_stance("force_eager")
    with eager, _Departures(watched), _Operations(watched):
        step(there)
    return {**unknown, **{path: frozenset(dtypes) for path, dtypes in watched.used.items()}}
