"""Where the named model `mini-wiki` and its text lie: in the package, so that no network is needed.

mini_wiki/model/        config, weights in float16, dictionary, model card, how it was trained
mini_wiki/train.txt     a small invented encyclopedia, tokenised as WikiText is
mini_wiki/valid.txt     articles of the same encyclopedia that are kept apart
"""

from pathlib import Path

from ffmem.errors import ModelError

NAME = "mini-wiki"
FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
TEXTS = {part: FOLDER / f"{part}.txt" for part in ("train", "valid")}

FILES = (
    *("config.json", "model.safetensors", "dict.txt", "tokenizer.json", "tokenizer_config.json"),
    *("README.md", "training.json"),
)
"""What the model's folder holds at least."""


def whole(folder: Path) -> Path:
    """Return the model's folder; one that lacks a file is refused."""
    lacking = [name for name in FILES if not (folder / name).is_file()]
    if lacking:
        raise ModelError(
            f"The model {NAME} should come with ffmem, but its folder {folder} lacks"
            f" {', '.join(lacking)}. Install ffmem again: pip install --force-reinstall ffmem."
        )
    return folder
