"""Work beside the training: one job at a time in a thread, with collectives of its own."""

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["Background"]

logger = logging.getLogger("epfsdp2")


class Background:
    """Jobs that all ranks start in the same order; created by all of them.

    Attributes:
        group: for the jobs' collectives, on the CPU: those of the default group may be under way meanwhile.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Begin a job once the one before has ended.

        Raises:
            BaseException: of the one before.
        """
        self.wait()
        # Not a daemon: a process that ends by itself ends the job first.
        self._thread = threading.Thread(target=self._run, args=(name, job), name=name)
        self._thread.start()

    def wait(self) -> None:
        """Have the job ended.

        Raises:
            BaseException: what it raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as failure:
            self._failure = failure
            if dist.get_rank() == 0:
                logger.error("epfsdp2: %s has failed, which ends the run when the next one begins: %s", name, failure)
