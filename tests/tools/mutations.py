"""Small faults that can be put into a source text: what ``mutants.py`` draws from.

``mutations_of`` reads a Python module, or a header of emitted text, and returns a :class:`Mutation` for each place and
operator; ``is_valid`` says whether the changed text compiles and differs. Left alone is what no test should pin:
docstrings, comments, annotations, decorators, sentences of errors.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

PAIRS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_GROUPS = {sign: "arithmetic" for sign in ("+", "-", "*", "/", "//", "%", "<<", ">>")}
_GROUPS |= {sign: "comparison" for sign in ("<", "<=", ">", ">=", "==", "!=", "in", "not", "is")}
_GROUPS |= {"and": "and and or", "or": "and and or"}
_BOTH_WAYS = ("min max", "any all", "median mean", "floor ceil", "argmin argmax", "amin amax", "add_ sub_")
OPPOSITES = {a: b for pair in map(str.split, _BOTH_WAYS) for a, b in (pair, pair[::-1])}
# In C text: a pattern and what takes its place. A number grows by one.
C_TEXT = tuple(
    (re.compile(pattern), other)
    for pattern, other in (
        (r"(?<=[\w)\]}] )\+(?= )|^ ?\+ ?$", "-"),
        (r"(?<=[\w)\]}] )-(?= )|^ ?- ?$", "+"),
        (r"\+=", "-="),
        (r"-=", "+="),
        (r"(?<= )\*(?= )", "/"),
        (r"(?<= )/(?= )", "*"),
        (r"(?<= )<(?= )", "<="),
        (r"(?<= )<=(?= )", "<"),
        (r"(?<= )>(?= )", ">="),
        (r"(?<= )>=(?= )", ">"),
        (r"==", "!="),
        (r"!=", "=="),
        (r"&&", "||"),
        (r"\|\|", "&&"),
        (r"__sync\w+\([^()]*\);", ";"),
        (r"(?<=[=(,] )-(?=[\w{(])|(?<=return )-", ""),
        (r"\bmin\(", "max("),
        (r"\bmax\(", "min("),
        (r"(?<![\w.\"#-])\d+(?![\w.\"])", None),
    )
)
# Larger integers are sizes and durations, of which one more is nothing.
LARGEST = 256
_UNSEEN_KEYWORDS = ("strict", "maxsize", "msg", "help", "match")
_NEVER_SWAPPED = ("isinstance", "issubclass", "getattr", "setattr", "hasattr", "print", "min", "max")


@dataclass(frozen=True)
class Mutation:
    """One change of a text: characters ``start`` to ``end``, which are ``before``, become ``after``."""

    operator: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def group(self) -> str:
        """Mutations of one kind, from which a draw takes equally."""
        if self.operator.startswith("C text"):
            return "C text"
        return self.operator if " to " not in self.operator else _GROUPS.get(self.operator.split()[0], "function")

    def apply(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]

    def lines(self, source: str) -> tuple[str, str]:
        """The changed lines before and after."""
        first, last = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.end)
        last = len(source) if last < 0 else last
        changed = source[first : self.start] + self.after + source[self.end : last]
        return " ".join(source[first:last].split()), " ".join(changed.split())


def mutations_of(source: str, *, c_text: bool = False, python: bool = True) -> list[Mutation]:
    """All mutations of a text, in order. c_text: strings hold C text. Text that is not Python is a header of C text."""
    if not python:
        found = list(_in_header(source))
    else:
        finder = _Finder(source)
        finder.visit(ast.parse(source))
        found = finder.found + (list(_in_strings(source, finder.unseen)) if c_text else [])
    return sorted(set(found), key=lambda one: (one.start, one.operator, one.after))


def is_valid(source: str, mutation: Mutation, python: bool = True) -> bool:
    """Whether the changed text compiles, and is another program."""
    if not python:
        return True
    try:
        changed = ast.parse(mutation.apply(source))
    except SyntaxError:  # an operator that does not fit here
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


class _Finder(ast.NodeVisitor):
    """Collects mutations of Python code; ``unseen`` are spans of text that no test should pin."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.begins = [0]
        for line in self.lines:
            self.begins.append(self.begins[-1] + len(line))
        self.found: list[Mutation] = []
        self.unseen: list[tuple[int, int]] = []

    def place(self, line: int, byte: int) -> int:
        return self.begins[line - 1] + len(self.lines[line - 1].encode()[:byte].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def put(self, operator: str, start: int, end: int, after: str) -> None:
        line = self.source.count("\n", 0, start) + 1
        self.found.append(Mutation(operator, line, start, end, self.source[start:end], after))

    def replace(self, operator: str, node: ast.AST, after: str) -> None:
        self.put(operator, *self.span(node), after)

    def between(self, left: ast.AST, right: ast.AST, kind: ast.AST) -> None:
        """Exchange the sign of an operation, which stands between its operands."""
        if type(kind) not in PAIRS:
            return
        sign, other = PAIRS[type(kind)]
        start, end = self.span(left)[1], self.span(right)[0]
        word = rf"\b{sign}\b".replace(" ", r"\s+") if sign[0].isalpha() else re.escape(sign)
        if place := re.search(word, re.sub(r"#.*", lambda found: " " * len(found[0]), self.source[start:end])):
            self.put(f"{sign} to {other}", start + place.start(), start + place.end(), other)

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "format_spec"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.unseen.append(self.span(node))

    def visit_Assert(self, node: ast.Assert) -> None:
        self.unseen.append(self.span(node))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            self.unseen.append(self.span(node))
            return
        if isinstance(node.value, ast.Call):
            self.replace("drop the call", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("drop the statement", node, "pass")
        start, end = self.span(node.target)[1], self.span(node.value)[0]
        sign, other = PAIRS.get(type(node.op), ("", ""))
        if sign and sign + "=" in (gap := self.source[start:end]):
            at = start + gap.index(sign + "=")
            self.put(f"{sign} to {other}", at, at + len(sign), other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = [each for each in (node.left, node.right) if isinstance(each, ast.JoinedStr) or _is_text(each)]
        if not texts:
            self.between(node.left, node.right, node.op)
            if isinstance(node.op, ast.Mult | ast.Div):
                self.replace("flip the sign", node, f"(-({self.text(node)}))")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self.replace("flip the sign", node, f"({self.text(node.operand)})")
        elif isinstance(node.op, ast.Not):
            self.replace("negate", node, f"bool({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, node.op)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, kind in zip(operands, operands[1:], node.ops, strict=False):
            self.between(left, right, kind)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare) or len(test.ops) > 1 or not isinstance(test.ops[0], ast.Eq | ast.NotEq):
            self.replace("negate", test, f"(not ({self.text(test)}))")

    def visit_If(self, node: ast.If) -> None:
        if self.text(node.test) == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)  # negated it never ends

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace("exchange true and false", node, str(not value))
        elif isinstance(value, int) and abs(value) <= LARGEST:
            self.replace("off by one", node, str(value + 1))
            self.replace("off by one", node, str(value - 1) if value else "(-1)")
        elif isinstance(value, float) and value:
            self.replace("flip the sign", node, f"(-{self.text(node)})")

    def visit_Call(self, node: ast.Call) -> None:
        name_node = node.func
        name = getattr(name_node, "attr", getattr(name_node, "id", ""))
        if name.endswith("Error"):
            self.unseen.append(self.span(node))
            return
        if name in OPPOSITES:
            end = self.span(name_node)[1]
            self.put(f"{name} to {OPPOSITES[name]}", end - len(name), end, OPPOSITES[name])
        if len(node.args) > 1 and name not in _NEVER_SWAPPED and not any(isinstance(a, ast.Starred) for a in node.args):
            first, second = node.args[:2]
            (start, a_end), (b_start, end) = self.span(first), self.span(second)
            self.put("swap arguments", start, end, self.text(second) + self.source[a_end:b_start] + self.text(first))
        self.visit(node.func)
        for each in (*node.args, *(k.value for k in node.keywords if k.arg not in _UNSEEN_KEYWORDS)):
            self.visit(each)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _in_strings(source: str, unseen: list[tuple[int, int]]) -> Iterator[Mutation]:
    """Mutations of the C text in strings and f-strings."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    kinds = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start = begins[token.start[0] - 1] + token.start[1]
        if token.type not in kinds or any(first <= start < last for first, last in unseen):
            continue
        body, shift, fields = token.string, 0, False
        if token.type == tokenize.STRING:
            opening = re.match(r"(?i)([a-z]*)(\"\"\"|'''|\"|')", body)
            assert opening
            fields, shift = "f" in opening[1].lower(), opening.end()
            body = body[shift : -len(opening[2])]
        if fields:
            body = _without_fields(body)
        yield from _in_c(source, start + shift, body.split("//")[0])


def _without_fields(body: str) -> str:
    """The body of an f-string, with letters in place of its fields."""
    depth, kept, place = 0, [], 0
    while place < len(body):
        pair = body[place : place + 2]
        if depth == 0 and pair in ("{{", "}}"):
            kept.append(pair)
            place += 2
            continue
        depth += (body[place] == "{") - (body[place] == "}" and depth > 0)
        kept.append("x" if depth or body[place] == "}" else body[place])
        place += 1
    return "".join(kept)


def _in_header(source: str) -> Iterator[Mutation]:
    plain = re.sub(r"/\*.*?\*/|//[^\n]*|^[ \t]*#[^\n]*", lambda found: " " * len(found[0]), source, flags=re.S | re.M)
    yield from _in_c(source, 0, plain)


def _in_c(source: str, begin: int, body: str) -> Iterator[Mutation]:
    for pattern, other in C_TEXT:
        for found in pattern.finditer(body):
            start, end = begin + found.start(), begin + found.end()
            before = source[start:end]
            after = str(int(before) + 1) if other is None else found[0].replace(found[0].strip(), other)
            line = source.count("\n", 0, start) + 1
            yield Mutation(f"C text: {before.strip() or before} to {after.strip()}", line, start, end, before, after)
