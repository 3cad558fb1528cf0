#!/bin/sh
# Records docs/assets/recovery.svg from a real run: two nodes join, one container is killed, training resumes, detections.
# Needs Docker, the image of `make image` and `make venv`.
set -eu
name=recording
log=$(mktemp)
trap 'rm -f "$log"' EXIT
command="clusterctl launch --nodes 2 --gpus 2"
rm -rf "runs/$name" "${XDG_STATE_HOME:-$HOME/.local/state}/clusterctl/jobs/$name.json"
# shellcheck disable=SC2086  # several words
.venv/bin/$command --backend compose --device cpu --name "$name" >"$log" 2>&1 &
launch=$!
until grep -q '^epoch 4/7' "$log"; do
    kill -0 "$launch"
    sleep 0.5
done
docker kill "$name-node-1" >/dev/null
wait "$launch"
.venv/bin/python docs/assets/recovery.py "$log" |
    .venv/bin/python docs/assets/terminal.py 56 "$command" "runs/$name/predictions.jpg" >docs/assets/recovery.svg
