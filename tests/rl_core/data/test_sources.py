"""Each kind of source on real files, what identifies it, and what a user reads when it cannot be used."""

import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.config.data import DataConfig
from rl_core.data import values
from rl_core.data.generate import create
from rl_core.data.sources import read_rows, source_fingerprint
from rl_core.errors import ConfigError, DataError

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(7)]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def files(path, **settings):
    return DataConfig(source={"kind": "files", "path": str(path)} | settings.pop("source", {}), **settings)


def gym(dataset="chain_sum", size=5, **settings):
    return DataConfig(source={"kind": "reasoning_gym", "dataset": dataset, "size": size, **settings})


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_json(path):
    write(path, json.dumps(ROWS))


def as_jsonl(path):
    write(path, jsonl(ROWS))


def as_zipped_jsonl(path):
    path.write_bytes(gzip.compress(jsonl(ROWS).encode()))


def as_csv(path):
    write(path, "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS))


def as_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def as_arrow(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.json", as_json),
        ("a.jsonl", as_jsonl),
        ("a.jsonl.gz", as_zipped_jsonl),
        ("a.csv", as_csv),
        ("a.parquet", as_parquet),
        ("a.arrow", as_arrow),
    ],
)
def test_formats_give_the_same_rows(tmp_path, home, name, make):
    make(tmp_path / name)
    rows = read_rows(files(tmp_path / name))
    assert list(rows) == ROWS
    assert list(rows.read(3, 5)) == ROWS[3:5]
    assert (len(rows), rows.columns) == (7, ["prompt", "answer"])
    assert any((home / "datasets").rglob("*.arrow"))


def test_csv_values_stay_texts(tmp_path):
    write(tmp_path / "a.csv", 'prompt,answer\nName it.,NA\nNumber?,007\n"Is ""x"", or\ny?",None\n')
    assert [row["answer"] for row in read_rows(files(tmp_path / "a.csv"))] == ["NA", "007", "None"]


def test_glob_reads_files_in_the_order_of_names(tmp_path):
    for name, part in (("b.jsonl", ROWS[3:]), ("a.jsonl", ROWS[:3])):
        write(tmp_path / name, jsonl(part))
    assert list(read_rows(files(tmp_path / "*.jsonl"))) == ROWS


@pytest.mark.parametrize("url", ["file://{}/a.jsonl", "zip://in/a.jsonl::file://{}/z.zip", "zip://in/*.jsonl::file://{}/z.zip"])
def test_urls(tmp_path, url):
    as_jsonl(tmp_path / "a.jsonl")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.write(tmp_path / "a.jsonl", "in/a.jsonl")
    config = files(url.format(tmp_path))
    assert list(read_rows(config)) == ROWS
    assert source_fingerprint(config) == source_fingerprint(files(tmp_path / "a.jsonl"))


def test_a_changed_file_is_never_stale(tmp_path):
    path = write(tmp_path / "a.jsonl", jsonl(ROWS))
    first = source_fingerprint(files(path))
    list(read_rows(files(path)))
    times = os.stat(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"0+1")] = ord("9")
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` and `rsync -t` do
    assert source_fingerprint(files(path)) != first
    assert next(iter(read_rows(files(path))))["prompt"] == "9+1="


def test_a_changed_remote_file_is_never_stale():
    memory = fsspec.filesystem("memory")
    seen = []
    for word in ("one", "two"):
        memory.pipe("/bucket/a.jsonl", jsonl([{"prompt": word}]).encode())
        config = files("memory://bucket/a.jsonl", answer_column=None)
        seen.append((next(iter(read_rows(config)))["prompt"], source_fingerprint(config)["files"][0]))
    assert [word for word, _ in seen] == ["one", "two"]
    assert seen[0][1] != seen[1][1]


def test_content_not_path_enters_the_fingerprint(tmp_path):
    as_jsonl(tmp_path / "a.jsonl")
    as_jsonl(tmp_path / "b.jsonl")
    assert source_fingerprint(files(tmp_path / "a.jsonl")) == source_fingerprint(files(tmp_path / "b.jsonl"))


def test_fingerprints_import_nothing_heavy(tmp_path):
    as_jsonl(tmp_path / "a.jsonl")
    code = (
        "import sys; from rl_core.config.data import DataConfig; from rl_core.data.sources import source_fingerprint as f\n"
        f"f(DataConfig(source=dict(kind='files', path={str(tmp_path / 'a.jsonl')!r})))\n"
        "f(DataConfig(source=dict(kind='reasoning_gym', dataset='chain_sum', size=3)))\n"
        f"f(DataConfig(source=dict(kind='hub', name='a/b', revision={'0' * 40!r})))\n"
        "from rl_core.rewards import reward_fingerprint; from rl_core.config.reward import ReasoningGymReward\n"
        "reward_fingerprint(ReasoningGymReward(kind='reasoning_gym'))\n"
        "heavy = {'torch', 'datasets', 'pyarrow', 'numpy', 'reasoning_gym', 'transformers', 'pandas', 'huggingface_hub'}\n"
        "print(heavy & set(sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "set()\n"


def test_reasoning_gym_rows_are_those_of_the_library():
    import reasoning_gym

    options = {"min_terms": 2, "max_terms": 2}
    expected = reasoning_gym.create_dataset("chain_sum", size=5, seed=3, **options)
    for row, entry in zip(read_rows(gym(seed=3, options=options)), expected, strict=True):
        assert (row["prompt"], row["answer"], row["data_source"]) == (entry["question"], entry["answer"], "chain_sum")
        assert row["metadata"] == entry["metadata"]


def test_generators_that_walk_over_sets_give_the_same_rows_in_every_process(tmp_path):
    """`ransom_note` depends on the hash seed of the process."""
    code = (
        "from rl_core.config.data import DataConfig; from rl_core.data.sources import read_rows\n"
        "print(list(read_rows(DataConfig(source=dict(kind='reasoning_gym', dataset='ransom_note', size=5)))))"
    )
    seen = set()
    for seed in ("1", "2"):
        places = os.environ | {"PYTHONHASHSEED": seed, "PPOFLOW_HOME": str(tmp_path / seed)}
        seen.add(subprocess.run([sys.executable, "-c", code], env=places, capture_output=True, check=True).stdout)
    assert len(seen) == 1


def test_values_survive_json():
    value = {"a": (1, (2, "é")), 3: [None, 1.5], "__tuple__": "x", "n": float("nan")}
    assert values.loads(values.dumps(value)) == {"a": (1, (2, "é")), 3: [None, 1.5], "__tuple__": "x", "n": None}


def test_settings_and_version_of_a_generator_enter_the_fingerprint():
    base = source_fingerprint(gym())
    assert base["version"]
    assert (
        len({str(source_fingerprint(gym(**change))) for change in ({}, {"seed": 1}, {"size": 6}, {"options": {"max_terms": 4}})})
        == 4
    )
    assert source_fingerprint(gym()) == base


def test_an_unknown_generator_is_named():
    with pytest.raises(ConfigError, match=r"data.source.dataset = 'chain_sun'.*did you mean chain_sum\?"):
        read_rows(gym("chain_sun"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_term": 2}, ["data.source.options.min_term", "did you mean min_terms"]),
        ({"seed": 2}, ["data.source.seed"]),
        ({"min_terms": 99}, ["data.source.options", "max_terms must be >= min_terms"]),
    ],
)
def test_generator_options(options, words):
    with pytest.raises(ConfigError) as caught:
        create("chain_sum", 5, 0, options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("name", "content", "ask", "kind", "words"),
    [
        ("data.jsonl", "{}", "dota.jsonl", ConfigError, ["data.source.path", "no such file", "did you mean", "data.jsonl"]),
        ("data.jsonl", "{}", "no/x.jsonl", ConfigError, ["there is no directory"]),
        ("data.jsonl", "{}", "*.csv", ConfigError, ["no file matches"]),
        ("data.jsonl", "{}", "", ConfigError, ["directory", "*.jsonl"]),
        ("data.txt", "{}", "data.txt", ConfigError, ["data.source.format", ".jsonl"]),
        ("a.jsonl", "", "a.jsonl", DataError, ["a.jsonl", "is empty"]),
        ("a.jsonl", "\n", "a.jsonl", DataError, ["a.jsonl", "has no rows"]),
        ("a.csv", "prompt,answer\n", "a.csv", DataError, ["has no rows"]),
        (
            "a.jsonl",
            '{"prompt": "x"}\n{"prompt":\n',
            "a.jsonl",
            DataError,
            ["a.jsonl", "cannot be read as json", "JSON parse error"],
        ),
        ("a.parquet", "x", "a.parquet", DataError, ["cannot be read as parquet"]),
        (
            "a.jsonl",
            '{"promt": "x", "answer": "1"}\n',
            "a.jsonl",
            DataError,
            ["data.prompt_column", "promt, answer", "mean promt?"],
        ),
        ("a.jsonl", '{"prompt": "x"}\n', "a.jsonl", DataError, ["data.answer_column", "null"]),
    ],
)
def test_file_errors(tmp_path, name, content, ask, kind, words):
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / name, content)
    with pytest.raises(kind) as caught:
        read_rows(files(tmp_path / "d" / ask))
    assert all(word in str(caught.value) for word in words), caught.value


def test_files_of_two_formats_are_refused(tmp_path):
    as_jsonl(tmp_path / "a.jsonl")
    as_csv(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match=r"several formats \(csv, json\)"):
        read_rows(files(tmp_path / "a.*"))


@pytest.mark.parametrize(
    ("url", "words"),
    [("memory://nothing/here.jsonl", "there is no such file"), ("nosuch://bucket/a.jsonl", "no URL that fsspec knows")],
)
def test_url_errors(url, words):
    with pytest.raises(ConfigError, match=words):
        read_rows(files(url))
