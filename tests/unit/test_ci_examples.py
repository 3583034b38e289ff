"""The workflow files of examples/ci: their command is accepted as it is printed."""

import shlex
from typing import Any

import yaml

from launcher_scripts.main import main
from tests.conftest import ROOT

CI = ROOT / "examples" / "ci"


def steps(file: str) -> list[str]:
    values: Any = yaml.safe_load((CI / file).read_text(encoding="utf-8"))
    if file == "gitlab.yml":
        job = values["evaluate"]
        return [*job["script"], *job["after_script"]]
    return [step["run"] for step in values["jobs"]["evaluate"]["steps"] if "run" in step]


def test_the_command_of_the_workflows_is_accepted(tmp_path):
    (command,) = [each for each in steps("github.yml") if "main.py" in each]
    program, _, *arguments = shlex.split(command.replace("$PWD", str(ROOT)))
    assert program == ".venv/bin/python"
    here = [each for each in arguments if not each.startswith("evaluate.output_dir=")]
    assert main([*here, f"base_results_dir={tmp_path}", "dry_run=true"]) == 0


def test_both_workflows_gate_alike_and_comment_the_changes():
    commands = [
        next(each for each in steps(f) if "main.py" in each) for f in ("github.yml", "gitlab.yml")
    ]
    assert shlex.split(commands[0]) == shlex.split(commands[1])
    for file in ("github.yml", "gitlab.yml"):
        assert any("report/changes.md" in each and "main.py" not in each for each in steps(file))


def upgrade_steps(file: str) -> list[str]:
    values: Any = yaml.safe_load((CI / file).read_text(encoding="utf-8"))
    job = values["upgrade"] if "upgrade" in values else values["jobs"]["upgrade"]
    return (
        [each["run"] for each in job["steps"] if "run" in each] if "steps" in job else job["script"]
    )


def test_the_upgrade_of_the_workflows_is_accepted(tmp_path):
    (command,) = [each for each in upgrade_steps("upgrade_github.yml") if "main.py" in each]
    _, _, *arguments = shlex.split(command.replace("$PWD", str(tmp_path)))
    for name in ("now", "next"):
        program = tmp_path / name / "bin" / "vllm"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        arguments = [each.replace(f":{name}/bin", f":{tmp_path}/{name}/bin") for each in arguments]
    assert main([*arguments, f"base_results_dir={tmp_path}", "dry_run=true"]) == 0
    assert {each.name for each in (tmp_path / "report").iterdir()} == {"now", "next"}


def test_both_upgrades_are_alike():
    commands = [
        next(each for each in upgrade_steps(f"upgrade_{name}.yml") if "main.py" in each)
        for name in ("github", "gitlab")
    ]
    assert shlex.split(commands[0]) == shlex.split(commands[1])
