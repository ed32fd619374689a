"""The LLTM as a layer over whole sequences, called like :class:`torch.nn.LSTM`."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from typing import Any, List, Optional, Tuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from lltm_ops._checks import (
    check_probability,
    check_tensor,
    fault_of_tensors,
    flag_as_bool,
    is_tracing,
    may_have_shape,
    node_of_fx,
    refuse_hx,
    size_as_int,
)
from lltm_ops._packed_rows import (
    batch_of,
    last_rows_of,
    last_state,
    reversed_resets,
    sequence_of_row,
)
from lltm_ops._step_by_step import run_step_by_step


# TorchScript reads the annotations of methods, and knows neither tuple[] nor "|" on old Pythons.
class LLTM(nn.Module):
    """Layers of LLTM cells, each run over the whole sequence by one operator.

    Args:
        input_size: features of the input.
        hidden_size: size of the hidden and of the cell state.
        num_layers: each layer takes the output of the one before.
        bias: if false, there is no bias.
        batch_first: input and output are ``[batch, time, ...]`` instead of ``[time, batch, ...]``.
        dropout: probability with which, in training, an element of a layer's output is zeroed
            before the next layer.
        bidirectional: a second cell in each layer runs from the last step to the first.
        proj_size: has to be 0. It is there for code that passes it to :class:`torch.nn.LSTM`.
        device: of the parameters.
        dtype: of the parameters: float64, float32, bfloat16 or float16.
        return_cells: whether a call returns the cell states of all steps as a third result.
        variational_dropout: ``dropout`` zeroes the same elements at all steps of a sequence.
        recurrent_dropout: probability with which, in training, an element of ``h`` is zeroed on
            its way into the next step, the same elements at all steps (Gal and Ghahramani, 2016).
        zoneout: probability with which, in training, a unit keeps its ``h`` of the step before, and
            independently its ``c``. In evaluation it takes the expectation (Krueger et al., 2017).
        layer_norm: if true, the pre-activations of each gate are normalised over units, scaled, and
            only then shifted by ``bias``. The cell state is normalised, scaled and shifted before
            the tanh (Ba et al., 2016).

    With one of the last three options (``recurrent_dropout``: only in training) the layer runs step
    by step, by the cell or, for ``layer_norm``, by plain PyTorch. This takes several times as long,
    and torch.compile unrolls it.

    Inputs: ``input, hx=(h_0, c_0), resets, batch_sizes``
        ``input`` is ``[time, batch, input_size]``, ``[time, input_size]`` or a
        :class:`~torch.nn.utils.rnn.PackedSequence`, sorted or not. ``h_0`` and ``c_0`` are
        ``[num_layers * directions, batch, hidden_size]``, without batch if ``input`` has none. They
        are zeros by default.

        ``resets`` are bool, and have all sizes of ``input`` but the last, or the rows of
        ``input.data``. Where true, a step begins with zeros instead of the state of the step before
        it. The second direction runs from the last step, so there the step before that one begins
        with zeros.

        With ``batch_sizes``, ``input`` is the data of a PackedSequence, and the results are in the
        same order. This is for TorchScript, in which the layer takes no PackedSequence.

    Outputs: ``output, (h_n, c_n)``, and ``cells`` with ``return_cells``
        ``output`` is the hidden state of the last layer after each step, ``[time, batch,
        directions * hidden_size]``, packed if ``input`` is. ``cells`` is its cell state in the same
        form. ``h_n`` and ``c_n`` are the state after the last step, with the sizes of ``h_0``.

    Attributes:
        weights_l0: ``[3 * hidden_size, hidden_size + features of the layer's input]``, as in
            :class:`lltm_ops.LLTMCell`. The others are ``weights_l0_reverse``, ``weights_l1`` and
            so on; the names below have the same suffixes.
        bias_l0: ``[3 * hidden_size]``, unless ``bias`` is false.
        layer_norm_weight_l0: with ``layer_norm``, the scales of three gates and of the cell state,
            ``[4 * hidden_size]``.
        layer_norm_bias_l0: with ``layer_norm``, the shift of the cell state, ``[hidden_size]``.

    Raises:
        TypeError: for sizes that are no integers, options that are no bools, and arguments of a
            call that are no tensors.
        ValueError: from the constructor, for sizes and probabilities out of range; from the call,
            for input of another number of dimensions or another dtype.
        RuntimeError: from the call, for tensors of other sizes, and as
            :func:`lltm_ops.sequence_forward`.

    Example::

        >>> layer = lltm_ops.LLTM(10, 20, num_layers=2)
        >>> output, (h_n, c_n) = layer(torch.randn(5, 3, 10))
    """

    __constants__ = [  # noqa: RUF012
        "batch_first", "bidirectional", "dropout", "hidden_size", "input_size", "layer_norm",
        "num_layers", "recurrent_dropout", "return_cells", "variational_dropout", "zoneout",
    ]  # fmt: skip
    __jit_unused_properties__ = ["all_weights"]  # noqa: RUF012

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        return_cells: bool = False,
        variational_dropout: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        input_size = size_as_int("lltm_ops.LLTM", "input_size", input_size)
        hidden_size = size_as_int("lltm_ops.LLTM", "hidden_size", hidden_size, 1)
        num_layers = size_as_int("lltm_ops.LLTM", "num_layers", num_layers, 1)
        if proj_size != 0:
            raise ValueError(f"lltm_ops.LLTM: expected proj_size to be 0, but got {proj_size}")
        for name, probability in (
            ("dropout", dropout),
            ("recurrent_dropout", recurrent_dropout),
            ("zoneout", zoneout),
        ):
            check_probability("lltm_ops.LLTM", name, probability)
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"lltm_ops.LLTM: dropout={dropout} is applied between layers, and num_layers is 1",
                stacklevel=2,
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = flag_as_bool("lltm_ops.LLTM", "bias", bias)
        self.batch_first = flag_as_bool("lltm_ops.LLTM", "batch_first", batch_first)
        self.dropout = float(dropout)
        self.bidirectional = flag_as_bool("lltm_ops.LLTM", "bidirectional", bidirectional)
        self.return_cells = flag_as_bool("lltm_ops.LLTM", "return_cells", return_cells)
        self.variational_dropout = flag_as_bool(
            "lltm_ops.LLTM", "variational_dropout", variational_dropout
        )
        self.recurrent_dropout = float(recurrent_dropout)
        self.zoneout = float(zoneout)
        self.layer_norm = flag_as_bool("lltm_ops.LLTM", "layer_norm", layer_norm)
        # Annotated here, because TorchScript warns of an annotated attribute that begins empty.
        names: List[str] = []
        directions = ("", "_reverse") if bidirectional else ("",)
        for layer in range(num_layers):
            features = input_size if layer == 0 else len(directions) * hidden_size
            shapes = {"weights": (3 * hidden_size, hidden_size + features)}
            if bias:
                shapes["bias"] = (3 * hidden_size,)  # type: ignore[assignment]
            if layer_norm:
                shapes["layer_norm_weight"] = (4 * hidden_size,)  # type: ignore[assignment]
                shapes["layer_norm_bias"] = (hidden_size,)  # type: ignore[assignment]
            for direction in directions:
                for name, shape in shapes.items():
                    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    names.append(f"{name}_l{layer}{direction}")
                    self.register_parameter(names[-1], parameter)
        self._parameter_names = names
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, uniformly from ``[-1, 1] / sqrt(hidden_size)``.

        The scales of ``layer_norm`` become ones, its shifts zeros.
        """
        bound = 1.0 / math.sqrt(self.hidden_size)
        for name in self._parameter_names:
            parameter = getattr(self, name)
            if name.startswith("layer_norm_weight"):
                nn.init.ones_(parameter)
            elif name.startswith("layer_norm_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -bound, bound)

    @property
    def all_weights(self) -> List[List[Tensor]]:
        """The parameters of each layer and direction, for code that initialises them in a loop."""
        parameters = self._parameters_in_order()
        each = len(parameters) // (self.num_layers * (2 if self.bidirectional else 1))
        return [parameters[i : i + each] for i in range(0, len(parameters), each)]

    def flatten_parameters(self) -> None:
        """Does nothing: for code that calls it on :class:`torch.nn.LSTM`."""

    def forward(  # type: ignore[no-untyped-def]
        self,
        input: Tensor,
        hx: Optional[Tuple[Tensor, Tensor]] = None,
        resets: Optional[Tensor] = None,
        batch_sizes: Optional[Tensor] = None,
    ):
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            arguments = {"input": input, "hx": hx, "resets": resets, "batch_sizes": batch_sizes}
            node = node_of_fx(self, arguments)
            if node is not None:
                return node
        self._check_types(hx, resets, batch_sizes)
        # With an overload for a PackedSequence, such as nn.LSTM has, TorchScript could not compile
        # the layer alone. It compiles neither this condition nor the call.
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            if isinstance(input, PackedSequence):
                if batch_sizes is not None:
                    raise RuntimeError(
                        "lltm_ops.LLTM: expected no batch_sizes beside a PackedSequence, which has "
                        f"its own, but got a tensor of shape {list(batch_sizes.shape)}"
                    )
                return self._forward_packed_sequence(input, hx, resets)
        check_tensor("lltm_ops.LLTM", "input", input, "a tensor or a PackedSequence")
        if batch_sizes is not None:
            output, cells, h_n, c_n = self._run(input, hx, batch_sizes, resets)
        elif input.dim() == 2:
            if hx is not None:
                self._check_state(hx, [])
                hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
            if resets is not None:
                self._check_resets(resets, "[time]", list(input.shape[:1]))
                resets = resets.unsqueeze(1)
            output, cells, h_n, c_n = self._run(input.unsqueeze(1), hx, None, resets)
            output, cells = output.squeeze(1), cells.squeeze(1)
            h_n, c_n = h_n.squeeze(1), c_n.squeeze(1)
        elif self.batch_first and input.dim() == 3:
            if resets is not None:
                self._check_resets(resets, "[batch, time]", list(input.shape[:2]))
                resets = resets.transpose(0, 1)
            output, cells, h_n, c_n = self._run(input.transpose(0, 1), hx, None, resets)
            output, cells = output.transpose(0, 1), cells.transpose(0, 1)
        else:
            output, cells, h_n, c_n = self._run(input, hx, None, resets)
        if self.return_cells:
            return output, (h_n, c_n), cells
        else:
            return output, (h_n, c_n)

    def _check_types(
        self,
        hx: Optional[Tuple[Tensor, Tensor]],
        resets: Optional[Tensor],
        batch_sizes: Optional[Tensor],
    ) -> None:
        if hx is not None:
            if not isinstance(hx, (tuple, list)) or len(hx) != 2:
                refuse_hx("lltm_ops.LLTM", "(h_0, c_0)", hx)
            check_tensor("lltm_ops.LLTM", "h_0", hx[0])
            check_tensor("lltm_ops.LLTM", "c_0", hx[1])
        if resets is not None:
            check_tensor("lltm_ops.LLTM", "resets", resets)
        if batch_sizes is not None:
            check_tensor("lltm_ops.LLTM", "batch_sizes", batch_sizes)

    @torch.jit.unused
    def _forward_packed_sequence(
        self,
        input: PackedSequence,
        hx: Optional[Tuple[Tensor, Tensor]],
        resets: Optional[Tensor],
    ) -> Any:
        def permuted(
            state: Tuple[Tensor, Tensor], permutation: Optional[Tensor]
        ) -> Tuple[Tensor, Tensor]:
            if permutation is None:
                return state
            return state[0].index_select(1, permutation), state[1].index_select(1, permutation)

        data, batch_sizes, sorted_indices, unsorted_indices = input
        if hx is not None:
            if sorted_indices is not None:
                # index_select would take other rows in silence. Without sorted_indices, _state()
                # compares h_0 with c_0, and the kernels compare them with batch_sizes.
                self._check_state(hx, [sorted_indices.size(0)])
            hx = permuted(hx, sorted_indices)
        results = self.forward(data, hx, resets, batch_sizes)  # as rows, beside batch_sizes
        packed = [PackedSequence(rows, *input[1:]) for rows in (results[0], *results[2:])]
        return packed[0], permuted(results[1], unsorted_indices), *packed[1:]

    def __prepare_scriptable__(self) -> LLTM:
        # TorchScript reads parameters by names that stand in its source, or from a list.
        module = self._without_parametrizations()
        module._flat_parameters = module._parameters_in_order()  # type: ignore[assignment]
        return module

    def _without_parametrizations(self) -> LLTM:
        """A copy that shares its parameters, except those that are parametrized.

        TorchScript cannot compile parametrizations, so a parametrized parameter becomes a plain one
        with the value that it has in evaluation.
        """
        module = type(self).__new__(type(self))  # copy.copy refuses what is parametrized
        vars(module).update(vars(self))
        if not parametrize.is_parametrized(self):
            return module
        module.__class__ = type(self).__bases__[0]
        module._modules = dict(self._modules)
        module._parameters = dict(self._parameters)
        parametrizations = cast(nn.ModuleDict, module._modules.pop("parametrizations"))
        for name, parametrization in parametrizations.items():
            # A copy: spectral_norm changes buffers unless it evaluates.
            value = copy.deepcopy(parametrization).eval()().detach()
            module.register_parameter(name, nn.Parameter(value))
        return module

    @torch.jit.unused
    def _parameters_in_order(self) -> List[Tensor]:
        # By their names, where pruning and parametrization put the tensors to use.
        return [getattr(self, name) for name in self._parameter_names]

    def _check_resets(self, resets: Tensor, names: str, expected: List[int]) -> None:
        if is_tracing():
            fit = resets.dim() == len(expected)
        elif torch.compiler.is_compiling():
            fit = may_have_shape(resets, expected)
        else:
            fit = list(resets.shape) == expected
        if not fit:
            raise RuntimeError(
                f"lltm_ops.LLTM: expected resets to have shape {names} = {expected}, "
                f"but got {list(resets.shape)}"
            )

    def _check_state(
        self, hx: Tuple[Tensor, Tensor], batch: List[int], batch_is_known: bool = True
    ) -> None:
        directions = 2 if self.bidirectional else 1
        expected = [self.num_layers * directions] + batch + [self.hidden_size]
        h_0, c_0 = hx
        if is_tracing():
            # Sizes are tensors while tracing; the number of unbound tensors is an int.
            fit = len(h_0.unbind()) == expected[0] == len(c_0.unbind())
        elif torch.compiler.is_compiling():
            fit = may_have_shape(h_0, expected) and may_have_shape(c_0, expected)
        else:
            fit = list(h_0.shape) == expected == list(c_0.shape)
        if not fit:
            names = "batch, hidden_size" if len(batch) > 0 else "hidden_size"
            sizes = f"{expected}"
            if not batch_is_known:
                sizes = f"[{expected[0]}, batch, {self.hidden_size}]"
            raise RuntimeError(
                "lltm_ops.LLTM: expected h_0 and c_0 to have shape [num_layers * directions, "
                f"{names}] = {sizes}, but got {list(h_0.shape)} and {list(c_0.shape)}"
            )

    def _state(
        self,
        input: Tensor,
        hx: Optional[Tuple[Tensor, Tensor]],
        batch_sizes: Optional[Tensor],
    ) -> Tuple[Tensor, Tensor]:
        """Returns hx, or zeros if there is none."""
        if hx is not None:
            if batch_sizes is None:
                self._check_state(hx, [input.size(1)])
            else:
                # h_0 and c_0 are compared with each other. The kernels compare their batch with
                # batch_sizes, whose values a compiler has not.
                batch = hx[0].size(1) if hx[0].dim() == 3 else 0
                self._check_state(hx, [batch], batch_is_known=False)
            return hx
        batch = input.size(1) if batch_sizes is None else batch_of(batch_sizes, input)
        directions = 2 if self.bidirectional else 1
        zeros = input.new_zeros([self.num_layers * directions, batch, self.hidden_size])
        return zeros, zeros

    def _run(
        self,
        input: Tensor,
        hx: Optional[Tuple[Tensor, Tensor]],
        batch_sizes: Optional[Tensor],
        resets: Optional[Tensor],
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns output and cells of the last layer, and h_n and c_n of all. Time comes first."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._run_layers(input, hx, batch_sizes, resets)
        else:
            return self._run_and_explain(input, hx, batch_sizes, resets)

    @torch.jit.unused
    def _run_and_explain(
        self,
        input: Tensor,
        hx: Optional[Tuple[Tensor, Tensor]],
        batch_sizes: Optional[Tensor],
        resets: Optional[Tensor],
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs the layers. If an operator refuses the layout, device or dtype of input or state,
        the layer says so in its own names. The operator's other words stand."""
        if torch.compiler.is_compiling():
            fault = self._fault(input, hx)
            if fault is not None:
                raise fault
            return self._run_layers(input, hx, batch_sizes, resets)
        try:
            return self._run_layers(input, hx, batch_sizes, resets)
        except RuntimeError:
            fault = self._fault(input, hx)
            if fault is not None:
                raise fault from None
            raise

    @torch.jit.unused
    def _fault(self, input: Tensor, hx: Optional[Tuple[Tensor, Tensor]]) -> Optional[Exception]:
        weights = self._parameters_in_order()[0]
        state = {} if hx is None else {"h_0": hx[0], "c_0": hx[1]}
        # nn.LSTM raises ValueError for the dtype of input, and nn.LSTMCell RuntimeError.
        return fault_of_tensors("lltm_ops.LLTM", ValueError, weights, input, state)

    def _run_layers(
        self,
        input: Tensor,
        hx: Optional[Tuple[Tensor, Tensor]],
        batch_sizes: Optional[Tensor],
        resets: Optional[Tensor],
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        if batch_sizes is not None:
            if input.dim() != 2:
                raise ValueError(
                    "lltm_ops.LLTM: expected input beside batch_sizes to have 2 dimensions "
                    f"[rows, input_size], but got {input.dim()}"
                )
            if resets is not None:
                self._check_resets(resets, "[rows]", [input.size(0)])
        elif input.dim() != 3:
            raise ValueError(
                "lltm_ops.LLTM: expected input to have 2 dimensions [time, input_size] or 3 with a "
                f"batch, but got {input.dim()}"
            )
        if not is_tracing() and input.size(-1) != self.input_size:
            raise RuntimeError(
                f"lltm_ops.LLTM: expected input to have input_size = {self.input_size} features, "
                f"but got {input.size(-1)}"
            )
        h_0, c_0 = self._state(input, hx, batch_sizes)
        directions = 2 if self.bidirectional else 1
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            parameters: List[Tensor] = self._flat_parameters  # type: ignore[assignment]
        else:
            parameters = self._parameters_in_order()
        each = len(parameters) // (self.num_layers * directions)
        # Both are computed after the first direction has run, whose operator checks resets and
        # batch_sizes.
        last_rows: Optional[Tensor] = None
        resets_of_reverse: Optional[Tensor] = None
        last_h: List[Tensor] = []
        last_c: List[Tensor] = []
        output, cells = input, input
        for layer in range(self.num_layers):
            if layer > 0:
                input = self._dropped_out(output, h_0.size(1), batch_sizes)
            outputs: List[Tensor] = []
            all_cells: List[Tensor] = []
            for direction in range(directions):
                i = layer * directions + direction
                reverse = direction == 1
                if reverse and resets is not None and resets_of_reverse is None:
                    resets_of_reverse = reversed_resets(resets, batch_sizes)
                output, cells = self._run_direction(
                    parameters[i * each : (i + 1) * each],
                    input, h_0[i], c_0[i], batch_sizes, reverse,
                    resets_of_reverse if reverse else resets,
                )  # fmt: skip
                outputs.append(output)
                all_cells.append(cells)
                if batch_sizes is not None and last_rows is None:
                    last_rows = last_rows_of(batch_sizes, h_0.size(1)).to(input.device)
                last_h.append(last_state(output, h_0[i], last_rows, reverse))
                last_c.append(last_state(cells, c_0[i], last_rows, reverse))
            if directions == 2:
                output, cells = torch.cat(outputs, -1), torch.cat(all_cells, -1)
        return output, cells, torch.stack(last_h), torch.stack(last_c)

    def _dropped_out(self, input: Tensor, batch: int, batch_sizes: Optional[Tensor]) -> Tensor:
        if not self.variational_dropout:
            return F.dropout(input, self.dropout, self.training)
        mask = input.new_ones([batch, input.size(-1)])
        mask = F.dropout(mask, self.dropout, self.training)
        if batch_sizes is not None:
            mask = mask.index_select(0, sequence_of_row(batch_sizes, input.size(0)).to(mask.device))
        return input * mask

    def _run_direction(
        self,
        parameters: List[Tensor],
        input: Tensor,
        h_0: Tensor,
        c_0: Tensor,
        batch_sizes: Optional[Tensor],
        reverse: bool,
        resets: Optional[Tensor],
    ) -> Tuple[Tensor, Tensor]:
        weights = parameters[0]
        bias = parameters[1] if self.bias else weights.new_zeros(3 * self.hidden_size)
        drops_out = self.training and self.recurrent_dropout > 0
        if not self.layer_norm and self.zoneout == 0 and not drops_out:
            output, cells = torch.ops.lltm.sequence_forward(
                input, weights, bias, h_0, c_0, batch_sizes, reverse, resets
            )
            return output, cells
        return run_step_by_step(
            input, weights, bias, h_0, c_0, batch_sizes, reverse, resets,
            parameters[-2:] if self.layer_norm else parameters[:0],
            self.recurrent_dropout, self.zoneout, self.training,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = [
            f", {name}={getattr(self, name)}"
            for name, parameter in inspect.signature(LLTM).parameters.items()
            if parameter.default not in (parameter.empty, getattr(self, name, parameter.default))
        ]
        return f"{self.input_size}, {self.hidden_size}{''.join(options)}"
