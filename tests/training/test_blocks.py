import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffmem.training.blocks import Blocks

LENGTHS = st.integers(1, 60)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 3), st.integers(0, 5))
def test_an_epoch_predicts_every_token_and_fewer_than_a_block_twice(length, context, seed, epoch):
    blocks = Blocks(np.arange(length), context, seed)
    n = blocks.of_an_epoch
    inputs, targets = blocks.batch(epoch, n)  # as many blocks as an epoch has
    assert inputs.shape == targets.shape == (n, context)
    counts = np.bincount(targets.flatten().numpy(), minlength=length)
    assert counts.min() >= 1
    assert counts.sum() - length < context
    assert ((inputs + 1) % length == targets).all()  # what follows on the ring
    assert (inputs[:, 1:] == targets[:, :-1]).all()


@given(LENGTHS, st.integers(1, 9), st.integers(1, 7))
def test_steps_take_the_blocks_of_all_epochs_one_after_the_other(length, context, size):
    blocks = Blocks(np.arange(length), context, 0)
    in_ones = [blocks.batch(number, 1)[0][0].tolist() for number in range(6 * size)]
    in_handfuls = [row for step in range(6) for row in blocks.batch(step, size)[0].tolist()]
    assert in_handfuls == in_ones


@given(LENGTHS, st.integers(1, 9), st.integers(1, 7), st.integers(1, 4))
def test_so_many_epochs_need_so_many_steps(length, context, size, epochs):
    blocks = Blocks(np.arange(length), context, 0)
    steps = blocks.steps(epochs, size)
    assert (steps - 1) * size < epochs * blocks.of_an_epoch <= steps * size


def test_order_and_offset_change_with_epoch_and_seed_and_with_nothing_else():
    def epoch(seed, number):
        return Blocks(np.arange(1000), 10, seed).batch(number, 100)[0].tolist()

    assert epoch(0, 0) == epoch(0, 0)
    seen = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert seen[one] != seen[other]
        assert sorted(seen[one]) != sorted(seen[other])  # other blocks, not only another order
