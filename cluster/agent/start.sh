# shellcheck shell=bash disable=SC2154
# Starts a node's script in its own session. Variables: `folder` (the attempt's), `node`, `job`, `launch` (its ID), `backend`,
# `gpus`, `secrets` (lines of stdin; the agent in one line of Base64 and the script follow). Exits with 74 and prints the job
# that holds a GPU. All files but the secrets get the umask of this shell, which is the user's.
mkdir -p -- "$folder" || exit 1
if [ "$secrets" -gt 0 ]; then
    rm -f -- "$folder/$node.secrets"
    mapfile -n "$secrets" lines && (umask 077 && printf %s "${lines[@]}" > "$folder/$node.secrets") || exit 1
fi
trap '[ -n "${started:-}" ] || rm -f -- "$folder/$node.secrets"' EXIT
read -r agent && base64 -d <<< "$agent" > "$folder/agent.pyz.$node" && mv -- "$folder/agent.pyz.$node" "$folder/agent.pyz" || exit 1
cat > "$folder/$node.sh" || exit 1
take_locks "$gpus" "$job" || exit $?
# --fork instead of `&`: the process has the variables by which stop.sh finds it from its first moment.
env "CLUSTER_JOB_ID=$job" "CLUSTER_LAUNCH_ID=$launch" "CLUSTER_BACKEND=$backend" "CLUSTER_ATTEMPT=${folder##*/attempt-}" \
    setsid --fork bash "$folder/$node.sh" < /dev/null > /dev/null 2> "$folder/$node.err" && started=yes
