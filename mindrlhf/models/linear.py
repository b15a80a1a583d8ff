"""Linear maps with adapters, and norms, of which halves are made."""

from collections.abc import Mapping

from mindspore import Parameter, nn

from mindrlhf.backend.operators import Operators
from mindrlhf.models.dropout import InputDropout
from mindrlhf.models.inputs import ROWS
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.models.weight import Weight


class LowRank(nn.Cell):
    """Low-rank adapter of a linear map.

    It maps x [T, in] -> scale * (x A^T) B^T [T, out] in the dtype of x, with A [rank, in] and B [out, rank]. dropout:
    applied to x, with the keys of its rows.
    """

    def __init__(
        self, a: Parameter, b: Parameter, scale: float, operators: Operators, dropout: InputDropout | None = None
    ):
        super().__init__(auto_prefix=False)
        self.a = Weight(a)
        self.b = Weight(b)
        self.linear = operators.composed.linear
        self.dropout = dropout
        self.scale = scale if dropout is None else scale / (1 - dropout.share)

    @classmethod
    def of_map(
        cls,
        name: str,
        parameters: Mapping[str, Parameter],
        adapters: Mapping[str, ParameterSpec],
        operators: Operators,
        dropout: InputDropout | None = None,
    ) -> "LowRank | None":
        """Build the adapter of a linear map, or None.

        adapters: see `Materials`.
        """
        a, b = f"{name}.lora_a", f"{name}.lora_b"
        return cls(parameters[a], parameters[b], adapters[a].scale, operators, dropout) if a in adapters else None

    def construct(self, x, given):
        if self.dropout is not None:
            x = self.dropout(x, given[ROWS][0])
        a, x = self.a(x)
        b, inner = self.b(self.linear(x, a))
        return self.linear(inner, b) * self.scale


class Linear(nn.Cell):
    """Product x [T, in] -> [T, out], in the dtype of x.

    The weight is [out, in], the optional bias [out]; the output of the optional adapter is added. given: the layer's
    inputs (`models.inputs`).
    """

    def __init__(self, weight: Weight, bias: Parameter | None, adapter: LowRank | None, operators: Operators):
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.bias = Weight(bias) if bias is not None else None
        self.adapter = adapter
        self.linear = operators.composed.linear
        self.linear_bias = operators.linear_bias

    @classmethod
    def of_map(
        cls,
        name: str,
        parameters: Mapping[str, Parameter],
        adapters: Mapping[str, ParameterSpec],
        operators: Operators,
        dropout: InputDropout | None = None,
        packed: Parameter | None = None,
    ) -> "Linear":
        """Build the linear map of this name, with its bias and adapter.

        packed: see `Weight`; others as in `LowRank.of_map`.
        """
        adapter = LowRank.of_map(name, parameters, adapters, operators, dropout)
        weight = Weight(parameters[f"{name}.weight"], packed)
        return cls(weight, parameters.get(f"{name}.bias"), adapter, operators)

    def construct(self, x, given):
        y = self._product(x)
        return y if self.adapter is None else y + self.adapter(x, given)

    def _product(self, x):
        weight, x = self.weight(x)
        if self.bias is None:
            return self.linear(x, weight)
        bias, x = self.bias(x)
        return self.linear_bias(x, weight, bias)

    def weights(self, name: str) -> dict[str, Weight | None]:
        """Return the weights by their names in an operator, for a map called `name`."""
        a, b = (self.adapter.a, self.adapter.b) if self.adapter else (None, None)
        return dict(zip(map_names(name), (self.weight, self.bias, a, b), strict=True))


def map_names(name: str) -> tuple[str, str, str, str]:
    """Name a linear map's matrix, bias, A and B in an operator."""
    return name, f"{name}_bias", f"{name}_a", f"{name}_b"


class Norm(nn.Cell):
    """RMSNorm over the last axis, with a weight of its size."""

    def __init__(self, weight: Parameter, eps: float, rms_norm):
        super().__init__(auto_prefix=False)
        self.weight = Weight(weight)
        self.eps = eps
        self.rms_norm = rms_norm

    def construct(self, x):
        weight, x = self.weight(x)
        return self.rms_norm(x, weight, self.eps)
