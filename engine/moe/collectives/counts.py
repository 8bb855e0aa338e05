"""Exchange the number of rows that each rank sends, and copy the sizes to the host for the all-to-alls of rows.

The exchange and the copy run on streams of their own, beside the work queued before the wait. That is the one host
sync of a layer's forward.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["start_counts"]


def start_counts(
    sent: torch.Tensor, group: dist.ProcessGroup | None, etp_group: dist.ProcessGroup | None
) -> Callable[[], tuple[torch.Tensor, list[list[int]]]]:
    """Start the exchange of numbers of rows, int64 ``(ep, chunks, e)``, and their copy to the host.

    Args:
        group, etp_group: as in ``dispatch``; the exchanged counts are gathered over ``etp_group``.

    Returns:
        A function that waits. It returns the numbers of received rows, ``(sources, chunks, e)``. Sources are the EP
        ranks. With ``etp`` each rank of ``etp_group`` adds its own EP ranks, and this rank's come last. The function
        also returns for each chunk the rows to and from each EP rank, and the rows of each ``etp`` rank.
    """
    received, work = sent, None
    if group is not None:
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    device = torch.get_device_module(sent.device)
    stream = _copies(sent.device)
    read_here = [sent, received]  # tensors of the compute stream, whose memory is not reused before the wait
    # The compute stream reads tensors of this stream: their memory is reused only behind those reads.
    stream.wait_stream(device.current_stream())
    with device.stream(stream):
        if work is not None:
            work.wait()
        sizes = [sent.sum(2), received.sum(2)]
        if etp_group is not None:
            by_rank = _gathered(received, etp_group)
            sizes.append(by_rank.sum((1, 3)))
            received = by_rank.flatten(0, 1)
        host = torch.cat(sizes).to("cpu", non_blocking=True)  # in pinned memory
        copied = device.Event()
        copied.record()

    def wait() -> tuple[torch.Tensor, list[list[int]]]:
        copied.synchronize()
        read_here.clear()
        return received, host.t().tolist()

    return wait


@functools.cache
def _copies(device: torch.device) -> torch.Stream:
    return torch.get_device_module(device).Stream()


def _gathered(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather counts, stacked as ``Gather`` orders the rows: the other ranks', then this rank's."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    everyone = counts.new_empty(ranks * counts.shape[0], *counts.shape[1:])
    dist.all_gather_into_tensor(everyone, counts, group=group)
    everyone = everyone.view(ranks, *counts.shape)
    return torch.cat([everyone[:rank], everyone[rank + 1 :], everyone[rank : rank + 1]])
