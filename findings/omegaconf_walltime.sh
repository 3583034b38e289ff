#!/usr/bin/env bash
# omegaconf 2.3.0, hydra-core 1.3.2, submitit 1.5.3: a limit of 12:00:00 in a file is 30 days, in an override 12 hours.
#
# Expected: time: 12:00:00 in a configuration file and time=12:00:00 on the command line give Slurm the same limit, as
#   04:00:00 does.
# Seen: YAML 1.1, by which OmegaConf reads files, takes digits with colons and no leading zero for a number to base 60:
#   43200. Hydra's overrides take both for text. submitit writes --time=43200, and Slurm reads a plain number as minutes.
# Matters for: launchers on Hydra and submitit: the job asks for 720 hours, and waits for ever, or is refused, or runs
#   far past its limit. 04:00:00 and 0:30:00 stay text, so that a file works until its limit becomes two digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

mkdir "$folder/conf"
printf 'short: 04:00:00\nlong: 12:00:00\n' >"$folder/conf/job.yaml"
cat >"$folder/show.py" <<'PY'
import sys

from hydra import compose, initialize_config_dir
from submitit.slurm.slurm import _make_sbatch_string

with initialize_config_dir(config_dir=sys.argv[1], version_base=None):
    for overrides in ([], ["short=04:00:00", "long=12:00:00"]):
        config = compose("job", overrides=overrides)
        for key in ("short", "long"):
            script = _make_sbatch_string(command="true", folder="logs", time=config[key])
            line = next(line for line in script.splitlines() if "--time" in line)
            print(f"{'override' if overrides else 'file'}, {key}: {config[key]!r}, {line}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    omegaconf==2.3.0 hydra-core==1.3.2 submitit==1.5.3
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder/conf")
printf 'Limits with omegaconf 2.3.0, hydra-core 1.3.2 and submitit 1.5.3\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
file, short: '04:00:00', #SBATCH --time=04:00:00
file, long: 43200, #SBATCH --time=43200
override, short: '04:00:00', #SBATCH --time=04:00:00
override, long: '12:00:00', #SBATCH --time=12:00:00
SEEN
