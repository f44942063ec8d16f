"""Where Dynamo's graph breaks cut a graph off, and which sites are kept because of that."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gemkv_compile.compat import graph_break_of
from gemkv_compile.passes.lens import op_of, rank_of


@dataclass(frozen=True)
class Break:
    """A graph break that ended a graph.

    Args:
        reason: Dynamo's words, several lines.
        place: "file:line, in function: code" of what Dynamo could not go on with.
        frame: File and line where the function that the graph is of stood then.
    """

    reason: str
    place: str
    frame: tuple[str, int]

    def __str__(self) -> str:
        return f"{self.reason.splitlines()[0].rstrip('.')}, at {self.place}"


@dataclass(frozen=True)
class Boundaries:
    """The graph breaks between which a graph lies, as far as they are known."""

    before: Break | None = None
    after: Break | None = None


def boundaries_of(module: GraphModule, known: Sequence[Break]) -> Boundaries:
    """The breaks around a graph that is being compiled.

    Args:
        known: Breaks that ended earlier graphs; the graph begins after one if its caller stands there now.
    """
    end = graph_break_of(module)
    after = None if end is None else Break(*end)
    by_frame = {each.frame: each for each in known}
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if (before := by_frame.get((frame.f_code.co_filename, frame.f_lineno))) is not None:
            return Boundaries(before, after)
    return Boundaries(None, after)


def cut_off(reason: str, node: Node, boundaries: Boundaries) -> str:
    """A sentence about the graph break that the other half of a site lies behind, or "".

    Args:
        reason: The site's reason code.
        node: What the site's sentence is about.
    """
    before, after = boundaries.before, boundaries.after
    if before is not None and (reason in _OUTSIDE or (reason == "no_cache" and _reads_inputs(node))):
        return f"This graph begins after a graph break: {before}."
    check = _LEAVING.get(reason)
    if after is not None and check is not None and check(node):
        return f"This graph ends at a graph break: {after}."
    return ""


def _reads_inputs(node: Node) -> bool:
    """Whether an attention reads tensors of four dimensions that are inputs of the graph, as keys and values are."""
    seen, pending = {node}, [node]
    while pending:
        for source in set(pending.pop().all_input_nodes) - seen:
            if source.op == "placeholder" and rank_of(source) == 4:
                return True
            seen.add(source)
            pending.append(source)
    return False


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _reader_is_missing(node: Node) -> bool:
    """Whether only the beginning of an attention, if anything, reads the rows of a grown cache."""
    seen, pending = {node}, [node]
    while pending:
        for user in set(pending.pop().users) - seen:
            if user.op != "output" and op_of(user) in ("", "softmax"):
                return False
            seen.add(user)
            pending.append(user)
    return op_of(node) == "cat"


_OUTSIDE = frozenset(("mask_outside_graph", "block_mask_not_proven"))
_LEAVING = {"cache_used_elsewhere": _is_returned, "attention_not_recognised": _reader_is_missing}
