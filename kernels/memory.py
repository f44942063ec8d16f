"""Pages as tensors: typed views over their bytes, and reading and writing of whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gemkv_compile.compat import bytes_at
from gemkv_compile.kernels.formats import (
    clamp_finite,
    dequantise_groups,
    dequantise_values,
    pack_codes,
    quantise_groups,
    quantise_values,
    unpack_codes,
)
from gemkv_compile.kernels.layout import SCALE_DTYPE, SCALE_PLANES, PageLayout


class GroupViews(NamedTuple):
    """The parts of some groups, as views.

    k: [..., group_size, head_dim] element dtype; of smaller codes [..., group_size, head_dim * bits / 8], packed.
    v: [..., head_dim, group_size] element dtype; of 4-bit codes [..., head_dim / 2, group_size].
    scales: [..., 3, head_dim] float16 (K scale, K zero, V scale), or None in format "model".
    v_last: V zero [..., head_dim] float16, or V norms [..., 2, group_size] of values of 4 bits, or None.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None
    v_last: Tensor | None


def page_bytes(address: int, layout: PageLayout, device: torch.device) -> Tensor:
    """The page at `address`, a uint8 view [num_kv_heads, groups_per_page, group_bytes] that does not own its memory."""
    data = bytes_at(address, layout.page_bytes, device)
    return data.view(layout.num_kv_heads, layout.groups_per_page, layout.group_bytes)


def split_groups(data: Tensor, layout: PageLayout) -> GroupViews:
    """Views of the parts of groups, from their bytes [..., group_bytes] uint8."""
    k_end, group, dtype = layout.k_bytes, layout.group_size, layout.element_dtype
    k = data[..., :k_end].view(dtype).unflatten(-1, (group, -1))
    v = data[..., k_end : k_end + layout.v_bytes].view(dtype).unflatten(-1, (-1, group))
    if not layout.is_quantised:
        return GroupViews(k, v, None, None)
    planes, end = data[..., k_end + layout.v_bytes :].view(SCALE_DTYPE), SCALE_PLANES * layout.head_dim
    scales, last = planes[..., :end].unflatten(-1, (SCALE_PLANES, layout.head_dim)), planes[..., end:]
    return GroupViews(k, v, scales, last.unflatten(-1, (2, group)) if layout.has_norms else last)


def unpack_groups(views: GroupViews, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of groups, each [..., group_size, head_dim]: numbers of the model, or codes int8."""
    if not layout.is_quantised:
        return views.k, views.v.mT
    return unpack_codes(views.k, layout.k_bits), unpack_codes(views.v.mT, layout.v_bits)


def group_views(address: int, layout: PageLayout, device: torch.device) -> GroupViews:
    """Views of the page at `address`; the leading dimensions are [num_kv_heads, groups_per_page]."""
    return split_groups(page_bytes(address, layout, device), layout)


def pack_groups(k: Tensor, v: Tensor, layout: PageLayout) -> Tensor:
    """The bytes of groups, in the format of the layout.

    Args:
        k, v: [..., group_size, head_dim], model dtype.
    Returns:
        [..., group_bytes] uint8.
    """
    data = torch.empty(*k.shape[:-2], layout.group_bytes, dtype=torch.uint8, device=k.device)
    views = split_groups(data, layout)
    if views.scales is not None and views.v_last is not None:
        k, k_scale, k_zero = quantise_groups(k, layout.k_bits)
        v, v_scale, v_last = quantise_values(v) if layout.has_norms else quantise_groups(v)
        views.scales.copy_(torch.stack((k_scale, k_zero, v_scale), dim=-2))
        views.v_last.copy_(v_last)
        k, v = pack_codes(k, layout.k_bits), pack_codes(v, layout.v_bits)
    views.k.copy_(k)
    views.v.copy_(v.mT)
    return data


def write_groups(address: int, first_group: int, data: Tensor, layout: PageLayout) -> None:
    """Store packed groups [num_kv_heads, n, group_bytes] in the page at `address`, from its group `first_group` on."""
    page_bytes(address, layout, data.device)[:, first_group : first_group + data.shape[1]].copy_(data)


def gather_pages(addresses: Sequence[Sequence[int]], layout: PageLayout, device: torch.device) -> Tensor:
    """Copy the bytes of the same number n of pages for each sequence.

    Args:
        addresses: [batch][n] addresses; 0 gives zeros.
    Returns:
        [batch, num_kv_heads, n * groups_per_page, group_bytes] uint8.
    """
    if not any(addresses):
        return torch.empty(len(addresses), layout.num_kv_heads, 0, layout.group_bytes, dtype=torch.uint8, device=device)
    pages = [page_bytes(address, layout, device) for row in addresses for address in row if address]
    if len(pages) < len(addresses) * len(addresses[0]):
        shape = layout.num_kv_heads, layout.groups_per_page, layout.group_bytes
        present, absent = iter(pages), torch.zeros(1, dtype=torch.uint8, device=device).expand(shape)
        pages = [next(present) if address else absent for row in addresses for address in row]
    data = torch.stack(pages, dim=1).view(layout.num_kv_heads, len(addresses), -1, layout.group_bytes)
    return data.transpose(0, 1)


def read_groups(data: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Decode groups to keys and values.

    Args:
        data: [..., n, group_bytes] uint8, n groups in the order of their tokens.
    Returns:
        k, v: [..., n * group_size, head_dim] float32.
    """
    views = split_groups(data, layout)
    k, v = unpack_groups(views, layout)
    if views.scales is None or views.v_last is None:
        k, v = k.to(torch.float32), v.to(torch.float32)
    else:
        k_scale, k_zero, v_scale = views.scales.unbind(-2)
        k = dequantise_groups(k, k_scale, k_zero)
        v = (dequantise_values if layout.has_norms else dequantise_groups)(v, v_scale, views.v_last)
    return k.flatten(-3, -2), v.flatten(-3, -2)


def read_keys(data: Tensor, layout: PageLayout) -> Tensor:
    """Decode the keys of groups; arguments and result as in `read_groups`."""
    views = split_groups(data, layout)
    if views.scales is None:
        return views.k.to(torch.float32).flatten(-3, -2)
    codes, (scale, zero, _) = unpack_codes(views.k, layout.k_bits), views.scales.unbind(-2)
    return dequantise_groups(codes, scale, zero).flatten(-3, -2)


def read_page(
    address: int, layout: PageLayout, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys and values of a page, [num_kv_heads, page_size, head_dim] in `dtype`; groups never written hold garbage.

    Finite numbers beyond the range of `dtype` become its largest or smallest.
    """
    k, v = read_groups(page_bytes(address, layout, device), layout)
    return clamp_finite(k, dtype).to(dtype), clamp_finite(v, dtype).to(dtype)
