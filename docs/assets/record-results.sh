#!/bin/sh
# Records docs/assets/serve.jpg and report.jpg from a real run: the page of `clusterctl serve` in epoch 5, and the
# report that the run leaves behind. Needs Chromium and `make venv`.
set -eu
name=recording
XDG_STATE_HOME=$(mktemp -d) # so that the page lists no other job
CLUSTERCTL_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export XDG_STATE_HOME CLUSTERCTL_TOKEN
trap '.venv/bin/clusterctl stop "$name" >/dev/null 2>&1; kill "$server"; rm -rf "$XDG_STATE_HOME"' EXIT

# screenshot URL FILE.jpg: what a window of 1280 x 900 shows of the page
screenshot() {
    chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,900 --timeout=5000 \
        --screenshot="$XDG_STATE_HOME/page.png" "$1" 2>/dev/null
    .venv/bin/python -c 'import sys; from PIL import Image; Image.open(sys.argv[1]).convert("RGB").save(sys.argv[2], quality=80)' \
        "$XDG_STATE_HOME/page.png" "$2"
}

rm -rf "runs/$name"
.venv/bin/clusterctl serve --port 8299 >/dev/null &
server=$!
.venv/bin/clusterctl launch --backend local --nodes 2 --gpus 1 --device cpu --name "$name" &
launch=$!
until grep -qs '"epoch":5,.*"step":[2-9][0-9],' "runs/$name/attempt-1/node-0.log"; do
    kill -0 "$launch"
    sleep 0.5
done
screenshot "http://localhost:8299/jobs/$name/?token=$CLUSTERCTL_TOKEN" docs/assets/serve.jpg
wait "$launch"
screenshot "file://$PWD/runs/$name/report.html" docs/assets/report.jpg
