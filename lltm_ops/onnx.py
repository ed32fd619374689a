"""The operators in ONNX, for ``torch.onnx.export``. Needs the extra ``onnx``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    import onnxscript
    from onnxscript import opset18 as op
    from onnxscript.onnx_types import TensorType as Tensor
except ImportError as error:
    raise ImportError(
        f"lltm_ops.onnx: expected the packages of the extra onnx, but {error.name} is missing: "
        "install them with `pip install onnx onnxscript onnxruntime`"
    ) from error

_script = onnxscript.script(onnxscript.values.Opset("lltm_ops", 1), default_opset=op)


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How ``torch.onnx.export`` writes ``lltm::forward`` and ``lltm::sequence_forward``.

    The translation uses standard operators of opset 18; a sequence is a ``Scan``. It computes half
    types in float32, rounds where the CPU rounds, and checks nothing.

    Returns:
        The ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True)``.

    Raises:
        ImportError: from the import of this module, if the extra ``onnx`` is not installed.

    Example::

        >>> import lltm_ops.onnx
        >>> table = lltm_ops.onnx.translation_table()
        >>> torch.onnx.export(model, args, dynamo=True, custom_translation_table=table)
    """
    return {
        torch.ops.lltm.forward.default: _forward,
        torch.ops.lltm.sequence_forward.default: _sequence_forward,
    }


def _forward(input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> Any:
    return _step(*_products(input, weights, bias, old_h), old_h, old_cell)


def _sequence_forward(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    h0: Tensor,
    c0: Tensor,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    resets: Tensor | None = None,
) -> Any:
    products, recurrent_weights = _products(input, weights, bias, h0)
    direction = int(reverse)
    if batch_sizes is None and resets is None:
        return _sequence(
            products, recurrent_weights, h0, c0,
            input_directions=[direction], output_directions=[direction, direction],
        )  # fmt: skip
    if resets is None:
        resets = op.Expand(False, op.Shape(products, end=1))
    if batch_sizes is None:
        runs = op.Expand(True, op.Shape(products, end=2))
    else:
        rows, runs = _padded_rows(batch_sizes, h0)
        products, resets = op.Gather(products, rows), op.Gather(resets, rows)
    output, cells, h_n, c_n = _masked_sequence(
        products, recurrent_weights, h0, c0, resets, runs,
        input_directions=[direction] * 3, output_directions=[direction, direction],
    )  # fmt: skip
    if batch_sizes is None:
        return output, cells, h_n, c_n
    packed_rows = op.Transpose(op.NonZero(runs), perm=[1, 0])
    return op.GatherND(output, packed_rows), op.GatherND(cells, packed_rows), h_n, c_n


def _products(input: Tensor, weights: Tensor, bias: Tensor, h: Tensor) -> Any:
    """Returns the products with input, plus bias, of all steps, and the weights for ``h``."""
    # onnxruntime has few kernels for half types on the CPU.
    double, single = onnxscript.DOUBLE.dtype, onnxscript.FLOAT.dtype
    dtype = double if input.dtype == double else single
    empty = 0 in (*input.shape, *weights.shape)
    input, weights, bias = (op.Cast(tensor, to=dtype) for tensor in (input, weights, bias))
    if empty:  # onnxruntime refuses the product, and there is nothing to multiply
        shape = op.Concat(op.Shape(input, end=-1), op.Shape(bias), axis=0)
        products = op.Expand(bias, shape)
    else:
        products = _input_products(input, weights, bias, h)
    return products, _recurrent_weights(weights, h)


@_script
def _input_products(input: Tensor, weights: Tensor, bias: Tensor, h: Tensor) -> Tensor:
    columns = op.Transpose(weights, perm=[1, 0])
    of_input = op.Slice(columns, op.Shape(h, start=1), op.Shape(columns, end=1), [0])
    return op.MatMul(input, of_input) + bias


@_script
def _recurrent_weights(weights: Tensor, h: Tensor) -> Tensor:
    return op.Slice(op.Transpose(weights, perm=[1, 0]), [0], op.Shape(h, start=1), [0])


@_script
def _padded_rows(batch_sizes: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row of packed data of each sequence at each step, and whether it has one."""
    sequences = op.Range(0, op.Squeeze(op.Shape(h0, end=1)), 1)
    runs = sequences < op.Unsqueeze(batch_sizes, [1])
    starts = op.CumSum(batch_sizes, 0, exclusive=1)
    return op.Where(runs, op.Unsqueeze(starts, [1]) + sequences, 0), runs


# The formula is here and in both sequences, because torch.onnx.export leaves out functions that
# the body of a Scan calls. Elu and Sigmoid are written out, because onnxruntime loses small results
# of both: its Elu is exp(x) - 1, and its Sigmoid is constant below -18. It has no Elu for float64.
# There is no Split: it would not take a state_size of 0, and would not convert to opset 17. The
# Slices are given steps, because a Slice with steps is not turned into a Split.
# Bodies have no return annotation: onnxscript would take it for that of the function around them.
@_script
def _step(
    products: Tensor, recurrent_weights: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    size = op.Shape(old_h, start=1)
    gates = products + op.MatMul(op.CastLike(old_h, products), recurrent_weights)
    input_gate = op.Slice(gates, [0], size, [1], [1])
    output_gate = op.Slice(gates, size, size * 2, [1], [1])
    candidate = op.Slice(gates, size * 2, size * 3, [1], [1])
    expm1 = op.Tanh(candidate * 0.5) * (op.Exp(candidate) + 1.0)
    candidate = op.Where(candidate > 0.0, candidate, expm1)
    new_cell = op.CastLike(old_cell, products) + candidate / (1.0 + op.Exp(-input_gate))
    new_h = op.Tanh(new_cell) / (1.0 + op.Exp(-output_gate))
    return op.CastLike(new_h, old_h), op.CastLike(new_cell, old_cell)


@_script
def _sequence(
    products: Tensor,
    recurrent_weights: Tensor,
    h0: Tensor,
    c0: Tensor,
    input_directions: Sequence[int],
    output_directions: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = op.Shape(h0, start=1)

    @onnxscript.graph()
    def step(old_h: Tensor, old_cell: Tensor, products: Tensor):  # type: ignore[no-untyped-def]
        gates = products + op.MatMul(op.CastLike(old_h, products), recurrent_weights)
        input_gate = op.Slice(gates, [0], size, [1], [1])
        output_gate = op.Slice(gates, size, size * 2, [1], [1])
        candidate = op.Slice(gates, size * 2, size * 3, [1], [1])
        expm1 = op.Tanh(candidate * 0.5) * (op.Exp(candidate) + 1.0)
        candidate = op.Where(candidate > 0.0, candidate, expm1)
        new_cell = old_cell + candidate / (1.0 + op.Exp(-input_gate))
        new_h = op.CastLike(op.Tanh(new_cell) / (1.0 + op.Exp(-output_gate)), old_h)
        return new_h, new_cell, op.Identity(new_h), op.CastLike(new_cell, old_h)

    h_n, c_n, output, cells = op.Scan(
        h0, op.CastLike(c0, products), products,
        body=step,
        num_scan_inputs=1,
        scan_input_directions=input_directions,
        scan_output_directions=output_directions,
    )  # fmt: skip
    return output, cells, h_n, op.CastLike(c_n, c0)


@_script
def _masked_sequence(
    products: Tensor,
    recurrent_weights: Tensor,
    h0: Tensor,
    c0: Tensor,
    resets: Tensor,
    runs: Tensor,
    input_directions: Sequence[int],
    output_directions: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A row that does not run keeps its state: in reverse, packed sequences begin late."""

    size = op.Shape(h0, start=1)

    @onnxscript.graph()
    def step(  # type: ignore[no-untyped-def]
        old_h: Tensor, old_cell: Tensor, products: Tensor, resets: Tensor, runs: Tensor
    ):
        kept_h = op.CastLike(old_h, products)
        reset, zero = op.Unsqueeze(resets, [1]), op.CastLike(0.0, products)
        h, cell = op.Where(reset, zero, kept_h), op.Where(reset, zero, old_cell)
        gates = products + op.MatMul(h, recurrent_weights)
        input_gate = op.Slice(gates, [0], size, [1], [1])
        output_gate = op.Slice(gates, size, size * 2, [1], [1])
        candidate = op.Slice(gates, size * 2, size * 3, [1], [1])
        expm1 = op.Tanh(candidate * 0.5) * (op.Exp(candidate) + 1.0)
        candidate = op.Where(candidate > 0.0, candidate, expm1)
        new_cell = cell + candidate / (1.0 + op.Exp(-input_gate))
        new_h = op.Tanh(new_cell) / (1.0 + op.Exp(-output_gate))
        running = op.Unsqueeze(runs, [1])
        new_h = op.CastLike(op.Where(running, new_h, kept_h), old_h)
        new_cell = op.Where(running, new_cell, old_cell)
        return new_h, new_cell, op.Identity(new_h), op.CastLike(new_cell, old_h)

    h_n, c_n, output, cells = op.Scan(
        h0, op.CastLike(c0, products), products, resets, runs,
        body=step,
        num_scan_inputs=3,
        scan_input_directions=input_directions,
        scan_output_directions=output_directions,
    )  # fmt: skip
    return output, cells, h_n, op.CastLike(c_n, c0)
