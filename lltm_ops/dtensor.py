"""Lets the operators take DTensors: ``import lltm_ops.dtensor``, once, in a program that has some.

It says which dimension of each tensor is the batch. ``import lltm_ops`` leaves this out, because
torch.distributed.tensor takes half as long to import as torch.

Rows of a batch are independent, so each process may compute its own. Weights and bias are then
replicated, and each process holds a part of the sums that are their gradients. DTensor
redistributes arguments that are sharded otherwise, and chooses the cheapest of the known ways.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

import lltm_ops  # noqa: F401  # loads the operators

_CELL_OPERATORS = ("forward", "_forward_with_gates", "backward")
_SEQUENCE_OPERATORS = ("sequence_forward", "_sequence_forward_with_gates", "sequence_backward")
_PARAMETERS = ("weights", "bias")
_STATES = ("h0", "c0", "h_n", "c_n", "grad_h_n", "grad_c_n")
# Tensors with a row for each row of the batch, or of every step.
_ROWS = (
    "input", "resets", "gates",
    "old_h", "old_cell", "new_h", "new_cell", "grad_h", "grad_cell",
    "output", "cells", "grad_output", "grad_cells",
)  # fmt: skip


def _register_shardings() -> None:
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for name in (*_CELL_OPERATORS, *_SEQUENCE_OPERATORS):
        op = getattr(torch.ops.lltm, name).default
        batch_dim = 0 if name in _CELL_OPERATORS else 1
        register_sharding(op)(partial(_shardings, op, batch_dim))
        # DTensor remembers a decision by the tensors of the call. Of the other arguments it would
        # compare integers only, and miss output_mask.
        tensors = [a for a in op._schema.arguments if isinstance(a.type, torch.TensorType)]
        known[op] = RuntimeSchemaInfo(static_argnum=len(tensors), needs_pytree=True)


def _values_of_batch_sizes(
    _subclass: Any, op: OpOverload, _types: Any, arguments: Any, _keywords: Any
) -> list[int]:
    batch_sizes, *words = arguments
    return op(batch_sizes.full_tensor(), *words)  # type: ignore[no-any-return]


def _shardings(
    op: OpOverload, batch_dim: int, *arguments: Any
) -> list[tuple[list[Placement], list[Placement]]]:
    """Returns placements of the results with the placements of the tensors that give them."""

    def sharded(name: str) -> Placement:
        of = name.removeprefix("d_")
        if of in _PARAMETERS:
            return Replicate() if of == name else Partial()
        if of in _STATES:
            return Shard(0)
        if of in _ROWS:
            return Shard(batch_dim)
        raise ValueError(f"{op}: expected to know how {name} may be sharded")

    tensors = [
        argument.name
        for argument, value in zip(op._schema.arguments, arguments, strict=False)
        if value is not None and argument.type.isSubtypeOf(torch.OptionalType.ofTensor())
    ]
    results = [result.name for result in op._schema.returns]
    replicated: list[Placement] = [Replicate()]
    shardings = [(replicated * len(results), replicated * len(tensors))]
    # The rows of a packed sequence are not those of a batch.
    if "batch_sizes" not in tensors:
        shardings.append(([sharded(name) for name in results], [sharded(name) for name in tensors]))
    return shardings


_register_shardings()
with contextlib.suppress(RuntimeError):  # a second import finds it registered
    torch.library.register_torch_dispatch(
        "lltm::_values_of_batch_sizes", DTensor, _values_of_batch_sizes
    )
