import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_core.errors import EXIT_USER
from tests.flows.conftest import Finished
from tests.pipeline import ROOT, environment, ppoflow, tiny_settings
from tests.tiny import tiny_model

STAGES = ["tokenize_dataset", "convert_checkpoint", "train_policy", "evaluate_policy", "register_policy"]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys, flows.cli\n"
        "try: flows.cli.main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('heavy:', sorted({'prefect', 'mlflow', 'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert "heavy: []" in result.stdout
    assert all(command in result.stdout for command in ("run", "explain", "promote", "rollback"))


def test_run_reports_stages_evaluation_and_version(finished: Finished) -> None:
    report = finished.report
    assert [row["name"] for row in report["stages"]] == STAGES
    assert {row["state"] for row in report["stages"]} == {"computed"}
    assert all(Path(row["artifact"], "manifest.json").is_file() for row in report["stages"][:4])
    assert all(len(row["key"]) == 64 and row["seconds"] >= 0 for row in report["stages"])
    assert set(report["evaluation"]) == {"base", "policy"}
    assert 0 <= report["evaluation"]["policy"]["reward"]["mean"] <= 1
    assert report["registered"]["name"] == "tiny"
    assert "candidate" in report["registered"]["aliases"]


def test_run_prints_a_table_and_where_things_are(finished: Finished) -> None:
    lines = finished.process.stdout
    assert all(name in lines for name in [*STAGES, "computed", "registered: tiny version 1"])
    curve = next(line for line in lines.splitlines() if line.startswith("learning curve: ")).removeprefix("learning curve: ")
    assert Path(curve).read_bytes().startswith(b"\x89PNG")
    assert "Step 1 | Reward computed" in finished.process.stderr  # the training's log, live
    assert "temporary server" not in finished.process.stderr


def artifacts(report: dict[str, Any], home: Path) -> list[str]:
    return [row["artifact"].removeprefix(str(home)) for row in report["stages"]]


def test_second_run_reuses_every_stage(copied: Finished, finished: Finished, tmp_path: Path) -> None:
    result = ppoflow("run", copied.config, "--json", tmp_path / "again.json", home=copied.home)
    assert result.returncode == 0, result.stderr
    again = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
    assert {row["state"] for row in again["stages"]} == {"reused"}
    assert artifacts(again, copied.home) == artifacts(finished.report, finished.home)
    assert again["registered"] == copied.report["registered"]
    assert again["evaluation"]["policy"] == copied.report["evaluation"]["policy"]


def one_paragraph(result: "subprocess.CompletedProcess[str]") -> str:
    """The error paragraph, after checking that it stands alone: no traceback, the command that continues, a user's exit code."""
    said = [line for line in result.stderr.splitlines() if line.startswith("ppoflow: error: ")]
    assert result.returncode == EXIT_USER, result.stderr
    assert len(said) == 1
    assert "Traceback" not in result.stderr + result.stdout
    assert re.match(r"ppoflow: to continue: PPOFLOW_HOME=\S+ \S*python\S* -m flows\.cli run ", result.stderr.splitlines()[-1])
    return said[0]


def changed(directory: Path, **sections: dict[str, Any]) -> Path:
    """The tiny configuration with keys of some sections set."""
    settings = tiny_settings(directory)
    for name, values in sections.items():
        settings[name] |= values
    path = directory / "changed.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "trainer.max_step=3"), ["trainer.max_step", "max_steps"]),
        (("--set", "trainer.max_steps=many"), ["trainer.max_steps", "many"]),
        (("--set", "trainer.max_steps"), ["key=value"]),
        (("--json", "nowhere/report.json"), ["--json", "nowhere"]),
    ],
)
def test_a_wrong_argument_is_one_paragraph(tmp_path: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    said = one_paragraph(ppoflow("run", changed(tmp_path), *arguments, home=tmp_path / "home"))
    assert all(word in said for word in words)
    assert not (tmp_path / "home").exists()


def test_the_command_that_continues_works_as_typed(tmp_path: Path) -> None:
    """Through a shell, from a directory that is not on PATH, as `.venv/bin/ppoflow`, over a home with a space in its name."""
    program = tmp_path / "bin" / "ppoflow"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom flows.cli import main\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    home = tmp_path / "the home"
    settings = environment(home)
    typed = "bin/ppoflow run none.yaml --set 'registry.name=a b' --fresh --json report.json"
    first = subprocess.run(typed, shell=True, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    said, command = first.stderr.splitlines()
    expected = f"PPOFLOW_HOME='{home}' {typed}"  # nothing was begun afresh yet
    assert command == f"ppoflow: to continue: {expected}"
    del settings["PPOFLOW_HOME"]
    again = subprocess.run(expected, shell=True, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert again.stderr == first.stderr
    assert "none.yaml" in said
    # Without the variable it is not named, and a program on PATH is its name.
    settings["PATH"] = f"{program.parent}:{settings['PATH']}"
    found = subprocess.run(
        "ppoflow run none.yaml", shell=True, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False
    )
    assert found.stderr.splitlines()[-1] == "ppoflow: to continue: ppoflow run none.yaml"


def test_the_flow_as_a_script(copied: Finished) -> None:
    result = subprocess.run(
        [sys.executable, "flows/post_training.py", str(copied.config)], cwd=ROOT, env=environment(copied.home),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("reused") == len(STAGES)


def test_promote_and_roll_back(copied: Finished) -> None:
    champion = copied.report["registered"]["version"]
    promoted = ppoflow("promote", "tiny", str(champion), home=copied.home)
    assert promoted.returncode == 0, promoted.stderr
    assert promoted.stdout.startswith(f"The champion of tiny is version {champion}.")
    for arguments, words in [(("promote", "tiny", "99"), "tiny has no version or alias 99"), (("rollback", "none"), "none")]:
        refused = ppoflow(*arguments, home=copied.home)
        assert refused.returncode == EXIT_USER
        (said,) = refused.stderr.splitlines()
        assert said.startswith("ppoflow: error: ")
        assert words in said
    rolled = ppoflow("rollback", "tiny", home=copied.home)
    assert rolled.returncode == EXIT_USER
    assert "replaced no other" in rolled.stderr


def test_a_missing_configuration_is_one_paragraph(tmp_path: Path) -> None:
    assert "nowhere.yaml" in one_paragraph(ppoflow("run", "nowhere.yaml", home=tmp_path / "home"))


def test_an_unwritable_store_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    said = one_paragraph(ppoflow("run", changed(tmp_path), home=tmp_path / "file" / "home"))
    assert "PPOFLOW_HOME" in said


def test_a_missing_file_is_one_paragraph(copied: Finished, tmp_path: Path) -> None:
    config = changed(tmp_path, data={"source": {"kind": "files", "path": str(tmp_path / "none.jsonl")}})
    assert "none.jsonl" in one_paragraph(ppoflow("run", config, home=copied.home))


def test_a_missing_prompt_column_is_one_paragraph(copied: Finished, tmp_path: Path) -> None:
    said = one_paragraph(ppoflow("run", changed(tmp_path, data={"prompt_column": "text"}), home=copied.home))
    assert "data.prompt_column" in said
    assert "text" in said


def test_a_model_without_chat_template_is_one_paragraph(copied: Finished, tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    model = tiny_tokenizer(tiny_model(tmp_path / "plain"), chat_template=None)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    said = one_paragraph(ppoflow("run", changed(tmp_path, model={"name_or_path": str(model)}), home=copied.home))
    assert "model.chat_template" in said


def test_explain_names_what_would_run(finished: Finished) -> None:
    result = ppoflow("explain", finished.config, "--set", "evaluation.samples=3", home=finished.home)
    assert result.returncode == 0, result.stderr
    assert not (ROOT / "mlflow.db").exists()
    outcomes = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert all("reused" in outcomes[name] for name in STAGES[:3])
    assert "runs" in outcomes["evaluate_policy"]
    assert "evaluation.samples" in outcomes["evaluate_policy"]
