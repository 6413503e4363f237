"""Quantized checkpoints load as plain weights: scale · q; what cannot be is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.errors import ModelError
from ffmem.models.load import load
from tests.tiny import EXPERTS, TINY, shaken, tiny_tokenizer

TOKENS = torch.tensor([[3, 9, 27, 17, 51, 25]])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers that four bits stand for in mxfp4."""


def save(folder, config, **sizes):
    torch.manual_seed(0)
    model = shaken(
        AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict() | sizes))
    )
    model.save_pretrained(folder)
    tiny_tokenizer().tokenizer.save_pretrained(folder)
    return folder


def rewrite(folder, weights, quantization):
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(settings | {"quantization_config": quantization})
    )


def plain(folder, weights, copy):
    """A checkpoint of the numbers that the quantized one stands for."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config))
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().tokenizer.save_pretrained(copy)
    return copy


def quantize_fp8(weight, block=8):
    """Quantize blocks of a matrix; return what is stored and what it stands for."""
    rows, columns = (size // block for size in weight.shape)
    blocks = weight.reshape(rows, block, columns, block)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = stored.float() * scale[:, None, :, None]
    return stored.reshape(weight.shape), scale, meant.reshape(weight.shape)


@pytest.fixture
def fp8(tmp_path):
    """A checkpoint in fp8, and one of the same numbers in float32."""
    folder = save(tmp_path / "fp8", TINY["llama"])
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "_proj.weight" in name:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantize_fp8(weight)
    quantization = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    rewrite(folder, stored, quantization | {"activation_scheme": "dynamic"})
    return folder, plain(folder, meant, tmp_path / "plain")


def test_an_fp8_checkpoint_has_the_weights_that_it_stands_for(fp8):
    quantized, meant = map(load, fp8)
    assert quantized.fingerprint() == meant.fingerprint()
    torch.testing.assert_close(quantized.logits(TOKENS), meant.logits(TOKENS))


def test_an_fp8_checkpoint_can_be_indexed_and_edited(fp8, tmp_path):
    (tmp_path / "corpus.txt").write_text("w5 w6 w7\nw9 w8\n")
    corpus = ffmem.Corpus(str(tmp_path / "corpus.txt"), unit="line")
    made = ffmem.index(fp8[0], corpus, tmp_path / "index", t=2)
    assert made.manifest.model.hash == load(fp8[1]).fingerprint()
    ffmem.edit(fp8[0], tmp_path / "edited", off=["L1N3"], corpus=None)
    assert not load(tmp_path / "edited").values(1)[3].any()


def test_an_mxfp4_checkpoint_has_the_weights_that_it_stands_for(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 8}
    folder = save(tmp_path / "mxfp4", EXPERTS["gpt_oss"], **sizes)
    stored, meant = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = weight
            continue
        n, inner, outer = weight.shape  # what transformers keeps is transposed
        shape = (n, outer, inner // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 128, shape[:3], generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], dim=-1)
        scaled = numbers.flatten(-2) * (scales.float() - 127).exp2()[..., None]
        meant[name] = scaled.flatten(-2).transpose(1, 2).contiguous()
    rewrite(folder, stored, {"quant_method": "mxfp4"})
    expected = load(plain(folder, meant, tmp_path / "plain"))
    quantized = load(folder)
    assert quantized.layout == expected.layout
    torch.testing.assert_close(quantized.logits(TOKENS), expected.logits(TOKENS))
    for layer in range(expected.n_layers):
        for one, other in zip(
            quantized.value_parts(layer), expected.value_parts(layer), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_a_torchao_checkpoint_has_the_weights_that_it_stands_for(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    folder = save(tmp_path / "plain", TINY["llama"])
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    model.save_pretrained(tmp_path / "torchao")
    tiny_tokenizer().tokenizer.save_pretrained(tmp_path / "torchao")
    memories = load(tmp_path / "torchao")
    for layer, block in enumerate(model.model.layers):
        expected = block.mlp.down_proj.weight.dequantize().T
        torch.testing.assert_close(memories.values(layer), expected)
    assert not torch.equal(memories.values(0), load(folder).values(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized by gptq, which transformers cannot"),
        ({"quant_method": "awq", "bits": 4}, "quantized by awq, which"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantized by bitsandbytes, which",
        ),
        ({"quant_method": "magic"}, "quantized by magic, which"),
        ({"quant_method": "torchao"}, "needs the package `torchao`"),
        ({"quant_method": "compressed-tensors"}, "needs the package `compressed-tensors`"),
    ],
)
def test_what_cannot_be_dequantized_is_refused_by_name(settings, message, tmp_path, monkeypatch):
    monkeypatch.setattr("ffmem.models.quantization.find_spec", lambda name: None)
    folder = save(tmp_path / "model", TINY["llama"])
    rewrite(folder, load_file(folder / "model.safetensors"), settings)
    with pytest.raises(ModelError, match=f"{message}.*unquantized checkpoint"):
        load(folder)
