"""From the residual stream to the vocabulary.

    logits(h) = cap(s · z(h)),    z(h) = U · P · N(h) + b
    N(h) = γ ⊙ (h − mean(h)) / σ(h) + β          LayerNorm; RMSNorm subtracts no mean
    folded(h) = s · U · P · (γ ⊙ (h − mean(h)))

N is the final norm, P the map behind it that a few models have, U the output embedding. Vectors
of the stream (r, o) are read by `logits`, the model's own way. Parts of it (v, m·v, y) have no
norm of their own and are read `folded`, which is linear. The two obey one law, exactly:

    folded(h) = s · σ(h) · (z(h) − c),    c = U · P · β + b

The paper's adaptive softmax turns vectors into log-probabilities at once, which is not linear:
there, U stands for the whole softmax, and without a final norm all three readings are the same.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from ffmem.errors import ModelError
from ffmem.models.split import copied, device_of

TILE = 2_048
"""Tokens of the output embedding that are multiplied at a time, so that they stay in the cache."""


class Norm:
    """What a norm does to vectors, found by probing it: γ, β, and whether it centres them.

    Probing needs no name of a weight, and sees through weights that are stored as γ − 1.
    """

    def __init__(self, module: nn.Module | None, width: int) -> None:
        self.module = module
        self.gain: Float[Tensor, " hidden"] = torch.ones(width)
        self.offset: Float[Tensor, " hidden"] = torch.zeros(width)
        self.centred = False
        self._exact = None if module is None else copied(module).float()
        if self._exact is not None:
            self._probe(self._exact, width)

    def _probe(self, norm: nn.Module, width: int) -> None:
        """Read γ and β off large vectors, for which the norm's epsilon vanishes."""
        device = next((weight.device for weight in norm.parameters()), torch.device("cpu"))
        vector = torch.full((1, width), 1000.0, device=device)
        vector[:, 1::2] *= -1
        with torch.no_grad():
            plus, minus, moved = norm(vector), norm(-vector), norm(vector + 1000.0)
        self.centred = bool((moved - plus).abs().max() <= 1e-3 * plus.abs().max())
        part = self.centre(vector)
        unit = part / part.pow(2).mean(dim=-1, keepdim=True).sqrt()
        self.gain = ((plus - minus) / 2 / unit).squeeze(0)
        self.offset = ((plus + minus) / 2).squeeze(0)

    @property
    def kind(self) -> str:
        """What people call it."""
        if self.module is None:
            return "none"
        return "LayerNorm" if self.centred else "RMSNorm"

    def centre(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Return vectors without their mean, under LayerNorm; unchanged otherwise."""
        return vectors - vectors.mean(dim=-1, keepdim=True) if self.centred else vectors

    def fold(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Return what the norm does to parts of a vector, all but dividing by σ, in float32."""
        return self.centre(vectors.float()) * self.gain.to(vectors.device)

    def apply(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Return the vectors as the model norms them."""
        if self.module is None:
            return vectors
        has_weights = next(self.module.parameters(), None) is not None
        normed: Tensor = self.module(vectors.to(device_of(self.module)) if has_weights else vectors)
        return normed

    def denominator(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, " row"]:
        """Return σ of each vector: what the norm divides it by, its epsilon included."""
        if self._exact is None:
            return torch.ones(len(vectors), device=vectors.device)
        vectors = vectors.to(self.gain.device, torch.float32)
        length = self.fold(vectors).norm(dim=-1)
        normed = (self._exact(vectors) - self.offset).norm(dim=-1)
        return torch.where(normed > 0, length / normed, 1.0)  # any σ will do for a zero vector


class Head:
    """A model's way from the last layer's output to its logits."""

    def __init__(
        self,
        output: nn.Module,
        norm: Norm,
        project_out: nn.Module | None = None,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> None:
        self.output = output
        self.norm = norm
        self.project_out = project_out
        self.scale = scale
        self.cap = cap
        self.adaptive = hasattr(output, "log_probabilities")
        reaches = len(norm.gain) if project_out is None else _width(project_out, 0)
        if not self.adaptive and reaches != _width(output, 1):
            raise ModelError(
                f"The residual stream reaches the output embedding with a width of {reaches},"
                f" where it takes {_width(output, 1)}. This model has another way to its logits."
            )

    @property
    def embedding(self) -> Float[Tensor, "vocab width"]:
        """The output embedding U itself, not a copy; the adaptive softmax has none."""
        if self.adaptive:
            raise ModelError("An adaptive softmax has no single output embedding.")
        return self.output.get_parameter("weight")

    @property
    def vocabulary(self) -> int:
        """How many tokens the output embedding has."""
        return _width(self.output, 0)

    @property
    def bias(self) -> Float[Tensor, " vocab"] | None:
        """The bias b of the output embedding, if it has one."""
        has_bias = getattr(self.output, "bias", None) is not None
        return self.output.get_parameter("bias") if has_bias else None

    def logits(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return the logits of vectors of the residual stream, by the model's own way, in float32.

        Norm and projections run in the dtype of the model.
        """
        return self.read_bands(self.bands(stream))

    def unscaled(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return z: the logits before scale and soft-cap, in float32."""
        self._must_be_linear("z")
        z = self._project(self.norm.apply(stream.to(self._dtype)))
        return z if self.bias is None else z.add_(self.bias.float())

    def meeting(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, "row width"]:
        """Return P · N(h): what meets U, in its dtype and on its device. z = U · that + b."""
        return self._before_output(self.norm.apply(stream.to(self._dtype)))

    def meeting_of_part(self, part: Float[Tensor, "row hidden"]) -> Float[Tensor, "row width"]:
        """Return P · (γ ⊙ (h − mean(h))), as `meeting`. folded(h) = s · U · that."""
        return self._before_output(self.norm.fold(part))

    def folded(
        self,
        part: Float[Tensor, "row hidden"],
        out: Float32[Tensor, "row vocab"] | None = None,
    ) -> Float[Tensor, "row vocab"]:
        """Return the reading of parts of the residual stream; no bias, no σ, no cap.

        γ is applied in float32, the projection runs in the dtype of the model, and the result is
        float32: in a bfloat16 model it is rounded to bfloat16 on the way. With `out`, the result
        is there, on its device.
        """
        is_linear = not self.adaptive
        if out is not None and is_linear and self.embedding.dtype == out.dtype:
            rows = self._before_output(self.norm.fold(part)).contiguous()
            if rows.device == out.device:
                for tile in range(0, out.shape[1], TILE):
                    tokens = slice(tile, tile + TILE)
                    torch.mm(rows, self.embedding[tokens].T, out=out[:, tokens])
                return out if self.scale == 1 else out.mul_(self.scale)
        folded = self._project(self.norm.fold(part))
        if self.scale != 1 and is_linear:
            folded.mul_(self.scale)
        return folded if out is None else out.copy_(folded)

    def raw(self, part: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return U · P · h: neither norm, scale, bias nor cap; dtypes as in `folded`."""
        return self._project(part)

    def denominator(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, " row"]:
        """Return σ of each vector of the stream, 1 where there is no final norm."""
        return self.norm.denominator(stream.to(self._dtype))

    def constant(self) -> Float[Tensor, " vocab"]:
        """Return c: what z holds that does not depend on the vector."""
        self._must_be_linear("c")
        c = self._project(self.norm.offset[None]).squeeze(0)
        return c if self.bias is None else c.add_(self.bias.float())

    def bands(self, stream: Float[Tensor, "row hidden"]) -> list[Float[Tensor, "row _"]]:
        """Return what is linear in the normed vectors: z, or each band's logits (adaptive)."""
        if self.adaptive:
            return self.band_logits(self.norm.apply(stream.to(self._dtype)))
        return [self.unscaled(stream)]

    def band_constants(self) -> list[Float[Tensor, " _"]]:
        """Return what `bands` hold that does not depend on the vector: c, band by band."""
        if self.adaptive:
            return [band.squeeze(0) for band in self.band_logits(self.norm.offset[None])]
        return [self.constant()]

    def read_bands(self, bands: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        """Return the logits of vectors of the stream from their `bands`, which it overwrites."""
        if self.adaptive:
            return self._normalised(bands)
        (z,) = bands
        if self.scale != 1:
            z.mul_(self.scale)
        return z if self.cap is None else z.div_(self.cap).tanh_().mul_(self.cap)

    def read_part(self, bands: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        """Return `folded` of a part of the stream from its share σ · (z − c) of the bands.

        Shares add up as vectors do: that of y is that of o = r + y minus that of r.
        """
        if self.adaptive:
            return self._normalised(bands)
        (z,) = bands
        return z if self.scale == 1 else z.mul_(self.scale)

    def band_logits(self, vectors: Float[Tensor, "row hidden"]) -> list[Float[Tensor, "row _"]]:
        """Return each band's logits of vectors that were normed or folded; adaptive heads only."""
        weight = next(self.output.parameters())
        found: list[Tensor] = self.output.cluster_logits(vectors.to(weight.device, weight.dtype))  # type: ignore[operator]
        return [band.float() for band in found]

    def _normalised(self, bands: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        log_probabilities: Tensor = self.output.normalize(bands)  # type: ignore[operator]
        return log_probabilities

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.output.parameters()).dtype

    def _project(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return U · P · h in float32, the products in the dtype of the model."""
        vectors = self._before_output(vectors)
        if self.adaptive:
            log_probabilities: Tensor = self.output.log_probabilities(vectors)  # type: ignore[operator]
            return log_probabilities.float()
        return functional.linear(vectors, self.embedding).float()

    def _before_output(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row width"]:
        """Return P · h in the dtype of the model, where the output embedding is."""
        vectors = vectors.to(self._dtype)
        if self.project_out is not None:
            vectors = self.project_out(vectors.to(device_of(self.project_out)))
        return vectors.to(device_of(self.output))

    def _must_be_linear(self, what: str) -> None:
        if self.adaptive:
            raise ModelError(f"{what} was asked of an adaptive softmax, which is not linear.")


def _width(linear: nn.Module, side: int) -> int:
    """Return how many numbers a linear map gives (side 0) or takes (side 1)."""
    return int(linear.get_parameter("weight").shape[side])
