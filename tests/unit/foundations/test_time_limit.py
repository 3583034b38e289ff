import pytest

from foundations.time_limit import minutes, slurm_notation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 30),
        (30, 30),
        ("05:00", 5),
        ("0:00:30", 1),
        ("2:00:00", 120),
        ("00:30:00", 30),
        ("1-00:00:00", 1440),
        ("1-6", 1800),
        ("2-03:30", 3090),
    ],
)
def test_slurm_notations_become_minutes(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["soon", "1:2:3:4", "2h", "", "-5", "0", "0:00:00", "1.5", "\uff11\uff12", "9" * 20, "4000-0"],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="write MM, MM:SS"):
        minutes(text)


def test_clock_time_that_yaml_turned_into_seconds_is_explained():
    with pytest.raises(ValueError, match=r'unquoted 02:00:00.*write "02:00:00" in quotes'):
        minutes(7200)


@pytest.mark.parametrize(
    ("limit", "text"), [(5, "00:05:00"), (120, "02:00:00"), (1500, "1-01:00:00")]
)
def test_minutes_are_written_as_slurm_reads_them(limit, text):
    assert slurm_notation(limit) == text
