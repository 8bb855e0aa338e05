"""Run jobs in a background thread, one at a time, with a process group of their own."""

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["Background"]

logger = logging.getLogger("epfsdp2")


class Background:
    """Runs jobs that all ranks start in the same order; collective to create.

    Attributes:
        group: a gloo group for the jobs' collectives, because training uses the default group meanwhile.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Start a job once the previous one has ended.

        Raises:
            BaseException: the error of the previous job.
        """
        self.wait()
        # Not a daemon: a process that exits normally finishes the job first.
        self._thread = threading.Thread(target=self._run, args=(name, job), name=name)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job to end.

        Raises:
            BaseException: the error of the job; only the first call raises it.
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
