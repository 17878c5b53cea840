"""A small language for selecting samples by their metadata: `Reader.select(where=…)`, `packer subset --where`.

    min_side >= 64 and label in ("cat", 3)
    medium == "jpeg" and not 0.5 <= aspect <= 2
    matches(key, "n01440764/*") or class_name == "tench" or has("mask")

The syntax is Python's, limited to comparisons, `and`, `or`, `not`, `in`, parentheses, numbers, texts and lists. `ast`
parses an expression, and this module evaluates it column by column; no code is executed.

    label               the class, compared with class numbers, or with texts as class names; -1 for none
    class_name          the name of the class, "" for none
    key, split          the key of the sample and the name of its split, texts
    folder              the key up to its last slash, "" without one
    width, height       pixels of the image as displayed, after its EXIF orientation
    min_side, max_side, pixels, aspect (width / height)
    bytes               size of the encoded image
    medium              "jpeg", "png", …; "" if the header cannot be read
    orientation, components
    matches(text, "…")  a pattern with * ? [abc], in which * also matches "/"
    has("field")        whether the sample has this field, or a value in this column
    patient             any other name is a column of the table that the set was packed from: a member of the JSON
                        object in the field json
    column("a name")    a column with a name that is not a Python identifier, or is one of the above

A column is compared with numbers or texts. In a comparison with numbers, a text such as "12.5" counts as a number,
because a CSV file has only texts; truth values are 1 and 0. Texts are ordered by their characters, so ISO dates sort by
time.

Values are unknown for images whose header cannot be read, and for samples without a value in a column (absent, null,
NaN or ""). Every comparison with an unknown value is false, including `!=` and `not in`, so `not width < 64` is true.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, UnknownNameError
from cache.messages import listed
from readers.table import ABSENT, Buffer, ImageInfo, Table, upright_sides

Bools: TypeAlias = npt.NDArray[np.bool_]
ReadColumns: TypeAlias = Callable[[Collection[str]], Mapping[str, Sequence[Any]]]
ERASED = "…"  # replaces a value that can identify a person
NUMBERS = ("width", "height", "min_side", "max_side", "pixels", "aspect", "bytes", "orientation", "components")
TEXTS = ("key", "class_name", "medium", "split", "folder")
_LABEL = "label"
_MAX_CHARACTERS = 1 << 16
_SHOWN = 5
_COLUMNS_SHOWN = 20
_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]{1,400}(\.[0-9]*)?|(\.[0-9]+))([eE][-+]?[0-9]+)?\s*")
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TURNED: dict[Any, Any] = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}


class Texts(NamedTuple):
    """A text for each sample: values[codes], or the values themselves if codes is None."""

    values: Sequence[str]
    codes: npt.NDArray[Any] | None = None

    def where(self, predicate: Callable[[str], Any]) -> Bools:
        """Whether `wanted` is true for the text of each sample, bool [n]."""
        chosen = np.fromiter((bool(predicate(text)) for text in self.values), np.bool_, len(self.values))
        return chosen if self.codes is None else chosen[self.codes]


class Facts:
    """The metadata of n samples, as far as a listing of files has it; subclasses add more.

    labels: class numbers, [n]. classes: their names, () without names.
    split: the name of the split.
    columns: a function of column names that returns all columns of the source table by name. The requested columns have
        n values, None for a missing value; the others may be empty.
    """

    def __init__(
        self,
        keys: Sequence[str],
        labels: npt.NDArray[Any],
        classes: Sequence[str] = (),
        split: str = "",
        columns: ReadColumns = lambda names: {},
    ) -> None:
        self.keys, self.labels, self.classes, self.split, self.columns = keys, labels, classes, split, columns

    def __len__(self) -> int:
        return len(self.labels)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """The values of one of NUMBERS, [n]; NaN for unknown values."""
        raise LookupError(name)  # a listing has no image headers

    def texts(self, name: str) -> Texts:
        """The texts of one of TEXTS."""
        if name == "key":
            return Texts(self.keys)
        if name == "folder":
            return Texts([key.rpartition("/")[0] for key in self.keys])
        if name == "split":
            return Texts((self.split,), np.zeros(len(self), np.int64))
        count, labels = len(self.classes), self.labels
        return Texts((*self.classes, ""), np.where((labels >= 0) & (labels < count), labels, count))

    def has(self, field: str) -> Bools:
        """Whether each sample has a field, [n]. Raises UnknownNameError."""
        raise UnknownNameError(f"the source has no field {field!r}, and its table no such column")


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed expression. names: the names in it, and "has" if it tests for fields."""

    text: str
    names: frozenset[str]

    @property
    def columns(self) -> frozenset[str]:
        """The names that may be columns of the table, including those in `has`."""
        return _columns(_tree(self.text))

    @property
    def without_values(self) -> str:
        """The text with "…" in place of every value in a comparison with a key, folder or column of the table."""
        return ast.unparse(_WithoutValues().visit(ast.parse(self.text.strip(), mode="eval")))

    @property
    def conjuncts(self) -> tuple[Where, ...]:
        """The expressions that `and` joins at the top level; this expression alone if there is no `and`."""
        tree = _tree(self.text)
        if not (isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)):
            return (self,)
        parts = (Where(ast.unparse(value), _names(value)) for value in tree.values)
        return tuple(inner for part in parts for inner in part.conjuncts)

    def mask(self, facts: Facts) -> Bools:
        """Whether the expression is true for each sample, bool [n]. Raises UnknownNameError."""
        return _Evaluation(self.text, facts).boolean(_tree(self.text))


def parse_where(text: str) -> Where:
    """Parse and check an expression. Raises ValueError with the position, what is expected, and what was found."""
    tree = _tree(text)
    try:
        nothing = _Nothing((), np.zeros(0, np.int64), columns=lambda names: dict.fromkeys(names, ()))
        _Evaluation(text, nothing).boolean(tree)
    except RecursionError:
        raise ValueError(f"{text[:80]!r}… is nested too deeply") from None
    return Where(text, _names(tree))


def group_values(facts: Facts, name: str) -> list[Any]:
    """The value of each sample by which to group samples; None for samples without a value.

    name: "folder", for the folder of the key, or a column of the table. Raises UnknownNameError for other names.
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
    names, functions = set[str](), set[int]()
    for node in ast.walk(tree):  # a call comes before its parts
        if isinstance(node, ast.Call):
            functions.add(id(node.func))
            if _is_call(node, "has", "column"):
                names |= {
                    argument.value
                    for argument in node.args
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                }
        elif isinstance(node, ast.Name) and id(node) not in functions and node.id not in (_LABEL, *NUMBERS, *TEXTS):
            names.add(node.id)
    return frozenset(names)


class _WithoutValues(ast.NodeTransformer):
    """Replaces values that can identify a person by "…"."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return self._replaced(node, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._replaced(node, node.args[0]) if _is_call(node, "matches") and node.args else node

    def _replaced(self, node: ast.AST, operands: ast.AST) -> ast.AST:
        names = {inner.id for inner in ast.walk(operands) if isinstance(inner, ast.Name)}
        if names & {"key", "folder"} or _columns(operands):
            kept = {id(argument) for call in ast.walk(node) if _is_call(call, "column") for argument in call.args}
            for value in ast.walk(node):
                if isinstance(value, ast.Constant) and id(value) not in kept:
                    value.value = ERASED
        return node


def _is_call(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


@functools.lru_cache(maxsize=64)  # a conversion evaluates an expression for every sample
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


_NUMBER_KIND, _LABEL_KIND, _TEXT_KIND = "a number", "a label", "a text"
_LIST_KIND, _COLUMN_KIND = "a list", "a column of the table"


class _Operand(NamedTuple):
    """One side of a comparison.

    values: the constant, or the items of a list constant. Otherwise the values of the samples: an array of numbers or
        labels, `Texts`, or a list of the values of a column, None for missing ones.
    """

    kind: str
    values: Any
    is_constant: bool = False

    @property
    def known(self) -> Any:
        """Whether the number or column value of each sample is known."""
        if self.kind == _COLUMN_KIND:
            return _bools(map(_is_value, self.values))
        return ~np.isnan(self.values) if self.kind == _NUMBER_KIND else True


class _Evaluation:
    """The evaluation of one expression, column by column."""

    def __init__(self, text: str, facts: Facts) -> None:
        self._text, self._facts = text.strip(), facts

    def boolean(self, node: ast.expr) -> Bools:
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return functools.reduce(join, map(self.boolean, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.boolean(node.operand)
        if isinstance(node, ast.Compare):
            chosen, left = np.ones(len(self._facts), np.bool_), self._operand(node.left)
            for op, right_node in zip(node.ops, node.comparators, strict=True):
                right = self._operand(right_node)
                chosen &= self._compare(left, op, right, node)
                left = right
            return chosen
        if isinstance(node, ast.Call):
            return self._call(node)
        raise self._refused(node, "is neither a comparison nor matches(…) nor has(…)")

    def _compare(self, left: _Operand, op: ast.cmpop, right: _Operand, node: ast.Compare) -> Any:
        if isinstance(op, (ast.In, ast.NotIn)):
            chosen = self._is_one_of(left, right, node)
            return ~chosen & left.known if isinstance(op, ast.NotIn) else chosen
        if type(op) not in _COMPARISONS:
            raise self._refused(node, "is not a supported comparison: == != < <= > >= in, not in")
        compare = _COMPARISONS[type(op)]
        if left.is_constant or (right.kind == _COLUMN_KIND and left.kind != _COLUMN_KIND):
            left, right, compare = right, left, _TURNED.get(compare, compare)
        if left.kind == _COLUMN_KIND:
            if not right.is_constant:
                why = "expected a column of the table, and a number or a text to compare it with"
                raise self._refused(node, why)
            values = self._values(left, [right.values] if right.kind != _LIST_KIND else [], node)
            if compare is operator.ne:
                return _bools(value != right.values for value in values) & left.known
            return _bools(value is not None and compare(value, right.values) for value in values)
        is_equal = compare in (operator.eq, operator.ne)
        if is_equal and left.kind == _LABEL_KIND and right.kind == _TEXT_KIND and right.is_constant:
            right = _Operand(_NUMBER_KIND, self._class(right.values), is_constant=True)
        if {left.kind, right.kind} <= {_NUMBER_KIND, _LABEL_KIND}:
            return compare(left.values, right.values) & left.known & right.known
        if is_equal and left.kind == right.kind == _TEXT_KIND and right.is_constant and not left.is_constant:
            return left.values.where(lambda text: compare(text, right.values))
        problem = f"cannot compare {left.kind} with" if is_equal else f"cannot order {left.kind} and"
        raise self._refused(node, f"{problem} {right.kind}")

    def _is_one_of(self, left: _Operand, right: _Operand, node: ast.Compare) -> Any:
        items = right.values
        if left.kind == _COLUMN_KIND:
            values = self._values(left, items if right.kind == _LIST_KIND else [], node)
            return _bools(value is not None and value in items for value in values)
        if right.kind != _LIST_KIND or left.is_constant:
            raise self._refused(node, "expected a column in a list, as  label in (1, 2)")
        are_texts = [isinstance(item, str) for item in items]
        if left.kind == _TEXT_KIND and all(are_texts):
            return left.values.where(frozenset(items).__contains__)
        if left.kind == _LABEL_KIND:
            items = [self._class(item) if isinstance(item, str) else item for item in items]
        elif left.kind == _TEXT_KIND or any(are_texts):
            raise self._refused(node, f"cannot compare {left.kind} with {'texts' if any(are_texts) else 'numbers'}")
        return np.isin(left.values, items)

    def _values(self, column: _Operand, items: list[Any], node: ast.expr) -> list[Any]:
        """The values of a column, converted to the kind of the wanted values; None for other values.

        Raises ValueError if the column has no value of this kind, or if the wanted values are of two kinds.
        """
        kinds = {isinstance(item, str) for item in items}
        if len(kinds) != 1:
            why = "expected  column == value  or  column in (value, value), with only numbers or only texts"
            raise self._refused(node, why)
        as_kind = _as_text if kinds.pop() else _as_number
        values = [as_kind(value) for value in column.values]
        if len(values) > 1 and all(
            value is None for value in values
        ):  # a single sample does not show the kind of the column
            other = next((value for value in column.values if _is_value(value)), None)
            if other is not None:
                expected = "texts" if as_kind is _as_text else "numbers"
                why = f"asks for {expected} in a column that has none, but values such as {other!r:.40}"
                raise self._refused(node, why)
        return values

    def _class(self, name: str) -> int:
        """The number of the class with this name. Raises UnknownNameError."""
        classes = self._facts.classes
        if isinstance(self._facts, _Nothing):
            return 0
        if name not in classes:
            known = listed(classes, _SHOWN) or "none"
            raise UnknownNameError(f"{self._text!r:.200}: no class {name!r}; there are {len(classes)}: {known}")
        return classes.index(name)

    def _operand(self, node: ast.expr) -> _Operand:
        if isinstance(node, ast.Name):
            if node.id == _LABEL:
                return _Operand(_LABEL_KIND, self._facts.labels)
            if node.id in NUMBERS:
                return _Operand(_NUMBER_KIND, self._facts.numbers(node.id))
            return (
                _Operand(_TEXT_KIND, self._facts.texts(node.id)) if node.id in TEXTS else self._of_table(node.id, node)
            )
        if _is_call(node, "column") and len(node.args) == 1 and not node.keywords:
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(name, str):
                return self._of_table(name, node)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return _Operand(_LIST_KIND, [self._constant(item) for item in node.elts], is_constant=True)
        value = self._constant(node)
        return _Operand(_TEXT_KIND if isinstance(value, str) else _NUMBER_KIND, value, is_constant=True)

    def _of_table(self, name: str, node: ast.expr) -> _Operand:
        """A column of the table. Raises UnknownNameError."""
        if name in self._columns:
            return _Operand(_COLUMN_KIND, self._columns[name])
        known = (_LABEL, *TEXTS, *NUMBERS)
        near = difflib.get_close_matches(name, [*known, *self._columns], 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        columns = listed(sorted(self._columns), _COLUMNS_SHOWN) or "none"
        text = f"is not known; there are {', '.join(known)}; columns of the table in the field json: {columns}{meant}"
        raise UnknownNameError(str(self._refused(node, text)))

    @cached_property
    def _columns(self) -> Mapping[str, Sequence[Any]]:
        return self._facts.columns(_columns(_tree(self._text)))

    def _constant(self, node: ast.expr) -> Any:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        value: Any = node.value if isinstance(node, ast.Constant) else None
        if type(value) in (int, float) and abs(value) < 1 << 63:
            return value * sign
        if isinstance(value, str) and sign == 1:
            return value
        raise self._refused(node, "is neither the name of a column nor a number nor a text")

    def _call(self, node: ast.Call) -> Bools:
        arguments = node.args if not node.keywords else []
        last: Any = arguments[-1].value if arguments and isinstance(arguments[-1], ast.Constant) else None
        if _is_call(node, "has") and len(arguments) == 1 and isinstance(last, str):
            try:
                return self._facts.has(last)
            except UnknownNameError:
                if last not in self._columns:
                    raise
            return _bools(map(_is_value, self._columns[last]))
        if _is_call(node, "matches") and len(arguments) == 2 and isinstance(last, str):
            column, matches = self._operand(arguments[0]), re.compile(fnmatch.translate(last)).match
            if column.kind == _COLUMN_KIND:
                return _bools(value is not None and matches(value) for value in self._values(column, [last], node))
            if column.kind == _TEXT_KIND and not column.is_constant:
                texts: Texts = column.values
                return texts.where(matches)
        raise self._refused(node, 'is not a function that is known here: matches(key, "a*"), has("mask")')

    def _refused(self, node: ast.expr, why: str) -> ValueError:
        part = ast.get_source_segment(self._text, node) or self._text
        line = self._text.splitlines()[node.lineno - 1] if node.lineno > 1 else self._text
        place = len(line.encode()[: node.col_offset].decode(errors="ignore")) + 1
        return ValueError(f"{self._text!r:.200}: at character {place}: {part!r:.80} {why}")


def _bools(chosen: Iterable[Any]) -> Bools:
    return np.fromiter(map(bool, chosen), np.bool_)


def _is_value(value: Any) -> bool:
    """Whether the value of a column is not missing: not None, "" or NaN."""
    return value is not None and value != "" and value == value


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _as_number(value: Any) -> int | float | None:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        return None if match is None else float(value) if any(match.groups()) else int(value)
    return value if isinstance(value, (int, float)) and value == value else None


class _Nothing(Facts):
    """The metadata of zero samples, to check expressions with."""

    def numbers(self, name: str) -> npt.NDArray[Any]:
        return np.zeros(0)

    def has(self, field: str) -> Bools:
        return np.zeros(0, np.bool_)


class TableFacts(Facts):
    """The metadata of the samples of a `Table`, for expressions.

    headers: a function that returns the header values, for a table without them.
    split: the name of the split.
    labels, classes: replace those of the table.
    columns: returns the columns of the table that the set was packed from; see `Facts`.
    """

    def __init__(
        self,
        table: Table,
        headers: Callable[[], ImageInfo] | None = None,
        split: str = "",
        labels: npt.NDArray[Any] | None = None,
        classes: Sequence[str] | None = None,
        columns: ReadColumns = lambda names: {},
    ) -> None:
        labels, classes = table.labels if labels is None else labels, table.classes if classes is None else classes
        super().__init__(table.keys, labels, classes, split, columns)
        self._table, self._read_headers = table, headers

    def numbers(self, name: str) -> npt.NDArray[Any]:
        if name == "bytes":
            return self._table.sizes()
        if name in ("orientation", "components"):
            return np.where(self._headers.height > 0, getattr(self._headers, name), np.nan)
        sides = np.array(upright_sides(self._headers), np.float64)
        sides[sides == 0] = np.nan
        height, width = sides
        if name in ("aspect", "pixels"):
            return np.asarray(width / height if name == "aspect" else width * height)
        return np.asarray({"min_side": sides.min(0), "max_side": sides.max(0), "width": width, "height": height}[name])

    def texts(self, name: str) -> Texts:
        if name != "medium":
            return super().texts(name)
        from readers.headers import MEDIA

        return Texts(MEDIA, self._headers.media)

    def has(self, field: str) -> Bools:
        return np.asarray(self._table.field_column(field, "offset") != np.uint64(ABSENT))

    @cached_property
    def _headers(self) -> ImageInfo:
        return self._table.headers(None) if self._read_headers is None else self._read_headers()


def json_columns(payloads: Iterable[tuple[str, Buffer | None]], names: Collection[str]) -> dict[str, list[Any]]:
    """The members of the JSON objects of n samples as columns: n values for each of `names`, None if missing.

    payloads: the key and the JSON text of each sample, None for a sample without one. The columns of members not in
        `names` are empty lists; JSON values other than objects have no members.

    Raises BadSampleError for bytes that are not JSON.
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
    """Add the columns of all parts of a table to each part; new ones are all None. counts: samples of each part."""
    for name in dict.fromkeys(name for part in parts for name in part):
        for part, count in zip(parts, counts, strict=True):
            part.setdefault(name, [])
            part[name] = part[name] or [None] * count
