"""A proof as one formula: sympy's, over the graph's own symbols, and a line of Python that people read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

import sympy
from torch import fx

from gemkv_compile.passes.masks.domain import Domain
from gemkv_compile.passes.masks.predicate import KV, B, Q
from gemkv_compile.passes.masks.proof import Documents, MaskProof, Padding, Prefix, Spans


def predicate_of(proof: MaskProof, offset: sympy.Expr) -> sympy.Basic:
    """The proven mask in sympy's own relations, which print and evaluate."""
    parts, here = [], Q + offset
    if proof.causal or proof.right is not None:
        bound = sympy.Le(KV, here + (proof.right or 0), evaluate=False)
        parts.append(_any([bound, *(_shown(kind, offset) for kind in _exceptions(proof, "after_bound"))]))
    if proof.window is not None:
        window = sympy.Gt(KV, here - proof.window, evaluate=False)
        parts.append(_any([window, *(_shown(kind, offset) for kind in _exceptions(proof, "before_window"))]))
    if proof.padding is not None:
        values = _values(proof.padding.source)
        parts.append(sympy.Ne(values(B, KV + proof.padding.column), 0, evaluate=False))
    if proof.documents is not None:
        parts.append(_same(proof.documents, offset))
    return _all(parts)


def _exceptions(proof: MaskProof, lifted: str) -> Iterator[Prefix | Spans]:
    return (kind for kind in (proof.prefix, proof.spans) if kind is not None and getattr(kind, lifted))


def _shown(kind: Prefix | Spans, offset: sympy.Expr) -> sympy.Basic:
    if isinstance(kind, Prefix):
        length = kind.extra if kind.source is None else _values(kind.source)(B) + kind.extra
        return sympy.Lt(KV, length, evaluate=False)
    parts = [_same(kind, offset)]
    if kind.least is not None:
        parts.append(sympy.Ge(_values(kind.source)(B, KV + kind.column), kind.least, evaluate=False))
    return _all(parts)


def _same(kind: Documents | Spans, offset: sympy.Expr) -> sympy.Basic:
    values = _values(kind.source)
    return sympy.Eq(values(B, Q + offset + kind.column), values(B, KV + kind.column), evaluate=False)


def _values(source: fx.Node) -> type[sympy.Function]:
    return sympy.Function(source.name, integer=True)


def _all(parts: list[sympy.Basic]) -> sympy.Basic:
    return sympy.And(*parts, evaluate=False) if len(parts) > 1 else parts[0] if parts else sympy.true


def _any(parts: list[sympy.Basic]) -> sympy.Basic:
    return sympy.Or(*parts, evaluate=False) if len(parts) > 1 else parts[0]


def text_of(proof: MaskProof, domain: Domain) -> str:
    """The proven mask as a line such as `kv <= q + past and kv > q + past - 512 and padding[b, kv] != 0`.

    Inputs of the graph are called as the caller calls them. `past` is kv_len - q_len: the keys before the first query.
    """
    return _Wording(proof, domain).line()


class _Wording:
    def __init__(self, proof: MaskProof, domain: Domain) -> None:
        self._proof = proof
        named = ((domain.sizes[KV], "kv_len"), (domain.sizes[Q], "q_len"), (domain.offset, "past"))
        self._names = {size: sympy.Symbol(name, integer=True) for size, name in named if size.is_Symbol}
        self._past = str(domain.offset) if domain.offset.is_Integer else "past"
        kinds = (proof.padding, proof.documents, proof.prefix, proof.spans)
        self._sources = _names_of({kind.source for kind in kinds if kind is not None and kind.source is not None})

    def line(self) -> str:
        proof, here = self._proof, _plus("q", self._past)
        parts = []
        if proof.causal or proof.right is not None:
            bound = f"kv <= {_plus(here, str(proof.right or 0))}"
            parts.append(self._or(bound, _exceptions(proof, "after_bound")))
        if proof.window is not None:
            parts.append(self._or(f"kv > {here} - {proof.window}", _exceptions(proof, "before_window")))
        if proof.padding is not None:
            parts.append(f"{self._of('kv', proof.padding)} != 0")
        if proof.documents is not None:
            parts.append(self._same(proof.documents))
        return " and ".join(parts) or "True"

    def _or(self, limit: str, exceptions: Iterator[Prefix | Spans]) -> str:
        parts = [limit, *map(self._shown, exceptions)]
        return f"({' or '.join(parts)})" if len(parts) > 1 else limit

    def _shown(self, kind: Prefix | Spans) -> str:
        if isinstance(kind, Prefix):
            length = self._number(kind.extra)
            return f"kv < {length if kind.source is None else _plus(f'{self._sources[kind.source]}[b]', length)}"
        least = "" if kind.least is None else f" and {self._of('kv', kind)} >= {kind.least}"
        return f"{self._same(kind)}{least}"

    def _same(self, kind: Documents | Spans) -> str:
        return f"{self._of(_plus('q', self._past), kind)} == {self._of('kv', kind)}"

    def _of(self, place: str, kind: Padding | Documents | Spans) -> str:
        return f"{self._sources[kind.source]}[b, {_plus(place, self._number(kind.column))}]"

    def _number(self, expr: sympy.Expr) -> str:
        return str(expr.xreplace(self._names)).replace("Max(", "max(").replace("Min(", "min(")


def _plus(place: str, number: str) -> str:
    if number == "0":
        return place
    return f"{place} - {number[1:]}" if re.fullmatch(r"-\w+", number) else f"{place} + {number}"


def _names_of(sources: Set[fx.Node]) -> dict[fx.Node, str]:
    """The caller's own names, such as attention_mask for l_kwargs_attention_mask_, where they say which is which."""
    own = {source: re.sub(r"^l_(kwargs_)?|_$", "", source.name) for source in sources}
    taken = [*own.values(), "b", "q", "kv", "past", "q_len", "kv_len"]
    return {s: name if name.isidentifier() and taken.count(name) == 1 else s.name for s, name in own.items()}
