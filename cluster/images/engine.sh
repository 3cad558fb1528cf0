# shellcheck shell=bash
# Operations of a container engine. $1 is the operation, ENGINE the engine ("": docker, else podman).
#   id ENGINE IMAGE       print the id of the image; nothing where the engine has no such image
#   inspect ENGINE IMAGE  print a line `NAME VALUE` for each fact of the engine, of the image, and of the layers of all images
#   arrived ENGINE        create the folder of the files that arrive; print its path, and the name of each complete file;
#       exit with 4 on a machine without rsync
#   load ENGINE IMAGE ARCHIVE FILE...  load the image from ARCHIVE, and print its id. Without ARCHIVE ("") the input is the
#       head of the archive, and each FILE is a layer. These files are removed, and those of broken pushes after a day.
engine=$2
[ -n "$engine" ] || { engine=docker; command -v docker >/dev/null || ! command -v podman >/dev/null || engine=podman; }
command -v "$engine" >/dev/null || { echo "no program $engine" >&2; exit 127; }

inspect() {
    local root
    echo "engine $engine"
    if [ "$engine" = docker ]; then
        docker version --format 'version {{.Server.Version}}' || exit 3
        docker info --format 'platform {{.OSType}}/{{.Architecture}}' || exit 3
        docker info --format 'driver {{.Driver}} {{json .DriverStatus}}' || exit 3
        root=$(docker info --format '{{.DockerRootDir}}') || exit 3
    else
        podman version --format 'version {{.Client.Version}}' || exit 3
        podman info --format 'platform {{.Host.OS}}/{{.Host.Arch}}' || exit 3
        root=$(podman info --format '{{.Store.GraphRoot}}') || exit 3
    fi
    echo "root $root"
    df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print "free", $4 }'
    "$engine" image inspect --format 'image {{.Id}} {{.Size}} {{json .RootFS.Layers}}' "$1" 2>/dev/null
    "$engine" image ls --all --quiet --no-trunc | sort -u |
        xargs -r "$engine" image inspect --format 'layers {{json .RootFS.Layers}}' 2>/dev/null
    exit 0
}

# Nodes with a common home have a folder each.
enter_cache() {
    umask 077
    mkdir -p "$HOME/.cache/clusterctl/layers-$(uname -n)" && cd "$_" || exit 1
}

load() {
    local image=$1 archive=$2 before now file files=()
    shift 2
    set -e -o pipefail
    enter_cache
    # One load at a time. The layers that another push has loaded and removed meanwhile are in the engine.
    exec 9<.
    flock 9
    for file; do [ ! -e "$file" ] || files+=("$file"); done
    before=$("$engine" image inspect --format '{{.Id}}' "$image" 2>/dev/null) || before=
    if [ -n "$archive" ]; then [ ! -e "$archive" ] || "$engine" load <"$archive" >/dev/null
    else { cat; [ ${#files[@]} -eq 0 ] || tar -c -- "${files[@]}"; head -c 1024 /dev/zero; } | "$engine" load >/dev/null; fi
    now=$("$engine" image inspect --format '{{.Id}}' "$image")
    # The image that had the name before is removed, if it had no other name and no container uses it.
    if [ -n "$before" ] && [ "$before" != "$now" ] && [ "$(count_names "$before")" = 0 ]; then
        "$engine" image rm "$before" >/dev/null 2>&1 || true
    fi
    rm -f -- "$archive" "$@"
    find . -mindepth 1 -mmin +1440 -delete 2>/dev/null || true
    rmdir "$PWD" 2>/dev/null || true
    echo "$now"
}
count_names() { "$engine" image inspect --format '{{len .RepoTags}}' "$1"; }

case $1 in
id) "$engine" image inspect --format '{{.Id}}' "$3" 2>/dev/null || "$engine" version >/dev/null ;;
inspect) inspect "$3" ;;
arrived) command -v rsync >/dev/null || exit 4; enter_cache && pwd && ls ;;
load) load "${@:3}" ;;
esac
