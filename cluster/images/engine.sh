# shellcheck shell=bash disable=SC2154
# Operations of the first installed engine of `engines`, which has its name and the Go templates for its facts.
#   inspect  print lines `NAME VALUE` with the facts of the engine, of `image`, and the layers of all images
#   folder   create the folder for received files and print its path; exit with 4 without rsync
#   load FILE...  load `image` and print its id. If `manifest` is "", FILE is an archive; else the input is the image's
#       configuration and each FILE is a layer. The files are removed, and files of broken pushes after a day. The folder
#       stays: another push may be about to write into it.
for ((at = 0; at < ${#engines[@]}; at += 3)); do ! command -v "${engines[at]}" >/dev/null || break; done
engine=${engines[at]:-${engines[0]}}
command -v "$engine" >/dev/null || { echo "no program $engine" >&2; exit 127; }

inspect() {
    echo "engine $engine"
    "$engine" version --format "${engines[at + 1]}" || exit 3
    "$engine" info --format "${engines[at + 2]}" || exit 3
    "$engine" image inspect --format 'image {{.Id}} {{.Size}} {{json .RootFS.Layers}}' "$image" 2>/dev/null
    "$engine" image ls --all --quiet --no-trunc | sort -u |
        xargs -r "$engine" image inspect --format 'layers {{json .RootFS.Layers}}' 2>/dev/null
    exit 0
}

# Nodes that share a home directory have separate folders.
enter_cache() {
    umask 077
    mkdir -p "$HOME/.cache/clusterctl/layers-$(uname -n)" && cd "$_" || exit 1
}

load() {
    local before now file files=()
    set -e -o pipefail
    enter_cache
    # One load at a time. A missing file was loaded by another push.
    exec 9<.
    flock 9
    for file; do [ ! -e "$file" ] || files+=("$file"); done
    before=$("$engine" image inspect --format '{{.Id}}' "$image" 2>/dev/null) || before=
    if [ -z "$manifest" ]; then [ ${#files[@]} -eq 0 ] || "$engine" load <"${files[0]}" >/dev/null
    else
        printf '%s' "$manifest" >manifest.json
        cat >config.json
        # tar exits with 1 if a file changed meanwhile: another push has put an equal one in its place. The engine
        # compares the digests of what it loads.
        { tar -c -- manifest.json config.json "${files[@]}" || [ $? = 1 ]; } | "$engine" load >/dev/null
    fi
    now=$("$engine" image inspect --format '{{.Id}}' "$image")
    # Remove the previous image of this name, if it has no other name and no container uses it.
    if [ -n "$before" ] && [ "$before" != "$now" ] && [ "$(count_names "$before")" = 0 ]; then
        "$engine" image rm "$before" >/dev/null 2>&1 || true
    fi
    rm -f -- manifest.json config.json "$@"
    find . -mindepth 1 -mmin +1440 -delete 2>/dev/null || true
    echo "$now"
}
count_names() { "$engine" image inspect --format '{{len .RepoTags}}' "$1"; }

case $1 in
inspect) inspect ;;
folder) command -v rsync >/dev/null || exit 4; enter_cache && pwd ;;
load) load "${@:2}" ;;
esac
