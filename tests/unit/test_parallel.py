"""Several ranks and several parts train what one would have; the loader keeps its order and passes on errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.config import Train
from eyas.train.loader import Loader
from eyas.train.loop import Trainer
from eyas.train.packing import pack
from eyas.train.parallel import World, together
from test_unroll import H, V, make_documents, make_draft

CPU = torch.device("cpu")
MASKS = [[False, True, True, True, True], [True] * 7, [False, False, True, True, True, True], [False, False]]


def batch(documents, steps):
    from eyas.store.shard import Sample

    return pack([Sample(str(i), *d) for i, d in enumerate(documents)], steps, CPU, torch.float64)


def trained(world, groups, steps=3):
    """Losses of three optimizer steps, and the weights after them; `groups` are documents to pack together."""
    torch.manual_seed(1)
    head = torch.randn(V, H, dtype=torch.float64)
    draft = make_draft()
    training = Trainer(
        draft, head[draft.target_ids], Train(ttt_steps=steps, learning_rate=1e-2), 10, compile=False, world=world
    )
    losses = [training.step(*(batch(group, steps) for group in groups)).loss for _ in range(3)]
    return losses, draft.lm_head.weight.detach(), draft.fc.weight.detach()


def share(world, documents):
    mine = [documents[i] for i in world.share([len(d[0]) for d in documents])]
    return [mine] if mine else []


def as_a_rank(world, cases):
    return [trained(world, share(world, documents)) for documents in cases]


def assert_same(ours, wanted):
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-9, atol=1e-12)


def test_parts_accumulated_equal_the_whole():
    documents = make_documents(MASKS)
    assert_same(trained(World(), [documents[:1], documents[1:]]), trained(World(), [documents]))


def test_two_ranks_equal_one():
    """Also where the second rank has nothing to do."""
    cases = [make_documents(MASKS), make_documents(MASKS)[1:2]]
    with together(2, CPU, as_a_rank, cases) as world:
        both = as_a_rank(world, cases)
    for ours, documents in zip(both, cases, strict=True):
        assert_same(ours, trained(World(), [documents]))


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5))
def test_shares_are_all_and_even(lengths, size):
    shares = [World(rank, size).share(lengths) for rank in range(size)]
    assert sorted(i for part in shares for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_loader_keeps_order_and_stops_where_it_fails():
    def load(item):
        if item == 3:
            raise ValueError("item 3")
        return item * item

    made = iter(Loader(load, range(5), CPU))
    assert [next(made) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(ValueError, match="item 3"):
        next(made)
    assert list(Loader(load, range(3), CPU, ahead=9)) == [0, 1, 4]


def test_loader_left_early_loads_no_more():
    loaded = []
    for item in Loader(lambda i: loaded.append(i) or i, range(100), CPU):
        if item == 2:
            break
    assert len(loaded) <= 6
