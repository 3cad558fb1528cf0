# shellcheck shell=bash disable=SC2154
# Starts the containers of the job `job`, whose launch ID is `launch`, with a command of docker compose, "$@", whose stdin is
# the compose file. The GPUs `gpus` stay locked until the last container exits. The user `user` gets folders of their own in
# those of the array `beside`. Exits with 74 and prints the job that holds a GPU, or with the command's exit code.
for folder in "${beside[@]}"; do
    [ -z "$user" ] || why=$(own_folder "$folder" "$user") || { echo "$why" >&2; exit 1; }
done
take_locks "$gpus" "$job" || exit $?
# CLUSTER_UID is the label of the containers, whose user may be another one.
CLUSTER_UMASK=$(umask)
CLUSTER_UID=$(id -u)
export CLUSTER_UMASK CLUSTER_UID
"$@" || exit $?
[ -n "$gpus" ] || exit 0
# Containers cannot inherit the locks, so a process outside of them does. It also waits while the engine restarts.
# shellcheck disable=SC2016
hold='until left=$(docker ps -q --filter "$1") && [ -z "$left" ]; do docker wait $left || sleep 2; done'
env "CLUSTER_JOB_ID=$job" "CLUSTER_LAUNCH_ID=$launch" CLUSTER_BACKEND=compose \
    setsid --fork bash -c "$hold" hold "label=CLUSTER_LAUNCH_ID=$launch" < /dev/null > /dev/null 2>&1
