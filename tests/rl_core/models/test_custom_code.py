"""Models with Python code of their own: run only where `trust_remote_code` says so, in every place alike, and carried along."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_core.checkpoint.convert import convert
from rl_core.checkpoint.export import export_policy
from rl_core.config.model import ModelConfig
from rl_core.errors import ModelError
from rl_core.groups import make_groups
from rl_core.models.build import build_policy, empty_model
from rl_core.models.source import (
    ModelSource,
    load_tokenizer,
    load_tokenizer_dir,
    model_fingerprint,
    resolve,
    tokenizer_fingerprint,
)
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.stop_ids import stop_ids_of
from rl_core.rollout.sync import sync_weights
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config, ragged
from tests.rl_core.models.custom import FILES, STRETCH, code_home, custom_model
from tests.tiny import tiny_prompts

TRUSTED = {"model": {"name_or_path": "unused", "trust_remote_code": True}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with code_home(tmp_path_factory.mktemp("home")) as home:
        yield home


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return custom_model(tmp_path_factory.mktemp("custom") / "model")


@pytest.fixture(scope="module")
def base(source: Path, home: Path) -> Path:
    """The base artifact of the trusted model."""
    trusted = ModelSource(source, trusted=True)
    convert(trusted, load_tokenizer(trusted), home / "base")
    return home / "base"


def test_refused_without_running_or_asking(source: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"asked: {prompt}"))
    untrusted = resolve(ModelConfig(name_or_path=str(source)))
    plain = load_tokenizer_dir(source.with_name("model-plain"))
    for use in (
        lambda: load_tokenizer(untrusted),
        lambda: load_tokenizer_dir(source),
        lambda: convert(untrusted, plain, tmp_path / "base"),
        lambda: empty_model(source, config().model),
        lambda: RolloutEngine(source, torch.float32, "cpu"),
        lambda: stop_ids_of(source, plain),
        lambda: export_policy(source, "", source, tmp_path / "policy"),
    ):
        with pytest.raises(
            ModelError, match=r"^model\.trust_remote_code: .*modeling_tiny\.py.* set model\.trust_remote_code: true"
        ):
            use()
    assert not list(source.glob("runs.txt"))
    assert not list(home.rglob("runs.txt"))


def used(rank: int, directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the sharded policy, and the logits of the rollout engine's model."""
    settings, cpu = config(**TRUSTED), torch.device("cpu")
    policy = build_policy(directory, settings, "actor", make_groups(settings, ["actor"], "cpu")["actor"], cpu, trainable=True)
    engine = RolloutEngine(directory, torch.float32, cpu, settings.model)
    sync_weights(policy, engine)
    engine.generate([[5, 6, 7], [8]], [0, 1], max_new_tokens=3, temperature=0.0, seed=0, step=0, stop_ids={1}, batch_size=2)
    with torch.no_grad():
        return policy(*ragged(), 1.0, False)[0], engine.model(ragged()[0]).logits


def test_trusted_code_runs_alike_everywhere(source: Path, base: Path) -> None:
    from transformers import AutoModelForCausalLM

    same = AutoModelForCausalLM.from_pretrained(source.with_name("model-plain")).eval()
    ids, prompt, response, _ = ragged()
    with torch.no_grad():
        same.model.embed_tokens.weight.mul_(STRETCH / 2)
        expected = same(ids).logits
    for logprobs, logits in run_ranks(used, 2, base):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        for row, length in enumerate(response.tolist()):
            chosen = expected[row].log_softmax(-1)[range(prompt[row] - 1, prompt[row] + length - 1)]
            picked = chosen.gather(1, ids[row, prompt[row] : prompt[row] + length, None]).squeeze(1)
            torch.testing.assert_close(logprobs[row, :length], picked, rtol=0, atol=2e-5)


def test_a_training_and_its_evaluation(source: Path, home: Path, tmp_path: Path) -> None:
    """Whatever they load, they load with the flag."""
    (tmp_path / "reward.py").write_text("def compute_score(**given):\n    return 1.0\n")
    settings = {
        "model": {"name_or_path": str(source), "trust_remote_code": True},
        "data": {"source": {"kind": "files", "path": str(tiny_prompts(tmp_path / "p.jsonl"))}, "eval_fraction": 0.1},
        "reward": {"kind": "function", "path": str(tmp_path / "reward.py")},
        "trainer": {"train_batch_size": 2, "max_steps": 1},
        "rollout": {"max_new_tokens": 4},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    program = """if True:
        import sys
        from pathlib import Path
        from rl_core import evaluate, train
        root = Path(sys.argv[1])
        train.main([f"--config_path={root / 'c.yaml'}", f"--output_dir={root / 'run'}"])
        evaluate.main([
            f"--config_path={root / 'c.yaml'}", f"--output_dir={root}", f"--dataset={root / 'run/dataset'}",
            f"--reference={root / 'run/base'}", f"--model={root / 'run/policy'}",
        ])
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | alone | {"MASTER_PORT": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["reward"]["mean"] == 1.0
    assert (tmp_path / "run/policy/modeling_tiny.py").read_text() == FILES["modeling_tiny.py"]


def test_the_code_travels_to_the_exported_policy(source: Path, base: Path, home: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_policy(base / "weights", "", base, tmp_path / "policy", trust_remote_code=True)
    for directory in (base, tmp_path / "policy"):
        assert all((directory / name).read_text() == code for name, code in FILES.items())
        assert type(load_tokenizer_dir(directory, trusted=True)).__name__ == "TinyTokenizer"
        assert 1 in stop_ids_of(directory, load_tokenizer_dir(directory, trusted=True), trusted=True)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", trust_remote_code=True)
    assert type(opened).__name__ == "TinyForCausalLM"
    assert type(AutoTokenizer.from_pretrained(tmp_path / "policy", trust_remote_code=True)).__name__ == "TinyTokenizer"
    weights = load_file(source / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in opened.state_dict().items())
    assert list((home / "downloads/modules/transformers_modules").rglob("modeling_tiny.py"))


def test_a_changed_line_is_another_model_and_tokenizer(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    (copy / "modeling_tiny.py").write_text(FILES["modeling_tiny.py"] + "\n# more\n")
    for trusted in (True, False):
        ours, theirs = (resolve(ModelConfig(name_or_path=str(path), trust_remote_code=trusted)) for path in (source, copy))
        assert (model_fingerprint(ours) != model_fingerprint(theirs)) == trusted
        assert (tokenizer_fingerprint(ours, None) != tokenizer_fingerprint(theirs, None)) == trusted


def test_code_is_fetched_only_of_trusted_models(source: Path, home: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in source.iterdir():
        memory.pipe_file(f"/custom/model/{path.name}", path.read_bytes())
    try:
        for trusted in (False, True):
            found = resolve(ModelConfig(name_or_path="memory://custom/model", trust_remote_code=trusted))
            assert {path.name for path in found.directory.glob("*.py")} == (FILES.keys() if trusted else set())
    finally:
        memory.rm("/custom", recursive=True)


def test_code_of_another_repository_is_refused(source: Path, home: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    text = (copy / "config.json").read_text().replace("modeling_tiny.", "somebody/else--modeling_tiny.")
    (copy / "config.json").write_text(text)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"takes its code from the repository somebody/else"):
            load_tokenizer(ModelSource(copy, trusted=True))
        for path in copy.glob("*.py"):  # as `save_pretrained` leaves such a model
            path.unlink()


def test_code_that_fails_is_the_models_fault(source: Path, home: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    (copy / "configuration_tiny.py").write_text("1 / 0")
    with pytest.raises(ModelError, match=r"model\.name_or_path: .*configuration of .*copy.*ZeroDivisionError"):
        load_tokenizer(ModelSource(copy, trusted=True))


def test_a_model_that_transformers_knows_needs_no_code(source: Path, tmp_path: Path) -> None:
    """Its class is used, and nothing points to the code any more."""
    plain = Path(shutil.copytree(source.with_name("model-plain"), tmp_path / "m"))
    (plain / "modeling_mine.py").write_text("1 / 0")
    settings = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}))
    untrusted = ModelSource(plain)
    assert convert(untrusted, load_tokenizer(untrusted), tmp_path / "base")["architecture"] == "LlamaForCausalLM"
    assert json.loads((tmp_path / "base/config.json").read_text()) == settings
    assert not list((tmp_path / "base").glob("*.py"))
