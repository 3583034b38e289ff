#!/usr/bin/env bash
# hydra-core 1.3.8: a job of a sweep that ends by sys.exit() ends the sweep, with its status: 0 looks like success.
#
# Expected: --multirun runs every job. Since 1.1 one that fails does not keep the others from running; the command
#   fails after the last. A job that has nothing to do and leaves by sys.exit() has ended, without an error.
# Seen: an exception of the second of four jobs lets the third and fourth run, and the status is 1. sys.exit(0) in the
#   second ends the command there with status 0, and the third and fourth never run; sys.exit with a text skips them
#   with status 1. Nothing says so: the number of jobs in the first line is the only sign.
# Matters for: sweeps of evaluations and conversions, whose jobs skip what is done already: the rest was never run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/job.py" <<'PY'
import sys

import hydra


@hydra.main(version_base=None, config_path=None)
def main(config):
    print(f"job {config.number}", flush=True)
    if config.number == 2:
        if config.end == "exception":
            raise ValueError("no such model")
        if config.end == "exit_0":
            sys.exit(0)
        if config.end == "exit_text":
            sys.exit("no such model")


main()
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check hydra-core==1.3.8 omegaconf==2.3.1
cd "$folder"
seen=$(for end in return exception exit_0 exit_text; do
  status=0
  "$folder/venv/bin/python" job.py --multirun +number=1,2,3,4 "+end=$end" >output 2>errors || status=$?
  printf '%s: %s; status %s\n' "$end" "$(grep '^job' output | paste -sd' ')" "$status"
done)
printf 'Jobs of a sweep of four by how the second ends, with hydra-core 1.3.8\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
return: job 1 job 2 job 3 job 4; status 0
exception: job 1 job 2 job 3 job 4; status 1
exit_0: job 1 job 2; status 0
exit_text: job 1 job 2; status 1
SEEN
