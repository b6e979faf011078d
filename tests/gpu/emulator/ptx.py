"""PTX text as the emulator takes it: a list of operations on places of a warp's registers.

Every register of a warp has a place in one block of memory, 32 lanes side by side; a predicate is
one word, a bit per lane. Constants, special registers and symbols are registers too, filled in
before the start. So an operation is a name, a predicate, and a list of places.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}
ROOM = {1: 64, 8: 64, 16: 64, 32: 128, 64: 256}
"""Bytes of a register of so many bits."""
SMEM = "global_smem"
_STATEMENT = re.compile(
    r"\s*(?:(?P<loc>\.(?:loc|file|section)[^\n]*)|(?P<label>[\w$.%]+):(?!:)|(?P<brace>[{}])"
    r"|(?P<text>[^;]*);)",
)
_PARAMETER = re.compile(r"\.(?:align (\d+) \.)?([busf]\d+)\b.*?(\w+)(?:\[(\d+)\])?\s*$")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*(?:,\s*(\{[^}]*\}))?\s*\]")
_DROPPED = re.compile(  # what changes no result here
    r"\.(approx|full|sync|aligned|cta|relaxed|acq_rel|acquire|release|gpu|sys|weak|volatile|nc|ca|cg|cs"
    r"|cluster|unicast|L1::\w+|L2::\w+|uni)(?=\.|$)"
)
_IGNORED = (
    "createpolicy", "griddepcontrol", "fence", "membar", "setmaxnreg", "bar.warp.sync", "prefetch",
    "wgmma.fence", "discard", "nanosleep", "applypriority", "pragma",
)  # fmt: skip


class UnknownError(NotImplementedError):
    """PTX that the emulator does not know."""


@dataclass
class Operation:
    """One instruction: its name here, its guard, and places and numbers."""

    name: str
    guard: int  # a predicate's place, or -1
    negated: bool
    operands: list[int]
    line: int
    source: str  # "decode.py:243:26"


@dataclass
class Program:
    """A kernel."""

    name: str
    operations: list[Operation] = field(default_factory=list)
    parameters: list[tuple[int, int]] = field(default_factory=list)  # place in the block, bytes
    parameter_bytes: int = 0
    register_bytes: int = 0
    constants: list[tuple[int, int, int]] = field(default_factory=list)  # place, bits, value
    specials: list[tuple[int, str]] = field(default_factory=list)  # place, name
    symbols: list[tuple[int, int, str, int]] = field(default_factory=list)  # and an offset


def parse(text: str) -> Program:
    """The one kernel of a module."""
    return _Parser(text).program


class _Parser:
    def __init__(self, text: str) -> None:
        entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{", text, re.DOTALL)
        assert entry is not None, "no kernel in this PTX"
        self.program = Program(entry[1])
        self.offsets: dict[str, int] = {}
        self._parameters(entry[2])
        self.places: list[dict[str, tuple[int, int]]] = [{}]  # scopes: name -> place, bits
        self.labels: list[dict[str, int]] = [{}]
        self.jumps: list[tuple[Operation, str, list[dict[str, int]]]] = []
        self.tables: dict[str, list[str]] = {}
        self.pooled: dict[tuple[object, ...], int] = {}
        self.source = ""
        self.line = text.count("\n", 0, entry.end()) + 1
        self._body(text, entry.end())
        for operation, label, scopes in self.jumps:
            found = [scope[label] for scope in reversed(scopes) if label in scope]
            operation.operands.append(found[0])

    def _parameters(self, text: str) -> None:
        at = 0
        for declared in filter(str.strip, re.sub(r"//[^\n]*", "", text).split(",")):
            found = re.search(
                r"\.(?:align (\d+) \.)?([busf]\d+)\b.*?(\w+)(?:\[(\d+)\])?\s*$", declared
            )
            assert found is not None, declared
            size = int(found[2][1:]) // 8 * int(found[4] or 1)
            align = max(int(found[1] or 1), 64 if found[4] else size)
            at += -at % align
            self.offsets[found[3]] = at
            self.program.parameters.append((at, size))
            at += size
        self.program.parameter_bytes = at

    def _body(self, text: str, at: int) -> None:
        while True:
            comment = re.match(r"\s*//[^\n]*\n?", text[at : at + 4000])
            if comment:
                self.line += comment[0].count("\n")
                at += comment.end()
                continue
            found = _STATEMENT.match(text, at)
            assert found is not None, text[at : at + 80]
            lead = len(found[0]) - len(found[0].lstrip())
            self.line += found[0].count("\n", 0, lead)
            if found["brace"] == "}" and len(self.places) == 1:
                return
            self._statement(found)
            self.line += found[0].count("\n", lead)
            at = found.end()

    def _statement(self, found: re.Match[str]) -> None:
        if found["loc"]:
            told = re.search(r"// (\S+)", found["loc"])
            self.source = told[1] if told else ""
        elif found["label"]:
            self.labels[-1][found["label"]] = len(self.program.operations)
        elif found["brace"] == "{":
            self.places.append({})
            self.labels.append({})
        elif found["brace"] == "}":
            self.places.pop()
            self.labels.pop()
        else:
            text = re.sub(r"//[^\n]*", "", found["text"]).strip()
            if text.startswith(".reg"):
                self._declare(text)
            elif text.startswith(".branchtargets"):
                self.tables[list(self.labels[-1])[-1]] = re.findall(r"\$\w+", text)
            elif text and not text.startswith(".pragma"):
                self._instruction(text)

    def _declare(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL).groups()
        bits = 1 if kind == "pred" else int(kind[1:])
        for name in re.split(r"\s*,\s*", names.strip()):
            many = re.match(r"(.*)<(\d+)>", name)
            for each in [name] if not many else [f"{many[1]}{i}" for i in range(int(many[2]))]:
                self.places[-1][each] = (-1, bits)  # a place once it is used

    def _room(self, bits: int) -> int:
        place = self.program.register_bytes
        self.program.register_bytes += ROOM[bits]
        return place

    def _register(self, name: str) -> tuple[int, int] | None:
        """Its place and its bits."""
        for scope in reversed(self.places):
            if name in scope:
                place, bits = scope[name]
                if place < 0:
                    place = self._room(bits)
                    scope[name] = place, bits
                return place, bits
        return None

    def _pool(self, key: tuple[object, ...], bits: int) -> tuple[int, bool]:
        key = (*key, bits)
        new = key not in self.pooled
        if new:
            self.pooled[key] = self._room(bits)
        return self.pooled[key], new

    def place(self, text: str, bits: int) -> int:
        """Where an operand lies; ``bits`` of it, if it is a constant."""
        text = text.strip()
        found = self._register(text)
        if found is not None:
            return found[0]
        if text == "_":  # nobody asks for it
            return self._pool(("_",), 64)[0]
        if text.startswith("%"):
            place, new = self._pool((text,), bits)
            if new:
                self.program.specials.append((place, text))
            return place
        symbol = re.fullmatch(r"([A-Za-z_$][\w$]*)(?:\+(\d+))?", text)
        if symbol and text not in ("true", "false"):
            if symbol[1] != SMEM and symbol[1] not in self.offsets:
                raise UnknownError(f"the symbol {text} (line {self.line})")
            name, more = (symbol[1], 0) if symbol[1] == SMEM else ("param", self.offsets[symbol[1]])
            place, new = self._pool((text,), bits)
            if new:
                more += int(symbol[2] or 0)
                self.program.symbols.append((place, bits, name, more))
            return place
        value = _constant(text, bits)
        place, new = self._pool((value,), bits)
        if new:
            self.program.constants.append((place, bits, value))
        return place

    def _address(self, text: str) -> list[int]:
        """[base + displacement]: a place and a number."""
        found = _ADDRESS.fullmatch(text)
        assert found is not None, text
        known = self._register(found[1])
        bits = known[1] if known else 64 if found[1] in self.offsets else 32
        return [self.place(found[1], bits), int(found[2] or "0", 0)]

    def _instruction(self, text: str) -> None:
        guard, negated = -1, False
        told = _GUARD.match(text)
        if told:
            guard, negated = self.place(told[2], 1), bool(told[1])
            text = text[told.end() :]
        name, _, rest = text.replace("\t", " ").partition(" ")
        operation = Operation("", guard, negated, [], self.line, self.source)
        if name.startswith(_IGNORED):
            return
        self.program.operations.append(operation)
        operands = _OPERAND.findall(rest)
        if "cache_hint" in name:
            operands.pop()
        name = _DROPPED.sub("", name.replace("::cta", "").replace("::cluster", ""))
        base, *kinds = name.split(".")
        if base == "brx":
            operation.name, operation.operands = "brx", [self.place(operands[0], 32)]
            for label in self.tables[operands[1].strip()]:
                self.jumps.append((operation, label, list(self.labels)))
        elif base == "bra":
            operation.name = "bra"
            self.jumps.append((operation, operands[0].strip(), list(self.labels)))
        elif base in ("ld", "st"):
            self._access(operation, base, kinds, operands)
        else:
            operation.name = self._key(base, kinds, operands)
            for i, operand in enumerate(operands):
                operation.operands += self._places(base, kinds, i, operand)

    def _access(
        self, operation: Operation, base: str, kinds: list[str], operands: list[str]
    ) -> None:
        """``ld.global.b32.64s``: what memory holds, and what the register does."""
        space, kind = kinds[0], kinds[-1]
        address, values = operands if base == "st" else reversed(operands)
        names = [x.strip() for x in values.strip("{} ").split(",")]
        size = int(kind[1:])
        found = self._register(names[0])
        wide = found[1] if found else max(size, 16)
        sign = "s" if kind[0] == "s" and wide > size else ""
        of = self._register(re.findall(r"[%\w$.]+", address)[0])
        space += "32" if space == "param" and of and of[1] == 32 else ""
        operation.name = f"{base}.{space}.{size}.{wide}{sign}"
        places = [self.place(x, wide) for x in names]
        operation.operands = [*self._address(address), len(places), *places]

    def _key(self, base: str, kinds: list[str], operands: list[str]) -> str:
        """The operation's name here: what differs in nothing has one name."""
        if base == "mov" and (operands[0].startswith("{") or operands[1].startswith("{")):
            way, many = ("unpack", operands[0]) if operands[0][0] == "{" else ("pack", operands[1])
            return f"{way}.{kinds[-1][1:]}.{many.count(',') + 1}"
        if base in ("add", "sub", "mul", "fma", "sqrt", "rcp", "div", "ex2", "lg2"):
            kinds = [x for x in kinds if x not in ("rn", "lo")]
        elif base == "mad" and kinds[0] == "lo":
            kinds = kinds[1:]
        plain = base in ("add", "sub", "mov", "selp", "and", "or", "xor", "not", "shl", "neg")
        plain |= base in ("mul", "mad") and len(kinds) == 1
        plain |= base == "setp" and kinds[0] in ("eq", "ne")
        same = "usf" if base in ("mov", "selp") else "us"
        if kinds and plain and re.fullmatch(rf"[{same}]\d+", kinds[-1]):
            kinds = [*kinds[:-1], "b" + kinds[-1][1:]]
        if base in ("min", "max") and len(operands) == 4:
            base += "3"
        name = ".".join([base, *kinds])
        if base == "cvt":  # of a part of a wider register, or into one
            into, of = (self._register(x.strip()) for x in operands[:2])
            bits = [32 if "x2" in x else int(re.sub(r"\D", "", x)) for x in kinds[-2:]]
            name += f">{into[1]}" if into and into[1] > bits[0] else ""
            name += f"<{of[1]}" if of and of[1] > bits[1] and "tf32" not in kinds[-2] else ""
        return name

    def _places(self, base: str, kinds: list[str], index: int, operand: str) -> Iterator[int]:
        if operand.startswith("["):
            yield from self._address(operand)
            inner = _ADDRESS.fullmatch(operand)[3]
            if inner:
                yield from (self.place(x, 32) for x in inner.strip("{} ").split(","))
            return
        bits, parts = self._bits(base, kinds, index), operand.strip("{} ").split(",")
        if base == "mov":
            bits //= len(parts)
        for each in parts:
            for name in each.split("|"):
                yield self.place(name, bits)

    def _bits(self, base: str, kinds: list[str], index: int) -> int:
        """Of a constant at this place."""
        kind = kinds[-1] if kinds else "b32"
        if base in ("mbarrier", "wgmma", "cp", "bar", "barrier", "elect"):
            return 32
        if base in ("shl", "shr") and index == 2:
            return 32
        if "f32" in kinds[:-1] and index == {"add": 2, "sub": 2, "fma": 3}.get(base):
            return 32  # the last operand of sub.f32.bf16
        if base == "selp" and index == 3:
            return 1
        one, _, pair = kind.partition("x")
        bits = WIDTHS.get(kind) or int(re.sub(r"\D", "", one) or 32) * int(pair or 1)
        return 2 * bits if base == "mad" and kinds[0] == "wide" and index == 3 else bits


def _constant(text: str, bits: int) -> int:
    """Its bits."""
    text = text.rstrip("U")
    if text in ("true", "false"):
        return -(text == "true")
    if text[:2] in ("0f", "0d"):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", text):
        return int(text, 0) & ((1 << max(bits, 32)) - 1)
    return struct.unpack("<I", struct.pack("<f", float(text)))[0]
