# shellcheck shell=bash
# Connections between nodes.
#   listen RUNTIME IMAGE PROGRAM ARGUMENT...  run the Python program with its arguments, because bash cannot listen. The
#       interpreter is this machine's, else the container image's. The output is the program's.
#   dial [NAME ADDRESS PORT WORD]...  connect to every address at once, and print `NAME PORT PROBLEM` for each. The problem
#       is empty where the answer is the word.
listen() {
    local runtime=$1 image=$2 program=$3
    shift 3
    command -v python3 >/dev/null && exec timeout 60 python3 -c "$program" "$@"
    if [ "$runtime" = none ] || [ -z "$image" ]; then
        echo "there is no python3" >&2
        exit 127
    fi
    exec timeout 60 "$runtime" run --rm -i --init --network host --entrypoint python3 "$image" -c "$program" "$@"
}

dial() {
    local answer
    # shellcheck disable=SC2016
    answer=$(timeout 5 bash -c '
        exec 3<>"/dev/tcp/$0/$1" && IFS= read -r -t 4 -u 3 line && echo "word=$line"' "$2" "$3" 2>&1)
    case $?$answer in
        0word="$4") answer= ;;
        0word=*) answer="another machine answered" ;;
        124*) answer="no answer within 5 s" ;;
        *) answer=${answer%%$'\n'*} answer=${answer##*: } answer=${answer:-no answer} ;;
    esac
    printf '%s %s %s\n' "$1" "$3" "$answer"
}

case $1 in
listen)
    shift
    listen "$@" ;;
dial)
    shift
    export LC_ALL=C
    while [ $# -ge 4 ]; do
        dial "$1" "$2" "$3" "$4" &
        shift 4
    done
    wait ;;
esac
