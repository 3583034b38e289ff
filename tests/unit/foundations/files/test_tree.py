"""Files of a tree behind links: found once, noticed when they change."""

from export_scripts.conversion.convert import ConversionRequest, convert
from foundations.files.tree import files_below
from tests.tiny import gpt_tensors, write_megatron


def test_files_behind_links_are_found_and_circles_end(tmp_path):
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
        (folder / "file").touch()
    (outer / "down").symlink_to(inner)
    (inner / "up").symlink_to(outer)
    (outer / "broken").symlink_to(tmp_path / "nowhere")
    assert sorted(files_below(outer)) == [outer / "down" / "file", outer / "file"]


def test_a_rank_behind_a_link_is_converted_again_when_it_changes(tmp_path):
    tensors = gpt_tensors()
    path = tmp_path / "checkpoint"
    for version, values in (("a", tensors), ("b", {k: 2 * v for k, v in tensors.items()})):
        write_megatron(tmp_path / version, values)
    path.mkdir()
    for file in (tmp_path / "a").glob("gpt2-*"):
        file.rename(path / file.name)
    link = path / "mp_rank_00"

    def made_from(version: str) -> bytes:
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / version / link.name)
        request = ConversionRequest(
            checkpoint_path=path,
            output_dir=tmp_path / "out",
            tp_size=1,
            weight_data_type="fp32",
            overwrite=True,
        )
        return (convert(request).ft_dir / "model.wte.bin").read_bytes()

    assert made_from("a") != made_from("b")
