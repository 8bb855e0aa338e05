"""Matrices assigned to ranks in buckets of equal cost."""

from epfsdp2.engine.optim import muon_partition

# -- owners of matrices ------------------------------------------------------------------------------------------------


def test_buckets_balance_cost_each_and_in_all():
    shapes = [(24, 40)] * 5 + [(40, 40)] * 3 + [(8, 200)] * 7 + [(100, 100)]
    blocks = [muon_partition.Block(None, (1, *shape), ()) for shape in shapes * 3]
    total = [0] * 4
    buckets = list(muon_partition._split_into_buckets(blocks, 4 * 4000, 4))
    assigned = [muon_partition._assign_to_ranks(bucket, total) for bucket in buckets]
    assert [b for bucket in buckets for b in bucket] == blocks and len(buckets) > 1
    for bucket, hands in zip(buckets, assigned, strict=True):
        # The largest matrix exceeds a rank's share of bytes, so a bucket has up to four such matrices.
        assert sum(block.numel for block in bucket) <= 4 * 100 * 100
        loads = [sum(block.cost for block in hand) for hand in hands]
        assert max(loads) - min(loads) <= max(block.cost for block in bucket)
    assert sum(total) == sum(block.cost for block in blocks)
    assert max(total) - min(total) <= 1.5 * max(block.cost for block in blocks)


def test_buckets_of_large_matrices_give_every_rank_one():
    blocks = [muon_partition.Block(None, (1, 100, 100), ()) for _ in range(8)]
    assert [len(bucket) for bucket in muon_partition._split_into_buckets(blocks, 1, 4)] == [4, 4]
