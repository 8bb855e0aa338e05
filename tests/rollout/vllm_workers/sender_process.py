"""A trainer rank that sends a few tensors and then hangs: ``python sender_process.py <zmq handle>``. To be killed."""

import asyncio
import sys
import time

import torch


def weights():
    for index in range(3):
        yield f"model.layers.{index % 2}.input_layernorm.{index}", torch.zeros(600_000)  # more than half a bucket
    print("hanging", flush=True)
    time.sleep(600)


def main() -> None:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    asyncio.run(BucketedWeightSender(sys.argv[1], bucket_size_mb=4, use_shm=True).async_send_weights(weights()))


if __name__ == "__main__":
    main()
