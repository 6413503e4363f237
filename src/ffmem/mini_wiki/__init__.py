"""`mini-wiki`, the paper's model in small, and a corpus for it; both ship with the package.

mini_wiki/model/        config, float16 weights, dictionary, model card, training record
mini_wiki/train.txt     a small invented encyclopedia, tokenized like WikiText
mini_wiki/valid.txt     held-out articles of the same encyclopedia
"""

from pathlib import Path

from ffmem.errors import ModelError

NAME = "mini-wiki"
MODEL = Path(__file__).parent / "model"
TEXTS = {part: Path(__file__).parent / f"{part}.txt" for part in ("train", "valid")}

FILES = (
    *("config.json", "model.safetensors", "dict.txt", "tokenizer.json", "tokenizer_config.json"),
    *("README.md", "training.json"),
)
"""Files that the model's folder must have."""


def missing_files(folder: Path) -> str:
    """Return the names of the model's files that a folder does not have, separated by commas."""
    return ", ".join(name for name in FILES if not (folder / name).is_file())


def check_complete(folder: Path) -> Path:
    """Return the model's folder; raise if a file is missing."""
    if missing := missing_files(folder):
        raise ModelError(
            f"The model {NAME} ships with ffmem, but its folder {folder} lacks {missing}."
            " Reinstall ffmem: `pip install --force-reinstall ffmem`."
        )
    return folder
