"""The scripts that a dry run writes for each cluster, letter by letter.

`SLIPWAY_UPDATE_GOLDEN=1 pytest tests/golden/test_scripts.py` writes the files anew; look at the
difference before keeping it.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from launcher_scripts.main import main
from tests.conftest import ROOT

GOLDEN = Path(__file__).parent / "scripts"
COMMON = ("export=gpt3/sample", "env_vars.NOTE=it's a $note", "dry_run=true")
CLUSTERS = {
    "local": ("cluster_type=local",),
    "bcm_bare": (
        "cluster_type=bcm", "container=null", "cluster.partition=batch", "cluster.account=llm",
        "cluster.qos=high", "cluster.gpus_per_node=null", "cluster.exclusive=False",
        "cluster.overcommit=False", "cluster.mem=1.5", "+cluster.mail_type=END",
        "cluster.setup=['module load python']",
    ),
    "bcm_container": (
        "cluster_type=bcm", "container=nvcr.io#nvidia/pytorch:24.01", "cluster.partition=batch",
        "container_mounts=[/scratch,null,'/my data:/data:ro']", "cluster.gpus_per_task=2",
        "cluster.srun_args=[--no-container-mount-home,'--container-workdir=/w']",
    ),
    "bcm_container_two_nodes": (
        "cluster_type=bcm", "container=nvcr.io#nvidia/pytorch:24.01", "cluster.gpus_per_node=2",
        "export.model.tensor_model_parallel_size=2",
        "export.triton_deployment.pipeline_model_parallel_size=2",
    ),
    "bcp": ("cluster_type=bcp",),
}  # fmt: skip


def scripts(folder: Path, words: tuple[str, ...]) -> dict[str, str]:
    """Return every stage's script with the places of this machine taken out."""
    assert main([*COMMON, f"base_results_dir={folder}", *words]) == 0
    places = {str(folder): "<results>", sys.executable: "<python>", str(ROOT): "<checkout>"}
    found = {}
    for path in folder.rglob("*_submission.sh"):
        text = path.read_text()
        for place, name in places.items():
            text = text.replace(place, name)
        found[f"{path.parent.name}.sh"] = text
    return found


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_scripts_are_the_checked_in_ones(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # what is installed here does not matter
    for name in [each for each in os.environ if each.startswith(("NGC_", "NEMO_"))]:
        monkeypatch.delenv(name)
    found = scripts(tmp_path, CLUSTERS[cluster])
    folder = GOLDEN / cluster
    if os.environ.get("SLIPWAY_UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (folder / name).write_text(text)
    kept = {path.name: path.read_text() for path in folder.iterdir()}
    if shlex.quote(str(ROOT)) != str(ROOT):  # quotes are not those of the checked-in ones
        found, kept = (
            {name: re.sub("['\"]", "", text) for name, text in each.items()}
            for each in (found, kept)
        )
    assert found == kept
    assert set(found) == {"convert.sh", "export.sh", "deploy.sh", "evaluate.sh"}
