"""Rules of single keys, which raise ValueError with what is wrong with a value."""

import re
from pathlib import Path

# Prefix of every job's name; some sites require account:project.
_PREFIX = re.compile(r"[\w.:@+-]{0,64}")
# SOURCE[:TARGET[:FLAGS]] as pyxis reads it, FLAGS such as ro+rprivate.
_MOUNT = re.compile(r"/[^:,]*(:/[^:,]*(:[\w=+-]+)?)?")


def check_prefix(prefix: object) -> None:
    """Refuse what cannot be part of the names of files and jobs."""
    if not _PREFIX.fullmatch(str(prefix)):
        raise ValueError("is part of file names; use at most 64 letters, digits and . _ - : @ +")


def check_mounts(mounts: object) -> None:
    """Refuse mounts that pyxis would not read."""
    listed = mounts if isinstance(mounts, list) else []
    wrong = [repr(each) for each in listed if each is not None and not _MOUNT.fullmatch(str(each))]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: not a mount; write /path, /path:/path/in/the/container, or with "
            "flags /path:/path/in/the/container:ro"
        )


def check_scripts(folder: object) -> None:
    """Refuse a folder of another name than the one that configurations of NeMo refer to."""
    if Path(str(folder)).name != "launcher_scripts":
        raise ValueError("does not end in /launcher_scripts; give that folder of your checkout")
