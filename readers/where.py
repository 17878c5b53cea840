"""A small language to choose samples by what is known of them: `Reader.select(where=…)`, `packer subset --where`.

    min_side >= 64 and label in ("cat", 3)
    medium == "jpeg" and not 0.5 <= aspect <= 2
    matches(key, "n01440764/*") or class_name == "tench" or has("mask")

It is Python's syntax for comparisons, `and`, `or`, `not`, `in`, parentheses, numbers, texts and lists of them. `ast`
parses it, and this module evaluates it, column by column: nothing else can be written, and nothing is executed.

    label               a class: compared with numbers, or with texts, which are names of classes; -1 for none
    class_name          its name, "" for none
    key, split          texts
    width, height       pixels of the image as displayed, after its EXIF orientation
    min_side, max_side, pixels, aspect (width / height)
    bytes               of the encoded image
    medium              "jpeg", "png", …; "" where the header cannot be read
    orientation, components
    matches(text, "…")  a pattern with * ? [abc], where * also stands for "/"
    has("field")        whether the sample has this field

What the header of an image says is not known of one that cannot be read: every comparison with it is false, and so
`not width < 64` is true.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cache.errors import UnknownNameError

__all__ = ["NUMBERS", "TEXTS", "Facts", "Texts", "Where", "parse_where"]

Bools: TypeAlias = npt.NDArray[np.bool_]
NUMBERS = ("width", "height", "min_side", "max_side", "pixels", "aspect", "bytes", "orientation", "components")
TEXTS = ("key", "class_name", "medium", "split")
_LABEL = "label"
_MAX_CHARACTERS = 1 << 16
_SHOWN = 5
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUAL, _MEMBER = (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)


class Texts(NamedTuple):
    """A text of each sample: values[codes], or, where codes is None, the values themselves."""

    values: Sequence[str]
    codes: npt.NDArray[Any] | None = None

    def where(self, wanted: Callable[[str], bool]) -> Bools:
        """The samples whose text is wanted, bool [n]."""
        found = np.fromiter(map(wanted, self.values), np.bool_, len(self.values))
        return found if self.codes is None else found[self.codes]


class Facts(Protocol):
    """What is known of n samples."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes, () where they have none."""

    def __len__(self) -> int: ...

    def labels(self) -> npt.NDArray[Any]:
        """Class numbers, [n]."""

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """One of NUMBERS, [n]; NaN where it is not known."""

    def texts(self, name: str) -> Texts:
        """One of TEXTS."""

    def has(self, field: str) -> Bools:
        """Whether each sample has a field, [n]. Raises UnknownNameError."""


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed expression. names: those of the columns that it looks at, and "has" where it asks for fields."""

    text: str
    names: frozenset[str]

    @property
    def conjuncts(self) -> tuple[Where, ...]:
        """The expressions that `and` joins in it, all of which must be true; it alone where it has none."""
        tree = _tree(self.text)
        if not (isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)):
            return (self,)
        parts = (Where(ast.unparse(value), _names(value)) for value in tree.values)
        return tuple(inner for part in parts for inner in part.conjuncts)

    def mask(self, facts: Facts) -> Bools:
        """The samples for which it is true, bool [n]. Raises UnknownNameError for a class or field that is unknown."""
        return _Evaluation(self.text, facts).boolean(_tree(self.text))


def parse_where(text: str) -> Where:
    """Check an expression. Raises ValueError, which says at which character, what is expected, and what was found."""
    tree = _tree(text)
    try:
        _Evaluation(text, _Nothing()).boolean(tree)
    except RecursionError:
        raise ValueError(f"{text[:80]!r}… is nested too deeply") from None
    return Where(text, _names(tree))


def _names(tree: ast.expr) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - {"matches"}


@functools.lru_cache(maxsize=64)  # a conversion evaluates one for every sample
def _tree(text: str) -> ast.expr:
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(text):,} characters, expected at most {_MAX_CHARACTERS:,}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        place = f" at character {error.offset}" if error.offset and error.lineno == 1 else ""
        why = "the class of a sample is label or class_name here" if re.search(r"\bclass\b", text) else error.msg
        raise ValueError(
            f"{text!r:.200}: cannot be read{place}: {why}; it is written like  min_side >= 64 and label == 'cat'"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.200}: cannot be read: {error}") from None


class _Number(NamedTuple):
    values: Any  # an array, or a number


class _Label(NamedTuple):
    values: npt.NDArray[Any]


class _Text(NamedTuple):
    text: str


class _List(NamedTuple):
    items: list[Any]


_Operand: TypeAlias = "_Number | _Label | _Text | Texts | _List"
_KINDS = {_Number: "a number", _Label: "a label", _Text: "a text", Texts: "a text", _List: "a list"}


class _Evaluation:
    """One walk over the tree of an expression."""

    def __init__(self, text: str, facts: Facts) -> None:
        self._text, self._facts = text.strip(), facts

    def boolean(self, node: ast.expr) -> Bools:
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            found = self.boolean(node.values[0])
            for value in node.values[1:]:
                found = join(found, self.boolean(value))
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.boolean(node.operand)
        if isinstance(node, ast.Compare):
            return self._chain(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise self._refused(node, "is neither a comparison nor matches(…) nor has(…)")

    def _chain(self, node: ast.Compare) -> Bools:
        found = np.ones(len(self._facts), np.bool_)
        left = self._operand(node.left)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self._operand(right_node)
            found &= self._compare(left, op, right, node)
            left = right
        return found

    def _compare(self, left: _Operand, op: ast.cmpop, right: _Operand, node: ast.Compare) -> Bools:
        if isinstance(op, _MEMBER):
            if not isinstance(right, _List) or _is_constant(left):
                raise self._refused(node, "expected a column in a list, as  label in (1, 2)")
            found = self._is_one_of(left, right.items, node)
            return ~found & _is_known(left) if isinstance(op, ast.NotIn) else found
        if _is_constant(left):
            left, right, op = right, left, _TURNED.get(type(op), type(op))()
        if isinstance(op, _EQUAL):
            equal = self._equal(left, right, node)
            return ~equal & _is_known(left) & _is_known(right) if isinstance(op, ast.NotEq) else equal
        order = _ORDERS.get(type(op))
        if order is None:
            raise self._refused(node, "is not a comparison that is known here: == != < <= > >= in, not in")
        if not isinstance(left, (_Number, _Label)) or not isinstance(right, (_Number, _Label)):
            raise self._refused(node, f"cannot order {_KINDS[type(left)]} and {_KINDS[type(right)]}")
        return self._full(order(left.values, right.values))

    def _equal(self, left: _Operand, right: _Operand, node: ast.Compare) -> Bools:
        if isinstance(left, (_Number, _Label)) and isinstance(right, (_Number, _Label)):
            return self._full(left.values == right.values)
        if isinstance(left, (_Label, Texts)) and isinstance(right, _Text):
            return self._is_one_of(left, [right.text], node)
        raise self._refused(node, f"cannot compare {_KINDS[type(left)]} with {_KINDS[type(right)]}")

    def _is_one_of(self, left: _Operand, items: list[Any], node: ast.Compare) -> Bools:
        is_text = [isinstance(item, str) for item in items]
        if isinstance(left, Texts) and all(is_text):
            return left.where(frozenset(items).__contains__)
        if isinstance(left, _Label):
            numbers = [self._class(item) if isinstance(item, str) else item for item in items]
            return np.isin(left.values, numbers)
        if isinstance(left, _Number) and not any(is_text):
            return self._full(np.isin(left.values, items))
        raise self._refused(node, f"cannot compare {_KINDS[type(left)]} with {'texts' if any(is_text) else 'numbers'}")

    def _class(self, name: str) -> int:
        """The number of a class. Raises UnknownNameError."""
        classes = self._facts.classes
        if isinstance(self._facts, _Nothing):
            return 0
        try:
            return classes.index(name)
        except ValueError:
            known = ", ".join(classes[:_SHOWN]) + (", …" if len(classes) > _SHOWN else "")
            raise UnknownNameError(
                f"{self._text!r:.200}: no class {name!r}; there are {len(classes)}: {known or 'none'}"
            ) from None

    def _operand(self, node: ast.expr) -> _Operand:
        if isinstance(node, ast.Name):
            return self._column(node)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return _List([self._constant(item) for item in node.elts])
        value = self._constant(node)
        return _Text(value) if isinstance(value, str) else _Number(value)

    def _column(self, node: ast.Name) -> _Operand:
        if node.id == _LABEL:
            return _Label(self._facts.labels())
        if node.id in NUMBERS:
            return _Number(self._facts.numbers(node.id))
        if node.id in TEXTS:
            return self._facts.texts(node.id)
        raise self._refused(node, f"is not known; there are {', '.join((_LABEL, *TEXTS, *NUMBERS))}")

    def _constant(self, node: ast.expr) -> int | float | str:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        value = node.value if isinstance(node, ast.Constant) else None
        if type(value) in (int, float) and abs(cast(float, value)) < 1 << 63:
            return cast(float, value) * sign
        if isinstance(value, str) and sign == 1:
            return value
        raise self._refused(node, "is neither the name of a column nor a number nor a text")

    def _call(self, node: ast.Call) -> Bools:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        arguments = node.args if not node.keywords else []
        last = arguments[-1].value if arguments and isinstance(arguments[-1], ast.Constant) else None
        if name == "has" and len(arguments) == 1 and isinstance(last, str):
            return self._facts.has(last)
        if name == "matches" and len(arguments) == 2 and isinstance(last, str):
            column = self._operand(arguments[0])
            if isinstance(column, Texts):
                pattern = re.compile(fnmatch.translate(last))
                return column.where(lambda text: pattern.match(text) is not None)
        raise self._refused(node, 'is not a function that is known here: matches(key, "a*"), has("mask")')

    def _full(self, found: Any) -> Bools:
        """A result for each sample, also where two constants were compared."""
        return np.broadcast_to(np.asarray(found, np.bool_), (len(self._facts),))

    def _refused(self, node: ast.expr, why: str) -> ValueError:
        part = ast.get_source_segment(self._text, node) or self._text
        line = self._text.splitlines()[node.lineno - 1] if node.lineno > 1 else self._text
        place = len(line.encode()[: node.col_offset].decode(errors="ignore")) + 1
        return ValueError(f"{self._text!r:.200}: at character {place}: {part!r:.80} {why}")


def _is_known(operand: _Operand) -> Any:
    """Whether a number is known, of each sample."""
    return ~np.isnan(operand.values) if isinstance(operand, _Number) else True


def _is_constant(operand: _Operand) -> bool:
    is_number = isinstance(operand, _Number) and not isinstance(operand.values, np.ndarray)
    return is_number or isinstance(operand, (_Text, _List))


_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


class _Nothing:
    """Facts about no samples, by which an expression is checked."""

    classes: Sequence[str] = ()

    def __len__(self) -> int:
        return 0

    def labels(self) -> npt.NDArray[Any]:
        return np.zeros(0, np.int64)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        return np.zeros(0)

    def texts(self, name: str) -> Texts:
        return Texts(())

    def has(self, field: str) -> Bools:
        return np.zeros(0, np.bool_)
