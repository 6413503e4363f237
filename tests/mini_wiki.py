"""The named model `mini-wiki` for tests: the package's own, or its shape with random weights."""

import shutil

from transformers import AutoConfig, set_seed

from ffmem.errors import ModelError
from ffmem.mini_wiki.folder import FILES, MODEL, whole
from ffmem.networks.model import AdaptiveLM


def model_folder(place):
    """Return the package's model; while it has no weights, its shape with random ones."""
    try:
        return whole(MODEL)
    except ModelError:
        set_seed(0)
        AdaptiveLM(AutoConfig.from_pretrained(MODEL)).half().save_pretrained(place)
        for name in FILES:
            if (MODEL / name).is_file() and not (place / name).exists():
                shutil.copyfile(MODEL / name, place / name)
        for name in ("README.md", "training.json"):
            (place / name).touch()
        return place
