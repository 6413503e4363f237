import pytest
import torch
from torch.testing import assert_close

from ffmem.errors import StoreError
from ffmem.training.checkpoint import Checkpoint, Standing, weights_of
from ffmem.training.network import config_of, new_model
from ffmem.training.optimizer import adamw
from tests.training.small import settings

TOKENS = torch.tensor([[2, 5, 6, 30], [2, 7, 8, 20]])


def made(seed):
    model = new_model(config_of(settings(), 40, 2, "relu", 12), seed, torch.device("cpu")).train()
    optimizer = adamw(model, 0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    optimizer.step()


def same(one, other):
    pairs = zip(weights_of(one).values(), weights_of(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_what_was_written_goes_on_as_if_it_had_never_stopped(tmp_path):
    model, optimizer = made(0)
    step(model, optimizer)
    checkpoint = Checkpoint(tmp_path)
    assert not checkpoint.exists
    standing = Standing(step=1, seconds=0.1, pending=[1 / 3], best_step=None)
    checkpoint.write(standing, model, optimizer)
    for _ in range(3):
        step(model, optimizer)  # dropout draws from the generator
    other, other_optimizer = made(1)
    assert not same(model, other)
    assert checkpoint.read(other, other_optimizer) == standing
    for _ in range(3):
        step(other, other_optimizer)
    assert same(model, other)


def test_the_best_weights_live_as_long_as_a_state_names_them(tmp_path):
    model, optimizer = made(0)
    step(model, optimizer)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.write_best(1, model)
    checkpoint.write(Standing(step=1, best_step=1, best_perplexity=9.0), model, optimizer)
    best = {name: weight.clone() for name, weight in weights_of(model).items()}
    step(model, optimizer)
    checkpoint.write_best(2, model)  # killed here, before the state: it names the first
    other, other_optimizer = made(1)
    checkpoint.read_best(checkpoint.read(other, other_optimizer), other)
    assert_close(weights_of(other), best, rtol=0, atol=0)
    checkpoint.write(Standing(step=2, best_step=2, best_perplexity=8.0), model, optimizer)
    assert [path.name for path in checkpoint.folder.glob("best-*")] == ["best-2.safetensors"]


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_damaged_state_is_told(tmp_path, kept):
    model, optimizer = made(0)
    step(model, optimizer)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.write(Standing(step=1), model, optimizer)
    path = checkpoint.folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StoreError, match=r"state\.safetensors is damaged.* train again"):
        checkpoint.read(*made(0))


def test_a_state_of_another_model_is_told(tmp_path):
    model, optimizer = made(0)
    step(model, optimizer)
    Checkpoint(tmp_path).write(Standing(step=1), model, optimizer)
    config = config_of(settings(width=32), 40, 2, "relu", 12)
    wider = new_model(config, 0, torch.device("cpu"))
    with pytest.raises(StoreError, match="is damaged, or was written by another version"):
        Checkpoint(tmp_path).read(wider, adamw(wider, 0.1))


def test_matrices_decay_and_norms_biases_and_embeddings_do_not():
    model, optimizer = made(0)
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, free = (
        {names[id(weight)] for weight in group["params"]} for group in optimizer.param_groups
    )
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert decayed | free == set(names.values())
    assert all("embedding" in n or "norm" in n or n.endswith("bias") for n in free)
    assert any("memory.keys.weight" in n for n in decayed)
    assert not any("embedding" in n or "norm" in n or n.endswith("bias") for n in decayed)
