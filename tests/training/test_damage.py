"""What happens to the files of an unfinished run is noticed before the run goes on."""

import pytest

import ffmem
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.training.telling import told
from tests.training.small import run, settings, write_corpus

TOKENIZER = ("dict.txt", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def stopped(tmp_path):
    """A run that was killed just before its end, and its corpus."""
    corpus = write_corpus(tmp_path / "text.txt")
    folder = tmp_path / "model"
    run(folder, corpus, keep=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != "curve.jsonl":
            path.unlink()
    return folder, corpus


def flip(path):
    """Change one bit three quarters into a file, where the numbers are."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 0x40
    path.write_bytes(content)


def test_a_whole_one_goes_on(stopped):
    folder, corpus = stopped
    half = folder / ".README.md.0123456789abcdef.tmp"
    half.touch()
    assert run(folder, corpus).steps == 12
    assert not half.exists()
    assert ffmem.load(folder).n_layers == 2


@pytest.mark.parametrize("name", ["state", "stream", "best-*"])
@pytest.mark.parametrize("harm", [flip, lambda path: path.write_bytes(path.read_bytes()[:3000])])
def test_damaged_numbers_are_refused_before_a_step_is_made(stopped, name, harm):
    folder, corpus = stopped
    (path,) = (folder / "checkpoint").glob(f"{name}.safetensors")
    harm(path)
    with pytest.raises(StoreError, match=r"is damaged.* Delete the folder and train again"):
        run(folder, corpus)
    assert not (folder / "config.json").exists()


@pytest.mark.parametrize("name", TOKENIZER)
@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_or_lost_tokenizer_is_refused(stopped, name, lost):
    folder, corpus = stopped
    path = folder / "checkpoint" / name
    if lost:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"could not be read. Delete the folder and train again"):
        run(folder, corpus)


@pytest.mark.parametrize("change", [('"steps": 12', '"steps": 11'), ('"start": 2', '"start": 3')])
def test_what_was_prepared_is_not_changed_by_a_digit(stopped, change):
    folder, corpus = stopped
    path = folder / "checkpoint" / "prepared.json"
    before = path.read_text(encoding="utf-8")
    assert change[0] in before
    path.write_text(before.replace(*change), encoding="utf-8")
    with pytest.raises(StoreError, match=r"prepared\.json is damaged"):
        run(folder, corpus)


def test_lost_best_weights_are_refused(stopped):
    folder, corpus = stopped
    (path,) = (folder / "checkpoint").glob("best-*.safetensors")
    path.unlink()
    with pytest.raises(StoreError, match="best-"):
        run(folder, corpus)


def test_a_run_that_has_not_ended_is_no_model_yet(stopped):
    with pytest.raises(ModelError, match=r"has not ended\. Give the same `ffmem train` again"):
        ffmem.load(stopped[0])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_finished_folder_that_has_lost_a_file_is_not_called_finished(stopped, name):
    folder, corpus = stopped
    run(folder, corpus)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=rf"trained, but {name} is not there any more. Delete"):
        run(folder, corpus)


def test_a_run_that_is_refused_before_it_begins_leaves_nothing(tmp_path):
    corpus = write_corpus(tmp_path / "text.txt", 3)
    with pytest.raises(FfmemError, match="less than one batch"):
        run(tmp_path / "new", corpus)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(FfmemError, match="less than one batch"):
        run(tmp_path / "old", corpus)
    assert (tmp_path / "old").is_dir()  # somebody else made it


def test_a_context_of_one_token_is_refused():
    with pytest.raises(FfmemError, match="a block of one token shows no prefix"):
        settings(context=1)


def test_a_lambda_model_tells_its_static_keys_and_where_they_are_cut(tmp_path):
    corpus = write_corpus(tmp_path / "text.txt")
    wide = {"memory": "lambda", "distances": 64, "steps": 2}
    trained = run(tmp_path / "model", corpus, **wide)
    line = told(trained.asked.settings, trained.prepared)[-1]
    assert "32 lambda memories (2 heads × 16 distances, cut at the context of 16)" in line
    assert "beside 12 relu ones" in line
    assert ffmem.load(tmp_path / "model").n_memories == 32
    assert "32 lambda memories" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
