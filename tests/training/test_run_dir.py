"""Checkpoints and the curve restore a run exactly; damaged files are noticed before it resumes."""

import pytest
import torch

import ffmem
from ffmem.errors import FfmemError, ModelError, StoreError
from ffmem.training.report import format_plan
from ffmem.training.run_dir import Curve, RunDir, TrainState
from ffmem.training.trainer import make_optimizer, model_config, new_model
from tests.training.small import Stopped, Stopping, run, tiny_config, write_corpus

TOKENS = torch.tensor([[2, 5, 6, 30], [2, 7, 8, 20]])


def make(seed):
    config = model_config(tiny_config(), 40, 2, "relu", 12)
    model = new_model(config, seed, torch.device("cpu")).train()
    optimizer = make_optimizer(model, 0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    optimizer.step()


def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_restored_checkpoint_continues_as_if_it_had_never_stopped(tmp_path):
    model, optimizer = make(0)
    step(model, optimizer)
    run_dir = RunDir(tmp_path)
    state = TrainState(step=1, seconds=0.1, rows=3, best_step=None)
    run_dir.write_state(state, model, optimizer)
    for _ in range(3):
        step(model, optimizer)  # dropout draws random numbers
    other, other_optimizer = make(1)
    assert not same(model, other)
    assert run_dir.read_state(other, other_optimizer) == state
    for _ in range(3):
        step(other, other_optimizer)
    assert same(model, other)


def test_the_best_weights_stay_as_long_as_a_state_names_them(tmp_path):
    model, optimizer = make(0)
    step(model, optimizer)
    run_dir = RunDir(tmp_path)
    run_dir.write_best(1, model)
    run_dir.write_state(TrainState(step=1, best_step=1, best_perplexity=9.0), model, optimizer)
    best, _ = make(1)
    best.load_state_dict(model.state_dict())
    step(model, optimizer)
    run_dir.write_best(2, model)  # killed here: the state still names the first
    other, other_optimizer = make(1)
    run_dir.read_best(run_dir.read_state(other, other_optimizer), other)
    assert same(other, best)
    assert not same(other, model)
    run_dir.write_state(TrainState(step=2, best_step=2, best_perplexity=8.0), model, optimizer)
    assert [path.name for path in run_dir.checkpoint.glob("best-*")] == ["best-2.safetensors"]


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_truncated_state_is_refused(tmp_path, kept):
    model, optimizer = make(0)
    step(model, optimizer)
    run_dir = RunDir(tmp_path)
    run_dir.write_state(TrainState(step=1), model, optimizer)
    run_dir.state_path.write_bytes(run_dir.state_path.read_bytes()[:kept])
    with pytest.raises(StoreError, match=r"state\.safetensors is damaged.* train again"):
        run_dir.read_state(*make(0))


def test_the_state_of_another_model_is_refused(tmp_path):
    model, optimizer = make(0)
    step(model, optimizer)
    RunDir(tmp_path).write_state(TrainState(step=1), model, optimizer)
    config = model_config(tiny_config(width=32), 40, 2, "relu", 12)
    wider = new_model(config, 0, torch.device("cpu"))
    with pytest.raises(StoreError, match="is damaged, or from another version"):
        RunDir(tmp_path).read_state(wider, make_optimizer(wider, 0.1))


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    curve = Curve(tmp_path)
    curve.start()
    for step in range(3):
        curve.add({"step": step, "loss": 1 / (step + 3)})
    with curve.path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed while writing a row
    again = Curve(tmp_path)
    again.resume(2)
    assert again.rows == curve.rows[:2]
    again.add(curve.rows[2])
    assert Curve(tmp_path).path.read_text().count("\n") == 3
    other = Curve(tmp_path)
    other.resume(3)
    assert other.rows == curve.rows


@pytest.mark.parametrize(
    ("content", "message"), [("{}\n", "has 1 rows, the checkpoint expects 2"), ("x\n{}\n", "read")]
)
def test_missing_or_damaged_rows_are_refused(tmp_path, content, message):
    (tmp_path / "curve.jsonl").write_text(content)
    with pytest.raises(StoreError, match=message):
        Curve(tmp_path).resume(2)


def test_a_missing_curve_is_refused(tmp_path):
    with pytest.raises(StoreError, match="cannot be read"):
        Curve(tmp_path).resume(1)


TOKENIZER = ("dict.txt", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def stopped(tmp_path):
    """A run that was killed just before its end, and its corpus."""
    corpus = write_corpus(tmp_path / "text.txt")
    folder = tmp_path / "model"
    with pytest.raises(Stopped):
        run(folder, corpus, progress=Stopping(7))  # after the last evaluation
    return folder, corpus


def flip(path):
    """Change one bit three quarters into a file, where the numbers are."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 0x40
    path.write_bytes(content)


def test_an_undamaged_run_resumes(stopped):
    folder, corpus = stopped
    half = folder / ".README.md.0123456789abcdef.tmp"
    half.touch()
    assert run(folder, corpus).steps == 12
    assert not half.exists()
    assert ffmem.load(folder).n_layers == 2


@pytest.mark.parametrize("name", ["state", "prepared", "best-*"])
@pytest.mark.parametrize("harm", [flip, lambda path: path.write_bytes(path.read_bytes()[:3000])])
def test_damaged_tensors_are_refused_before_the_next_step(stopped, name, harm):
    folder, corpus = stopped
    (path,) = (folder / "checkpoint").glob(f"{name}.safetensors")
    harm(path)
    with pytest.raises(StoreError, match=r"is damaged.* Delete the folder and train again"):
        run(folder, corpus)
    assert not (folder / "config.json").exists()


@pytest.mark.parametrize("name", TOKENIZER)
@pytest.mark.parametrize("missing", [True, False])
def test_a_damaged_or_missing_tokenizer_is_refused(stopped, name, missing):
    folder, corpus = stopped
    path = folder / "checkpoint" / name
    if missing:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"cannot be resumed. Delete the folder and train again"):
        run(folder, corpus)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("prepared", b'steps\\": 12', b'steps\\": 11'),
        ("prepared", b'start\\": 2', b'start\\": 3'),
        ("state", b'step\\": 12', b'step\\": 11'),
    ],
)
def test_a_changed_digit_of_a_record_is_refused(stopped, name, before, after):
    folder, corpus = stopped
    path = folder / "checkpoint" / f"{name}.safetensors"
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))
    with pytest.raises(StoreError, match=rf"{name}\.safetensors is damaged"):
        run(folder, corpus)


def test_missing_best_weights_are_refused(stopped):
    folder, corpus = stopped
    (path,) = (folder / "checkpoint").glob("best-*.safetensors")
    path.unlink()
    with pytest.raises(StoreError, match="best-"):
        run(folder, corpus)


def test_an_unfinished_run_is_not_a_model(stopped):
    with pytest.raises(ModelError, match=r"is an unfinished training run"):
        ffmem.load(stopped[0])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_finished_folder_without_one_of_its_files_is_refused(stopped, name):
    folder, corpus = stopped
    run(folder, corpus)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=rf"trained model, but {name} is missing. Delete"):
        run(folder, corpus)


def test_a_refused_run_leaves_no_folder(tmp_path):
    corpus = write_corpus(tmp_path / "text.txt", 3)
    with pytest.raises(FfmemError, match="less than one batch"):
        run(tmp_path / "new", corpus)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(FfmemError, match="less than one batch"):
        run(tmp_path / "old", corpus)
    assert (tmp_path / "old").is_dir()  # it was there before


def test_a_lambda_model_reports_its_memories_and_their_limit(tmp_path):
    corpus = write_corpus(tmp_path / "text.txt")
    wide = {"memory": "lambda", "distances": 64, "steps": 2}
    result = run(tmp_path / "model", corpus, **wide)
    line = format_plan(result.run.config, result.plan)[-1]
    assert "32 lambda memories (2 heads × 16 distances, limited by the context of 16)" in line
    assert "and 12 relu memories" in line
    assert ffmem.load(tmp_path / "model").layout.widths[0] == 32
    assert "32 lambda memories" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
