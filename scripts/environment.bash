# Sourced by the scripts that make an environment for one engine's tests: `environment NAME TEXT` prints its python, and makes it
# first where there is none. It lies in the cache folder under a hash of TEXT, which tells all that goes into it. The script's
# function `install_into FOLDER` installs into FOLDER, a fresh venv; a build that is broken off leaves nothing behind.
#
# Leyden itself is not installed there, so that the checkout whose tests run is the one that is imported (PYTHONPATH).
base=${PYTHON:-python3}

# What setup.cfg lists: `requirements EXTRA…` prints Leyden's own and those of the extras, a line each.
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
    # One build at a time; whoever waited finds it done.
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
            # Commands name their interpreter by the path they were installed under.
            grep -rlIF "$part" "$part/bin" "$part/pyvenv.cfg" | xargs -r sed -i "s#$part#$final#g"
        } >&2
        rm -rf "$final"
        mv "$part" "$final"
    fi
    echo "$final/bin/python"
}
