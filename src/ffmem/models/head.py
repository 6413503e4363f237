"""From the residual stream to the vocabulary.

    logits(h) = cap(s · z(h)),    z(h) = U · P · N(h) + b
    N(h) = γ ⊙ (h − mean(h)) / σ(h) + β          LayerNorm; RMSNorm does not subtract the mean
    folded(h) = s · U · P · (γ ⊙ (h − mean(h)))

N is the final norm, P the projection after it that a few models have, U the output embedding.
`logits` reads vectors of the stream (r, o), exactly as the model does. `folded` reads parts of it
(v, m·v, y), which have no norm of their own; it is linear. Law, exact:

    folded(h) = s · σ(h) · (z(h) − c),    c = U · P · β + b

The paper's adaptive softmax turns vectors into log-probabilities directly, which is not linear.
There, U is the whole softmax; without a final norm, all readings are the same. A few models have a
small network T between N and U: it reads vectors and parts alike, U · T(·), and is not linear.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from ffmem.errors import ModelError
from ffmem.models.modules import copy_without_hooks, device_of

TILE = 2_048
"""Tokens of an embedding that are multiplied at a time, so that the result stays in the cache."""


class Norm:
    """A norm's γ and β, and whether it subtracts the mean, found by probing it.

    Probing does not depend on the names of weights, and works if they are stored as γ − 1.
    """

    def __init__(self, module: nn.Module | None, width: int) -> None:
        self.module = module
        self.gain: Float[Tensor, " hidden"] = torch.ones(width)
        self.offset: Float[Tensor, " hidden"] = torch.zeros(width)
        self.centered = False
        self._float32 = None if module is None else copy_without_hooks(module).float()
        if self._float32 is not None:
            self._probe(self._float32, width)

    def _probe(self, norm: nn.Module, width: int) -> None:
        """Measure γ and β with vectors so large that the norm's epsilon vanishes."""
        device = next((weight.device for weight in norm.parameters()), torch.device("cpu"))
        vector = torch.full((1, width), 1000.0, device=device)
        vector[:, 1::2] *= -1
        with torch.no_grad():
            plus, minus, shifted = norm(vector), norm(-vector), norm(vector + 1000.0)
        self.centered = bool((shifted - plus).abs().max() <= 1e-3 * plus.abs().max())
        part = self.center(vector)
        unit = part / part.pow(2).mean(dim=-1, keepdim=True).sqrt()
        self.gain = ((plus - minus) / 2 / unit).squeeze(0)
        self.offset = ((plus + minus) / 2).squeeze(0)

    def center(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Subtract the mean of each vector, if this is a LayerNorm."""
        return vectors - vectors.mean(dim=-1, keepdim=True) if self.centered else vectors

    def fold(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Return γ ⊙ (h − mean(h)) in float32: the norm without σ and β."""
        return self.center(vectors.float()) * self.gain.to(vectors.device)

    def fold_keys(self, keys: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Return keys as they act before the norm: k · N(h) = k̃ · h / σ(h) + k · β."""
        return self.center(keys.float() * self.gain.to(keys.device))

    def apply(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Return N(h), as the model computes it."""
        if self.module is None:
            return vectors
        has_weights = next(self.module.parameters(), None) is not None
        normed: Tensor = self.module(vectors.to(device_of(self.module)) if has_weights else vectors)
        return normed

    def denominator(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, " row"]:
        """Return σ of each vector, epsilon included."""
        if self._float32 is None:
            return torch.ones(len(vectors), device=vectors.device)
        vectors = vectors.to(self.gain.device, torch.float32)
        length = self.fold(vectors).norm(dim=-1)
        normed = (self._float32(vectors) - self.offset).norm(dim=-1)
        return torch.where(normed > 0, length / normed, 1.0)  # for a zero vector, any σ will do


class Head:
    """The last steps of a model: from the last layer's output to logits."""

    def __init__(
        self,
        output: nn.Module,
        norm: Norm,
        project_out: nn.Module | None = None,
        scale: float = 1.0,
        cap: float | None = None,
        transform: nn.Module | None = None,
    ) -> None:
        self.output = output
        self.norm = norm
        self.project_out = project_out
        self.transform = transform
        self.scale = scale
        self.cap = cap
        self.adaptive = hasattr(output, "log_probabilities")
        self.linear = not self.adaptive and transform is None
        """Whether `folded` is linear."""
        if not self.linear:
            return
        width = len(norm.gain)
        if project_out is not None:
            width = project_out.get_parameter("weight").shape[0]
        expected = self.embedding.shape[1]
        if width != expected:
            raise ModelError(
                f"The residual stream reaches the output embedding with width {width}, but the"
                f" embedding has width {expected}. ffmem does not support this kind of head."
            )

    @property
    def embedding(self) -> Float[Tensor, "vocab width"]:
        """The output embedding U itself, not a copy; the adaptive softmax has none."""
        if self.adaptive:
            raise ModelError("An adaptive softmax has no single output embedding.")
        return self.output.get_parameter("weight")

    @property
    def bias(self) -> Float[Tensor, " vocab"] | None:
        """The bias b of the output embedding, if it has one."""
        has_bias = getattr(self.output, "bias", None) is not None
        return self.output.get_parameter("bias") if has_bias else None

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.output.parameters()).dtype

    def logits(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return the model's logits for vectors of the residual stream, in float32.

        Norm and projections run in the dtype of the model.
        """
        return self.combine_clusters(self.cluster_logits(stream))

    def unscaled(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return z: the logits before scale and soft-cap, in float32."""
        self._check_linear("z")
        z = self._project(self.norm.apply(stream.to(self._dtype)))
        return z if self.bias is None else z.add_(self.bias.float())

    def constant(self) -> Float[Tensor, " vocab"]:
        """Return c: the part of z that does not depend on the vector."""
        self._check_linear("c")
        c = self._project(self.norm.offset[None]).squeeze(0)
        return c if self.bias is None else c.add_(self.bias.float())

    def folded(self, part: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return the logits of parts of the residual stream: no bias, no σ, no cap.

        γ is applied in float32, the projection runs in the dtype of the model, and the result is
        float32: a bfloat16 model rounds it to bfloat16 on the way.
        """
        folded = self._project(self.norm.fold(part))
        return folded if self.adaptive or self.scale == 1 else folded.mul_(self.scale)

    def folded_tiles(
        self, part: Float[Tensor, "row hidden"], tiles: Float32[Tensor, "tile row size"]
    ) -> Iterator[int]:
        """Write `folded` in tiles of consecutive tokens, and yield the number of each in turn.

        Tiles are contiguous, so that each is written, and then read by the caller, in the cache.
        Entries of the last tile beyond the vocabulary stay as they are.
        """
        size = tiles.shape[2]
        if not self.adaptive and self.embedding.dtype == tiles.dtype:
            rows = self.pre_unembed_part(part).contiguous()
            if rows.device == tiles.device:
                for number, tokens in enumerate(self.embedding.split(size)):
                    tile = tiles[number, :, : len(tokens)]
                    torch.mm(rows, tokens.T, out=tile)
                    if self.scale != 1:
                        tile.mul_(self.scale)
                    yield number
                return
        for number, logits in enumerate(self.folded(part).split(size, dim=1)):
            tiles[number, :, : logits.shape[1]] = logits
            yield number

    def raw(self, part: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return U · P · h, without norm, scale, bias and cap; dtypes as in `folded`."""
        return self._project(part)

    def denominator(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, " row"]:
        """Return σ of each vector of the stream; 1 without a final norm."""
        return self.norm.denominator(stream.to(self._dtype))

    def pre_unembed(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, "row width"]:
        """Return P · N(h), in the dtype and on the device of U. z = U · pre_unembed + b."""
        return self._before_output(self.norm.apply(stream.to(self._dtype)))

    def pre_unembed_part(self, part: Float[Tensor, "row hidden"]) -> Float[Tensor, "row width"]:
        """Return P · (γ ⊙ (h − mean(h))) likewise. folded(h) = s · U · pre_unembed_part."""
        return self._before_output(self.norm.fold(part))

    def part_map(self) -> Float[Tensor, "hidden width"]:
        """Return F of a linear head, in float32: folded(h) = s · U · Fᵀ · h."""
        if not self.linear:
            raise ModelError(
                "This model's head is not linear (an adaptive softmax, or a network before the"
                " output embedding), so parts of the stream have no logits that add up."
            )
        width = len(self.norm.gain)
        folded = self.norm.fold(torch.eye(width, device=self.norm.gain.device))
        if self.project_out is None:
            return folded
        return folded @ self.project_out.get_parameter("weight").float().T.to(folded.device)

    # Logits before the last step that is not linear. An adaptive softmax has one tensor per
    # cluster of the vocabulary, any other head a single one, z.

    def cluster_logits(self, stream: Float[Tensor, "row hidden"]) -> list[Float[Tensor, "row _"]]:
        """Return what is linear in the normed vectors: [z], or the logits of each cluster."""
        if self.adaptive:
            return self.project_clusters(self.norm.apply(stream.to(self._dtype)))
        return [self.unscaled(stream)]

    def cluster_constants(self) -> list[Float[Tensor, " _"]]:
        """Return the part of `cluster_logits` that does not depend on the vector: [c] for [z]."""
        if self.adaptive:
            return [logits.squeeze(0) for logits in self.project_clusters(self.norm.offset[None])]
        return [self.constant()]

    def project_clusters(
        self, vectors: Float[Tensor, "row hidden"]
    ) -> list[Float[Tensor, "row _"]]:
        """Return the cluster logits of vectors after norm or fold; adaptive softmax only."""
        vectors = vectors.to(device_of(self.output), self._dtype)
        found: list[Tensor] = self.output.cluster_logits(vectors)  # type: ignore[operator]
        return [logits.float() for logits in found]

    def combine_clusters(
        self, clusters: list[Float[Tensor, "row _"]]
    ) -> Float[Tensor, "row vocab"]:
        """Return the logits of vectors from their `cluster_logits`, which are overwritten."""
        combined = self.combine_part_clusters(clusters)
        if self.adaptive or self.cap is None:
            return combined
        return combined.div_(self.cap).tanh_().mul_(self.cap)

    def combine_part_clusters(
        self, clusters: list[Float[Tensor, "row _"]]
    ) -> Float[Tensor, "row vocab"]:
        """Return `folded` of a part of the stream from its share σ · (z − c) of cluster logits.

        Shares add up like vectors: the share of y is that of o = r + y minus that of r. The shares
        are overwritten.
        """
        if self.adaptive:
            log_probabilities: Tensor = self.output.normalize(clusters)  # type: ignore[operator]
            return log_probabilities
        (z,) = clusters
        return z if self.scale == 1 else z.mul_(self.scale)

    def _project(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return U · P · h in float32, computed in the dtype of the model."""
        vectors = self._before_output(vectors)
        if self.adaptive:
            log_probabilities: Tensor = self.output.log_probabilities(vectors)  # type: ignore[operator]
            return log_probabilities.float()
        return functional.linear(vectors, self.embedding).float()

    def _before_output(self, vectors: Float[Tensor, "row hidden"]) -> Float[Tensor, "row width"]:
        """Return P · h, or T(h), in the dtype of the model, on the device of U."""
        vectors = vectors.to(self._dtype)
        if self.project_out is not None:
            vectors = self.project_out(vectors.to(device_of(self.project_out)))
        if self.transform is not None:
            vectors = self.transform(vectors.to(device_of(self.transform)))
        return vectors.to(device_of(self.output))

    def _check_linear(self, what: str) -> None:
        if self.adaptive:
            raise ModelError(f"An adaptive softmax has no {what}: it is not linear.")
