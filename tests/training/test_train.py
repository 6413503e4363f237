import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ffmem.errors import CorpusError, StorageFull, StoreError
from ffmem.models.tokenizer import WordTokenizer
from ffmem.training.config import KINDS
from ffmem.training.run_dir import RunDir, read_tensors, write_tensors
from ffmem.training.trainer import DivergenceError, Trainer, perplexity
from tests.training.small import Stopped, Stopping, curve, run, sentence, weights, write_corpus

FILES = {
    *("config.json", "generation_config.json", "model.safetensors", "dict.txt", "tokenizer.json"),
    *("tokenizer_config.json", "training.json", "curve.jsonl", "curve.svg", "README.md"),
}


class Listening(Stopping):
    def __init__(self):
        super().__init__(0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """A run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    run(folder, corpus)
    return folder


def test_a_finished_folder_holds_a_model_and_its_records(whole):
    assert {path.name for path in whole.iterdir()} == FILES
    result = RunDir(whole).read_result()
    assert (result.steps, result.tokens) == (12, 12 * 64)
    assert result.plan.train.tokens > 0
    assert f"{result.valid_perplexity:,.2f}" in (whole / "README.md").read_text()
    assert (whole / "curve.svg").read_text().startswith("<svg")
    rows = curve(whole)
    assert [row["step"] for row in rows] == [5, 5, 10, 10, 12, 12]
    assert [row["step"] for row in rows if "valid_perplexity" in row] == [5, 10, 12]
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert sum(p.numel() for p in model.parameters()) == result.plan.parameters


def test_the_saved_weights_have_the_reported_perplexity(whole, corpus):
    result = RunDir(whole).read_result()
    model = AutoModelForCausalLM.from_pretrained(whole)
    words = WordTokenizer.from_file(whole / "dict.txt")
    held = corpus.read_text().splitlines()[-result.plan.valid.sentences :]
    ids = [id for encoding in words.encode(held) for id in (2, *encoding.ids)]
    found = perplexity(model, torch.tensor(ids, dtype=torch.int32).numpy(), 16, 4)
    assert found == pytest.approx(result.valid_perplexity, rel=1e-6)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(whole, corpus, tmp_path):
    run(tmp_path / "same", corpus)
    assert weights(tmp_path / "same") == weights(whole)
    assert curve(tmp_path / "same") == curve(whole)
    run(tmp_path / "other", corpus, seed=1)
    assert weights(tmp_path / "other") != weights(whole)


def test_a_run_leaves_the_random_numbers_and_threads_of_the_process_alone(corpus, tmp_path):
    torch.manual_seed(5)
    before, n_threads = torch.get_rng_state(), torch.get_num_threads()
    run(tmp_path / "model", corpus, steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == n_threads


@pytest.mark.parametrize("line", range(1, 8))
def test_a_run_stopped_anywhere_resumes_to_the_same_weights(whole, corpus, tmp_path, line):
    stopping = Stopping(line)
    with pytest.raises(Stopped):
        run(tmp_path / "model", corpus, progress=stopping, checkpoint_minutes=0.0)
    listening = Listening()
    run(tmp_path / "model", corpus, progress=listening)
    assert weights(tmp_path / "model") == weights(whole)
    assert curve(tmp_path / "model") == curve(whole)
    assert {path.name for path in (tmp_path / "model").iterdir()} == FILES
    evaluated = {5: 5, 6: 10, 7: 12}  # lines that tell of an evaluation, and its step
    if line in evaluated:
        assert listening.lines[0] == f"Resuming after step {evaluated[line]} of 12."


def test_a_folder_is_finished_only_when_all_is_written(whole, corpus, tmp_path):
    folder = tmp_path / "model"
    with pytest.raises(Stopped):
        run(folder, corpus, progress=Stopping(7))  # after the last evaluation
    (folder / "README.md").mkdir()  # where no card can be written
    with pytest.raises(StoreError, match=r"Cannot write .*README\.md"):
        run(folder, corpus)
    assert not (folder / "training.json").exists()
    (folder / "README.md").rmdir()
    run(folder, corpus)
    assert weights(folder) == weights(whole)


def test_a_run_resumes_from_a_checkpoint_between_evaluations(corpus, tmp_path, monkeypatch):
    run(tmp_path / "whole", corpus, evaluate_every=12)
    take_step = Trainer.step

    def stop_at_12(trainer):
        if trainer.state.step == 11:
            raise Stopped
        take_step(trainer)

    monkeypatch.setattr(Trainer, "step", stop_at_12)
    with pytest.raises(Stopped):
        run(tmp_path / "model", corpus, evaluate_every=12, checkpoint_minutes=0.0)
    monkeypatch.undo()
    listening = Listening()
    run(tmp_path / "model", corpus, evaluate_every=12, progress=listening)
    assert listening.lines[0] == "Resuming after step 10 of 12."
    assert weights(tmp_path / "model") == weights(tmp_path / "whole")
    assert curve(tmp_path / "model") == curve(tmp_path / "whole")


COMMAND = "from ffmem.cli.train import train; train()"


def test_a_run_killed_at_any_moment_resumes_to_the_same_weights(whole, corpus, tmp_path):
    """`kill -9` while checkpoints are written all the time."""
    folder = tmp_path / "model"
    options = {
        **{"memory": "relu", "layers": 2, "width": 16, "heads": 2, "memories": 12},
        **{"context": 16, "batch-tokens": 64, "steps": 12, "evaluate-every": 5, "cutoffs": "10,20"},
        **{"distances": 4, "key-width": 4, "threads": 1, "unit": "line", "device": "cpu"},
        **{"checkpoint-minutes": 0, "corpus": corpus, "out": folder},
    }
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    state = folder / "checkpoint" / "state.safetensors"
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *given], env=_environment())
    while process.poll() is None and not state.exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.exists() or (folder / "training.json").exists()
    run(folder, corpus)
    assert weights(folder) == weights(whole)
    assert curve(folder) == curve(whole)


def _environment():
    source = Path(__file__).parents[2] / "src"
    return os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}


def test_other_settings_are_refused_in_an_unfinished_folder(corpus, tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path / "model", corpus, progress=Stopping(6))
    with pytest.raises(StoreError, match=r"unfinished run with .*: width: 16 → 32; seed: 0 → 1\."):
        run(tmp_path / "model", corpus, width=32, seed=1)
    with pytest.raises(StoreError, match="validation corpus: none → "):
        run(tmp_path / "model", corpus, valid=corpus)
    with pytest.raises(StoreError, match="threads: 1 → 2"):
        run(tmp_path / "model", corpus, threads=2)
    run(tmp_path / "model", corpus, threads=None)  # as many as it had


def test_a_changed_corpus_is_refused_and_a_moved_one_is_not(corpus, tmp_path):
    moved = tmp_path / "moved" / corpus.name
    moved.parent.mkdir()
    moved.write_text(corpus.read_text())
    with pytest.raises(Stopped):
        run(tmp_path / "model", corpus, progress=Stopping(6))
    run(tmp_path / "model", moved)
    moved.write_text(moved.read_text() + "More .\n")
    with pytest.raises(StoreError, match="settings: the files of the corpus have changed"):
        run(tmp_path / "model", moved)


def test_a_finished_folder_is_left_as_it_is(whole, corpus):
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir() if path.is_file()}
    listening = Listening()
    result = run(whole, corpus, progress=listening)
    assert "is already trained: 12 steps" in listening.lines[0]
    assert result == RunDir(whole).read_result()
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before
    with pytest.raises(StoreError, match="a model trained with other settings: steps: 12 → 13"):
        run(whole, corpus, steps=13)


def test_a_folder_that_is_something_else_is_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="is a file"):
        run(tmp_path / "file", corpus)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(StoreError, match="is not empty and is not a training run"):
        run(other, corpus)
    assert [path.name for path in other.iterdir()] == ["mine.txt"]


def test_two_processes_do_not_train_in_one_folder(corpus, tmp_path):
    folder = tmp_path / "model"
    with RunDir(folder).lock(), pytest.raises(StoreError, match="Another process is training"):
        run(folder, corpus)


def test_a_run_that_diverges_stops(corpus, tmp_path):
    mad = {"learning_rate": 1e30, "warmup": 0, "evaluate_every": 1, "cutoffs": None}
    with pytest.raises(
        DivergenceError, match=r"Training diverged at step \d+: .* lower `learning_rate`"
    ):
        run(tmp_path / "model", corpus, **mad)
    assert not (tmp_path / "model" / "training.json").exists()


def test_a_run_that_diverges_later_keeps_the_last_good_checkpoint(corpus, tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path / "model", corpus, progress=Stopping(5))
    state = tmp_path / "model" / "checkpoint" / "state.safetensors"
    tensors, metadata = read_tensors(state)
    tensors["model.model.layers.1.memory.keys.weight"].fill_(float("inf"))
    write_tensors(state, tensors, metadata)
    before = state.read_bytes()
    with pytest.raises(DivergenceError, match=r"at step 6: .* The checkpoint after step 5 is kept"):
        run(tmp_path / "model", corpus, checkpoint_minutes=0.0)
    assert state.read_bytes() == before


def test_a_corpus_smaller_than_one_batch_is_refused_and_leaves_the_folder_free(tmp_path):
    few = write_corpus(tmp_path / "few.txt", 4)
    with pytest.raises(CorpusError, match="less than one batch of 64"):
        run(tmp_path / "model", few)
    run(tmp_path / "model", write_corpus(tmp_path / "more.txt"), steps=1)


def test_a_missing_corpus_leaves_no_folder(tmp_path):
    with pytest.raises(CorpusError):
        run(tmp_path / "model", tmp_path / "nowhere.txt")
    assert not (tmp_path / "model").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 150 kB, where mounting is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=150k", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_an_error_and_the_run_can_be_resumed(whole, corpus, small_disk):
    with pytest.raises(StorageFull, match="Free some space and rerun the command"):
        run(small_disk / "model", corpus, checkpoint_minutes=0.0)
    assert (small_disk / "model" / "checkpoint" / "prepared.safetensors").exists()
    assert not list(small_disk.rglob("*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    run(small_disk / "model", corpus)
    assert weights(small_disk / "model") == weights(whole)
    assert curve(small_disk / "model") == curve(whole)


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [*((kind, "words") for kind in KINDS), ("relu", "bpe")]
)
def test_every_kind_of_memory_learns_and_is_loaded_again(corpus, tmp_path, kind, tokenizer):
    vocabulary = {"words": None, "bpe": 300}[tokenizer]
    options = {"memory": kind, "tokenizer": tokenizer, "vocabulary": vocabulary, "steps": 40}
    result = run(tmp_path / "model", corpus, **options, match="relu", evaluate_every=40)
    first = next(row["loss"] for row in curve(tmp_path / "model") if "loss" in row)
    assert result.last_loss < first - 0.5
    assert result.plan.active_parameters == pytest.approx(result.plan.matched_parameters, rel=0.05)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.memory == kind
    assert model.config.vocab_size == result.plan.vocabulary


MOE = {"memory": "moe", "memories": 6, "experts": 4, "shared_expert": True}


def test_the_curve_of_experts_has_their_load_balancing_loss_and_resumes_to_the_same_bytes(
    corpus, tmp_path
):
    run(tmp_path / "whole", corpus, **MOE)
    rows = curve(tmp_path / "whole")
    balances = [row["balance_loss"] for row in rows if "loss" in row]
    assert all(0.5 < balance < 4 for balance in balances)
    assert not any("balance_loss" in row for row in rows if "loss" not in row)
    for line in (3, 5):
        folder = tmp_path / str(line)
        with pytest.raises(Stopped):
            run(folder, corpus, progress=Stopping(line), checkpoint_minutes=0.0, **MOE)
        run(folder, corpus, **MOE)
        assert weights(folder) == weights(tmp_path / "whole")
        assert curve(folder) == rows


def test_a_large_coefficient_evens_the_load_of_experts(corpus, tmp_path):
    """The loss that is reported is −log p alone, whatever the coefficient."""
    last = {}
    for balance in (0.0, 10.0):
        result = run(tmp_path / str(balance), corpus, **MOE, steps=60, balance=balance)
        row = [row for row in curve(tmp_path / str(balance)) if "loss" in row][-1]
        last[balance] = row["balance_loss"]
        assert row["loss"] == result.last_loss < 5
    assert last[10.0] < last[0.0]
    assert last[10.0] == pytest.approx(1, abs=0.1)


def test_all_and_active_parameters_of_experts_are_reported(corpus, tmp_path):
    listening = Listening()
    result = run(
        tmp_path / "model",
        corpus,
        progress=listening,
        steps=1,
        match="relu",
        **(MOE | {"memories": 40}),
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert result.plan.parameters == sum(weight.numel() for weight in model.parameters())
    idle = sum(w.numel() for n, w in model.named_parameters() if ".experts." in n) // 2
    assert result.plan.active_parameters == result.plan.parameters - idle
    said = "\n".join(listening.lines)
    assert (
        f"{result.plan.parameters:,} parameters, {result.plan.active_parameters:,} active" in said
    )
    memories = result.plan.memories
    assert f"4 experts of {memories} memories, 2 per token, and a shared one" in said
    assert f"{result.plan.active_parameters:,} active" in (tmp_path / "model/README.md").read_text()


def test_a_step_in_several_passes_is_the_same_step(corpus, tmp_path):
    one = run(tmp_path / "one", corpus, dropout=0.0)
    several = run(tmp_path / "several", corpus, dropout=0.0, pass_tokens=20)
    assert several.valid_perplexity == pytest.approx(one.valid_perplexity, rel=1e-4)
    losses = [[r["loss"] for r in curve(tmp_path / n) if "loss" in r] for n in ("one", "several")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bfloat16_comes_close_and_is_reported(corpus, tmp_path):
    exact = run(tmp_path / "exact", corpus)
    near = run(tmp_path / "near", corpus, dtype="bfloat16")
    assert near.valid_perplexity == pytest.approx(exact.valid_perplexity, rel=0.05)
    assert near.valid_perplexity != exact.valid_perplexity
    assert "bfloat16" in (tmp_path / "near" / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "near").dtype == torch.float32


def test_a_run_without_steps_stops_when_validation_does_not_improve(tmp_path):
    noise = tmp_path / "noise.txt"
    words = torch.randint(0, 30, (60, 12), generator=torch.Generator().manual_seed(0)).tolist()
    noise.write_text("".join(" ".join(f"w{word}" for word in row) + "\n" for row in words))
    options = {"steps": None, "learning_rate": 0.03, "dropout": 0.0, "evaluate_every": 10}
    result = run(tmp_path / "model", noise, **options)
    assert result.stopped_early
    assert result.steps < result.plan.steps
    rows = [row for row in curve(tmp_path / "model") if "valid_perplexity" in row]
    found = [row["valid_perplexity"] for row in rows]
    assert found[-3] == min(found) == result.valid_perplexity  # two evaluations without improvement
    assert result.best_step == rows[-3]["step"]
    assert result.last_valid_perplexity == found[-1]


def test_a_run_without_steps_takes_at_most_ten_epochs(tmp_path):
    corpus = write_corpus(tmp_path / "short.txt", 20)
    result = run(tmp_path / "model", corpus, steps=None, evaluate_every=None, learning_rate=1e-4)
    assert result.steps == result.plan.steps
    assert result.epochs == pytest.approx(10, abs=0.2)  # in whole steps
    assert not result.stopped_early


def test_what_is_held_out_or_unknown_is_reported(corpus, tmp_path):
    listening = Listening()
    run(tmp_path / "model", corpus, progress=listening, vocabulary=8, steps=1, cutoffs=None)
    said = "\n".join(listening.lines)
    assert "held out" in said
    result = RunDir(tmp_path / "model").read_result()
    assert result.plan.train.unknown > 0
    assert f"{result.plan.valid.unknown_share:.2%} <unk>" in said


def test_validation_reads_the_given_corpus(corpus, tmp_path):
    valid = write_corpus(tmp_path / "valid.txt", 10, first=60)
    result = run(tmp_path / "model", corpus, valid=valid, steps=1)
    assert result.plan.valid.sentences == 10
    assert result.plan.valid.tokens == sum(len(sentence(n).split()) + 1 for n in range(60, 70))
    assert result.plan.train.sentences == 60


def test_a_damaged_result_is_refused(whole, corpus, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    content = json.loads((whole / "training.json").read_text())
    del content["run"]["threads"]
    (folder / "training.json").write_text(json.dumps(content))
    with pytest.raises(StoreError, match=r"training\.json is damaged, .*run\.threads is missing"):
        run(folder, corpus)
