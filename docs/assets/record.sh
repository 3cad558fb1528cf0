#!/bin/sh
# Records docs/assets/live.svg from a real run: the live view in epoch 5. Needs tmux and `make venv`.
set -eu
name=recording
columns=118 # the line of an epoch
command="clusterctl launch --backend here --nodes 2 --gpus 2"
.venv/bin/clusterctl stop "$name" >/dev/null 2>&1 || true
rm -rf "runs/$name" "${XDG_STATE_HOME:-$HOME/.local/state}/clusterctl/jobs/$name.json"
tmux new-session -d -s "$name" -x "$columns" -y 24 ".venv/bin/$command --name $name; sleep 600"
log="runs/$name/attempt-1/node-0.log"
until [ -f "$log" ] && grep -q '"epoch":5,.*"step":[2-9][0-9],' "$log"; do sleep 0.5; done
sleep 1
tmux capture-pane -e -p -t "$name" | .venv/bin/python docs/assets/terminal.py "$columns" "$command" >docs/assets/live.svg
tmux kill-session -t "$name"
.venv/bin/clusterctl stop "$name"
