# Sourced by the scripts that build an environment for one engine's tests. `environment NAME TEXT` prints the path of
# the environment's Python, and builds the environment if it is missing. The environment is in the cache folder, under a
# hash of TEXT, which lists its contents. The calling script must define `install_into FOLDER`, which installs into
# FOLDER, a fresh venv. An interrupted build leaves nothing behind.
#
# Leyden itself is not installed there: PYTHONPATH makes the tests import their own checkout.
base=${PYTHON:-python3}

# `requirements EXTRA…` prints the requirements of Leyden and of these extras from setup.cfg, one per line.
requirements() {
    "$base" - "$root/setup.cfg" "$@" <<'PY'
import configparser, sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
extras = config["options.extras_require"]
print("\n".join((config["options"]["install_requires"] + "".join(extras[name] for name in sys.argv[2:])).split()))
PY
}

environment() {
    local name=$1 envs=${XDG_CACHE_HOME:-$HOME/.cache}/leyden/envs key final
    key=$({ "$base" -c 'import sys; print(sys.version)'; printf '%s\n' "$2"; } | sha256sum | cut -c -16)
    final=$envs/$name-$key
    mkdir -p "$envs"
    # One build at a time. A process that had to wait finds the environment built.
    exec 9>"$envs/$name.lock"
    flock 9
    if [[ ! -x $final/bin/python ]]; then
        part=$final.part
        rm -rf "$part"
        trap 'rm -rf "$part"' EXIT
        echo "$name-env: building $final" >&2
        {
            "$base" -m venv "$part"
            install_into "$part"
            # Installed commands contain the path of their interpreter.
            grep -rlIF "$part" "$part/bin" "$part/pyvenv.cfg" | xargs -r sed -i "s#$part#$final#g"
        } >&2
        rm -rf "$final"
        mv "$part" "$final"
    fi
    echo "$final/bin/python"
}
