"""A model by its id on the hub: from the cache without the network, else by one download for each host."""

import json
import shutil
import time
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import torch.distributed as dist
from transformers import AutoConfig

from epfsdp2.engine.checkpoint import safetensors_reader
from epfsdp2.engine.checkpoint.safetensors_reader import local_checkpoint, open_checkpoint
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.model import check_model_path, inspect_model
from epfsdp2.engine.topology.rank_consistency import RankMismatchError
from tests.support.engine.sharded import sharded_model, whole_parameters
from tests.support.models.hub import COMMIT, save_in_hub_cache, use_hub_cache
from tests.support.models.tiny import reference_model, save_qwen3_moe
from tests.support.ranks import each_case, run_ranks

ID = "some/moe"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    """A model in shards with an index."""
    plain = reference_model(save_qwen3_moe(tmp_path / "saved"))
    plain.save_pretrained(tmp_path / "model", max_shard_size="400KB")
    return tmp_path / "model"


@pytest.fixture
def shard(model):
    """The name of its last shard."""
    return max(json.loads((model / INDEX).read_text())["weight_map"].values())


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Make this process use an empty cache without the network; returns the cache's folder."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def _loads_offline(cache, folder, revisions):
    use_hub_cache(cache)
    for revision in revisions:
        found = local_checkpoint(ID, revision)
        # transformers 5.19 notes no commit.
        assert found.endswith(COMMIT) and getattr(AutoConfig.from_pretrained(ID), "_commit_hash", COMMIT) == COMMIT
    wanted = dict(reference_model(folder).named_parameters())
    loaded, _ = sharded_model(Path(found), dist.get_world_size(), 2)
    for name, param in whole_parameters(loaded).items():
        assert param.equal(wanted[name]), name


def _finds_commit(cache, snapshot):
    use_hub_cache(cache)
    assert local_checkpoint(ID, COMMIT) == str(snapshot) == local_checkpoint(str(snapshot), None)


def _refuses_offline(cache, words):
    use_hub_cache(cache)
    with pytest.raises(SettingError, match=words):
        local_checkpoint(ID, COMMIT)


def _has_no_safetensors(cache, folder):
    use_hub_cache(cache, offline=False)

    def snapshot_download(*args, local_files_only=False, **kwargs):
        if local_files_only:
            return huggingface_hub.snapshot_download(*args, local_files_only=True, **kwargs)
        return save_in_hub_cache(cache, ID, folder, {file.name for file in folder.glob("*.safetensors*")})

    refusal = pytest.raises(SettingError, match=r"has no \*.safetensors file")
    with mock.patch.object(safetensors_reader, "snapshot_download", snapshot_download), refusal:
        open_checkpoint(local_checkpoint(ID))


def _each_check(checks):
    each_case(checks, lambda check, *args: check(*args))


def test_hub_id_in_the_cache_needs_no_network_and_what_it_lacks_is_named_offline(tmp_path, model, shard, offline):
    lacking = {
        "shard": ([shard], rf"snapshots/{COMMIT} lacks {shard}, which HF_HUB_OFFLINE forbids to download"),
        "index": ([INDEX], f"lacks model.safetensors or {INDEX}, which HF_HUB_OFFLINE forbids to download"),
        "blob": ([], f"lacks {shard}"),
    }
    checks = []
    for name, (without, words) in lacking.items():
        snapshot = save_in_hub_cache(offline / name, ID, model, without)
        if name == "blob":
            (snapshot / shard).resolve().unlink()
        checks.append((_refuses_offline, offline / name, words))
        refusal = pytest.raises(SettingError, match=f"^critic.model.path={ID}: .*{words}.*hf download {ID}")
        with mock.patch.object(huggingface_hub.constants, "HF_HUB_CACHE", str(offline / name)), refusal:
            check_model_path({"path": ID}, "critic.model")
    save_in_hub_cache(tmp_path / "whole", ID, model)
    without_ref = save_in_hub_cache(tmp_path / "without a ref", ID, model)
    shutil.rmtree(without_ref.parents[1] / "refs")
    checks += [
        (_loads_offline, tmp_path / "whole", model, [None, "main", COMMIT]),
        (_finds_commit, tmp_path / "without a ref", without_ref),
        (_has_no_safetensors, tmp_path / "none", model),
    ]
    run_ranks(_each_check, 2, checks)


def test_inspect_model_of_a_hub_id_in_the_cache_checks_config_and_files(model, shard, offline):
    snapshot = save_in_hub_cache(offline, ID, model)
    assert inspect_model({"path": ID}).experts == (8, 8)
    with (snapshot / shard).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(SettingError, match=f"model.path={ID}: {shard} can't be read: .* it is cut off"):
        inspect_model({"path": ID})


def _downloads(cache, folder, without, lacking_hosts, fails_on):
    rank, calls = dist.get_rank(), []
    host = rank // 2
    use_hub_cache(cache / str(host), offline=False)
    if rank % 2 == 0 and host in lacking_hosts:
        save_in_hub_cache(cache / str(host), ID, folder, without)
    elif rank % 2 == 0:
        save_in_hub_cache(cache / str(host), ID, folder)
    dist.barrier()

    def snapshot_download(hub_id, *, revision, local_files_only=False, **patterns):
        if local_files_only:
            return huggingface_hub.snapshot_download(hub_id, revision=revision, local_files_only=True, **patterns)
        calls.append((hub_id, revision))
        time.sleep(0.6)
        if rank == fails_on:
            raise OSError("401 Client Error: Unauthorized")
        return save_in_hub_cache(cache / str(host), ID, folder, {file.name for file in folder.iterdir()} - set(without))

    safetensors_reader.snapshot_download = snapshot_download
    safetensors_reader.socket.gethostname = lambda: f"host {host}"
    safetensors_reader._POLL_SECONDS = 0.2  # shorter than the download, as a collective's time-out is
    if fails_on is None:
        assert len(open_checkpoint(local_checkpoint(ID, COMMIT)).file_of) > 20
    else:
        with pytest.raises(RankMismatchError, match=f"rank {fails_on}: OSError: 401 Client Error"):
            local_checkpoint(ID, COMMIT)
    assert calls == [(ID, COMMIT)] * (rank % 2 == 0 and host in lacking_hosts)


def _each_download(folder, model, shard):
    cases = [((0, 1), None), ((1,), None), ((0, 1), 2)]
    each_case([(folder / str(i), model, [shard], *case) for i, case in enumerate(cases)], _downloads)


def test_local_checkpoint_downloads_once_on_each_host_that_lacks_files(tmp_path, model, shard):
    run_ranks(_each_download, 4, tmp_path / "cache", model, shard)
