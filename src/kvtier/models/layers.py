"""The layers that the families are written with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvtier.kernels import tuning
from kvtier.kernels.quantized_rows import QuantizedRows
from kvtier.models.attention import Attention
from kvtier.models.fused_operations import add_rms_norm, linear_silu_mul, rms_norm, silu_mul
from kvtier.models.layer import Layer, empty_parameter
from kvtier.models.linear import PlainLinear
from kvtier.models.quantization.fp8 import Fp8Linear, quantized_rms_norm
from kvtier.models.recipe import Recipe
from kvtier.models.rope import Rope
from kvtier.models.slot import SlotKind, WeightSlot


class Embedding(Layer):
    """Token ids (T,) to hidden states (T, hidden)."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        config = recipe.config
        self.weight = empty_parameter((config.vocab_size, config.hidden_size), recipe.dtype, recipe.device)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}.weight", tuple(self.weight.shape), SlotKind.WEIGHT, self.weight.copy_)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class RmsNorm(Layer):
    """Root mean square normalisation over the last dimension, of `size`."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        super().__init__()
        self.eps = recipe.config.rms_eps
        self.weight = empty_parameter((size,), recipe.dtype, recipe.device)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}.weight", tuple(self.weight.shape), SlotKind.NORM, self.weight.copy_)

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)

    def add(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The normalised sum and the sum; without a residual, `hidden` is the sum."""
        if residual is None:
            return rms_norm(hidden, self.weight, self.eps), hidden
        return add_rms_norm(hidden, residual, self.weight, self.eps)


class QuantizingNorm(RmsNorm):
    """A norm before linear layers in 8-bit floats, which need only its quantised rows."""

    def add(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor | QuantizedRows, Tensor]:
        if not tuning.NORMS_QUANTIZE:
            return super().add(hidden, residual)
        return quantized_rms_norm(hidden, residual, self.weight, self.eps)


class SelfAttention(Layer):
    """The projections around the attention, which applies the rotation given here."""

    def __init__(self, recipe: Recipe, rope: Rope, layer: int) -> None:
        super().__init__()
        config = recipe.config
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_eps
        self._rope = (rope,)  # in a tuple: the model owns the table, not each of its layers
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = recipe.make_linear(
            config.hidden_size, {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}, bias=config.qkv_bias
        )
        self.o_proj = recipe.make_linear(query_size, {"o_proj": config.hidden_size}, bias=config.output_bias)
        self.q_norm = RmsNorm(recipe, config.head_dim) if config.has_qk_norm else None
        self.k_norm = RmsNorm(recipe, config.head_dim) if config.has_qk_norm else None

    def forward(self, hidden: Tensor | QuantizedRows, rope_rows: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight)
        (rope,) = self._rope
        rotation = rope.rotation(rope_rows, norms=norms, eps=self.eps)
        return self.o_proj(attention(self.layer, query, key, value, rotation))


class GatedMlp(Layer):
    """`down(silu(gate) * up)`. `is_merged`: the checkpoint itself holds gate and up as one tensor."""

    def __init__(self, recipe: Recipe, *, is_merged: bool = False) -> None:
        super().__init__()
        hidden, inner, bias = recipe.config.hidden_size, recipe.config.intermediate_size, recipe.config.mlp_bias
        parts = {"gate_up_proj": 2 * inner} if is_merged else {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = recipe.make_linear(hidden, parts, bias=bias)
        self.down_proj = recipe.make_linear(inner, {"down_proj": hidden}, bias=bias)

    def forward(self, hidden: Tensor | QuantizedRows) -> Tensor:
        gate_up = self.gate_up_proj
        if isinstance(gate_up, PlainLinear) and gate_up.bias is None:
            return self.down_proj(linear_silu_mul(hidden, gate_up.weight))
        if isinstance(gate_up, Fp8Linear):
            return self.down_proj(*gate_up.gated(hidden))
        return self.down_proj(silu_mul(gate_up(hidden)))


class DecoderLayer(Layer):
    """Attention, then MLP, each on a normalised copy of the residual stream.

    Takes and returns `(hidden, residual)` whose sum is the stream: the next norm computes the sum.
    """

    def __init__(self, recipe: Recipe, rope: Rope, layer: int) -> None:
        super().__init__()
        norm = QuantizingNorm if recipe.linear is Fp8Linear else RmsNorm
        self.input_layernorm = norm(recipe, recipe.config.hidden_size)
        self.self_attn = SelfAttention(recipe, rope, layer)
        self.post_attention_layernorm = norm(recipe, recipe.config.hidden_size)
        self.mlp = self.make_mlp(recipe)

    def make_mlp(self, recipe: Recipe) -> GatedMlp:
        return GatedMlp(recipe)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rope_rows: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, rope_rows, attention)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual
