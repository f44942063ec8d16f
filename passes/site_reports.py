"""From verdicts to the sites of a report: which attention, what happened, why, and where it stands in the source."""

from __future__ import annotations

import re
from dataclasses import replace

from torch.fx import Graph, Node

from gemkv_compile.passes.boundaries import Boundaries, cut_off
from gemkv_compile.passes.decide import Read, Rewrite, Verdicts
from gemkv_compile.passes.find_attention import AttentionReport
from gemkv_compile.passes.find_updates import UpdateReport
from gemkv_compile.passes.lens import module_path, source_line, value_of
from gemkv_compile.passes.prompts import Prefill, takes_engine
from gemkv_compile.passes.sites import Attention, Refusal
from gemkv_compile.passes.symbols import static_int
from gemkv_compile.report import Site, describe_mask

_WHOLE, _OWN_KERNEL = Boundaries(), Prefill()


def describe_sites(
    graph: Graph,
    verdicts: Verdicts,
    attentions: AttentionReport,
    updates: UpdateReport,
    boundaries: Boundaries = _WHOLE,
    prefill: Prefill = _OWN_KERNEL,
) -> tuple[Site, ...]:
    """One site per attention and per unread cache update, in graph order."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    sites: list[tuple[Node, Node, Site]] = []  # what stands there, what its sentence is about, what is said
    for rewrite in verdicts.rewrites:
        nodes = [read.attention.node for read in rewrite.reads]
        sites += [
            (node, node, _rewritten(rewrite, read, prefill)) for node, read in zip(nodes, rewrite.reads, strict=True)
        ]
    for attention, refusal in (*verdicts.kept, *updates.without):
        sites.append((attention.node, refusal.node, _kept(attention, refusal)))
    for refusal in (*(refusal for _, refusal in attentions.refused), *updates.unread):
        sites.append((refusal.node, refusal.node, _refused(refusal)))
    sites.sort(key=lambda triple: order[triple[0]])
    cuts = [cut_off(site.reason, about, boundaries) for _, about, site in sites]
    return tuple(_numbered(site, node, i, cuts[i]) for i, (node, _, site) in enumerate(sites))


def _rewritten(rewrite: Rewrite, read: Read, prefill: Prefill) -> Site:
    reason, sentence = ("", "") if read.unproven is None else (read.unproven.reason, read.unproven.sentence)
    operator = "attend_prompt" if takes_engine(rewrite, read, prefill) else "attend_chunk"
    return Site(
        layer=0,
        module="",
        status="rewritten",
        reason=reason,
        sentence=sentence,
        source=source_line(read.attention.node),
        operator="attend_pages" if rewrite.is_decode else operator,
        mask=_mask(read),
        predicate=_predicate(read),
        num_q_heads=static_int(value_of(read.attention.query).shape[1]),
        num_kv_heads=rewrite.layout.num_kv_heads,
        head_dim=rewrite.layout.head_dim,
        window=read.window,
        softcap=read.attention.softcap,
        rule=f"{read.attention.rule}, {rewrite.cache.rule}",
        drop=rewrite.drop.sentence,
    )


def _mask(read: Read) -> str:
    """The mask in words; of one that is used densely, what it is proven to be."""
    if read.dense_mask is None or read.proof is None:
        return describe_mask(read.causal, read.window, read.padding, read.dense_mask is not None)
    proof = read.proof
    return describe_mask(proof.causal, proof.window, proof.padding, True, proof.dense_kinds)


def _predicate(read: Read) -> str:
    """The proven formula; where the window is none of the mask's, that is said behind it."""
    if read.proof is None:
        return ""
    if read.window is None or read.window == read.proof.window:
        return read.proof.text
    rows = "the cache keeps" if read.attention.visible is None else "the attention is given"
    checked = ", which each call checks" if read.window_is_kept_rows else ""
    return f"{read.proof.text}; window {read.window} is not the mask's: it follows from the rows that {rows}{checked}"


def _kept(attention: Attention, refusal: Refusal) -> Site:
    query, keys = value_of(attention.query), value_of(attention.keys)
    return Site(
        layer=0,
        module="",
        status="kept",
        reason=refusal.reason,
        sentence=refusal.sentence,
        source=source_line(refusal.node) or source_line(attention.node),
        num_q_heads=static_int(query.shape[1]),
        num_kv_heads=static_int(keys.shape[1]),
        head_dim=static_int(query.shape[-1]),
        softcap=attention.softcap,
        rule=attention.rule,
    )


def _refused(refusal: Refusal) -> Site:
    return Site(0, "", "kept", refusal.reason, refusal.sentence, source_line(refusal.node))


def layer_number(node: Node, position: int) -> int:
    """The layer of an attention by its module path, or `position` where that has no number."""
    number = re.search(r"\.(\d+)(?:\.|$)", f".{module_path(node)}")
    return int(number[1]) if number else position


def _numbered(site: Site, node: Node, position: int, cut: str) -> Site:
    """The site with its module path, and its layer number from that path (else its position among the sites)."""
    path = module_path(node)
    return replace(
        site,
        layer=layer_number(node, position),
        module=path or f"attention {position}",
        sentence=f"{site.sentence.rstrip('.')}. {cut}".rstrip() if site.sentence else "",
    )
