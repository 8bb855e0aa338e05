"""The part of the engine that saves and resumes."""

import json
import logging
from pathlib import Path

from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ..checkpoint import state as checkpoint
from ..checkpoint.saves import CheckpointSaver
from ..config.values import overrides_of
from ..fsdp.after_gather import reshard_all
from ..model.layers import has_mtp
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
from ..survivors import Watch
from ..topology.rank_consistency import raise_on_all_ranks
from .building import print_lines

__all__ = ["WritesCheckpoints"]

logger = logging.getLogger(__name__)


class WritesCheckpoints(FSDPEngineWithLMHead):
    """Checkpoints in this engine's layout instead of verl's."""

    _is_value_model = False
    _saves: CheckpointSaver

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs) -> None:
        """Write ``checkpoint.save_contents`` under ``local_path`` (``checkpoint/state.py`` has the layout).

        With ``checkpoint.async_save`` training continues once the state is copied to the host. A save ends before the
        next one begins; the run's last save ends before this returns. ``CheckpointSaver`` then names the latest
        checkpoint, because verl does so only for saves that it waits for.
        """
        if hdfs_path is not None and self.rank == 0:
            logger.warning("epfsdp2: nothing is copied to hdfs_path=%s; checkpoints are local", hdfs_path)
        folder, in_background = Path(local_path), bool(self.checkpoint_config.get("async_save"))
        if in_background and folder.name.startswith("global_step_"):
            # sft_trainer, which has no folders of roles, names the latest checkpoint as soon as this returns.
            in_background = False
            if self.rank == 0:
                logger.warning("epfsdp2: checkpoint.async_save is for main_ppo; %s is waited for", folder)
        state = (self.module, self.optimizer, self.lr_scheduler)
        with_base = self.engine_config.save_frozen_base
        snapshot = checkpoint.Snapshot.of(*state, self._contents(), global_step, self.scaler, with_base)
        self._saves.save(snapshot, folder, max_ckpt_to_keep, in_background)
        # verl's total counts the steps of its trainer or, as the schedule does, updates
        # (trainer.v1.separate_async.parameter_sync_step).
        total = self.optimizer_config.total_training_steps
        if in_background and (0 < total <= global_step or self.lr_scheduler.last_epoch == total):
            self._saves.wait()

    def _contents(self) -> list[str]:
        return list(self.checkpoint_config.get("save_contents") or ())

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=True, **kwargs) -> None:
        self._saves.trainer_goes_on()
        self._saves.wait()
        contents = set(self.checkpoint_config.get("load_contents") or ())
        # Optimizer state is created on the device of the parameters.
        self.to(get_device_name(), model=self._is_offload_param, optimizer=False, grad=False)
        state = (self.module, self.optimizer, self.lr_scheduler)
        checkpoint.load_checkpoint(Path(local_path), *state, contents, get_device_name(), self.scaler)
        if self._survivors is not None:
            self._survivors.restart()
        self.rollout_sync.base.loaded()
        # A forward without a backward may have left parameters gathered, which would keep the old weights.
        reshard_all(self.module)
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=False)

    def _watch_for_failures(self) -> None:
        """Let a restart read this rank's state after a failure, for a role that trains."""
        self._survivors: Watch | None = None
        if self.engine_config.survivors_folder and self.optimizer is not None:
            self._survivors = Watch(
                Path(self.engine_config.survivors_folder),
                "critic" if self._is_value_model else "actor",
                self.module,
                self.optimizer,
                self.lr_scheduler,
                self.scaler,
                self._contents(),
                self.meshes.topology,
                self._save_hf_config,
            )

    def _prepare_saves(self, base: Path) -> None:
        """Read the small files of a save now, on the ranks that write them: the base may be gone at the save.

        A tokenizer from ``tokenizer_path`` and the run's chat template replace the base's.
        """
        contents = self._contents()
        if contents and "model" not in contents and not self.engine_config.forward_only:
            setting = f"checkpoint.save_contents={contents}"
            print_lines(self.rank, f"no run can resume from this run's checkpoints: {setting} is without model")
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
        config = with_overrides(base / CONFIG, overrides_of(model), self.module.config, has_mtp(self.module))
        config |= value_fields(self.module)
        return {**files, CONFIG: plain if config == json.loads(plain) else json_bytes(config)}

    def _save_hf_config(self, folder: Path) -> None:
        write_files(folder, self._model_files)
