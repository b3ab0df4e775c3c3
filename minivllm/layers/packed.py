"""Packed copies of decoder layer and LM head weights (``kernels/linear/packed_weights.py``), kept beside the originals:
steps of few rows read the copies, all others the weights themselves. ``executors/packing.py`` decides whether a model
gets any.

``load_weights`` packs again whatever was packed (as it folds norms again). If you change a weight in any other way, set
its module's ``packed_weight`` to None: then all layers run without packed weights, except in CUDA graphs that are
already captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import nn

from minivllm.errors import CheckpointError
from minivllm.kernels.linear.chain_config import ChainShape
from minivllm.kernels.linear.packed_chain import packed_rows
from minivllm.kernels.linear.packed_weights import Order, pack_again, pack_all
from minivllm.kernels.megakernel.megakernel import DecoderShape, packed_megakernel_rows
from minivllm.layers.decoder import Decoder, DecoderLayer
from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.fused import chain_shape
from minivllm.layers.linear import LinearBase, MergedColumnParallelLinear

Product: TypeAlias = LinearBase | ParallelLMHead


def packable_decoders(model: nn.Module) -> list[Decoder]:
    """Decoders that would read packed weights: ``forward`` is not overridden, and two or more layers share a shape."""
    found = (module for module in model.modules() if isinstance(module, Decoder) and len(module.layers) > 1)
    return [its for its in found if type(its).forward is Decoder.forward and chain_shape(list(its.layers)) is not None]


class Ways(NamedTuple):
    """The order of packed weights for each kernel that reads them, where that is faster: the kernel of the matmuls
    between two attentions, and that of all layers."""

    chain: ChainShape | None
    whole: DecoderShape | None
    order: Order

    def __bool__(self) -> bool:
        return self.chain is not None or self.whole is not None


def packed_ways(chain: ChainShape, whole: DecoderShape | None, ranks: int) -> Ways:
    """``Ways`` for layers of these shapes. ``whole``: None if they never run as one kernel."""
    chained = chain if ranks == 1 and packed_rows(chain) else None
    order = Order.LINES if chained is None else Order.UNITS  # the one of all layers reads either, but lines faster
    return Ways(chained, whole if whole is not None and packed_megakernel_rows(whole, order) else None, order)


def products_of(decoder: Decoder) -> list[LinearBase]:
    """The linear layers whose packed weights its steps would read."""
    return [product for layer in decoder.layers for product in cast(DecoderLayer, layer).products()]


def heads_of(model: nn.Module) -> list[ParallelLMHead]:
    return [module for module in model.modules() if isinstance(module, ParallelLMHead)]


def pack_products(model: nn.Module, products: Mapping[Product, Order]) -> str | None:
    """Pack the weights of these linear layers, all or none. Returns the name of one that cannot be packed, if any."""
    gated = [isinstance(product, MergedColumnParallelLinear) for product in products]
    packed = pack_all([product.weight for product in products], gated, list(products.values()))
    if None in packed:
        return _name_of(model, list(products)[packed.index(None)])
    for product, its in zip(products, packed, strict=True):
        product.packed_weight = its
    return None


def packed_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all that packed weights consist of; ``pack_products_again`` writes to them."""
    for path, module in model.named_modules():
        if isinstance(module, Product) and module.packed_weight is not None:
            yield f"{path}.packed_weight.data", module.packed_weight.data
            yield f"{path}.packed_weight.scales", module.packed_weight.scales


def unpack_products(products: Iterable[Product]) -> None:
    """Drop their packed weights."""
    for product in products:
        product.packed_weight = None


def pack_products_again(model: nn.Module) -> None:
    """Called after loading weights into a model that may have packed weights.

    Raises:
        CheckpointError: one can no longer be packed; then none stays packed.
    """
    modules = (module for module in model.modules() if isinstance(module, Product))
    copies = {module: module.packed_weight for module in modules if module.packed_weight is not None}
    fits = pack_again(list(copies.values())) if copies else []
    if not all(fits):
        unpack_products(copies)
        raise CheckpointError(
            f"{_name_of(model, list(copies)[fits.index(False)])} has weights whose exponents lie too far apart to be "
            "packed, where CUDA graphs read packed ones; make a new engine, or one with packed_weights=false"
        )


def _name_of(model: nn.Module, product: Product) -> str:
    return next(f"{name}.weight" for name, module in model.named_modules() if module is product)
