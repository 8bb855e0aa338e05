"""verl's own FSDP and SFT scripts with two words added: which compose, and which pass the driver's checks.

    python -m benchmarks.scripts.verl_scripts --verl PATH [--match TEXT] [--record FOLDER]

``PATH`` is a git directory or a checkout of verl. Each script runs unchanged in a folder of its own, with ``python3``,
``torchrun``, ``ray`` and ``uv`` replaced by programs that write down their arguments. The recorded command is composed
with the installed verl and checked as verl's driver does it, on a small random model of the same architecture.
"""

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

import verl
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from rich.console import Console
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from benchmarks.scripts.small_models import small_model
from benchmarks.tables import RESULTS, report
from epfsdp2.engine.compat import versions
from epfsdp2.engine.compat.versions import installed
from epfsdp2.engine.errors import SettingError
from epfsdp2.engine.preflight.run import check_training

ADDED = ("engine=epfsdp2", "engine.ep_size=8")
FOLDERS = ("examples", "verl/experimental")
# A trainer's module: where its primary config is, below the verl package, and how it is called.
TRAINERS = {
    "verl.trainer.main_ppo": ("trainer/config", "ppo_trainer"),
    "verl.trainer.sft_trainer": ("trainer/config", "sft_trainer_engine"),
    "verl.experimental.one_step_off_policy.main_ppo": (
        "experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
}
SFT = "verl.trainer.sft_trainer"
# Engines of other back ends, whose settings no FSDP engine has.
OTHER_ENGINES = re.compile(r"model_engine=(?!dp)|^engine=(?!fsdp|epfsdp2)|megatron|veomni|torchtitan|automodel|mlite")
# Replaced programs: recorded, without effect; and programs of the system that a script may call.
STAND_INS = ("python", "python3", "torchrun", "ray", "uv")
NOTHING = ("pip", "pkill", "sleep", "hf", "huggingface-cli", "wget", "curl", "git", "nvidia-smi", "npu-smi", "ulimit")
TOOLS = (
    "bash sh env date mkdir cat dirname basename tee seq head tail tr sed awk grep sort wc expr mktemp realpath "
    "hostname cut uname id chmod ls printf test rm touch"
)
STAND_IN = """#!{python}
import json, os, sys
if "-c" in sys.argv[1:3]:
    sys.exit(1)  # a script asks whether a package is there
with open(os.environ["RECORDED"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verl", type=Path, required=True, help="git directory or checkout of verl")
    parser.add_argument("--match", default="", help="scripts whose path has this pattern; writes no result file")
    parser.add_argument("--record", type=Path, help="also write each script's arguments to this folder")
    options = parser.parse_args()
    console, rows = Console(highlight=False), []
    commit = _git(options.verl, "rev-parse", "HEAD").decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "verl"
        with tarfile.open(fileobj=io.BytesIO(_git(options.verl, "archive", "HEAD"))) as archive:
            archive.extractall(tree, filter="data")
        for path in sorted(str(p.relative_to(tree)) for root in FOLDERS for p in (tree / root).rglob("*.sh")):
            recorded = record(tree, path, Path(folder) / "home") if re.search(options.match, path) else None
            if recorded is None:
                continue
            rows.append({"path": path, **examine(recorded, Path(folder) / "models")})
            if options.record is not None:
                facts = {"script": path, "verl": commit, **{k: recorded[k] for k in ("module", "arguments")}}
                name = path.replace("/", "-").removesuffix(".sh")
                (options.record / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
            console.print("; ".join(rows[-1][key] for key in ("path", "model", "composes", "checks")), markup=False)
    rows.sort(key=lambda row: (not _has_experts(row["model"]), row["path"]))  # models with experts first
    counts = [
        f"{sum(row['composes'] == 'yes' for row in some)} of {len(some)} compose, "
        f"{sum(row['checks'] == 'passes' for row in some)} pass the driver's checks"
        for some in ([row for row in rows if _has_experts(row["model"])], rows)
    ]
    text = [
        f"Scripts of commit {commit[:12]}. Added: `{shlex.join(ADDED)}`, for dense models `{ADDED[0]}` alone.",
        f"Of scripts for models with experts {counts[0]}; of all {counts[1]}. The checks are those of a machine with",
        "GPUs and flash-attn, on a small model of the same architecture. A refusal is quoted with its first sentence.",
    ]
    lines = [
        {"script": row["path"], **{key: row[key] for key in ("model", "added", "composes", "checks")}} for row in rows
    ]
    heading, command = "verl's scripts with engine=epfsdp2", "make verl-scripts VERL=PATH"
    return report("verl_scripts", heading, command, ("verl",), text, lines, folder=None if options.match else RESULTS)


def _git(folder: Path, *words: str) -> bytes:
    place = ["--git-dir", str(folder)] if (folder / "HEAD").exists() else ["-C", str(folder)]
    return subprocess.run(["git", *place, *words], check=True, capture_output=True).stdout


def record(tree: Path, path: str, home: Path) -> dict | None:
    """Run one script with stand-ins.

    Returns:
        ``module`` and ``arguments`` of the trainer, with the added words at their end, and ``added``, their position.
        A dense model gets no ``engine.ep_size``. None for a script that starts no trainer of verl, or another engine.
    """
    programs = home / "bin"
    if not programs.exists():
        programs.mkdir(parents=True)
        for name in (*STAND_INS, *NOTHING):
            text = STAND_IN.format(python=sys.executable) if name in STAND_INS else "#!/bin/sh\nexit 0\n"
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name in TOOLS.split():
            if found := shutil.which(name):
                (programs / name).symlink_to(found)
    recorded = home / "recorded"
    recorded.unlink(missing_ok=True)
    env = {"PATH": str(programs), "HOME": str(home), "RECORDED": str(recorded), "PWD": str(tree), "BYTENAS": "x"}
    # SFT scripts have positional arguments: ranks and a folder.
    first = ["8", str(home / "saved")] if "save_path" in (tree / path).read_text() else []
    subprocess.run(["bash", path, *first, *ADDED], cwd=tree, env=env, capture_output=True, timeout=60)
    lines = [json.loads(line) for line in recorded.read_text().splitlines()] if recorded.exists() else []
    for words in lines:
        module = next((word for word in words if word in TRAINERS), None)
        if module is None:
            continue
        arguments = words[words.index(module) + 1 :]
        if any(OTHER_ENGINES.search(word) for word in arguments if not word.startswith("trainer.")):
            return None
        handed_on = ADDED[0] in arguments
        arguments = [word.replace(str(home), "$HOME").replace(str(tree), "$PWD") for word in arguments]
        plain = [word for word in arguments if word not in ADDED]
        words = ADDED if _has_experts(model_name(arguments)) else ADDED[:1]
        added = "behind the script's name" if handed_on else "behind the script's last argument"
        return {"module": module, "arguments": [*plain, *words], "added": added}
    return None


def examine(recorded: dict, models: Path) -> dict:
    """Return whether the script composes, and the result of the driver's checks."""
    module, arguments = recorded["module"], recorded["arguments"]
    stock = [word for word in arguments if word not in ADDED]
    name = model_name(arguments)
    row = {"module": module, "model": name, "added": recorded["added"], "stock": _composes(module, stock)[1]}
    if missing := missing_config(module, arguments):
        row["added"] += f", and the trainer's own --config-name: verl has no {missing}"
    config, row["composes"] = _composes(module, arguments)
    if config is None:
        if row["stock"] != "yes":
            row["composes"] = f"neither does stock verl {verl.__version__}: {row['composes']}"
        return row | {"checks": "-"}
    try:
        folder = small_model(name, models)
    except KeyError:
        return row | {"checks": "no small model of this architecture"}
    paths = [f"{'model.path' if module == SFT else 'actor_rollout_ref.model.path'}={folder}"]
    if module != SFT and need_critic(config):
        paths += [f"critic.model.path={folder}", "++critic.model.load_tokenizer=False"]
    row["checks"] = checks(module, [*arguments, *paths]).replace(str(folder), "SMALL")
    # A refusal of ours names a setting; anything else may be verl's own, with its own engine too.
    theirs = row["checks"] != "passes" and not re.match(r"[\w.]+=", row["checks"])
    if theirs and row["stock"] == "yes" and checks(module, [*stock, *paths]) == row["checks"]:
        row["checks"] = f"neither does stock verl {verl.__version__}: {row['checks']}"
    return row


def composed(module: str, arguments: list[str]):
    """Return the config that the trainer would get."""
    folder, name = TRAINERS[module]
    for word in arguments:
        if word.startswith("--config-name") and missing_config(module, [word]) is None:
            name = word.partition("=")[2].removesuffix(".yaml")
    words = [word for word in arguments if not word.startswith("--")]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.__file__).parent / folder), version_base=None):
        return compose(name, words)


def missing_config(module: str, arguments: list[str]) -> str | None:
    """Return the primary config that a script names and verl does not have."""
    folder = Path(verl.__file__).parent / TRAINERS[module][0]
    names = [word.partition("=")[2].removesuffix(".yaml") for word in arguments if word.startswith("--config-name")]
    return next((f"{name}.yaml" for name in names if not (folder / f"{name}.yaml").exists()), None)


def _composes(module: str, arguments: list[str]):
    try:
        return composed(module, arguments), "yes"
    except Exception as error:
        return None, _first_line(error)


def model_name(arguments: list[str]) -> str:
    for word in reversed(arguments):
        key, _, value = word.lstrip("+").partition("=")
        if key in ("actor_rollout_ref.model.path", "model.path"):
            return value.rstrip("/").rpartition("/")[2]
    return "-"


def checks(module: str, arguments: list[str]) -> str:
    """Return "passes" or the refusal's first sentence, by the driver's checks on a machine with GPUs and flash-attn."""
    with contextlib.ExitStack() as stack:
        for target, value in (
            ("epfsdp2.engine.config.roles.get_device_name", lambda: "cuda"),
            ("epfsdp2.engine.config.roles.is_support_ipc", lambda: True),
            (
                "epfsdp2.engine.preflight.features.versions.installed",
                lambda name: installed(name) or [*versions.tested(name), "0"][0],
            ),
            ("epfsdp2.engine.preflight.run.choose_backend", lambda *args: None),
        ):
            stack.enter_context(mock.patch(target, value))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            config = composed(module, arguments)
            if module == SFT and ADDED[0] not in arguments:
                return "passes"  # verl's own engine has no such checks
            if module == SFT:
                engine = omega_conf_to_dataclass(config.engine)
                model = OmegaConf.to_container(config.model, resolve=True)
                check_training(engine, 8, model, device="cuda", setting="model", checkpoint=config.checkpoint)
            else:
                OmegaConf.resolve(config)
                validate_config(config, need_reference_policy(config), need_critic(config))
        except Exception as error:
            return _first_line(error)
    return "passes"


def _first_line(error: BaseException) -> str:
    refused = error
    while refused is not None and not isinstance(refused, SettingError):
        refused = refused.__cause__
    while refused is None and error.__cause__ is not None:
        error = error.__cause__  # what Hydra wraps
    text = (str(refused or error).strip() or type(error).__name__).splitlines()[0]
    if refused is not None:
        text = text.partition(" What works: ")[0]
    return text.replace("|", "\\|")


def _has_experts(name: str) -> bool:
    return bool(re.search(r"A3B|gpt-oss|Next", name))


if __name__ == "__main__":
    raise SystemExit(main())
