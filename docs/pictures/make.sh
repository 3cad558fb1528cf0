#!/bin/sh
# Makes the pictures of the documentation from a real run (needs tmux): the live view while it trains, and what the
# trained detector found. Run it in the project's folder after `make venv`.
set -eu
name=pictures
.venv/bin/clusterctl stop "$name" >/dev/null 2>&1 || true
rm -rf "runs/$name" "${XDG_STATE_HOME:-$HOME/.local/state}/clusterctl/jobs/$name.json"
tmux new-session -d -s pictures -x 110 -y 22 ".venv/bin/clusterctl launch --nodes 2 --gpus 2 --name $name; sleep 600"
log="runs/$name/attempt-1/node-0.log"
until [ -f "$log" ] && grep -q '"epoch":5,.*"step":[2-9][0-9],' "$log"; do sleep 0.5; done
sleep 1
tmux capture-pane -e -p -t pictures |
    .venv/bin/python docs/pictures/terminal.py 110 'clusterctl launch --nodes 2 --gpus 2' >docs/pictures/live.svg
until [ -f "runs/$name/attempt-1/node-0.exit" ]; do sleep 1; done
sleep 5
tmux kill-session -t pictures
cp "runs/$name/predictions.jpg" docs/pictures/predictions.jpg
