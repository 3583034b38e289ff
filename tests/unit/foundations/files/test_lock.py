"""Locks among processes."""

from foundations.files.lock import folder_lock, is_locked


def test_looking_at_a_lock_leaves_no_trace(tmp_path):
    path = tmp_path / "a.lock"
    assert not is_locked(path)
    assert not path.exists()
    with folder_lock(path, "busy"):
        before = path.read_bytes()
        assert is_locked(path)
        assert path.read_bytes() == before
    path.touch()  # left by a process that was killed
    assert not is_locked(path)
    assert path.exists()
