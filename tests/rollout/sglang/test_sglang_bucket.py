"""The memory that a trainer rank shares with its SGLang worker holds tensors and answers."""

import torch

from epfsdp2.rollout.sglang.bucket import ANSWER_BYTES, Header, answer_of, fill, write_answer
from epfsdp2.rollout.transport.buckets import tensors_of


def allocate(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_sglang_bucket_filled_with_any_tensors_holds_them():
    tensors = [
        ("first", torch.arange(6.0).view(2, 3)),
        ("narrow", torch.arange(5).bfloat16()),
        ("larger than a bucket", torch.arange(100, dtype=torch.int64)),
        ("a scalar", torch.tensor(7.0)),
    ]
    buffers = [allocate(ANSWER_BYTES + 64) for _ in range(2)]
    found, last = {}, []
    for header, memory in fill(iter(tensors), buffers, allocate):
        received = Header.of(header.as_text())
        found |= {name: tensor.clone() for name, tensor in tensors_of(received.entries, memory)}
        last.append(received.is_last)
    assert list(found) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert last == [False] * (len(last) - 1) + [True] and len(last) > 1


def test_sglang_buckets_in_turn_do_not_share_memory():
    tensors = [(str(i), torch.full((16,), float(i))) for i in range(5)]
    buffers = [allocate(ANSWER_BYTES + 64) for _ in range(2)]
    pointers = [memory.data_ptr() for _, memory in fill(iter(tensors), buffers, allocate)]
    assert len(pointers) == 5
    assert all(one != other for one, other in zip(pointers, pointers[1:], strict=False))


def test_sglang_answer_is_read_as_written_and_a_long_one_is_cut():
    memory = allocate(ANSWER_BYTES)
    write_answer(memory, "layers.0: größer")
    assert answer_of(memory) == "layers.0: größer"
    write_answer(memory, "x" * 10_000)
    assert answer_of(memory) == "x" * (ANSWER_BYTES - 1)
    write_answer(memory, "")
    assert answer_of(memory) == ""
