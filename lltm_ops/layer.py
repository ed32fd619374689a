"""The LLTM as a layer over whole sequences, called like :class:`torch.nn.LSTM`."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from typing import Any, List, Optional, Tuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from lltm_ops._checks import (
    check_hx,
    check_probability,
    check_tensor,
    explain_missing_keys,
    flag_as_bool,
    in_a_graph,
    size_as_int,
)
from lltm_ops._direction import Options
from lltm_ops._leaf_module import LeafModule
from lltm_ops._stacked_layers import run_layers


# TorchScript reads the annotations of methods, and knows neither tuple[] nor "|" on old Pythons.
class LLTM(LeafModule):
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
        proj_size: must be 0. It is there for code that passes it to :class:`torch.nn.LSTM`.
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
        TypeError: for sizes that are not integers, options that are not bools, and arguments of a
            call that are not tensors.
        ValueError: from the constructor, for sizes and probabilities out of range; from the call,
            for input of another number of dimensions.
        RuntimeError: from the call, for another number of layers or directions, and as
            :func:`lltm_ops.sequence_forward`, in its names: ``h0`` is one of ``h_0``.

    Example::

        >>> layer = lltm_ops.LLTM(10, 20, num_layers=2)
        >>> output, (h_n, c_n) = layer(torch.randn(5, 3, 10))
    """

    __constants__ = [  # noqa: RUF012
        "batch_first", "bidirectional", "dropout", "hidden_size", "input_size", "layer_norm",
        "num_layers", "proj_size", "recurrent_dropout", "return_cells", "variational_dropout",
        "zoneout",
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
        self.proj_size = 0
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
        self._lltm_parameter_names = names
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, uniformly from ``[-1, 1] / sqrt(hidden_size)``.

        The scales of ``layer_norm`` become ones, its shifts zeros.
        """
        bound = 1.0 / math.sqrt(self.hidden_size)
        for name in self._lltm_parameter_names:
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
        parameters = _parameters_in_order(self)
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
        _check_types(resets, batch_sizes)
        options = Options(
            self.input_size, self.hidden_size, self.num_layers, self.bidirectional, self.bias,
            self.dropout, self.variational_dropout, self.recurrent_dropout, self.zoneout,
            self.layer_norm, self.training,
        )  # fmt: skip
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            parameters: List[Tensor] = self._lltm_parameters  # type: ignore[assignment]
        else:
            # With an overload for a PackedSequence, such as nn.LSTM has, TorchScript could not
            # compile the layer alone. It does not compile this branch.
            if isinstance(input, PackedSequence):
                return _run_packed_sequence(self, options, input, hx, resets, batch_sizes)
            parameters = _parameters_in_order(self)
        check_tensor("lltm_ops.LLTM", "input", input, "a tensor or a PackedSequence")
        is_padded = batch_sizes is None
        if is_padded and input.dim() != 2 and input.dim() != 3:
            raise ValueError(
                "lltm_ops.LLTM: expected input to have 2 dimensions [time, input_size] or 3 with a "
                f"batch, but got {input.dim()}"
            )
        if hx is not None:
            check_hx("lltm_ops.LLTM", ("h_0", "c_0"), hx, input.dim() if is_padded else 3)
        if resets is not None and resets.dim() != input.dim() - 1:
            raise RuntimeError(
                "lltm_ops.LLTM: expected resets to have all dimensions of input but the last, "
                f"{input.dim() - 1}, but got {resets.dim()}"
            )
        has_no_batch = is_padded and input.dim() == 2
        has_batch_first = is_padded and input.dim() == 3 and self.batch_first
        if has_no_batch:
            if hx is not None:
                hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
            if resets is not None:
                resets = resets.unsqueeze(1)
            input = input.unsqueeze(1)
        elif has_batch_first:
            if resets is not None:
                # The operator would name the sizes in its own order. In a graph it does.
                if not in_a_graph() and resets.shape != input.shape[:2]:
                    raise RuntimeError(
                        "lltm_ops.LLTM: expected resets to have shape [batch, time] = "
                        f"{list(input.shape[:2])}, but got {list(resets.shape)}"
                    )
                resets = resets.transpose(0, 1)
            input = input.transpose(0, 1)
        results = run_layers(options, parameters, input, hx, batch_sizes, resets)
        output, cells, h_n, c_n = results
        if has_no_batch:
            output, cells = output.squeeze(1), cells.squeeze(1)
            h_n, c_n = h_n.squeeze(1), c_n.squeeze(1)
        elif has_batch_first:
            output, cells = output.transpose(0, 1), cells.transpose(0, 1)
        if self.return_cells:
            return output, (h_n, c_n), cells
        else:
            return output, (h_n, c_n)

    def __prepare_scriptable__(self) -> LLTM:
        # TorchScript reads parameters by names that are in its source, or from a list.
        module = _without_parametrizations(self)
        module._lltm_parameters = _parameters_in_order(module)  # type: ignore[assignment]
        return module

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *args
        )
        explain_missing_keys(
            state_dict, missing_keys, prefix + "weights_l0", prefix + "weight_ih_l0"
        )

    def extra_repr(self) -> str:
        # Only what the constructor has set: a subclass may have a property or a method of the name.
        attributes = vars(self)
        options = [
            f", {name}={attributes[name]}"
            for name, parameter in inspect.signature(LLTM).parameters.items()
            if parameter.default not in (parameter.empty, attributes.get(name, parameter.default))
        ]
        return f"{self.input_size}, {self.hidden_size}{''.join(options)}"


def _check_types(resets: Optional[Tensor], batch_sizes: Optional[Tensor]) -> None:
    if resets is not None:
        check_tensor("lltm_ops.LLTM", "resets", resets)
    if batch_sizes is not None:
        check_tensor("lltm_ops.LLTM", "batch_sizes", batch_sizes)


def _parameters_in_order(layer: LLTM) -> List[Tensor]:
    # By their names, where pruning and parametrization put the tensors to use.
    return [getattr(layer, name) for name in layer._lltm_parameter_names]


def _run_packed_sequence(
    layer: LLTM,
    options: Options,
    input: PackedSequence,
    hx: Optional[Tuple[Tensor, Tensor]],
    resets: Optional[Tensor],
    batch_sizes: Optional[Tensor],
) -> Any:
    if batch_sizes is not None:
        raise RuntimeError(
            "lltm_ops.LLTM: expected no batch_sizes beside a PackedSequence, which has "
            f"its own, but got a tensor of shape {list(batch_sizes.shape)}"
        )

    def permuted(
        state: Tuple[Tensor, Tensor], permutation: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor]:
        if permutation is None:
            return state
        return state[0].index_select(1, permutation), state[1].index_select(1, permutation)

    data, batch_sizes, sorted_indices, unsorted_indices = input
    check_tensor("lltm_ops.LLTM", "input", data)
    if hx is not None:
        check_hx("lltm_ops.LLTM", ("h_0", "c_0"), hx, 3)
        if sorted_indices is not None:
            # index_select would take other rows in silence.
            batch = sorted_indices.size(0)
            if hx[0].size(1) != batch or hx[1].size(1) != batch:
                raise RuntimeError(
                    f"lltm_ops.LLTM: expected h_0 and c_0 to have a batch of {batch}, as the "
                    f"PackedSequence has, but got {list(hx[0].shape)} and {list(hx[1].shape)}"
                )
        hx = permuted(hx, sorted_indices)
    parameters = _parameters_in_order(layer)
    output, cells, h_n, c_n = run_layers(options, parameters, data, hx, batch_sizes, resets)
    packed, state = PackedSequence(output, *input[1:]), permuted((h_n, c_n), unsorted_indices)
    if layer.return_cells:
        return packed, state, PackedSequence(cells, *input[1:])
    return packed, state


def _without_parametrizations(layer: LLTM) -> LLTM:
    """A copy that shares its parameters, except those that are parametrized.

    TorchScript cannot compile parametrizations, so a parametrized parameter becomes a plain one
    with the value that it has in evaluation.
    """
    module = type(layer).__new__(type(layer))  # copy.copy refuses what is parametrized
    vars(module).update(vars(layer))
    if not parametrize.is_parametrized(layer):
        return module
    module.__class__ = type(layer).__bases__[0]
    module._modules = dict(layer._modules)
    module._parameters = dict(layer._parameters)
    parametrizations = cast(nn.ModuleDict, module._modules.pop("parametrizations"))
    for name, parametrization in parametrizations.items():
        # A copy: spectral_norm changes buffers unless it evaluates.
        value = copy.deepcopy(parametrization).eval()().detach()
        module.register_parameter(name, nn.Parameter(value))
    return module
