"""A small language to choose samples by what is known of them: `Reader.select(where=…)`, `packer subset --where`.

    min_side >= 64 and label in ("cat", 3)
    medium == "jpeg" and not 0.5 <= aspect <= 2
    matches(key, "n01440764/*") or class_name == "tench" or has("mask")

It is Python's syntax for comparisons, `and`, `or`, `not`, `in`, parentheses, numbers, texts and lists of them. `ast`
parses it, and this module evaluates it, column by column: nothing else can be written, and nothing is executed.

    label               a class: compared with numbers, or with texts, which are names of classes; -1 for none
    class_name          its name, "" for none
    key, split          texts
    folder              the key up to its last slash, "" without one
    width, height       pixels of the image as displayed, after its EXIF orientation
    min_side, max_side, pixels, aspect (width / height)
    bytes               of the encoded image
    medium              "jpeg", "png", …; "" where the header cannot be read
    orientation, components
    matches(text, "…")  a pattern with * ? [abc], where * also stands for "/"
    has("field")        whether the sample has this field, or a value in this column
    patient             any other name is a column of the table that the set was packed from: a member of the JSON
                        object in the field json
    column("a name")    the same, for a name that is no identifier of Python, or is one of the above

A column is compared with numbers or texts. A text that reads as a number is one where it is compared with a number,
since a CSV file has texts only; truth values are 1 and 0. Texts are in the order of their characters, so that ISO dates
are in order.

What the header of an image says is not known of one that cannot be read, and a sample may have no value in a column
(it is absent, null, NaN or ""): every comparison with what is not known is false, `!=` and `not in` included, and so
`not width < 64` is true.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError, UnknownNameError
from cache.messages import listed
from readers.table import ABSENT, Buffer, ImageInfo, Table, checked_indices

if TYPE_CHECKING:
    from readers.reader import Reader


Bools: TypeAlias = npt.NDArray[np.bool_]
ERASED = "…"  # in place of a value that may name a person
NUMBERS = ("width", "height", "min_side", "max_side", "pixels", "aspect", "bytes", "orientation", "components")
TEXTS = ("key", "class_name", "medium", "split", "folder")
_LABEL = "label"
_MAX_CHARACTERS = 1 << 16
_SHOWN = 5
_COLUMNS_SHOWN = 20
_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]{1,400}(\.[0-9]*)?|(\.[0-9]+))([eE][-+]?[0-9]+)?\s*")
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

    def columns(self, names: Collection[str]) -> Mapping[str, Sequence[Any]]:
        """All columns of the table by name; those of `names` with their n values, None for none."""


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed expression. names: those of the columns that it looks at, and "has" where it asks for fields."""

    text: str
    names: frozenset[str]

    @property
    def columns(self) -> frozenset[str]:
        """The names that may be columns of the table, those of `has` included."""
        return _columns(_tree(self.text))

    @property
    def without_values(self) -> str:
        """The text, with "…" for every value that a key, a folder or a column of the table is compared with."""
        return ast.unparse(_WithoutValues().visit(ast.parse(self.text.strip(), mode="eval")))

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


def group_values(facts: Facts, name: str) -> list[Any]:
    """What samples are grouped by: the folder of their keys (name: "folder"), or a column of the table; None for none.

    Raises UnknownNameError.
    """
    if name == "folder":
        return list(facts.texts(name).values)
    columns = facts.columns(frozenset({name}))
    if name not in columns:
        near = difflib.get_close_matches(name, [*columns, "folder"], 1)
        known = listed(["folder (of the key)", *sorted(columns)], _COLUMNS_SHOWN)
        raise UnknownNameError(
            f"no column {name!r} to group samples by; there are {known}{f'; did you mean {near[0]}?' if near else ''}"
        )
    return [value if _is_value(value) else None for value in columns[name]]


def _names(tree: ast.expr) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - {"matches"}


def _columns(tree: ast.AST) -> frozenset[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {
        argument.value
        for call in calls
        for argument in call.args
        if isinstance(call.func, ast.Name) and call.func.id in ("has", "column")
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    functions = {id(call.func) for call in calls}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions}
    return frozenset(named | names - {_LABEL, *NUMBERS, *TEXTS})


class _WithoutValues(ast.NodeTransformer):
    """Replaces what may name a person by "…"."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return self._replaced(node, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_matches = isinstance(node.func, ast.Name) and node.func.id == "matches"
        return self._replaced(node, node.args[0]) if is_matches and node.args else node

    def _replaced(self, node: ast.AST, operands: ast.AST) -> ast.AST:
        names = {inner.id for inner in ast.walk(operands) if isinstance(inner, ast.Name)}
        if not (names & {"key", "folder"} or _columns(operands)):
            return node
        kept = {id(argument) for call in ast.walk(node) if _is_column_call(call) for argument in call.args}
        for above in ast.walk(node):
            for name, value in ast.iter_fields(above):
                if isinstance(value, list):
                    setattr(above, name, [_hidden(item, kept) for item in value])
                elif isinstance(value, ast.AST):
                    setattr(above, name, _hidden(value, kept))
        return node


def _hidden(node: Any, kept: Collection[int]) -> Any:
    return ast.Constant(ERASED) if isinstance(node, ast.Constant) and id(node) not in kept else node


def _is_column_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "column"


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


class _Column(NamedTuple):
    values: Sequence[Any]  # None for none


_Operand: TypeAlias = "_Number | _Label | _Text | Texts | _List | _Column"
_KINDS = {
    _Number: "a number",
    _Label: "a label",
    _Text: "a text",
    Texts: "a text",
    _List: "a list",
    _Column: "a column of the table",
}


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
        if isinstance(left, _Column) or isinstance(right, _Column):
            return self._compare_column(left, op, right, node)
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

    def _compare_column(self, left: _Operand, op: ast.cmpop, right: _Operand, node: ast.Compare) -> Bools:
        """A column compared with a number or a text, or with a list of these."""
        if not isinstance(left, _Column) and not isinstance(op, _MEMBER):
            left, right, op = right, left, _TURNED.get(type(op), type(op))()
        if not isinstance(left, _Column) or not _is_constant(right):
            raise self._refused(node, "expected a column of the table, and a number or a text to compare it with")
        wanted = right.items if isinstance(right, _List) else [right.text if isinstance(right, _Text) else right.values]
        texts = {isinstance(item, str) for item in wanted}
        order = _ORDERS.get(type(op))
        fits = isinstance(op, _MEMBER) if isinstance(right, _List) else isinstance(op, _EQUAL) or order is not None
        if not fits or len(texts) != 1:
            why = "expected  column == value  or  column in (value, value), of numbers alone or of texts alone"
            raise self._refused(node, why)
        values = self._values(left, texts.pop(), node)
        if order is not None:
            return _bools(value is not None and order(value, wanted[0]) for value in values)
        found = _bools(value is not None and value in wanted for value in values)
        return ~found & _has_value(left) if isinstance(op, (ast.NotEq, ast.NotIn)) else found

    def _values(self, column: _Column, as_texts: bool, node: ast.expr) -> list[Any]:
        """The texts, or the numbers, of a column; None for other values. Raises ValueError where it has none."""
        values = [_as_text(value) if as_texts else _as_number(value) for value in column.values]
        if len(values) > 1 and all(value is None for value in values):  # of one sample alone others are not known
            other = next((value for value in column.values if _is_value(value)), None)
            if other is not None:
                what = "texts" if as_texts else "numbers"
                raise self._refused(
                    node, f"asks for {what} in a column that has none, but values such as {other!r:.40}"
                )
        return values

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
        if _is_column_call(node) and len(node.args) == 1 and not node.keywords:
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(name, str):
                return self._of_table(name, node)
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
        return self._of_table(node.id, node)

    def _of_table(self, name: str, node: ast.expr) -> _Column:
        """A column of the table. Raises UnknownNameError."""
        if name in self._columns:
            return _Column(self._columns[name])
        known = (_LABEL, *TEXTS, *NUMBERS)
        near = difflib.get_close_matches(name, [*known, *self._columns], 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        columns = listed(sorted(self._columns), _COLUMNS_SHOWN) or "none"
        text = f"is not known; there are {', '.join(known)}; columns of the table in the field json: {columns}{meant}"
        raise UnknownNameError(str(self._refused(node, text)))

    @functools.cached_property
    def _columns(self) -> Mapping[str, Sequence[Any]]:
        return self._facts.columns(_columns(_tree(self._text)))

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
            try:
                return self._facts.has(last)
            except UnknownNameError:
                if last not in self._columns:
                    raise
            return _has_value(_Column(self._columns[last]))
        if name == "matches" and len(arguments) == 2 and isinstance(last, str):
            column = self._operand(arguments[0])
            pattern = re.compile(fnmatch.translate(last))
            if isinstance(column, _Column):
                values = self._values(column, True, node)
                return _bools(value is not None and pattern.match(value) is not None for value in values)
            if isinstance(column, Texts):
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


def _bools(found: Iterable[bool]) -> Bools:
    return np.fromiter(found, np.bool_)


def _is_value(value: Any) -> bool:
    """Whether a member of a JSON object says anything."""
    return value is not None and value != "" and value == value


def _has_value(column: _Column) -> Bools:
    return _bools(_is_value(value) for value in column.values)


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _as_number(value: Any) -> int | float | None:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        return None if match is None else float(value) if any(match.groups()) else int(value)
    return value if isinstance(value, (int, float)) and value == value else None


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

    def columns(self, names: Collection[str]) -> Mapping[str, Sequence[Any]]:
        return dict.fromkeys(names, ())


# The criteria of a selection, and the samples of a reader that fulfil all of them.
#
# They are evaluated from cheap to expensive: header facts, for which a folder has to read files, come last.


_JSON_BLOCK = 4096
_CRITERIA_SHOWN = 5
_CRITERIA_TURNED = 5  # EXIF orientations from 5 on exchange height and width


@dataclass(frozen=True)
class Criteria:
    """The arguments of `readers.reader.Reader.select`. Raises ValueError for invalid ones."""

    labels: int | str | Iterable[int | str] | None = None
    keys: str | Iterable[str] | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    min_side: int | None = None
    indices: npt.ArrayLike | None = None
    mask: npt.ArrayLike | None = None
    where: str | None = None
    fraction: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}, expected more than 0 and at most 1")
        if self.where is not None:
            parse_where(self.where)

    def apply(self, reader: Reader) -> npt.NDArray[np.int64]:
        """The numbers of the samples, int64: in stored order, or in that of `indices` where given.

        Raises SourceError where none is left, UnknownNameError for classes and keys that the reader lacks.
        """
        left = self._named(reader)
        left = self._by_label(left, reader)
        left = self._by_bytes(left, reader)
        left = self._by_key(left, reader)
        left = self._by_side(left, reader)
        left = self._by_facts(left, reader)
        if self.fraction is not None and left.size:
            left = left[_share(len(left), self.fraction, self.seed)]
        if not left.size:
            raise SourceError(
                f"nothing is selected: none of the {len(reader)} samples of {reader} has {self._describe()}"
            )
        return left

    def _named(self, reader: Reader) -> npt.NDArray[np.int64]:
        left = np.arange(len(reader), dtype=np.int64)
        if self.indices is not None:
            left = checked_indices(self.indices, reader)
        if self.mask is None:
            return left
        mask = np.asarray(self.mask)
        if mask.dtype != np.bool_ or mask.shape != (len(reader),):
            raise ValueError(f"mask must be bool [{len(reader)}], found {mask.dtype} {list(mask.shape)}")
        wanted: npt.NDArray[np.int64] = left[mask[left]]
        return wanted

    def _by_label(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.labels is None:
            return left
        asked = [self.labels] if isinstance(self.labels, (int, str, np.integer)) else list(self.labels)
        numbers = {name: number for number, name in enumerate(reader.classes)}
        count = len(numbers)
        unknown = [x for x in asked if (x not in numbers if isinstance(x, str) else count and not -1 <= x < count)]
        if unknown:
            known = ", ".join(list(numbers)[:_CRITERIA_SHOWN]) + (", …" if count > _CRITERIA_SHOWN else "")
            raise UnknownNameError(f"{reader}: no class {unknown[0]!r}; it has {count}: {known or 'none'}")
        wanted = np.array([numbers[x] if isinstance(x, str) else x for x in asked], np.int64)
        return left[np.isin(reader.labels[left], wanted)]

    def _by_bytes(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.min_bytes is None and self.max_bytes is None:
            return left
        sizes = reader.sizes()[left]
        fits = np.ones(len(left), np.bool_)
        if self.min_bytes is not None:
            fits &= sizes >= self.min_bytes
        if self.max_bytes is not None:
            fits &= sizes <= self.max_bytes
        return left[fits]

    def _by_key(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.keys is None:
            return left
        if isinstance(self.keys, str):
            matches = re.compile(fnmatch.translate(self.keys)).match
            fits = [matches(key) is not None for key in _keys(left, reader)]
            return left[np.array(fits, np.bool_)]
        wanted = set(self.keys)
        fits, found = [], set()
        for key in _keys(left, reader):
            fits.append(key in wanted)
            if fits[-1]:
                found.add(key)
        missing = sorted(wanted - found)
        if missing:
            few = ", ".join(map(repr, missing[:_CRITERIA_SHOWN])) + (", …" if len(missing) > _CRITERIA_SHOWN else "")
            raise UnknownNameError(f"{reader}: {len(missing)} keys are not among the {len(left)} asked: {few}")
        return left[np.array(fits, np.bool_)]

    def _by_side(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.min_side is None:
            return left
        info = reader.image_info(left)
        return left[np.minimum(info.height, info.width) >= self.min_side]

    def _by_facts(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.where is None:
            return left
        split = getattr(reader.table.columns, "split", "")
        facts = TableFacts(
            reader.table.take(left),
            lambda: reader.image_info(left),
            split,
            columns=lambda names: json_columns(json_payloads(reader, left), names),
        )
        return left[parse_where(self.where).mask(facts)]

    def _describe(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seed"}
        return ", ".join(f"{name}={value!r:.60}" for name, value in given.items() if value is not None)


class TableFacts:
    """The samples of a table as `readers.where` looks at them.

    headers: reads the header facts, where the table does not have them.
    split: the name of the split.
    labels, classes: in place of those of the table.
    columns: reads the columns of the table that the set was packed from; see `readers.where.Facts.columns`.
    """

    def __init__(
        self,
        table: Table,
        headers: Callable[[], ImageInfo] | None = None,
        split: str = "",
        labels: npt.NDArray[Any] | None = None,
        classes: Sequence[str] | None = None,
        columns: Callable[[Collection[str]], Mapping[str, Sequence[Any]]] | None = None,
    ) -> None:
        self.classes = table.classes if classes is None else classes
        self._read_columns = columns
        self._table, self._read_headers, self._split, self._labels = table, headers, split, labels

    def __len__(self) -> int:
        return len(self._table)

    def labels(self) -> npt.NDArray[Any]:
        return self._table.labels if self._labels is None else self._labels

    def numbers(self, name: str) -> npt.NDArray[Any]:
        if name == "bytes":
            return self._table.sizes()
        if name in ("orientation", "components"):
            values: npt.NDArray[Any] = getattr(self._headers, name)
            return np.where(self._headers.height > 0, values, np.nan)
        height, width = self._size
        if name == "aspect":
            return width / height
        if name == "pixels":
            return width * height
        return {"min_side": np.minimum(width, height), "max_side": np.maximum(width, height), "width": width}.get(
            name, height
        )

    def texts(self, name: str) -> Texts:
        if name == "folder":
            return folders_of(self.texts("key").values)
        if name == "key":
            return Texts(self._table.keys)
        if name == "split":
            return Texts((self._split,), np.zeros(len(self), np.int64))
        if name == "class_name":
            names = (*self.classes, "")
            labels = self.labels()
            return Texts(names, np.where((labels >= 0) & (labels < len(self.classes)), labels, len(self.classes)))
        from readers.headers import MEDIA

        return Texts(MEDIA, self._headers.media)

    def has(self, field: str) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._table.field_column(field, "offset") != np.uint64(ABSENT)
        return found

    def columns(self, names: Collection[str]) -> Mapping[str, Sequence[Any]]:
        return {} if self._read_columns is None else self._read_columns(names)

    @cached_property
    def _headers(self) -> ImageInfo:
        return self._table.headers(None) if self._read_headers is None else self._read_headers()

    @cached_property
    def _size(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(height, width) of the images as displayed; NaN where they are not known."""
        height, width = (getattr(self._headers, name).astype(np.float64) for name in ("height", "width"))
        height[height == 0] = width[width == 0] = np.nan
        turned = self._headers.orientation >= _CRITERIA_TURNED
        return np.where(turned, width, height), np.where(turned, height, width)


def json_payloads(reader: Reader, indices: npt.NDArray[np.int64]) -> Iterator[tuple[str, Buffer | None]]:
    """The key of each of these samples, and its field json; None where it has none, or it is not of this kind."""
    keys = reader.table.take(indices).keys
    if reader.kinds.get("json") != "json":
        yield from ((key, None) for key in keys)
        return
    has = reader.table.field_column("json", "offset")[indices] != np.uint64(ABSENT)
    for first in range(0, len(indices), _JSON_BLOCK):
        block = slice(first, first + _JSON_BLOCK)
        found = iter(reader.read_many(indices[block][has[block]], "json"))
        yield from zip(keys[block], (next(found) if there else None for there in has[block]), strict=True)


def json_columns(payloads: Iterable[tuple[str, Buffer | None]], names: Collection[str]) -> dict[str, list[Any]]:
    """The members of the JSON objects of n samples as columns: those of `names` with n values, None for none.

    payloads: with the names of the samples. The lists of other members are empty; what is no object has no members.

    Raises BadSampleError for what is not JSON.
    """
    columns: dict[str, list[Any]] = {}
    for number, (key, data) in enumerate(payloads):
        try:
            members = {} if data is None else json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"{key}: the field json is not JSON in UTF-8: {error}") from error
        for name in members if isinstance(members, dict) else ():
            column = columns.setdefault(name, [])
            if name in names:
                column += [None] * (number - len(column))
                column.append(members[name])
    for name in columns.keys() & set(names):
        columns[name] += [None] * (number + 1 - len(columns[name]))
    return columns


def complete_columns(parts: Sequence[dict[str, list[Any]]], counts: Sequence[int]) -> None:
    """Give each part of a table the columns of all its parts, without values. counts: samples of each part."""
    for name in dict.fromkeys(name for part in parts for name in part):
        for part, count in zip(parts, counts, strict=True):
            part.setdefault(name, [])
            part[name] = part[name] or [None] * count


def folders_of(keys: Iterable[str]) -> Texts:
    """What comes before the last slash of each key, "" without one."""
    return Texts([key.rpartition("/")[0] for key in keys])


def _keys(left: npt.NDArray[np.int64], reader: Reader) -> Iterable[str]:
    keys = reader.keys
    return keys if len(left) == len(reader) and bool((np.diff(left) == 1).all()) else (keys[i] for i in left.tolist())


def _share(count: int, fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """At least one of range(count), in rising order; those of a smaller fraction are among those of a larger one."""
    from readers.order.base import Permutation

    wanted = max(1, round(count * fraction))
    return np.sort(Permutation(count, seed, purpose="fraction").forward(np.arange(wanted, dtype=np.int64)))
