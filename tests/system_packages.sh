#!/usr/bin/env bash
# Install what some tests need from the system: Slurm and MPI for the cluster tests, Chromium for
# the look of the report. Where it may not install (no root, no apt-get), it says what those tests
# will skip for, and ends well.
set -euo pipefail

declare -A PACKAGE_OF=(
  [slurmctld]=slurm-wlm
  [mpirun]=openmpi-bin
  [chromium]=chromium
  [gcc]="gcc libc6-dev"
)

missing=()
for program in "${!PACKAGE_OF[@]}"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing+=("${PACKAGE_OF[$program]}")
done
# Slurm's PMIx plug-in opens libpmix.so, the unversioned name that only the -dev package carries.
compgen -G "/usr/lib/*/libpmix.so" >/dev/null || missing+=(libpmix-dev)
# The stand-in for pyxis is compiled against Slurm's headers.
[ -e /usr/include/slurm/spank.h ] || missing+=(libslurm-dev)
[ "${#missing[@]}" -eq 0 ] && exit 0

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
  echo "not installed, and may not be installed from here: ${missing[*]}; tests that need them skip"
  exit 0
fi
echo "installing for the tests: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2068 # one entry may name several packages
if ! { "${as_root[@]}" apt-get update -qq &&
       "${as_root[@]}" apt-get install -y -qq --no-install-recommends ${missing[@]} >/dev/null; }; then
  echo "could not install ${missing[*]}; tests that need them skip"
fi
