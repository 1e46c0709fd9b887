#!/usr/bin/env bash
# Builds (or brings up to date) the virtual environment that the tests run in: SGLang on a CPU.
#
#   tests/setup_env.sh [VENV_DIR]        VENV_DIR: default .venv in the repository root, .venv-$RELEASE
#                                        where a release is named
#   RELEASE=0.5.23 tests/setup_env.sh    the SGLang release; needs requirements/engine-$RELEASE.txt
#   PYTHON=python3.12 tests/setup_env.sh the interpreter for a new environment (3.11 or newer: the
#                                        newest torch and numpy have no wheels for 3.10)
#
# A stamp in the environment holds a hash of everything that decides its contents, so a second
# call costs milliseconds; when an input changes, pip changes only what differs.
set -euo pipefail

tests="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$tests")"
venv="${1:-${VENV:-$root/.venv${RELEASE:+-$RELEASE}}}"
release="${RELEASE:-0.5.14}"
python="${PYTHON:-python3}"
engine="$tests/cpu_engine"
requirements=("$tests/requirements/engine-$release.txt" "$tests/requirements/tools.txt")
common="$tests/requirements/engine-common.txt"
# The installs of the project and of the engine are editable: their sources need no reinstall,
# only what their metadata says and the start-up hook, which is copied.
inputs=("${BASH_SOURCE[0]}" "${requirements[@]}" "$common" "$root/pyproject.toml"
        "$engine/pyproject.toml" "$engine/zz_sglang_cpu_engine.pth")

for file in "${requirements[@]}"; do
    [[ -f "$file" ]] || { echo "setup_env: no $file: SGLang $release has no CPU environment" >&2; exit 2; }
done

existing=()
for file in "${inputs[@]}"; do
    if [[ -f "$file" ]]; then existing+=("$file"); fi
done
want="$release $root $(cat "${existing[@]}" | sha256sum | cut -d' ' -f1)"
stamp="$venv/.setup_env_stamp"
if [[ -x "$venv/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$want" ]]; then
    exit 0
fi

echo "setup_env: building $venv for SGLang $release (about 6.5 GB, some minutes)"
if [[ ! -x "$venv/bin/python" ]]; then
    # Releases share most packages. Hard links spare 6 GB and some minutes, and do no harm: pip replaces files, it
    # doesn't write into them.
    if [[ "$venv" != "$root/.venv" && -f "$root/.venv/.setup_env_stamp" ]] && cp -al "$root/.venv" "$venv"; then
        :
    else
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
fi
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "setup_env: $venv has a Python older than 3.11; name a newer one with PYTHON=" >&2; exit 2; }

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
rm -f "$stamp"
pip install --quiet "${requirements[@]/#/--requirement=}"
# --no-deps: SGLang's own requirements name an older torch and kernels that need a GPU driver.
pip install --quiet --no-deps "sglang==$release"
for project in "$engine" "$root"; do
    if [[ -f "$project/pyproject.toml" ]]; then
        # --no-build-isolation: the build backends are in tools.txt, nothing to download again.
        pip install --quiet --no-deps --no-build-isolation --editable "$project"
    fi
done
echo "$want" > "$stamp"
echo "setup_env: $venv is ready, SGLang $release"
