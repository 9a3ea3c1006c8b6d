# Sourced by the other scripts. Goes to the project's root, makes .venv on a fresh machine, keeps it
# as pinned in requirements/dev.txt, and sets $python to its interpreter.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$PWD/.venv/bin/python"
stamp="$PWD/.venv/installed"
wanted="$PWD $(cat requirements/*.txt pyproject.toml | cksum)"

is_current() {
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$python" -c "" 2>/dev/null
}

fail() {
    echo "$*" >&2
    exit 1
}

make_venv() {
    local base="${PYTHON:-python3}"
    command -v "$base" >/dev/null || fail "$base is not found; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3 $0"
    "$base" -c "import sys; sys.exit(sys.version_info < (3, 11))" ||
        fail "$base is $("$base" -V 2>&1), but deepinfer needs 3.11 or newer; name one: PYTHON=/path/to/python3.11 $0"
    rm -rf .venv
    "$base" -m venv .venv || { rm -rf .venv; fail "$base cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; }
}

# The stamp is written last and removed first, so that a half-made .venv is never trusted.
install() {
    { [[ "$(cat "$stamp" 2>/dev/null)" == "$PWD "* ]] && "$python" -c "" 2>/dev/null; } || make_venv
    rm -f "$stamp"
    echo "Installing the pinned packages into .venv (a few minutes the first time) ..." >&2
    "$python" -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt ||
        fail "The packages of requirements/dev.txt could not be installed; see above. Run $0 again to retry."
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/no-deps.txt ||
        fail "The packages of requirements/no-deps.txt could not be installed; see above. Run $0 again to retry."
    echo "Installing deepinfer itself ..." >&2
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . ||
        fail "deepinfer could not be installed into .venv; see above."
    echo "Compiling the native CPU ops ..." >&2
    "$python" -c "from deepinfer.backends.cpu.library import is_available; is_available()"
    echo "$wanted" >"$stamp"
    echo "Ready." >&2
}

if ! is_current; then
    exec 9>.venv.lock
    if command -v flock >/dev/null && ! flock -n 9; then
        echo "Another run is setting up .venv; waiting for it ..." >&2
        flock 9
    fi
    is_current || install
    exec 9>&-
fi
