"""The part of the engine that verl calls to save and to resume."""

import json
import logging
from pathlib import Path
from typing import Any

from verl.utils.device import get_device_name

from ..checkpoint import state as checkpoint
from ..checkpoint.saves import CheckpointSaver
from ..fsdp.reshard import reshard_all
from ..model.value_head import value_fields
from ..model_files import (
    CONFIG,
    GENERATION_CONFIG,
    folder_of,
    is_code,
    json_bytes,
    read_small_files,
    with_chat_template,
    with_overrides,
    write_files,
)
from ..optim.loss_scale import LossScale
from ..settings.values import overrides_of
from ..survivors import Watch
from ..topology.rank_consistency import raise_on_all_ranks

__all__ = ["WritesCheckpoints"]

logger = logging.getLogger(__name__)


class WritesCheckpoints:
    """Mix-in over verl's engine: writes checkpoints in this engine's own layout instead of verl's."""

    # What the engine has.
    module: Any
    optimizer: Any
    lr_scheduler: Any
    scaler: LossScale | None
    rollout_sync: Any
    rank: int
    meshes: Any
    model_config: Any
    checkpoint_config: Any
    engine_config: Any
    optimizer_config: Any
    to: Any
    _is_value_model = False
    _is_offload_param: bool
    _is_offload_optimizer: bool
    _saves: CheckpointSaver
    _survivors: Watch | None

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs) -> None:
        """Write what ``checkpoint.save_contents`` names under ``local_path`` (``checkpoint/state.py`` has the layout).

        With ``checkpoint.async_save`` the training goes on once the state is copied to the host's memory. Such a save
        ends before the next one begins, and the run's last before this returns. verl then leaves it to the engine to
        name the latest checkpoint, which it does once verl's trainer has called it again (``CheckpointSaver``).
        """
        if hdfs_path is not None and self.rank == 0:
            logger.warning(
                "epfsdp2: nothing is copied to hdfs_path=%s; checkpoints are written to local paths", hdfs_path
            )
        contents = self.checkpoint_config.get("save_contents") or ()
        state = (self.module, self.optimizer, self.lr_scheduler)
        with_base, folder = self.engine_config.save_frozen_base, Path(local_path)
        snapshot = checkpoint.Snapshot.of(*state, contents, global_step, self.scaler, with_base)
        in_background = self._saves_in_background(folder)
        self._saves.save(snapshot, folder, max_ckpt_to_keep, in_background)
        if in_background and self._trained_to_the_end(global_step):
            self._saves.wait()

    def _trained_to_the_end(self, global_step: int) -> bool:
        """Tell whether a save at this step is the run's last.

        verl counts the optimizer's steps in its trainers' own, or in updates where some of those make a step, as the
        schedule does (``trainer.v1.separate_async.parameter_sync_step``).
        """
        total = self.optimizer_config.total_training_steps
        return 0 < total <= global_step or self.lr_scheduler.last_epoch == total

    def _saves_in_background(self, folder: Path) -> bool:
        wanted = bool(self.checkpoint_config.get("async_save"))
        if wanted and folder.name.startswith("global_step_"):
            # sft_trainer has no roles, and calls a checkpoint the latest as soon as it is asked to be saved.
            if self.rank == 0:
                logger.warning("epfsdp2: checkpoint.async_save is for main_ppo; %s is waited for", folder)
            return False
        return wanted

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=True, **kwargs) -> None:
        self._saves.trainer_goes_on()
        self._saves.wait()
        contents = set(self.checkpoint_config.get("load_contents") or ())
        # Optimizer state is created where the parameters are.
        self.to(get_device_name(), model=self._is_offload_param, optimizer=False, grad=False)
        state = (self.module, self.optimizer, self.lr_scheduler)
        checkpoint.load_checkpoint(Path(local_path), *state, contents, get_device_name(), self.scaler)
        if self._survivors is not None:
            self._survivors.restart()
        self.rollout_sync.base.loaded()
        # A forward-only pass may have left parameters gathered, with the weights from before.
        reshard_all(self.module)
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=False)

    def _watch_for_failures(self) -> None:
        """Let this rank be asked for its state after a failure, if it is to be and trains."""
        self._survivors = None
        if self.engine_config.survivors_folder and self.optimizer is not None:
            self._survivors = Watch(
                Path(self.engine_config.survivors_folder),
                "critic" if self._is_value_model else "actor",
                self.module,
                self.optimizer,
                self.lr_scheduler,
                self.scaler,
                self.checkpoint_config.get("save_contents") or (),
                self.meshes.topology,
                self._save_hf_config,
            )

    def _prepare_saves(self, base: Path) -> None:
        """Read what saves write beside the weights, on the ranks that may write it, as the base may be gone by then.

        A tokenizer from another folder (``tokenizer_path``) counts before the base's, and so does a chat template that
        is set for the run.
        """
        contents = list(self.checkpoint_config.get("save_contents") or ())
        if self.rank == 0 and contents and "model" not in contents and not self.engine_config.forward_only:
            print(
                f"[epfsdp2] no run can resume from this run's checkpoints: checkpoint.save_contents={contents} is "
                "without model",
                flush=True,
            )
        self._model_files: dict[str, bytes] = {}
        topology = self.meshes.topology
        is_first = self.rank % (topology.world // topology.dp_replicate) == 0
        with raise_on_all_ranks(get_device_name()):
            if is_first and not self.engine_config.forward_only:
                self._model_files = self._files_of(base)

    def _files_of(self, base: Path) -> dict[str, bytes]:
        model = self.model_config
        files = read_small_files(base)
        if model.tokenizer_path != model.path:
            of_model = {name: files[name] for name in files if name == GENERATION_CONFIG or is_code(name)}
            files = read_small_files(folder_of(model.local_tokenizer_path or model.tokenizer_path))
            files.pop(GENERATION_CONFIG, None)
            files |= of_model
        if model.hf_config_path != model.path:
            base = folder_of(model.local_hf_config_path)
            files |= {name: content for name, content in read_small_files(base).items() if is_code(name)}
        if model.custom_chat_template is not None:
            files = with_chat_template(files, model.custom_chat_template)
        plain = (base / CONFIG).read_bytes()
        config = with_overrides(base / CONFIG, overrides_of(model), self.module.config) | value_fields(self.module)
        return {**files, CONFIG: plain if config == json.loads(plain) else json_bytes(config)}

    def _save_hf_config(self, folder: Path) -> None:
        write_files(folder, self._model_files)
