"""A test hook: after each weight sync the vLLM worker writes digests of its model."""

import os

from tests.support.rollout.vllm_extension import ReadableWorker


class WritesDigests(ReadableWorker):
    syncs = 0

    def update_weights_from_ipc(self, *args, **kwargs):
        super().update_weights_from_ipc(*args, **kwargs)
        self.syncs += 1
        self.epfsdp2_digests(path=f"{os.environ['EPFSDP2_TEST_DIGESTS']}.sync-{self.syncs}")
