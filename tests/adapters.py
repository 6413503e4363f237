"""Adapters of tiny models, made by peft itself."""

import json
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM


def write_lora(base: Path, folder: Path, **settings: object) -> Path:
    """Write a random LoRA adapter of a checkpoint; `settings` change its adapter_config.json."""
    config = peft.LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["gate_proj", "down_proj", "q_proj"],
        task_type="CAUSAL_LM",
    )
    return write_adapter(base, folder, config, **settings)


def write_adapter(base: Path, folder: Path, config: peft.PeftConfig, **settings: object) -> Path:
    """Write an adapter whose every weight is random, and return its folder."""
    torch.manual_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        weight.data = weight.data + 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder, save_embedding_layers=False)
    return change_settings(folder, **settings)


def change_settings(folder: Path, **settings: object) -> Path:
    """Change the adapter_config.json of an adapter."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def rename_base(folder: Path, base: Path) -> Path:
    """Let an adapter name another base model."""
    return change_settings(folder, base_model_name_or_path=str(base))
