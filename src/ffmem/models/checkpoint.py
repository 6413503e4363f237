"""What is refused of a checkpoint before and after transformers loads it.

Python code of its own, an adapter without its base, weights that are no real numbers, and weights
that are not those of the model that its config describes.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ffmem.errors import ModelError

ADAPTER = "adapter_config.json"
"""The file that makes a folder an adapter, such as LoRA, of peft."""

IF_THERE = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
"""What `cached_file` is told of a file that a model may lack."""

_IGNORED = re.compile(
    r"(^|\.)("
    r"\w*rotary\w*\.\w*(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn)\.(bias|masked_bias|causal_mask|embed_positions)"
    r"|position_ids|embed_positions\.weights"
    r")$"
    r"|(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mtp)\."
)
"""Keys that may be left out beside those that transformers itself ignores: masks and positions,
which older versions stored and which are computed; parts that see or hear, or predict further
tokens."""

OWN_CODE: dict[str, Any] = {"trust_remote_code": False}
"""What every loader of transformers is told: left to itself, it asks on standard input, which may
be the corpus, whether to run Python code that a model folder holds."""


@contextmanager
def refusing_own_code(name: str | Path) -> Iterator[None]:
    """Say it plainly when transformers would have to run Python code that comes with a model.

    A model that names such code, but whose architecture transformers has, loads without it.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"The model {name} asks for its own Python code to run (`auto_map` in its config.json"
            " or tokenizer_config.json), which ffmem never does: give a model that transformers"
            " supports by itself, or, if you trust the code, load model and tokenizer with"
            " transformers and use ffmem.load(model, tokenizer)."
        ) from error


def refuse_adapter(name: str, where: dict[str, Any]) -> None:
    """Raise if a model is an adapter, which transformers adds to its base only if peft is there."""
    found = cached_file(name, ADAPTER, **where, **IF_THERE)
    if found is None:
        return
    try:
        settings = json.loads(Path(found).read_text(encoding="utf-8"))
        kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path")
    except (ValueError, AttributeError):
        kind, base = None, None
    what = "a LoRA adapter" if kind in (None, "LORA") else f"an adapter ({kind})"
    of = f"the base model {base}" if base else f"a base model that {ADAPTER} does not name"
    aside = f" Or move {ADAPTER} away, to read the model beside it without the adapter."
    raise ModelError(
        f"{name} is {what} of {of}, and ffmem reads whole models only. Merge them with peft:"
        f" AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()"
        ".save_pretrained(FOLDER); save the tokenizer to FOLDER too, and give FOLDER to ffmem."
        + (aside if (Path(name) / "config.json").exists() else "")
    )


def refuse_integers(name: str, where: dict[str, Any]) -> None:
    """Raise if weights are stored as integers, or as anything else that is no real number.

    transformers would cast them without a word: quantized weights, without their scales.
    """
    single = cached_file(name, SAFE_WEIGHTS_NAME, **where, **IF_THERE)
    parts = [] if single is None else [SAFE_WEIGHTS_NAME]
    if single is None and (
        listed := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **where, **IF_THERE)
    ):
        parts = sorted(
            set(json.loads(Path(listed).read_text(encoding="utf-8"))["weight_map"].values())
        )
    for part in parts:
        with safe_open(cached_file(name, part, **where), "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                dtype = file.get_slice(key).get_dtype()
                if not dtype.startswith(("F", "BF")) and not _IGNORED.search(key):
                    raise ModelError(
                        f"The checkpoint {name} stores {key} as {dtype}, and its config names no"
                        " quantization that says what these numbers mean. Give a checkpoint in"
                        " float32, bfloat16 or float16."
                    )


def refuse_unfitting(name: str | Path, report: dict[str, Any]) -> None:
    """Raise unless the weights of a checkpoint are those of the model that its config describes."""
    for kind in ("missing_keys", "mismatched_keys"):
        if report[kind]:
            example = sorted(map(str, report[kind]))[0]
            raise ModelError(
                f"The checkpoint {name} does not fill the model: {len(report[kind])}"
                f" {kind.replace('_', ' ')}, such as {example}. transformers would fill them with"
                " random numbers; give a whole checkpoint."
            )
    unexpected = sorted(key for key in report["unexpected_keys"] if not _IGNORED.search(key))
    if unexpected:
        raise ModelError(
            f"The checkpoint {name} holds more than the model that its config describes:"
            f" {len(unexpected)} unexpected keys, such as {unexpected[0]}. transformers would leave"
            " them out and compute something else; give the config that belongs to the weights."
        )
