"""Every role × offload × dtype on one device: a tiny PPO run each, as `rl_core.train` builds it, against one without offload.

    PYTHONPATH=. python tests/bench/roles.py --out FILE.json [--strategy fsdp]

Actor, critic, reference and reward model are real tiny Llamas. For each dtype the run is made without offload, with each offload
for all roles at once, and with each offload for each role alone; a case is well if its rewards, losses and gradient norms of both
steps are those of the run without offload, bit for bit. On a GPU the trial of the largest batch runs before each.
"""

import argparse
import json
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from rl_core.artifacts import open_artifact
from rl_core.config import Config
from rl_core.distributed import World, joined
from rl_core.inputs import prepare
from rl_core.ppo import train
from rl_core.train import build
from tests.rl_core.tiny_runs import REWARD, config_for
from tests.tiny import tiny_model, tiny_prompts

DTYPES = ("float32", "bfloat16", "float16")
OFFLOADS: dict[str, dict[str, bool]] = {
    "param": {"param_offload": True},
    "optimizer": {"optimizer_offload": True},
    "param + optimizer": {"param_offload": True, "optimizer_offload": True},
    "policy": {"offload_policy": True},
}
ROLES = {"actor": "actor", "critic": "critic", "reference": "ref_model", "reward model": "reward"}
COMPARED = ("critic/score/mean", "actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/reference_kl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="fsdp", choices=["single", "fsdp"])
    parser.add_argument("--inputs", type=Path, help="made there, or made before: prompts are read with datasets")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.inputs or Path(scratch)
        if not (directory / "base").is_dir():
            _make(directory, options.strategy)
        with joined(_config(directory, options.strategy, "float32", {}).launch) as world:
            cases = _cases(directory, options.strategy, world)
            report = {
                "command": shlex.join(["PYTHONPATH=.", "python", *sys.argv]),
                "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
                "torch": torch.__version__,
                "strategy": options.strategy,
                "cases": len(cases),
                "equal to the run without offload": sum(case["greatest_difference"] == 0.0 for case in cases),
                "failed": [case for case in cases if "error" in case],
                "details": cases,
            }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print({name: value for name, value in report.items() if name != "details"})


def _make(directory: Path, strategy: str) -> None:
    tiny_model(directory / "model", hidden_size=64, intermediate_size=128, initializer_range=0.2)
    tiny_model(directory / "judge", seed=1, initializer_range=0.2)
    tiny_prompts(directory / "prompts.jsonl", 60)
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    prepare(None, None, _config(directory, strategy, "float32", {}), directory, World(0, 1, torch.device("cpu")))


def _config(directory: Path, strategy: str, dtype: str, overrides: dict[str, Any]) -> Config:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fixed = {
        "reward": {"kind": "model", "name_or_path": str(directory / "judge")},
        "model.torch_dtype": dtype, "fsdp.strategy": strategy, "launch.device": device, "trainer.max_steps": 2,
    }  # fmt: skip
    return config_for(directory, fixed | overrides)


def _cases(directory: Path, strategy: str, world: World) -> list[dict[str, Any]]:
    cases = []
    for dtype in DTYPES:
        plain = _run(directory, _config(directory, strategy, dtype, {}), world)
        cases.append({"dtype": dtype, "offload": "none", "roles": "all", "greatest_difference": 0.0, "metrics": plain})
        for name, settings in OFFLOADS.items():
            for roles in [*ROLES, "all"]:
                sections = list(ROLES.values()) if roles == "all" else [ROLES[roles]]
                given = {
                    f"{section}.fsdp.{key}": value
                    for section in sections
                    for key, value in settings.items()
                    if key != "optimizer_offload" or section in ("actor", "critic")
                }
                if given:
                    cases.append(
                        {
                            "dtype": dtype,
                            "offload": name,
                            "roles": roles,
                            **_against(plain, directory, strategy, dtype, given, world),
                        }
                    )
    return cases


def _against(
    plain: dict[str, Any], directory: Path, strategy: str, dtype: str, given: dict[str, Any], world: World
) -> dict[str, Any]:
    try:
        metrics = _run(directory, _config(directory, strategy, dtype, given), world)
    except Exception as error:  # noqa: BLE001 - a failure is a result of this bench
        traceback.print_exc()
        return {"greatest_difference": None, "error": f"{type(error).__name__}: {error}"[:300]}
    difference = max(abs(a - b) for name in plain for a, b in zip(plain[name], metrics[name], strict=True))
    return {"greatest_difference": difference, "metrics": metrics}


def _run(directory: Path, config: Config, world: World) -> dict[str, list[float]]:
    dataset, base = (open_artifact(directory / name) for name in ("dataset", "base"))
    output = Path(tempfile.mkdtemp(dir=directory))
    train(build(config.settled(1), dataset, base, output, world, lambda: False))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {name: [row[name] for row in rows] for name in COMPARED}


if __name__ == "__main__":
    main()
