"""Saves that are written in the background while training goes on."""

import contextlib
import json
import threading
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from epfsdp2.engine.checkpoint import background
from epfsdp2.engine.checkpoint import state as checkpoint
from epfsdp2.engine.checkpoint.atomic_folder import MANIFEST
from epfsdp2.engine.checkpoint.background import Background
from epfsdp2.engine.checkpoint.saves import CheckpointSaver
from epfsdp2.engine.model import hf_convert
from epfsdp2.engine.model.layers import layer_names
from epfsdp2.engine.topology.dtensor import local_tensor
from epfsdp2.engine.topology.rank_consistency import RankMismatchError
from tests.support.engine.checkpoints import ALL, build_trainer, raise_full_disk, train_step
from tests.support.engine.sharded import full_tensors
from tests.support.models.tiny import VOCAB, reference_model, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks


def _full(model, meshes):
    return dict(full_tensors(model, meshes, layer_names(model), 1 << 30))


def _export_in_background(folder, out):
    """During a forward, which it does not disturb."""
    trainer = build_trainer(folder, 2)
    model, wanted = trainer[0], _full(*trainer[:2])
    hf_convert._SHAPES.clear()  # as if nothing had been loaded or synchronised by this process
    saves, elsewhere = Background(), []
    with contextlib.ExitStack() as watched:
        for name in ("state_dict", "named_parameters", "named_buffers"):
            method = getattr(nn.Module, name)

            def noted(self, *args, _method=method, _name=name, **kwargs):
                if threading.current_thread() is not threading.main_thread():
                    elsewhere.append(_name)
                return _method(self, *args, **kwargs)

            watched.enter_context(mock.patch.object(nn.Module, name, noted))
        snapshot = checkpoint.Snapshot.of(model, None, None, {"hf_model"}, 1).on_host()
        write = partial(snapshot.write, out, AutoConfig.from_pretrained(folder).save_pretrained, "cpu", saves.group)
        saves.start("an export", write)
        train_step(trainer, torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(2)))
        saves.wait()
    assert elsewhere == []
    dist.barrier()
    exported = dict(reference_model(out / checkpoint.HF).named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())


def _named_when_both_have_ended(folder, out):
    """It is named latest when its folder is complete and the trainer has ended its own part."""
    model, _, optimizer, schedule = build_trainer(folder, 2)
    tracker, may_write = out / "latest_checkpointed_iteration.txt", threading.Event()
    saver = CheckpointSaver("cpu", lambda folder: may_write.wait())  # called on rank 0, and all write together

    def save(step):
        snapshot = checkpoint.Snapshot.of(model, optimizer, schedule, ALL, step)
        saver.save(snapshot, out / f"global_step_{step}" / "actor", 1, in_background=True)

    save(1)
    may_write.set()
    saver.wait()
    dist.barrier()
    assert (out / "global_step_1/actor" / MANIFEST).is_file()
    assert not tracker.exists()  # the critic's part and data.pt are still to come
    dist.barrier()
    saver.trainer_goes_on()
    dist.barrier()
    assert tracker.read_text() == "1"
    may_write.clear()
    save(2)
    saver.trainer_goes_on()
    saver.trainer_goes_on()  # by each call of a worker
    dist.barrier()
    assert tracker.read_text() == "1" and (out / "global_step_1/actor").is_dir()
    dist.barrier()
    may_write.set()
    saver.wait()
    dist.barrier()
    assert tracker.read_text() == "2" and not (out / "global_step_1/actor").exists()


def _in_the_same_memory(folder, out):
    """A save copies to the memory of the last one once that is written."""
    trainer = build_trainer(folder, 2)
    model, meshes, optimizer, schedule = trainer
    may_write, written = threading.Event(), []
    saver = CheckpointSaver("cpu", lambda folder: None)
    write = checkpoint.Snapshot.write

    def noted(self, *args):
        may_write.wait()
        write(self, *args)
        written.append({name: local_tensor(tensor).data_ptr() for name, tensor in self.tensors.items()})

    def save(step, contents=ALL, in_background=True):
        snapshot = checkpoint.Snapshot.of(model, optimizer, schedule, contents, step)
        saver.save(snapshot, out / str(step), None, in_background)

    ids = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(2))
    with mock.patch.object(checkpoint.Snapshot, "write", noted):
        train_step(trainer, ids)
        wanted = [_full(model, meshes)]
        save(1)
        train_step(trainer, ids)
        wanted.append(_full(model, meshes))
        threading.Timer(0.5, may_write.set).start()
        save(2)  # while the first is still being written
        saver.wait()
        assert written[0] == written[1] and len(written[0]) == len({*written[0].values()})
        save(3, {"model"})
        saver.wait()
        assert written[2].items() < written[0].items()
        assert saver._copies.keys() == written[2].keys()
        save(4, in_background=False)
        assert not saver._copies
    for step, values in enumerate(wanted, 1):
        other = build_trainer(folder, 1)
        checkpoint.load_checkpoint(out / str(step), other[0], other[2], other[3], ALL)
        assert all(torch.equal(tensor, values[name]) for name, tensor in _full(*other[:2]).items())


def _fails_in_background(folder, out):
    """Reported when the next one begins."""
    model, _, optimizer, schedule = build_trainer(folder, 2)
    saves = Background()

    def save(step):
        snapshot = checkpoint.Snapshot.of(model, optimizer, schedule, ALL, step).on_host()
        job = partial(snapshot.write, out, lambda folder: None, "cpu", saves.group)
        saves.start(f"saving {step}", job)

    save(1)
    saves.wait()
    with mock.patch.object(checkpoint, "save_file", raise_full_disk if dist.get_rank() == 1 else checkpoint.save_file):
        save(2)
        with pytest.raises((OSError, RankMismatchError), match="No space left on device"):
            save(3)
    assert json.loads((out / "trainer_state.json").read_text())["step"] == 1
    saves.wait()


def _each_check(folder, out):
    checks = (_export_in_background, _named_when_both_have_ended, _in_the_same_memory, _fails_in_background)
    each_case([(check, folder, out / check.__name__) for check in checks], lambda check, *args: check(*args))


def test_background_save_has_the_values_from_before_the_updates_during_it(tmp_path):
    run_ranks(_each_check, 2, save_qwen3_moe(tmp_path / "model"), tmp_path / "run")


def test_copies_of_other_shapes_and_dtypes_get_memory_of_their_own():
    kept = background.copied_to_host({name: torch.randn(4, 6) for name in ("same", "reshaped", "half", "gone")})
    still = kept["same"]
    tensors = {"half": torch.randn(4, 6).half(), "same": torch.randn(4, 6), "reshaped": torch.randn(6, 4)}
    copies = background.copied_to_host(tensors, kept)
    assert list(copies) == list(tensors) and all(torch.equal(copies[name], tensors[name]) for name in tensors)
    assert list(kept) == ["same"] and copies["same"] is still


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(64, 8, 4), (16, 8, 2)])
def test_copies_to_the_host_are_made_by_several_threads_at_once(monkeypatch, cores, ranks, threads):
    together, copy = threading.Barrier(threads, timeout=20), torch.Tensor.copy_

    def copy_together(target, source):
        together.wait()  # until each thread has a part
        return copy(target, source)

    monkeypatch.setattr(background.os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(background, "_LEAST_BYTES", 1)
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", f"{ranks}")
    tensor = torch.randn(999)
    with mock.patch.object(torch.Tensor, "copy_", copy_together):
        copies = background.copied_to_host({"a": tensor})
    assert torch.equal(copies["a"], tensor)


def test_background_save_of_device_tensors_copies_them_through_two_pinned_buffers(monkeypatch):
    """Larger than a buffer, smaller, and of none; a buffer is read only when what was copied to it has arrived."""
    log = []

    class Event:
        def __init__(self):
            self.name, self.recorded = f"{sum(e == 'made' for e in log)}", False
            log.append("made")

        def record(self, stream):
            assert stream == "the stream that computes" and not self.recorded
            self.recorded = True

        def synchronize(self):
            assert self.recorded
            self.recorded = False
            log.append(f"emptied {self.name}")

    stream = "the stream that computes"
    module = SimpleNamespace(Event=Event, current_stream=lambda device: stream, is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(background, "_on_host", lambda tensor: False)
    monkeypatch.setattr(background, "_Staging", partial(background._Staging, nbytes=64))
    monkeypatch.setattr(background, "_LEAST_BYTES", 5)  # a buffer's bytes are divided among threads
    tensors = {
        "large": torch.randn(7, 9),
        "step": torch.tensor(3.0),
        "half": torch.randn(5).bfloat16(),
        "none": torch.empty(0, 2),
        "transposed": torch.randn(3, 4).t(),
    }
    copies = background.copied_to_host(tensors)
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
    tensors["large"].zero_()
    assert copies["large"].any()
    assert log == ["made"] * 2 + ["emptied 0", "emptied 1"] * 3 + ["emptied 0"]
