"""The habits of Hydra's users: folders of configuration files of their own."""

from launcher_scripts.main import main
from tests.conftest import ROOT


def test_files_of_the_user_s_own_folder_are_chosen_like_ours(tmp_path, capsys):
    own = tmp_path / "conf/export/mine/tiny.yaml"
    own.parent.mkdir(parents=True)
    text = (ROOT / "conf/export/gpt3/sample.yaml").read_text()
    own.write_text(text.replace("model_train_name: gpt_books_5m", "model_train_name: my_model"))
    words = ("export=mine/tiny", "stages=[convert]", f"base_results_dir={tmp_path}", "dry_run=true")
    assert main([f"--config-dir={tmp_path / 'conf'}", *words]) == 0
    assert "export_my_model" in capsys.readouterr().out
    assert list(tmp_path.glob("my_model/*/convert/*_submission.sh"))
