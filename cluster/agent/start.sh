# shellcheck shell=bash disable=SC2154
# Starts a node's script in its own session. $1 the attempt's folder, $2 node, $3 job, $4 GPUs, $5 lines of secrets on
# stdin; the agent in one line of Base64 and the script follow. Exits with 74 and prints the job that holds a GPU.
umask 077
mkdir -p -- "$1" || exit 1
if [ "$5" -gt 0 ]; then mapfile -n "$5" lines && printf %s "${lines[@]}" > "$1/$2.secrets" || exit 1; fi
trap '[ -n "${started:-}" ] || rm -f -- "$1/$2.secrets"' EXIT
umask 022
read -r agent && base64 -d <<< "$agent" > "$1/agent.pyz.$2" && mv -- "$1/agent.pyz.$2" "$1/agent.pyz" || exit 1
cat > "$1/$2.sh" || exit 1
chmod 755 -- "$1"
take_locks "$4" "$3" || exit $?
# --fork instead of `&`: the process has the variables by which stop.sh finds it from its first moment.
env "CLUSTER_JOB_ID=$3" "CLUSTER_ATTEMPT=${1##*/attempt-}" setsid --fork bash "$1/$2.sh" < /dev/null > /dev/null 2> "$1/$2.err" && started=yes
